"""Directory checkpoints: complete or absent, checked, and never unpickled."""

from __future__ import annotations

import errno
import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import REPO
from torch import nn

from gtrain.data.planted.kg import PlantedKGData
from gtrain.data.sources.kg import KGData
from gtrain.data.sources.libsvm import LibsvmData
from gtrain.errors import CheckpointError, DiskFullError
from gtrain.graph.store import Store
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.nn import Embedding, SparseLinear
from gtrain.run import runs
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy.base import GraphStrategy
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


def test_the_run_folder_leads_to_a_checkpoint_in_another_folder(tmp_path: Path, model: nn.Module) -> None:
    run, last = tmp_path / "run", tmp_path / "run" / "checkpoints" / "last.ckpt"

    def save_in(folder: Path, epoch: int) -> None:
        path = folder / "last.ckpt"
        checkpoints.save(Group(), path, content(model) | {"epoch": epoch}, {}, model, run_folder=run)

    for epoch, folder in enumerate(("a", "a", "b")):
        save_in(tmp_path / folder, epoch)
        saved = runs.last_checkpoint(run)
        assert saved is not None and (saved.path, saved.epochs) == (last, epoch + 1)
        assert last.resolve() == tmp_path / folder / "last.ckpt"
        assert runs.checkpoint_of(run) == last
        assert load(last, model).checkpoint["epoch"] == epoch
    target = tmp_path / "b" / "last.ckpt"
    target.rename(target.with_name("last.ckpt.old"))  # a kill between the renames of a replacement
    saved = runs.last_checkpoint(run)
    assert saved is not None and saved.epochs == 3 and runs.checkpoint_of(run) == last
    assert load(last, model).checkpoint["epoch"] == 2
    target.with_name("last.ckpt.old").rename(target)
    strategy: Any = SimpleNamespace(is_global_zero=True, run_folder=run)
    GraphStrategy.remove_checkpoint(strategy, tmp_path / "a" / "last.ckpt")
    assert last.exists()
    GraphStrategy.remove_checkpoint(strategy, target)
    assert not last.is_symlink()
    save_in(tmp_path / "b", 2)
    save_in(run / "checkpoints", 3)  # in place of the link
    assert not last.is_symlink() and load(last, model).checkpoint["epoch"] == 3
    save_in(tmp_path / "a", 4)  # of another callback
    assert load(last, model).checkpoint["epoch"] == 3
    assert [path.name for path in last.parent.iterdir()] == ["last.ckpt"]
    assert load(tmp_path / "b" / "last.ckpt", model).checkpoint["epoch"] == 2


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


def test_a_test_maps_the_file_and_a_run_that_continues_reads_it(tmp_path: Path, model: nn.Module) -> None:
    """The optimizer's state is most of a checkpoint: a test does not take memory for it."""
    save(tmp_path / "a.ckpt", model)
    for continues in (False, True):
        weight = load(tmp_path / "a.ckpt", model, restore_rng=continues).checkpoint["state_dict"]["weight"]
        files = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "trainer.pt" in line]
        spans = [[int(end, 16) for end in line[0].split("-")] for line in files]
        assert any(first <= weight.data_ptr() < last for first, last in spans) != continues
        del weight


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
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load(tmp_path / "a.ckpt", model)
    save(tmp_path / "b.ckpt", model)
    (tmp_path / "b.ckpt" / "rank-0.pt").unlink()
    with pytest.raises(CheckpointError, match="rank-0.pt is missing"):
        load(tmp_path / "b.ckpt", model)


def test_a_missing_checkpoint_names_those_beside_it(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "last.ckpt", model)
    with pytest.raises(CheckpointError, match=r"no such checkpoint exists; the folder contains last\.ckpt"):
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
    with pytest.raises(CheckpointError, match=r"evil\.ckpt holds torch\.nn\.\S+Linear: .* never unpickled") as refused:
        load(tmp_path / "evil.ckpt", model)
    assert "weights_only" not in str(refused.value)
    (tmp_path / "metrics.csv").write_text("epoch,loss\n")
    with pytest.raises(CheckpointError, match="neither a checkpoint folder nor a file of torch.save"):
        load(tmp_path / "metrics.csv", model)


