"""Directory checkpoints: complete or absent, checked, and never unpickled."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gtrain.errors import CheckpointError
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy.group import Group


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 2)


def content(model: nn.Module, **more: object) -> dict[str, object]:
    return {"state_dict": model.state_dict(), "epoch": 4, "global_step": 5, **more}


def save(path: Path, model: nn.Module, shard: dict | None = None, **more: object) -> None:
    checkpoints.save(Group(), path, content(model, **more), shard or {}, model)


def load(path: Path, model: nn.Module, restore_rng: bool = False) -> checkpoints.Loaded:
    return checkpoints.load(Group(), path, model, restore_rng=restore_rng)


def test_everything_comes_back(tmp_path: Path, model: nn.Module) -> None:
    state = {"lists": [1, 2.5, "x", None], "pair": (1, torch.ones(2)), "path": Path("a/b"), "number": np.float64(0.5)}
    save(tmp_path / "a.ckpt", model, {"rows": torch.arange(3)}, callbacks=state)
    loaded = load(tmp_path / "a.ckpt", model)
    assert torch.equal(loaded.checkpoint["state_dict"]["weight"], model.weight)
    assert loaded.checkpoint["callbacks"]["lists"] == [1, 2.5, "x", None]
    assert loaded.checkpoint["callbacks"]["path"] == "a/b"
    assert loaded.checkpoint["callbacks"]["number"] == 0.5
    assert torch.equal(loaded.shard["rows"], torch.arange(3))


def test_random_numbers_go_on_where_they_stood(tmp_path: Path, model: nn.Module) -> None:
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    save(tmp_path / "a.ckpt", model)
    expected = (torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)])
    torch.manual_seed(9)
    load(tmp_path / "a.ckpt", model, restore_rng=True)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]) == expected


def test_a_test_leaves_random_numbers_alone(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "a.ckpt", model)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    load(tmp_path / "a.ckpt", model)
    assert torch.equal(torch.rand(3), expected)


def test_the_manifest_says_what_is_inside(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "a.ckpt", model)
    manifest = json.loads((tmp_path / "a.ckpt" / "manifest.json").read_text())
    assert (manifest["world_size"], manifest["epoch"], manifest["global_step"]) == (1, 4, 5)
    assert manifest["model"] == {"class": "Linear", "tensors": {"weight": [2, 3], "bias": [2]}}
    assert set(manifest["files"]) == {"trainer.pt", "rank-0.pt"}


def test_another_model_is_refused_by_name_and_shape(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "a.ckpt", model)
    with pytest.raises(CheckpointError, match=r"another model than Linear: weight: \[2, 3\] there, \[2, 4\] here"):
        load(tmp_path / "a.ckpt", nn.Linear(4, 2))
    with pytest.raises(CheckpointError, match="bias: \\[2\\] there, absent here"):
        load(tmp_path / "a.ckpt", nn.Linear(3, 2, bias=False))


@pytest.mark.parametrize("name", ["trainer.pt", "rank-0.pt"])
def test_a_flipped_byte_is_named(tmp_path: Path, model: nn.Module, name: str) -> None:
    save(tmp_path / "a.ckpt", model)
    path = tmp_path / "a.ckpt" / name
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        load(tmp_path / "a.ckpt", model)


def test_an_unfinished_checkpoint_is_refused(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "a.ckpt", model)
    (tmp_path / "a.ckpt" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load(tmp_path / "a.ckpt", model)
    save(tmp_path / "b.ckpt", model)
    (tmp_path / "b.ckpt" / "rank-0.pt").unlink()
    with pytest.raises(CheckpointError, match="rank-0.pt is missing"):
        load(tmp_path / "b.ckpt", model)


def test_a_missing_checkpoint_names_those_beside_it(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "last.ckpt", model)
    with pytest.raises(CheckpointError, match=r"no such checkpoint; the folder holds last\.ckpt"):
        load(tmp_path / "lost.ckpt", model)


def test_a_kill_between_the_renames_leaves_the_one_before(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "last.ckpt", model)
    (tmp_path / "last.ckpt").rename(tmp_path / "last.ckpt.old")
    assert load(tmp_path / "last.ckpt", model).checkpoint["epoch"] == 4


def test_a_newer_one_replaces_the_old_and_leaves_nothing_else(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "last.ckpt", model)
    nn.init.zeros_(model.weight)
    save(tmp_path / "last.ckpt", model)
    assert load(tmp_path / "last.ckpt", model).checkpoint["state_dict"]["weight"].sum() == 0
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_an_object_that_would_need_unpickling_is_refused_when_saving(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint.callbacks.mine is a Linear"):
        save(tmp_path / "a.ckpt", model, callbacks={"mine": model})
    assert not (tmp_path / "a.ckpt").exists()


def test_such_a_hyper_parameter_is_left_out(tmp_path: Path, model: nn.Module) -> None:
    with pytest.warns(UserWarning, match=r"hyper_parameters.net is a Linear"):
        save(tmp_path / "a.ckpt", model, hyper_parameters={"net": model, "lr": 0.1})
    assert load(tmp_path / "a.ckpt", model).checkpoint["hyper_parameters"] == {"lr": 0.1}


def test_a_single_file_of_lightnings_loads_without_unpickling(tmp_path: Path, model: nn.Module) -> None:
    torch.save({"state_dict": model.state_dict()}, tmp_path / "plain.ckpt")
    assert "state_dict" in load(tmp_path / "plain.ckpt", model).checkpoint
    torch.save({"state_dict": model.state_dict(), "evil": model}, tmp_path / "evil.ckpt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path / "evil.ckpt", model)


def test_another_format_is_named(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "a.ckpt", model)
    manifest = json.loads((tmp_path / "a.ckpt" / "manifest.json").read_text())
    (tmp_path / "a.ckpt" / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="checkpoint format 99"):
        load(tmp_path / "a.ckpt", model)
