"""``run=FOLDER``: which settings a command gets from a run's folder, composed without a process."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf, open_dict

from gtrain import config, targets
from gtrain.cli import earlier_run, entry, inherit
from gtrain.errors import ConfigError, GtrainError
from gtrain.launch import launchers
from gtrain.run import runs
from gtrain.settings import as_typed

MakeRun = Callable[..., Path]


_COMPOSED: dict[tuple[str, ...], DictConfig] = {}


def compose_once(name: str, overrides: Sequence[str], *, return_hydra_config: bool = False) -> DictConfig:
    """Hydra's function, which takes half a second; what it returned for the same overrides is copied."""
    key = (str(return_hydra_config), *overrides)
    if key in _COMPOSED and not any("searchpath" in each for each in key):
        return copy.deepcopy(_COMPOSED[key])
    cfg = compose(name, list(overrides), return_hydra_config=return_hydra_config)
    _COMPOSED[key] = copy.deepcopy(cfg)
    return cfg


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRun]:
    """Makes the folder that a command with some overrides leaves; the test runs in a folder of its own."""
    Plugins.instance().register(entry.BackendConfigs)
    config.register(sweep=True)
    launchers.register()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(inherit, "compose", compose_once)

    def make(*overrides: str, name: str = "one", checkpoints: tuple[str, ...] = ("last", "best")) -> Path:
        GlobalHydra.instance().clear()
        with initialize_config_module("gtrain.conf", **config.VERSION_BASE):
            cfg = compose_once("config", overrides, return_hydra_config=True)
        folder = tmp_path / "here" / "runs" / name
        (folder / ".hydra").mkdir(parents=True)
        with open_dict(cfg):
            hydra = cfg.pop("hydra")
        OmegaConf.save(OmegaConf.create({"hydra": hydra}), folder / ".hydra" / "hydra.yaml")
        OmegaConf.save(cfg, folder / ".hydra" / "config.yaml")
        OmegaConf.save(OmegaConf.create(list(overrides)), folder / ".hydra" / "overrides.yaml")
        for checkpoint in checkpoints:
            path = folder / "checkpoints" / f"{checkpoint}.ckpt"
            path.mkdir(parents=True)
            (path / "manifest.json").write_text(json.dumps({"epoch": 4}))
        runs.register(
            tmp_path / "here" / "runs", folder, config.plain(OmegaConf.create(dict.fromkeys(runs._GROUPS, {})))
        )
        return folder

    yield make
    GlobalHydra.instance().clear()
    config.register()


def command(*arguments: str) -> tuple[dict[str, Any], inherit.Command]:
    """The values that a command line ends up with, by key, and the command line."""
    expanded = inherit.inherit(arguments)
    flags, overrides = inherit._divided(expanded.arguments)
    assert flags == expanded.arguments[: len(flags)]
    parsed = OverridesParser.create().parse_overrides(overrides)
    return {each.key_or_group: each.value() for each in parsed if not each.is_delete()}, expanded


def composed(expanded: inherit.Command) -> DictConfig:
    """The configuration that Hydra composes for a command line."""
    with initialize_config_module("gtrain.conf", **config.VERSION_BASE):
        return compose("config", expanded.arguments)


def refusal(*arguments: str) -> str:
    """The message of a command that is refused."""
    with pytest.raises(GtrainError) as caught:
        inherit.inherit(arguments)
    assert caught.value.hint
    return str(caught.value)


def edit(file: Path, changes: dict[str, Any]) -> None:
    """Change values of a configuration file by key."""
    cfg = OmegaConf.load(file)
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    OmegaConf.save(cfg, file)


def test_settings_come_from_the_run_and_the_command_line_overrides(make_run: MakeRun) -> None:
    run = make_run("strategy=sar", "mode=3", "trainer.max_epochs=7", "model=sage", "model.hidden_channels=24", "seed=5")
    got, expanded = command("verb=train", f"run={run}", "trainer.max_epochs=20")
    cfg = composed(expanded)
    assert (cfg.trainer.max_epochs, cfg.model.hidden_channels, cfg.seed, cfg.strategy.mode) == (20, 24, 5, 3)
    assert cfg.strategy.name == "sar" and cfg.run == str(run)
    assert cfg.ckpt_path == str(run / "checkpoints" / "last.ckpt") and expanded.notices == []
    assert "trainer.max_epochs" not in expanded.inherited and expanded.inherited["mode"] == f"run={run}"
    for verb in ("test", "predict", "export"):
        assert command(f"verb={verb}", f"run={run}")[0]["ckpt_path"] == str(run / "checkpoints" / "best.ckpt")
    for ckpt_path in (None, "other.ckpt", "s3://bucket/last.ckpt"):
        got, _ = command("verb=test", f"run={run}", f"ckpt_path={as_typed(ckpt_path)}")
        assert got["ckpt_path"] == ckpt_path
    got, _ = command("verb=test", f"run={run}", "ckpt_path=last")
    assert got["ckpt_path"] == str(run / "checkpoints" / "last.ckpt")
    assert "ckpt_path" not in command("verb=plan", f"run={run}")[0]


