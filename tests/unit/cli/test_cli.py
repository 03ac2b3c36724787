"""Verbs, and every mistake in a command as one readable message."""

from __future__ import annotations

import argparse
import gc
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers import REPO
from hydra import compose
from omegaconf import DictConfig

from gtrain import backends, config, messages, targets
from gtrain.cli import entry, hydra_changes
from gtrain.errors import ConfigError
from gtrain.run import build

LAZY = object()
"""Stands for Hydra 1.3's help of ``--shell-completion``, which is not a string."""


pytestmark = pytest.mark.usefixtures("composed_by_hydra")


def message(*overrides: str) -> str:
    """What a user reads after a mistake."""
    with pytest.raises(Exception) as caught:
        cfg = compose("config", overrides=["paths.run=here", *overrides])
        config.validate(cfg)
    text = messages.readable(caught.value, overrides)
    assert text is not None, f"a traceback would be shown: {caught.value!r}"
    assert "Traceback" not in text
    return text


def test_several_values_without_multirun() -> None:
    text = message("data.target=author,writes,paper")
    assert text.startswith("data.target=author,writes,paper was set; a comma") and "--multirun" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], []),
        (["test", "ckpt_path=best"], ["verb=test", "ckpt_path=best"]),
        (["seed=1", "partition"], ["seed=1", "verb=partition"]),
        (["--cfg", "job"], ["--cfg", "job"]),
        (["--info", "searchpath"], ["--info", "searchpath"]),
        (["--config-dir", "train", "train"], ["--config-dir", "train", "verb=train"]),
        (["--multirun", "seed=1,2"], ["--multirun", "seed=1,2"]),
        (["~logger", "+trainer.x=1"], ["~logger", "+trainer.x=1"]),
        (["neighbors", "run=kg", "neighbors", "e1"], ["verb=neighbors", "run=kg", "neighbors", "e1"]),
        (["report", "report", "runs"], ["verb=report", "report", "runs"]),
        (["output=x", "runs", "--help"], ["output=x", "verb=runs", "--help"]),
    ],
)
def test_a_verb_becomes_an_override(arguments: list[str], expected: list[str]) -> None:
    assert entry.verb_to_override(arguments) == expected


