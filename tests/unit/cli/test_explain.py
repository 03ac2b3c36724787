"""gtrain explain: keys, options and groups from what declares them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import REPO

from gtrain import backends, config
from gtrain.cli import entry, explain, verb_help
from gtrain.errors import ConfigError


def test_a_key_is_explained_for_each_option_that_has_it() -> None:
    text = explain.explain("strategy.wire_dtype")
    assert text.count("strategy.wire_dtype (str; default float32)") == 3
    assert "with strategy=pyg" in text and "bfloat16  half the bytes, not exact, with float32's range" in text
    assert explain.explain("strategy.timeout_seconds").count("\n") == 2, "one declaration, one answer"


def test_an_option_is_explained_with_what_else_it_sets() -> None:
    text = explain.explain("strategy=pyg")
    assert text.startswith(f"strategy=pyg: {backends.get('pyg').description}")
    assert "it sets data.batch_size=1024" in text and "it sets trainer.num_nodes=2" in text
    assert "strategy.cache_bytes (int; default 0)" in text and "0 or more bytes" in text


def test_options_without_a_dataclass_are_shown_as_they_stand() -> None:
    assert "max_epochs: 200" in explain.explain("experiment=cora")


@pytest.mark.parametrize(
    ("topic", "lines"),
    [
        ("trainer", ["trainer.max_epochs (int or null; default 50)", "epochs; -1: no limit"]),
        ("trainer.devices=3", ["trainer.devices (int; default 1)"]),
        ("mode", ["mode (int; default 1)", "3  one exchange"]),
        ("ckpt_path", ["s3://bucket/prefix/last.ckpt; train resumes from it"]),
        ("paths.stores", ["default ${paths.data}/stores"]),
        (
            "model=gcn",
            ["model.hidden_channels (int; default 64)", "model.optimizer (dict; default {'_target_':'torch.opt"],
        ),
        ("model.heads", ["default 8; default 4 with model=hgt", "with model=dgl_gat, dgl_gatv2, gat, hgt"]),
        ("model.margin", ["model.margin (float; default 0.1)", "of the ranking loss", "with model=kg"]),
        ("data.batch_size", ["default null; default 1000 with data=kg; default 512 with data=libsvm, parquet"]),
        ("logger", ["logger=csv", "logger=none"]),
        ("callbacks", ["callbacks=early_stopping"]),
    ],
)
def test_answers(topic: str, lines: list[str]) -> None:
    text = explain.explain(topic)
    assert [line for line in lines if line not in text] == []
    assert "`" not in text and "](" not in text, "Markdown"


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("strategy.prefetsh", "did you mean strategy.prefetch"),
        ("prefetch", "did you mean strategy.prefetch?"),
        ("strategy=sra", "did you mean sar"),
        ("trainr", "did you mean trainer"),
        ("model.hidden_chanels", "did you mean model.hidden_channels"),
        ("num_neighbors", "did you mean data.num_neighbors?"),
        ("data=plantet", "did you mean planted"),
        ("zzz", "gtrain explain lists the groups"),
    ],
)
def test_typing_errors_are_answered_with_what_is_close(topic: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"explain {topic} was given.*") as caught:
        explain.explain(topic)
    assert hint in str(caught.value)


def test_without_a_topic_it_lists_the_groups() -> None:
    done = subprocess.run([sys.executable, "-m", "gtrain", "explain"], capture_output=True, text=True, check=True)
    assert "strategy=ps" in done.stdout and "data=planted" in done.stdout and "ckpt_path" in done.stdout


def test_it_imports_no_torch() -> None:
    code = "import sys, gtrain.cli.explain as e; e.main(['strategy=ps', 'data.split']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_every_verb_has_help_that_names_what_exists() -> None:
    assert list(verb_help.HELP) == list(config.VERBS)
    for verb, described in verb_help.HELP.items():
        text = verb_help.text_of(verb)
        assert text.startswith(f"gtrain {verb} ") and all(key in text for key in described.settings)
        assert (REPO / "docs" / described.page).exists()
        words = described.example.split()
        assert words[0] == "gtrain" and (verb == "train" or f"verb={verb}" in entry.verb_to_override(words[1:]))


@pytest.mark.parametrize(
    ("arguments", "verb"),
    [
        (["watch", "--help"], "watch"),
        (["-h", "score", "run=last"], "score"),
        (["predict", "--help"], "predict"),
        (["predict", "model=sage", "--help"], None),
        (["--help"], None),
        (["doctor"], None),
    ],
)
def test_help_of_a_verb_is_that_of_hydra_only_with_settings(arguments: list[str], verb: str | None) -> None:
    assert verb_help.requested(arguments) == verb


def test_help_as_a_verb_says_how_to_ask() -> None:
    with pytest.raises(ConfigError, match="gtrain --help, or gtrain VERB --help"):
        entry.verb_to_override(["help"])


def test_help_is_printed_and_nothing_is_done() -> None:
    done = subprocess.run([sys.executable, "-m", "gtrain", "doctor", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == verb_help.text_of("doctor") + "\n"