@pytest.mark.slow
def test_what_belongs_to_one_command_is_not_inherited(make_run: MakeRun) -> None:
    run = make_run("verb=predict", "output=a.npy", "allow_targets=[os]", "cluster=manual", "cluster.rank=0", "seed=3")
    got, _ = command("verb=test", f"run={run}")
    assert got.keys() == {"cluster", "seed", "verb", "run", "ckpt_path"} and got["verb"] == "test"


@pytest.mark.slow
def test_another_strategy_leaves_out_what_it_lacks(make_run: MakeRun) -> None:
    run = make_run("strategy=pyg", "strategy.halo_hops=1", "data.num_neighbors=[4,3]", "trainer.num_nodes=3")
    _, expanded = command("verb=test", f"run={run}", "strategy=sar", "trainer.num_nodes=2")
    cfg = composed(expanded)
    line = config.fit_strategy(cfg, ["strategy", "trainer.num_nodes"], inherited=expanded.inherited)
    assert cfg.strategy.name == "sar" and cfg.trainer.num_nodes == 2
    assert line.startswith("strategy=sar leaves out settings that it does not serve: ")
    assert f"strategy.halo_hops=1 (run={run})" in line
    _, expanded = command("verb=test", f"run={run}", "strategy=sar", "strategy.halo_hops=2")
    with pytest.raises(ConfigError, match=r"strategy\.halo_hops=2 was set; strategy has no key"):
        config.fit_strategy(composed(expanded), ["strategy", "strategy.halo_hops"], inherited=expanded.inherited)


@pytest.mark.slow
def test_another_option_of_a_group_leaves_out_what_it_lacks(make_run: MakeRun) -> None:
    of_data = ("data=edges", "data.path=e.txt", "data.ids=int", "data.split=random")
    run = make_run(*of_data, "model=gat", "model.heads=2", "model.dropout=0.25")
    _, expanded = command("verb=train", f"run={run}", "data=planted", "model=gcn")
    assert expanded.notices == [
        f"gtrain: data=planted leaves out settings that it does not have: data.path=e.txt, data.ids=int (run={run})",
        f"gtrain: model=gcn leaves out settings that it does not have: model.heads=2 (run={run})",
    ]
    cfg = composed(expanded)
    assert (cfg.data._target_, cfg.model.dropout) == ("gtrain.data.planted.PlantedData", 0.25)


def test_a_sweep_over_strategies_of_a_run(make_run: MakeRun) -> None:
    run = make_run("strategy=sar", "mode=2")
    expanded = inherit.inherit(["--multirun", "verb=test", f"run={run}", "strategy=single,sar", "seed=1,2"])
    assert expanded.arguments[:2] == ["--multirun", "mode=2"]
    assert "strategy=single,sar" in expanded.arguments and "seed=1,2" in expanded.arguments
    assert "run=a,b was set; it takes one value" in refusal("verb=test", "run=a,b")


def test_last_is_the_newest_run_with_a_checkpoint(make_run: MakeRun) -> None:
    folders = [make_run("seed=1", name="a"), make_run("seed=1", name="b"), make_run("seed=1", name="c", checkpoints=())]
    shutil.copytree("runs/a", "runs/copied")
    index = folders[0].parent
    assert earlier_run.folder_of("last", index) == folders[1]
    assert inherit.folders(["run=last", "files=png"]) == [str(folders[2]), "files=png"]
    shutil.rmtree(folders[1])
    assert earlier_run.folder_of("last", index) == folders[0]
    said = refusal("verb=test", "run=last", "paths.runs=elsewhere")
    assert "run=last was set; no run with a checkpoint is recorded in" in said and "elsewhere/index.txt" in said


