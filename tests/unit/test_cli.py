"""Verbs, and every mistake in a command as one readable message."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins

from gtrain import backends, cli, config, messages
from gtrain.errors import ConfigError


@pytest.fixture(autouse=True)
def composed_by_hydra():
    Plugins.instance().register(cli.BackendConfigs)
    config.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("gtrain.conf", version_base="1.3"):
        yield


def message(*overrides: str) -> str:
    """What a user reads after a mistake."""
    with pytest.raises(Exception) as caught:
        cfg = compose("config", overrides=["paths.run=here", *overrides])
        config.validate(cfg)
    text = messages.readable(caught.value, overrides)
    assert text is not None, f"a traceback would be shown: {caught.value!r}"
    assert "Traceback" not in text
    return text


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
    ],
)
def test_a_verb_becomes_an_override(arguments: list[str], expected: list[str]) -> None:
    assert cli.verb_to_override(arguments) == expected


def test_an_unknown_verb_lists_the_verbs() -> None:
    with pytest.raises(
        ConfigError,
        match=r"partion was given; the verbs are train, test, predict, export, partition(.|\n)*mean partition",
    ):
        cli.verb_to_override(["partion"])


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["strategy=sra"], ["strategy=sra was set", "sar, single", "did you mean sar?"]),
        (["model=gcnn"], ["model=gcnn was set", "gat, gcn, gin, hetero_sage", "did you mean gcn or"]),
        (["strategy.moode=1"], ["strategy.moode=1 was set", "no key moode", "did you mean mode?"]),
        (["model.hiden_channels=3"], ["its keys are", "did you mean hidden_channels?"]),
        (["data.num_node=3"], ["data has no key num_node", "did you mean num_nodes"]),
        (["trainer.max_epoch=3"], ["trainer has no key max_epoch", "max_epochs"]),
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
    assert set(backends.serving("message-passing")) >= {"single", "sar"}
    assert "sar" not in backends.serving("per-node")
