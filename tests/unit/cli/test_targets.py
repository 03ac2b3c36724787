"""Configurations of strangers: a file names classes that train, and nothing else is imported or called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked import gtrain
from helpers import ok, show
from omegaconf import OmegaConf

from gtrain import targets
from gtrain.data.config import SCHEMAS
from gtrain.errors import ConfigError
from gtrain.run import build
from gtrain.settings import schema

QUICK = ("strategy=single", "trainer.max_epochs=1", "data.num_nodes=60", "data.num_edges=300", "hydra.run.dir=run")


def refused_file(folder: Path, group: str, text: str, *arguments: str) -> str:
    """What the command answers to a file of a group; with the mark of an attack that it must not leave."""
    (folder / "conf" / group).mkdir(parents=True, exist_ok=True)
    (folder / "conf" / group / "evil.yaml").write_text(text)
    add = "" if group in ("model", "data", "callbacks", "experiment") else "+"
    settings = [setting for setting in QUICK if group != "data" or not setting.startswith("data.")]
    result = gtrain("--config-dir", "conf", f"{add}{group}=evil", *settings, *arguments, cwd=folder)
    assert result.returncode == 1 and "Traceback" not in result.stderr, show(result)
    assert not (folder / "mark").exists()
    return result.stderr


@pytest.mark.parametrize(
    "group, text",
    [
        ("callbacks", "evil: {_target_: os.system, command: touch mark}"),
        ("callbacks", 'evil: {_target_: builtins.eval, _args_: [\'open("mark", "w")\']}'),
        ("callbacks", "evil: {_target_: torch.os.system, command: touch mark}"),
        ("callbacks", "evil: {_target_: gtrain.launch.children.os.system, command: touch mark}"),
        ("callbacks", "evil: {_target_: torch.utils.collect_env.run, command: touch mark}"),
        ("callbacks", "evil: {_target_: torch.hub.load, repo_or_dir: ., model: x, source: local}"),
        ("callbacks", "evil: {_target_: gtrain.run_local, task: 'os:system', _args_: [touch mark]}"),
        ("callbacks", "evil: {_target_: hydra.utils.call, config: {_target_: os.system, command: touch mark}}"),
        (
            "callbacks",
            "evil: {_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: [{_target_: os.system, command: a}]}",
        ),
        (
            "callbacks",
            "evil: {_target_: gtrain.callbacks.timeline.Timeline, folder: '\\${oc.create:{_target_: os.system}}'}",
        ),
        ("callbacks", "evil: {_target_: torch_geometric.nn.Sequential, input_args: x, modules: []}"),
        ("model", "_target_: os.system\ncommand: touch mark"),
        ("model", "_target_: gtrain.model.networks.gcn\noptimizer: {_target_: os.system, command: touch mark}"),
        ("data", "_target_: os.system\ncommand: touch mark"),
        ("experiment", "# @package _global_\nmodel: {_target_: os.system, command: touch mark}"),
        ("experiment", "# @package _global_\nallow_targets: [os]\nmodel: {_target_: os.system}"),
        ("experiment", "# @package _global_\nhydra: {callbacks: {evil: {_target_: os.system, command: touch mark}}}"),
        (
            "experiment",
            "# @package _global_\nhydra: {job_logging: {handlers: {e: {(): os.system, command: touch mark}}}}",
        ),
        ("experiment", "# @package _global_\nhydra: {hydra_logging: {handlers: {e: {class: logging.os.system}}}}"),
        ("experiment", "# @package _global_\nhydra: {job: {env_set: {NUMBA_CACHE_DIR: elsewhere}}}"),
    ],
)
def test_files_of_a_stranger(group: str, text: str, tmp_path: Path) -> None:
    said = refused_file(tmp_path, group, text)
    assert "_target_=" in said or "in a file" in said or "logging" in said or "interpolation" in said, said
    assert "HINT" in said and not (tmp_path / "run" / "checkpoints").exists()


def test_what_the_user_allows(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom torch_geometric.nn import GCN as Borrowed\nclass Net(Borrowed): ..."
    )
    (tmp_path / "conf" / "model").mkdir(parents=True)
    own = "_target_: {}\nhidden_channels: 4\nnum_layers: 2\n"
    own += "optimizer: {{_target_: torch.optim.SGD, lr: 0.1}}\nscheduler: null"
    for name, target in (("mine", "mine.Net"), ("borrowed", "mine.Borrowed")):
        (tmp_path / "conf" / "model" / f"{name}.yaml").write_text(own.format(target))
    for name in ("mine", "borrowed"):
        ok(gtrain("--config-dir", "conf", f"model={name}", *QUICK, cwd=tmp_path))
    said = refused_file(tmp_path, "callbacks", "evil: {_target_: mine.os.system, command: touch mark}")
    assert "mine.os.system (posix.system) was set in a file" in said
    counter = "evil: {_target_: email.message.Message}"
    assert "allow_targets=[email.message]" in refused_file(tmp_path, "callbacks", counter)
    assert (
        "email.message.Message"
        not in refused_file(tmp_path, "callbacks", counter, "allow_targets=[email]").partition("was set in a file")[0]
    )


def test_what_is_typed_is_the_users_own() -> None:
    arguments = [
        "model._target_=a.B",
        "+callbacks.c={_target_: d.E, f: [{_target_: g.h}]}",
        "data._target_=i.J,k.L",
        "allow_targets=[m, n.o]",
        "--config-dir",
        "model=evil",
        "~logger",
    ]
    assert targets.typed(arguments) == (["a.B", "d.E", "g.h", "i.J", "k.L"], ["m", "n.o"])


def resolved(model: dict[str, Any], *arguments: str) -> dict[str, Any]:
    cfg = OmegaConf.create({"data": {}, "model": model, "callbacks": {}, "logger": {}, "allow_targets": []})
    targets.settle(cfg, arguments)
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def test_the_shipped_configurations_name_what_is_allowed(request: pytest.FixtureRequest) -> None:
    names: set[str] = set()
    for path in (request.config.rootpath / "conf").rglob("*.yaml"):
        content = OmegaConf.load(path)
        if "hydra" in content:
            targets.check_hydra(content.pop("hydra"), [])
        names |= {str(target) for _, target in targets.found_in(OmegaConf.to_container(content))}
    names |= {
        "gtrain.PlantedData",
        "torch_geometric.nn.GAT",
        "torch.optim.lr_scheduler.StepLR",
        "torchmetrics.Accuracy",
    }
    names |= {schema(options)._target_ for options in SCHEMAS.values()}  # of data sources, which have no YAML
    assert len(names) > 30
    for name in names - {"gtrain.model.dgl_networks"}:
        if ".dgl_networks." not in name:
            targets.check_objects(resolved({"_target_": name}), build.find_target)


@pytest.mark.parametrize(
    "name", ["os.system", "torch.nn.functional.relu", "gtrain.data.sources.ogb.download", "torch.load"]
)
def test_names_that_are_not_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model\._target_=.*was set in a file"):
        targets.check_objects(resolved({"_target_": name}), build.find_target)
    targets.check_objects(resolved({"_target_": name}, f"model._target_={name}"), build.find_target)


def test_a_run_of_a_stranger_is_not_unpickled(tmp_path: Path) -> None:
    result = gtrain("--experimental-rerun", "run/.hydra/config.pickle", cwd=tmp_path)
    assert result.returncode == 1 and "--experimental-rerun was given" in result.stderr


def test_the_hydra_folder_of_a_strangers_run(tmp_path: Path) -> None:
    """The stored configuration of a run, edited, read by test and by a training that goes on."""
    ok(gtrain(*QUICK, cwd=tmp_path))
    stored = tmp_path / "run" / ".hydra" / "config.yaml"
    text = stored.read_text()
    evil = text.replace("_target_: torch.optim.Adam\n", "_target_: os.system\n    command: touch mark\n", 1)
    assert evil != text
    stored.write_text(evil)
    for verb in ("test", "train"):
        arguments = ["ckpt_path=run/checkpoints/last.ckpt", "hydra.run.dir=again"]
        result = gtrain("--config-path", str(stored.parent), verb, *arguments, cwd=tmp_path)
        assert result.returncode == 1 and "os.system" in result.stderr and not (tmp_path / "mark").exists(), show(
            result
        )