@pytest.mark.parametrize("arguments", [["--version"], ["strategy=single", "--version"]])
def test_the_version_is_that_of_gtrain(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gtrain", *arguments])
    monkeypatch.setattr("sys.path", list(sys.path))
    entry.main()
    expected = f"gtrain {version('gtrain')} (torch {version('torch')}, Hydra {version('hydra-core')})\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("loaded", [False, True])
def test_the_last_collection_is_skipped_unless_triton_would_report_leaks(
    loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "triton", argparse)
    gc.freeze()  # as the agent does before it forks
    entry._skip_last_collection()
    assert (gc.get_freeze_count() > 0) == (not loaded)
    gc.unfreeze()


def test_a_lazy_help_text_passes_the_check_of_python_3_14(monkeypatch: pytest.MonkeyPatch) -> None:
    def expand(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        if "%" in action.help:  # type: ignore[operator]  # TypeError where it is no container, as in argparse
            raise ValueError("badly formed help string")

    def parser_with(text: object) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser()
        parser._check_help(parser.add_argument("--shell-completion", help=text))  # as add_argument does since 3.14
        return parser

    monkeypatch.setattr(argparse._ActionsContainer, "_check_help", expand, raising=False)
    with pytest.raises(TypeError):
        parser_with(LAZY)
    assert hydra_changes.with_lazy_help(lambda: parser_with(LAZY))().parse_args([]) is not None
    with pytest.raises(ValueError, match="badly formed"):  # other help texts are checked
        hydra_changes.with_lazy_help(lambda: parser_with("100 %"))()
    with pytest.raises(TypeError):  # and so is everything afterwards
        parser_with(LAZY)


def test_an_unknown_verb_lists_the_verbs() -> None:
    with pytest.raises(
        ConfigError,
        match=r"partion was given; the verbs are train, test, predict, export, partition(.|\n)*mean partition",
    ):
        entry.verb_to_override(["partion"])


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["strategy=sra"], ["strategy=sra was set", "sar, single", "did you mean sar?"]),
        (["model=gcnn"], ["model=gcnn was set", "gat, gcn, gin, hetero_sage", "did you mean gcn or"]),
        (["logger=[csv,tensorbord]"], ["logger=tensorbord was set", "csv, mlflow, none", "did you mean tensorboard?"]),
        (["strategy.moode=1"], ["strategy.moode=1 was set", "no key moode", "did you mean mode?"]),
        (["model.hiden_channels=3"], ["its keys are", "did you mean hidden_channels?"]),
        (
            ["model.scheduler._target_=torch.optim.lr_scheduler.StepLR"],
            ["HINT: a plus sign adds a new key: +model.scheduler._target_=torch.optim.lr_scheduler.StepLR"],
        ),
        (
            ["callbacks.checkpoint.save_every=3"],
            ["HINT: a plus sign adds a new key: +callbacks.checkpoint.save_every=3"],
        ),
        (["data.num_node=3"], ["data has no key num_node", "did you mean num_nodes"]),
        (["trainer.max_epoch=3"], ["trainer has no key max_epoch", "max_epochs"]),
        (["lr=0.1"], ["the configuration has no key lr", "did you mean model.optimizer.lr=0.1"]),
        (
            ["model.lr=0.1"],
            ["model has no key lr", "did you mean model.optimizer.lr=0.1?"],
        ),
        (["model=kg", "lr=0.1"], ["did you mean model.optimizer.lr=0.1 or model.sparse_optimizer.lr=0.1?"]),
        (["max_epochs=3"], ["did you mean trainer.max_epochs=3?"]),
        (["optimizer.lr=0.1"], ["did you mean model.optimizer.lr=0.1"]),
        (["trainer.max_epochs=many"], ["trainer.max_epochs=many was set", "Integer", "HINT"]),
        (["data.num_nodes=abc"], ["data.num_nodes=abc was set", "HINT"]),
        (["model.hidden_channels=abc"], ["must be of type int, not str", "HINT"]),
        (["model.dropout=1.5"], ["at least 0 and below 1"]),
        (["model.num_layers=0"], ["at least 1"]),
        (["mode=4"], ["mode=4 was set", "modes 1, 2 and 3", "HINT: 1: sequential"]),
        (["mode=fast"], ["mode", "fast"]),
        (["strategy=single", "mode=1"], ["mode=1 was set", "setting of strategy=sar"]),
        (["strategy=single", "strategy.cache_inputs=auto"], ["strategy.cache_inputs is a setting of strategy=sar"]),
        (
            ["strategy=single", "strategy.prefetch=1"],
            ["strategy.prefetch is a setting of ", "strategy=pyg", "strategy=sar"],
        ),
        (["strategy.prefetch=-1"], ["strategy.prefetch=-1", "0 or more"]),
        (["strategy.timeout_seconds=0"], ["above 0"]),
        (["trainer.num_nodes=0"], ["trainer.num_nodes=0 was set", "at least 1", "ranks ="]),
        (["trainer.accumulate_grad_batches=0"], ["at least 1"]),
        (["seed=-1"], ["seed=-1 was set"]),
        (["seed=one"], ["seed=one was set"]),
        (["verb=fly"], ["verb=fly was set", "train, test, predict, export, partition"]),
        (["seed=${nothing.there}"], ["nothing"]),
        (["model=["], ["cannot be read", "key=value"]),
        (["data=kg"], ["data.path"]),
    ],
)
def test_a_mistake_is_explained(overrides: list[str], parts: list[str]) -> None:
    text = message(*overrides)
    for part in parts:
        assert part in text