@pytest.mark.parametrize("place", ["trainer.pt", "rank-0.pt", "own.bin", "manifest.json"])
def test_a_full_disk_is_named_with_the_file(
    place: str, tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's writer says "unexpected pos"; files of the strategy's own and the manifest fail without a name."""
    save(tmp_path / "last.ckpt", model)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write, fsync = torch.save, os.fsync

    def torch_save(value: object, path: Path) -> None:
        if path.name == place:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 23872 vs 23764")
        write(value, path)

    def no_space(descriptor: int) -> None:
        raise full

    def write_files(folder: Path) -> None:
        if place == "own.bin":
            raise full

    monkeypatch.setattr(torch, "save", torch_save)
    monkeypatch.setattr(os, "fsync", no_space)  # of the manifest, and of the write that finds out why torch's failed
    with pytest.raises(DiskFullError, match="cannot be written: no space left on device") as failed:
        checkpoints.save(Group(), tmp_path / "last.ckpt", content(model), {}, model, write_files)
    where = "last.ckpt.part" if place == "own.bin" else f"last.ckpt.part/{place}"
    assert f"{tmp_path}/{where} cannot" in failed.value.message
    assert f"resume with ckpt_path={tmp_path}/last.ckpt" in str(failed.value)
    assert not (tmp_path / "last.ckpt.part").exists(), "it would fill the disk"
    if place == "trainer.pt":
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(RuntimeError, match="unexpected pos"):  # the disk is not full: another error stays as it is
            checkpoints.save(Group(), tmp_path / "last.ckpt", content(model), {}, model)


def test_any_changed_byte_of_a_manifest_is_damage(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "a.ckpt", model)
    path = tmp_path / "a.ckpt" / "manifest.json"
    text, before = path.read_bytes(), checkpoints.read_manifest(tmp_path / "a.ckpt")
    for place in range(len(text)):
        for flip in (1, 2, 4, 16, 32):
            path.write_bytes(text[:place] + bytes([text[place] ^ flip]) + text[place + 1 :])
            try:
                assert checkpoints.read_manifest(tmp_path / "a.ckpt") == before  # white space
            except CheckpointError as error:
                assert "damaged" in str(error) or "checkpoint format" in str(error)
    added = ("gtrain", "training", "within_epoch")
    older = {name: value for name, value in before.items() if name not in added}
    path.write_text(json.dumps(older))
    assert checkpoints.read_manifest(tmp_path / "a.ckpt") == older, "written before there was a checksum"


def test_the_specification_lists_the_manifests_fields(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "a.ckpt", model)
    section = (REPO / "docs" / "formats.md").read_text().split("### Manifest of a checkpoint\n")[1].split("\n### ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(
        json.loads((tmp_path / "a.ckpt" / "manifest.json").read_text())
    )


def test_another_format_is_named(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "a.ckpt", model)
    manifest = json.loads((tmp_path / "a.ckpt" / "manifest.json").read_text())
    (tmp_path / "a.ckpt" / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="checkpoint format 99"):
        load(tmp_path / "a.ckpt", model)


# ------------------------------------------------------------------------------------------- numbering of learned rows


def kg_store(folder: Path, lines: list[str], parts: int = 1) -> Store:
    """A knowledge graph of these triples, cut into parts."""
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("\n".join(lines if split == "train" else lines[:1]) + "\n")
    data = KGData(path=str(folder), num_parts=parts, partitioner="random", store=str(folder / "stores"))
    data.prepare_data()
    return data.open_store()


TRIPLES = ["ann\tlikes\tbob", "bob\tlikes\tcid", "cid\tknows\tann", "dan\tknows\tann"]


def test_learned_rows_belong_to_the_names_of_the_data(tmp_path: Path) -> None:
    """Parts do not matter, the order of names does: of nodes, and of relations."""
    model = KGEmbedding(4, 2, dimension=2)
    numbering = checkpoints.numbering_of(model, kg_store(tmp_path / "a", TRIPLES))
    checkpoints.save(Group(), tmp_path / "a.ckpt", content(model), {}, model, numbering=numbering)

    def load_for(name: str, lines: list[str], parts: int = 1) -> None:
        other = checkpoints.numbering_of(model, kg_store(tmp_path / name, lines, parts))
        checkpoints.load(Group(), tmp_path / "a.ckpt", model, restore_rng=False, numbering=other)

    load_for("cut", [*TRIPLES, "ann\tknows\tdan"], 3)
    with pytest.raises(CheckpointError, match=r"other data: names of node: 4 \(checksum \w+\) there, 4 \(checksum"):
        load_for("nodes", [line.replace("bob", "eve") for line in TRIPLES])
    with pytest.raises(CheckpointError, match=r"names of relation: 2 \(checksum \w+\) there") as raised:
        load_for("relations", [*TRIPLES[2:], *TRIPLES[:2]])
    assert "names of node" in str(raised.value)  # their order is another as well
    assert "the same names in another order, restore their order" in str(raised.value)


def test_old_checkpoints_and_models_without_rows_are_not_bound(tmp_path: Path) -> None:
    store, model = kg_store(tmp_path / "a", TRIPLES), KGEmbedding(4, 2, dimension=2)
    assert checkpoints.numbering_of(nn.Linear(2, 2), store) is None
    numbering = checkpoints.numbering_of(model, store)
    assert numbering is not None
    save(tmp_path / "old.ckpt", model)
    with pytest.warns(UserWarning, match="does not state which nodes its learned rows belong to"):
        checkpoints.load(Group(), tmp_path / "old.ckpt", model, restore_rng=False, numbering=numbering)


@pytest.mark.parametrize(
    ("make", "layer", "message"),
    [
        (
            lambda folder, other: PlantedKGData(
                num_entities=30, num_positions=5, num_relations=2, num_triples=60, seed=int(other)
            ),
            lambda: Embedding(30, 2),
            "seed: 0 there, 1 here",
        ),
        (
            lambda folder, other: LibsvmData(path=str(libsvm(folder, other)), num_features=4),
            lambda: SparseLinear(4, 2),
            "the first feature id: 1 there, 0 here",
        ),
    ],
    ids=["generator", "features"],
)
def test_rows_without_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, layer: Any, message: str
) -> None:
    """Nodes of a generator belong to its parameters, columns of libsvm files to the first feature id."""
    monkeypatch.chdir(tmp_path)
    found = []
    for other in (False, True):
        data = make(tmp_path, other)
        data.prepare_data()
        found.append(checkpoints.numbering_of(layer(), data.open_store()))
    model = layer()
    checkpoints.save(Group(), tmp_path / "a.ckpt", content(model), {}, model, numbering=found[0])
    checkpoints.load(Group(), tmp_path / "a.ckpt", model, restore_rng=False, numbering=found[0])
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(Group(), tmp_path / "a.ckpt", model, restore_rng=False, numbering=found[1])


def libsvm(folder: Path, from_zero: bool) -> Path:
    """A file of rows whose smallest feature id is 0 or 1."""
    path = folder / f"from-{int(not from_zero)}.svm"
    path.write_text("".join(f"{row % 2} {int(not from_zero)}:1 {2 + row % 2}:0.5\n" for row in range(20)))
    return path
