"""Binary files that are damaged, or are none of their kind: one sentence each, whatever their reader raises."""

from __future__ import annotations

import errno
import gzip
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from gtrain.data.readers.files import load_tensors, read_array
from gtrain.data.sources.heco import load_npz
from gtrain.data.sources.temporal import TemporalData
from gtrain.errors import DataError, GtrainError
from gtrain.graph.partition import read_assignment


def damaged(contents: bytes, times: int = 40) -> list[bytes]:
    """Return what a file may become: empty, cut, overwritten, changed here and there, or text."""
    rng = random.Random(0)
    changed = []
    for _ in range(times):
        piece = bytearray(contents)
        for _ in range(rng.randint(1, 12)):
            piece[rng.randrange(len(piece))] = rng.randrange(256)
        changed.append(bytes(piece))
    noise = [bytes(rng.randrange(256) for _ in range(300)) for _ in range(times)]
    return [b"", contents[: len(contents) // 2], contents[:-3], b"hello\n", *noise, *changed]


def test_tensors(tmp_path: Path) -> None:
    """torch's unpickler answers noise with KeyError, IndexError and more."""
    path, refused = tmp_path / "a.pt", 0
    torch.save({"rows": torch.arange(20), "name": [1, 2]}, path)
    for contents in damaged(path.read_bytes()):
        path.write_bytes(contents)
        try:
            load_tensors(path, "write it again")
        except DataError as err:
            refused += 1
            assert "never unpickled" in str(err) or f"{path} cannot be loaded: it is damaged" in str(err)
    assert refused >= 44  # but for changed bytes in the values, all


def test_files_that_may_not_be_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, whom no permission stops."""
    (tmp_path / "events").write_text("0 1 2\n1 0 3\n")
    module = TemporalData(path="events", root=str(tmp_path), store=str(tmp_path / "stores"))

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(DataError, match=r"data\.path=events cannot be prepared: .*events: Permission denied"):
            module.prepare_data()
    assert not (tmp_path / "stores").exists()
    (tmp_path / "stores").write_text("a file")
    with pytest.raises(DataError, match=r"cannot be prepared: .*stores.*: (Not a directory|File exists)"):
        module.prepare_data()


def test_objects_are_told_from_noise(tmp_path: Path) -> None:
    torch.save({"edge": print}, tmp_path / "code.pt")
    with pytest.raises(DataError, match=r"code\.pt holds Python objects other than tensors.*: print"):
        load_tensors(tmp_path / "code.pt", "write it again")


@pytest.mark.parametrize("how", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("value", [np.eye(3), torch.nn.Linear(2, 2), [np.eye(2)], print, os.system])
def test_objects_are_named(value: object, how: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(DataError, match=r"x\.pt holds Python objects .* are never unpickled.*: .") as refused:
        read_array("data.features", path)
    assert "weights_only" not in str(refused.value) and "not written by torch.save" not in str(refused.value)


@pytest.mark.parametrize("kind", ["array", "archive", "parts"])
def test_arrays(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.npz" if kind == "archive" else "a.npy")
    readers = {"array": lambda: read_array("data.features", path), "archive": lambda: load_npz(path)}
    readers["parts"] = lambda: read_assignment(str(path))
    np.savez_compressed(path, a=np.arange(40)) if kind == "archive" else np.save(path, np.arange(40))
    refused = 0
    for contents in damaged(path.read_bytes()):
        path.write_bytes(contents)
        try:
            readers[kind]()
        except GtrainError as err:
            refused += 1
            assert "allow_pickle=`" not in str(err) and "unsafely" not in str(err)  # numpy's advice
    assert refused >= 44


def test_no_dense_real_numbers(tmp_path: Path) -> None:
    torch.save(torch.eye(3).to_sparse(), tmp_path / "x.pt")
    with pytest.raises(DataError, match=r"x\.pt holds a torch\.sparse_coo tensor .* a dense tensor"):
        read_array("data.features", tmp_path / "x.pt")
    np.save(tmp_path / "x.npy", np.ones(3, dtype=complex))
    with pytest.raises(DataError, match=r"x\.npy holds a torch\.strided tensor of torch\.complex128"):
        read_array("data.features", tmp_path / "x.npy")


def test_hdf5(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="HDF5 folders need h5py: pip install 'gtrain[hdf5]'")
    from gtrain.data.readers.biggraph import find_buckets, read_bucket

    path, refused = tmp_path / "edges_0_0.h5", 0
    with h5py.File(path, "w") as file:
        file.attrs["format_version"] = 1
        for name in ("rel", "lhs", "rhs"):
            file.create_dataset(name, data=np.arange(5))
    for contents in damaged(path.read_bytes()):
        path.write_bytes(contents)
        try:
            read_bucket(find_buckets(tmp_path, 1, 1)[0])
        except DataError:
            refused += 1
    assert refused >= 44


def test_packed_text_of_a_social_graph(tmp_path: Path) -> None:
    """zlib's own error is none of OSError."""
    from gtrain.data.sources.ogb import read_lines

    path, refused = tmp_path / "types.csv.gz", 0
    path.write_bytes(gzip.compress(b"author,paper\n2,3\n"))
    for contents in damaged(path.read_bytes()):
        path.write_bytes(contents)
        try:
            read_lines(path)
        except DataError:
            refused += 1
    assert refused >= 43  # an empty file is empty text