def test_the_bare_command_is_two_ranks_of_sar_on_planted_with_gcn() -> None:
    cfg = compose("config", overrides=["paths.run=here"])
    config.validate(cfg)
    assert (cfg.strategy.name, cfg.mode, cfg.strategy.mode, cfg.trainer.num_nodes) == ("sar", 1, 1, 2)
    assert cfg.data._target_ == "gtrain.data.planted.PlantedData"
    assert cfg.model._target_ == "gtrain.model.networks.gcn"


def test_single_runs_one_rank_unless_told_otherwise() -> None:
    assert compose("config", overrides=["strategy=single"]).trainer.num_nodes == 1
    assert compose("config", overrides=["strategy=single", "trainer.num_nodes=3"]).trainer.num_nodes == 3


def test_dropout_zero_switches_off_input_dropout_too() -> None:
    cfg = compose("config", overrides=["paths.run=here", "model.dropout=0"])
    assert cfg.model.input_dropout == 0


def test_an_unexpected_error_is_not_dressed_up() -> None:
    assert messages.readable(ZeroDivisionError("a defect"), []) is None


def test_every_strategy_describes_itself() -> None:
    text = backends.descriptions()
    assert "  single" in text and "  sar" in text and len(text.splitlines()) >= 2


def test_strategies_are_named_by_what_they_serve() -> None:
    assert set(backends.serving(backends.Traits(kind="message-passing"))) >= {"single", "sar"}
    assert "sar" not in backends.serving(backends.Traits(kind="per-node"))
    without_table = backends.Traits("message-passing", has_table=False)
    assert {"pbg", "ps"}.isdisjoint(backends.serving(without_table)) and backends.serving(without_table)


def composed(*overrides: str) -> DictConfig:
    return compose("config", overrides=["paths.run=here", *overrides])