@pytest.mark.slow
def test_the_choice_of_auto_is_taken_over(make_run: MakeRun) -> None:
    run = make_run("strategy=auto", "strategy.race_seconds=3", "model=sage")
    cfg = OmegaConf.load(run / ".hydra" / "config.yaml")
    cfg.plan.chosen, cfg.strategy = "sar mode=2", {"name": "sar", "mode": "${mode}"}
    OmegaConf.save(cfg, run / ".hydra" / "config.yaml")
    got, expanded = command("verb=test", f"run={run}")
    assert (got["strategy"], got["mode"], got["model"]) == ("sar", 2, "sage")
    assert expanded.arguments[:3] == ["strategy=sar", "model=sage", "mode=2"] and "strategy.race_seconds" not in got


def test_the_values_of_the_run_hold_where_files_and_defaults_have_changed(make_run: MakeRun) -> None:
    run = make_run("seed=1")
    changes = {"model.hidden_channels": 48, "model.act": "it's", "data.num_classes": 5, "model.old": 1}
    edit(run / ".hydra" / "config.yaml", changes)
    got, expanded = command("verb=test", f"run={run}", "data.num_classes=6")
    assert (got["model.hidden_channels"], got["model.act"], got["data.num_classes"]) == (48, "it's", 6)
    assert expanded.notices == [f"gtrain: run={run}: this release lacks model.old=1; they are left out."]
    got, _ = command("verb=test", f"run={run}", "model=sage")
    assert got.keys() == {"seed", "data.num_classes", "verb", "model", "run", "ckpt_path"}, "sage has its own defaults"


