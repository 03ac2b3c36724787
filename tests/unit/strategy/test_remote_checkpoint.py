"""Checkpoints at an address: complete for every reader, whatever ends or overtakes the writer."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from gtrain.callbacks.checkpoint import RunCheckpoint
from gtrain.errors import CheckpointError, ConfigError, DiskFullError
from gtrain.object_store import AddressedFolder, followed
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy import remote_checkpoint
from gtrain.strategy.folder_sharing import FolderSharing
from gtrain.strategy.group import Group
from gtrain.strategy.remote_checkpoint import LocalCopies, RemoteCheckpoint, check_dirpath


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/last.ckpt"


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket" / "last.ckpt"


def save(address: str, value: float, run_folder: Path | None = None, epoch: int = 4) -> nn.Module:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    content = {"state_dict": model.state_dict(), "epoch": epoch, "global_step": 5}
    checkpoints.save(
        *(Group(), address, content, {"rows": torch.full((3,), value)}, model),
        write_files=lambda folder: (folder / "own.npy").write_bytes(bytes([int(value)])) and None,
        run_folder=run_folder,
    )
    return model


def loaded(address: str, folder: Path) -> tuple[float, float, bytes]:
    """A value of the weights, of the rank's state, and the strategy's file, as written by :func:`save`."""
    RemoteCheckpoint(address).fetch(folder)
    loaded = checkpoints.load(Group(), folder, nn.Linear(3, 2), restore_rng=False)
    checkpoints.verify_files(folder)
    weight, rows = loaded.checkpoint["state_dict"]["weight"], loaded.shard["rows"]
    return float(weight[0, 0]), float(rows[0]), (folder / "own.npy").read_bytes()


def generations(bucket: Path) -> set[str]:
    return {path.name for path in bucket.iterdir() if path.is_dir()}


def test_a_checkpoint_is_replaced_as_a_whole_and_leaves_nothing_else(
    address: str, bucket: Path, tmp_path: Path
) -> None:
    save(address, 1)
    first = generations(bucket)
    assert loaded(address, tmp_path / "one") == (1, 1, b"\1")
    save(address, 2)
    assert loaded(address, tmp_path / "two") == (2, 2, b"\2")
    assert len(first) == len(generations(bucket)) == 1 and not first & generations(bucket)
    assert {path.name for path in bucket.iterdir() if path.is_file()} == {"manifest.json"}


def test_the_run_points_to_its_checkpoint(address: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(address, 1, run)
    pointer = run / "checkpoints" / "last.ckpt"
    assert followed(pointer) == address == checkpoints.located(pointer)
    assert json.loads((pointer / "manifest.json").read_text())["epoch"] == 4
    assert [path.name for path in run.iterdir()] == ["checkpoints"], "files of ranks are written into the run's folder"
    checkpoints.check_complete(address)
    checkpoints.check_model(address, nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=f"ckpt_path={address} holds another model than Linear"):
        checkpoints.check_model(address, nn.Linear(4, 2))


def test_a_writer_that_is_killed_leaves_the_one_before(address: str, bucket: Path, tmp_path: Path) -> None:
    save(address, 1)
    (tmp_path / "own.npy").write_bytes(b"2")
    (tmp_path / "files").mkdir()
    shutil.move(tmp_path / "own.npy", tmp_path / "files")
    killed = RemoteCheckpoint(address)
    killed.begin()
    killed.add(tmp_path / "files", 0)  # and rank 0 never finishes
    assert len(generations(bucket)) == 2
    assert loaded(address, tmp_path / "one") == (1, 1, b"\1")
    save(address, 3)
    assert loaded(address, tmp_path / "two") == (3, 3, b"\3") and len(generations(bucket)) == 1


def test_a_reader_that_is_overtaken_reads_the_successor(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(address, 1)
    get, files = AddressedFolder.get, []

    def slow_get(self: AddressedFolder, name: str, target: Path) -> None:
        files.append(name)
        if len(files) == 2:
            monkeypatch.setattr(AddressedFolder, "get", get)
            save(address, 2)
        get(self, name, target)

    monkeypatch.setattr(AddressedFolder, "get", slow_get)
    assert loaded(address, tmp_path / "one") == (2, 2, b"\2") and len(files) == 2


def test_a_missing_object_is_named(address: str, bucket: Path, tmp_path: Path) -> None:
    save(address, 1)
    next(bucket.glob("*/rank-0.pt")).unlink()
    for read in (lambda: loaded(address, tmp_path / "one"), lambda: checkpoints.check_complete(address)):
        with pytest.raises(CheckpointError, match="not a complete checkpoint: rank-0.pt is missing"):
            read()


def test_damage_is_reported_by_the_address(address: str, bucket: Path) -> None:
    save(address, 1)
    path = next(bucket.glob("*/trainer.pt"))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    copies = LocalCopies()
    with (
        pytest.raises(CheckpointError, match=f"^{address}/trainer.pt is damaged"),
        copies.readable(address, None) as at,
    ):
        checkpoints.load(Group(), at, nn.Linear(3, 2), restore_rng=False)
    copies.close()
    assert not at.exists()


def test_a_missing_checkpoint_names_those_beside_it(address: str) -> None:
    save(address, 1)
    folder = address.rpartition("/")[0]
    for missing in (f"{folder}/lost.ckpt", folder):
        with pytest.raises(
            CheckpointError, match=f"ckpt_path={missing} was set; no such checkpoint exists; {folder} has"
        ):
            checkpoints.read_manifest(missing)


def test_two_runs_with_one_address_are_refused(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(address, 1, tmp_path / "a")
    ours, theirs = RemoteCheckpoint(address, f"{tmp_path}/a"), RemoteCheckpoint(address, f"{tmp_path}/b")
    ours.begin()
    theirs.begin()  # the first time in its process: a later run may write to the same address
    with pytest.raises(CheckpointError, match=f"{address} is written by another run, {tmp_path}/b"):
        ours.add(tmp_path, 0)
    with pytest.raises(CheckpointError, match="is written by another run"):
        ours.begin()
    monkeypatch.setattr(remote_checkpoint, "_started", set())
    save(address, 2, tmp_path / "a")
    assert loaded(address, tmp_path / "one") == (2, 2, b"\2")


def test_a_checkpoint_that_was_copied_from_a_disk_is_read_and_replaced(
    address: str, bucket: Path, tmp_path: Path
) -> None:
    save(str(tmp_path / "local.ckpt"), 1)
    shutil.copytree(tmp_path / "local.ckpt", bucket)
    checkpoints.check_complete(address)
    assert loaded(address, tmp_path / "one") == (1, 1, b"\1")
    save(address, 2)
    assert loaded(address, tmp_path / "two") == (2, 2, b"\2")
    assert {path.name for path in bucket.iterdir() if path.is_file()} == {"manifest.json"}


def test_the_path_of_an_address_is_refused_with_the_address(address: str, bucket: Path) -> None:
    save(address, 1)
    with pytest.raises(CheckpointError, match=f"layout of object stores.\nHINT: set ckpt_path={address}"):
        checkpoints.read_manifest(bucket)


def test_a_single_file_of_lightning_is_read(address: str, bucket: Path, tmp_path: Path) -> None:
    bucket.parent.mkdir()
    torch.save({"state_dict": {}}, bucket)
    assert RemoteCheckpoint(address).exists() and RemoteCheckpoint(address).is_file
    RemoteCheckpoint(address).fetch(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == bucket.read_bytes()


def test_a_preserved_checkpoint_outlives_its_original(address: str, bucket: Path, tmp_path: Path) -> None:
    save(address, 1)
    RemoteCheckpoint(address).preserve("epoch-00001.ckpt")
    save(address, 2)
    RemoteCheckpoint(address).preserve("epoch-00001.ckpt")
    RemoteCheckpoint(address).remove()
    assert not RemoteCheckpoint(address).exists() and not list(bucket.glob("*"))
    kept = f"{address.rpartition('/')[0]}/epoch-00001.ckpt"
    assert loaded(kept, tmp_path / "one") == (1, 1, b"\1")
    save(address, 3, run_folder=tmp_path / "another run")
    RemoteCheckpoint(address).preserve("epoch-00001.ckpt")
    assert loaded(kept, tmp_path / "three") == (3, 3, b"\3")


@pytest.mark.parametrize("name", ["../own.npy", "..", "/own.npy"])
def test_a_manifest_cannot_name_a_file_elsewhere(name: str, address: str, bucket: Path, tmp_path: Path) -> None:
    save(address, 1)
    manifest = json.loads((bucket / "manifest.json").read_text())
    manifest["files"] = {name: {"bytes": 1, "crc32": 0}}
    (bucket / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        RemoteCheckpoint(address).fetch(tmp_path / "copies" / "one")


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    check_dirpath(f"file://{tmp_path}/bucket/")
    assert not list((tmp_path / "bucket").iterdir())
    with pytest.raises(ConfigError, match="memory:// cannot replace a checkpoint in one step"):
        check_dirpath("memory://bucket")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"dirpath=file://{tmp_path}/file was set; a file there cannot be written: "):
        check_dirpath(f"file://{tmp_path}/file")


def test_the_callback_takes_an_address_and_deletes_in_it_alone(tmp_path: Path) -> None:
    callback = RunCheckpoint(dirpath=f"file://{tmp_path}/bucket/", filename="best")
    assert callback.format_checkpoint_name({}) == f"file://{tmp_path}/bucket/best.ckpt"

    class Trainer:
        ckpt_path = f"file://{tmp_path}/bucket/resumed.ckpt"

    removes = callback._should_remove_checkpoint
    new = f"file://{tmp_path}/bucket/new.ckpt"
    assert removes(Trainer, f"file://{tmp_path}/bucket/best.ckpt", new)  # type: ignore[arg-type]
    for other in (f"file://{tmp_path}/elsewhere/best.ckpt", new, Trainer.ckpt_path):
        assert not removes(Trainer, other, new)  # type: ignore[arg-type]


def test_a_full_disk_of_another_machine_removes_its_temporary_folder_alone(tmp_path: Path) -> None:
    own, near = tmp_path / "tmp" / "gtrain-1", tmp_path / "tmp" / "of another program"
    own.mkdir(parents=True)
    near.touch()

    class Elsewhere(FolderSharing):
        def target(self, folder: Path, marker: str) -> Path:
            return own

    def write_files(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = nn.Linear(3, 2)
    arguments = (Group(), tmp_path / "a.ckpt", {"state_dict": model.state_dict()}, {}, model, write_files)
    with pytest.raises(DiskFullError, match="no space left on device"):
        checkpoints.save(*arguments, sharing=Elsewhere())
    assert near.exists() and not own.exists()