@pytest.fixture
def own_experiment(tmp_path: Path) -> str:
    """Settings that find an experiment of the user's own, ``experiment=own``, for ``pbg``."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /data: kg\n  - override /model: kg\n  - override /strategy: pbg\n"
        "strategy:\n  matmul: bfloat16\ntrainer:\n  devices: 2\n"
    )
    return f"hydra.searchpath=[file://{tmp_path}]"


def test_what_an_experiment_sets_for_another_strategy_is_left_out(own_experiment: str) -> None:
    cfg = composed(own_experiment, "experiment=own", "strategy=ps", "data.path=there")
    line = config.fit_strategy(cfg, ["strategy", "data.path"], experiment="own")
    assert line.count("\n") == 0 and line.endswith(": strategy.matmul=bfloat16 (experiment=own)")
    config.validate(cfg)
    assert "matmul" not in cfg.strategy and cfg.trainer.devices == 2  # two workers, which ps has as well
    cfg = composed(own_experiment, "experiment=own", "strategy=single", "data.path=there")
    assert "trainer.devices=2" in config.fit_strategy(cfg, experiment="own") and cfg.trainer.devices == 1


def test_what_was_typed_beside_an_experiment_is_a_mistake_as_ever(own_experiment: str) -> None:
    cfg = composed(own_experiment, "experiment=own", "strategy=ps", "data.path=there", "strategy.matmul=float32")
    with pytest.raises(ConfigError, match=r"strategy.matmul=float32 was set; strategy has no key matmul here"):
        config.fit_strategy(cfg, ["strategy.matmul"], experiment="own")


@pytest.mark.parametrize(
    ("strategy", "setting", "left"),
    [
        ("ps", "strategy.num_partitions=4", True),
        ("pbg", "strategy.num_partitions=4", False),
        ("single", "data.num_neighbors=[10,10]", True),
        ("sar", "data.num_neighbors=[10,10]", True),
        ("pyg", "data.num_neighbors=[10,10]", False),
        ("single", "mode=2", True),
        ("sar", "mode=2", False),
        ("single", "trainer.num_nodes=2", True),
        ("sar", "data.batch_size=64", True),
    ],
)
def test_a_job_of_a_sweep_leaves_out_what_its_strategy_lacks(strategy: str, setting: str, left: bool) -> None:
    config.register(sweep=True)
    cfg = composed(f"strategy={strategy}", setting)
    line = config.fit_strategy(cfg, ["strategy", setting.partition("=")[0]], sweep=True)
    assert line == (f"strategy={strategy} leaves out settings that it does not serve: {setting} (the sweep)" * left)
    config.validate(cfg)
    assert not backends.get(strategy).serves.violated(config.settings_of(cfg))
    assert ("mode" in cfg) == (strategy == "sar")


def test_a_typo_in_a_sweep_is_a_mistake() -> None:
    cfg = composed("strategy=ps", "strategy.num_partition=4")
    with pytest.raises(ConfigError, match="strategy has no key num_partition; its keys are"):
        config.fit_strategy(cfg, ["strategy.num_partition"], sweep=True)


def test_a_class_variable_of_the_settings_is_no_key() -> None:
    cfg = composed("strategy=single", "strategy.group=x")
    expected = r"strategy has no key group; its keys are dropout, layers, name, timeout_seconds\."
    with pytest.raises(ConfigError, match=expected):
        config.fit_strategy(cfg, ["strategy.group"])


def documented_models() -> list[tuple[str, list[str]]]:
    """The first table of docs/models.md: the models of each row, and the keys that are their own."""
    text = (REPO / "docs/models.md").read_text().split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    named = {name: keys for row in rows for name in re.findall(r"`(\w+)`", row[0]) for keys in [row[-1]]}
    own = {name: re.findall(r"`(\w+)`", keys) for name, keys in named.items()}
    own["gat"] = [key for key in own["gat"] if key != "gcn"] + own["gcn"]  # "those of"
    own["link_gcn"] = [key for key in own["link_gcn"] if key not in ("gcn", "sage")] + own["gcn"]  # "those of"
    own["link_sage"] = [*own["link_gcn"], "aggr"]
    for name in ("sage", "link_sage"):
        own[name] = [key for key in own[name] if key != "ego"]
    for name in ("gcn", "gin", "gat", "link_gcn"):
        own[name] = [key for key in own[name] if key not in ("sage", "aggr")]
    return sorted(own.items())


@pytest.mark.parametrize(("model", "keys"), documented_models())
def test_a_documented_setting_of_a_model_is_taken(model: str, keys: list[str]) -> None:
    common = ["score=val/auc", "monitor=val/acc", "optimizer.lr=0.5", "scheduler={_target_:x}"]
    common += ["sparse_optimizer._target_=gtrain.nn.RowwiseAdagrad", "sparse_optimizer.lr=0.1"]
    common += [] if model in ("kg", "link_gcn", "link_sage") else ["class_weights=balanced", "label_smoothing=0.1"]
    settings = [*common, *(f"{key}=1" for key in keys if not model.startswith("dgl_"))]
    cfg = compose("config", overrides=["paths.run=here", f"model={model}", *(f"model.{each}" for each in settings)])
    assert cfg.callbacks.checkpoint.monitor == "val/auc"
    assert (cfg.model.sparse_optimizer._target_, cfg.model.sparse_optimizer.lr) == ("gtrain.nn.RowwiseAdagrad", 0.1)


def test_the_optimizer_of_tables_is_none_unless_it_is_named() -> None:
    cfg = compose("config", overrides=["paths.run=here", "model=sage", "model.optimizer.lr=0.25"])
    assert (cfg.model.sparse_optimizer._target_, cfg.model.sparse_optimizer.lr) == (None, 0.25)
    assert build.optional(config.plain(cfg.model.sparse_optimizer), "model.sparse_optimizer") is None
    assert "model.sparse_optimizer._target_" not in dict(targets.found_in(config.plain(cfg.copy())))
    assert cfg.callbacks.checkpoint.monitor == "auto"