@pytest.mark.slow
def test_paths_of_a_run_that_started_in_another_folder(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("edges.txt", "labels.txt", "int"):
        Path(name).touch()
    Path("data").mkdir()
    names = ("data.path=[edges.*,gone.txt]", "data.labels=labels.txt", "data.ids=int", "data.features=degree")
    run = make_run("data=edges", *names)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    here = tmp_path / "here"
    got, _ = command("verb=predict", f"run={run}", "data.labels=mine.txt")
    assert got["data.path"] == [str(here / "edges.*"), "gone.txt"] and got["data.labels"] == "mine.txt"
    assert (got["data.ids"], got["data.features"]) == ("int", "degree"), "not the names of files"
    assert got["paths.data"] == str(here / "data") and "data.root" not in got, "which follows paths.data"
    monkeypatch.chdir(here)
    assert command("verb=predict", f"run={run}")[0]["data.path"] == ["edges.*", "gone.txt"]


def test_names_of_files_in_the_entries_of_tables(tmp_path: Path) -> None:
    for name in ("users.csv", "items.csv", "id"):
        (tmp_path / name).touch()
    users = {
        "path": "users.csv",
        "key": "id",
        "labels": {"path": ["items.csv"], "label": "id"},
        "columns": {"id": "id"},
    }
    named = inherit._absolute({"user": users, "item": "items.csv", "other": "gone.csv"}, tmp_path)
    user, items = str(tmp_path / "users.csv"), str(tmp_path / "items.csv")
    expected = {**users, "path": user, "labels": {"path": [items], "label": "id"}}
    assert named == {"user": expected, "item": items, "other": "gone.csv"}
    query = {"duckdb": "SELECT * FROM 'users.csv'", "key": "id"}
    assert inherit._absolute(query, tmp_path) == query


@pytest.mark.slow
def test_files_of_the_run_s_own_configuration_folder(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("seed=1")
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "model" / "mine.yaml").write_text("defaults: [gcn]\nhidden_channels: 12\n")
    OmegaConf.save(OmegaConf.create(["model=mine"]), run / ".hydra" / "overrides.yaml")
    stored = run / ".hydra" / "hydra.yaml"
    sources = [*OmegaConf.load(stored).hydra.runtime.config_sources]
    edit(stored, {"hydra.runtime.config_sources": [*sources, source(own)]})
    edit(run / ".hydra" / "config.yaml", {"model.hidden_channels": 12})
    got, expanded = command("verb=test", f"run={run}")
    assert got["model"] == "mine" and expanded.arguments[:2] == ["--config-dir", str(own)]
    assert "model.hidden_channels" not in got
    (own / "model" / "mine.yaml").write_text("defaults: [gcn]\nhidden_channels: 99\n")
    assert command("verb=test", f"run={run}")[0]["model.hidden_channels"] == 12, "the file has changed since"
    own.rename(tmp_path / "moved")
    said = refusal("verb=test", f"run={run}")
    assert f"its configuration files were in file://{own}, which is not a folder" in said and "--config-dir DIR" in said
    arguments = ("--config-dir", str(tmp_path / "moved"), "verb=test", f"run={run}")
    assert command(*arguments)[0]["model.hidden_channels"] == 12
    edit(stored, {"hydra.runtime.config_sources": [*sources, source("here.evil", "pkg")]})
    assert "were in pkg://here.evil, which is a package" in refusal("verb=test", f"run={run}")


def source(path: Path | str, scheme: str = "file") -> dict[str, str]:
    """What Hydra stores of ``--config-dir``."""
    return {"path": str(path), "schema": scheme, "provider": "command-line"}


def test_what_a_strangers_run_names_is_not_typed(make_run: MakeRun) -> None:
    run = make_run("seed=1")
    overrides = ["model._target_=os.system", "allow_targets=[os]"]
    others = ["hydra.job.env_set={A:b}", "hydra/launcher=evil", "--multirun", "-cd=evil"]
    OmegaConf.save(OmegaConf.create([*overrides, *others]), run / ".hydra" / "overrides.yaml")
    got, expanded = command("verb=test", f"run={run}")
    assert expanded.arguments[0] == "model._target_=os.system" and "allow_targets" not in got
    assert [each for each in expanded.arguments if "evil" in each or "env_set" in each or each.startswith("-")] == []
    cfg = composed(expanded)
    with pytest.raises(ConfigError, match=r"model\._target_=os\.system was set in a file") as caught:
        targets.settle(cfg, ["verb=test", f"run={run}"])
    assert "allow_targets=[os] on the command line" in str(caught.value.hint)
    cfg.allow_targets = ["os"]
    targets.settle(cfg, ["verb=test", f"run={run}", "allow_targets=[os]"])


def test_mistakes(make_run: MakeRun) -> None:
    run = make_run("seed=1")
    assert "is not a folder" in refusal("verb=test", "run=nowhere")
    Path("empty").mkdir()
    assert "is not the folder of a run: it has no .hydra/overrides.yaml" in refusal("verb=test", "run=empty")
    assert f"such as run={run}" in refusal("verb=test", "run=runs")
    bare = make_run("seed=1", name="bare", checkpoints=())
    assert f"run={bare} was set; this run has no checkpoint." in refusal("verb=test", f"run={bare}")
    assert "ckpt_path=null trains with its settings" in refusal("verb=train", f"run={bare}")
    edit(bare / ".hydra" / "config.yaml", {"verb": "test"})
    assert "it is a run of gtrain test: name the run that trained" in refusal("verb=predict", f"run={bare}")
    shutil.rmtree(run / "checkpoints" / "best.ckpt")
    assert "has no checkpoint best.ckpt" in refusal("verb=test", f"run={run}", "ckpt_path=best")
    assert str(command("verb=test", f"run={run}")[0]["ckpt_path"]).endswith("last.ckpt")
    (run / ".hydra" / "hydra.yaml").write_text("hydra: {job: 1}")
    assert "hydra.yaml is not what gtrain writes" in refusal("verb=test", f"run={run}")
    (run / ".hydra" / "hydra.yaml").write_text("hydra: [")
    assert "hydra.yaml cannot be read" in refusal("verb=test", f"run={run}")


@pytest.mark.slow
def test_settings_of_other_releases_that_have_gone_are_named(make_run: MakeRun) -> None:
    run = make_run("seed=1")
    (run / "run.json").write_text(json.dumps({"identity": "", "gtrain": "9.1.0"}))
    stored = run / ".hydra" / "overrides.yaml"
    OmegaConf.save(OmegaConf.create(["seed=1", "trainer.warp=9", "data.fold=2"]), stored)
    said = refusal("verb=test", f"run={run}")
    assert "it was trained with trainer.warp=9, data.fold=2, which this release lacks (gtrain 9.1.0 trained it" in said
    assert f"gtrain VERB seed=1 ckpt_path={run}/checkpoints/best.ckpt" in said
    OmegaConf.save(OmegaConf.create(["model=vanished"]), stored)
    assert "model=vanished was set; the options of model are" in refusal("verb=test", f"run={run}")


@pytest.mark.parametrize(("limit", "from_run", "refused"), [
    (4, False, True), (5, False, False), (5, True, True), (6, True, False), (-1, True, False), (None, True, False),
])  # fmt: skip
def test_epochs_that_are_done(make_run: MakeRun, limit: int | None, from_run: bool, refused: bool) -> None:
    checkpoint = make_run() / "checkpoints" / "last.ckpt"
    job = {"trainer": {"max_epochs": limit}, "run": "runs/one" if from_run else None}
    if not refused:
        runs.check_epochs_left(checkpoint, job)
        return
    with pytest.raises(ConfigError, match=rf"max_epochs={limit} was set; .*last.ckpt has completed 5 epochs already"):
        runs.check_epochs_left(checkpoint, job)
