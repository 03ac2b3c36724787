"""gtrain.graph.{csc,kernels,files,numbering}: edges by column, sorted a range at a time."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from small_graphs import random_parts
from torch_geometric.data import Data

from gtrain.errors import DataError
from gtrain.graph.store import csc
from gtrain.graph.store.csc import EdgeView, SortedColumns
from gtrain.graph.store.files import ArrayFile, file_crc, release
from gtrain.graph.store.numbering import Numbering
from gtrain.graph.store.tables import EdgeArrays
from gtrain.graph.store.writer import write_store


def skewed(num_edges: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources and targets among 60 nodes and times: a hub, nodes without edges, many equal (target, time, source)."""
    random = np.random.default_rng(seed)
    target = np.minimum(random.geometric(0.1, num_edges) - 1, 49)
    target[: num_edges // 3] = 50
    return random.integers(0, 60, num_edges), target, random.integers(-3, 3, num_edges)


def reference(source: np.ndarray, target: np.ndarray, time: np.ndarray | None) -> list[tuple[int, ...]]:
    """(target, time, source, position) of each edge in order, by Python's own sort."""
    times = time.tolist() if time is not None else [0] * len(source)
    return sorted(zip(target.tolist(), times, source.tolist(), range(len(source)), strict=True))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("limit", [1, 700, 10**6])
@pytest.mark.parametrize("compiled", [False, True])
def test_columns_in_order(
    dtype: type, timed: bool, limit: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One range or many, one larger than the limit, by numpy and by the kernels; the hub's 1333 edges need merging."""
    monkeypatch.setattr("gtrain.graph.store.files.CHUNK_ROWS", 999)
    source, target, time = skewed()
    numbering = Numbering.of(random_parts(60, 3).numpy(), 3)
    times = time if timed else None
    view = EdgeView(
        source.astype(dtype), target.astype(dtype), numbering.global_id, numbering.global_id, 60, 60, time=times
    )
    columns = SortedColumns(view, limit=limit, small=0 if compiled else 10**9)
    wanted = reference(numbering.globals(source), numbering.globals(target), times)
    found = []
    for first, last in ((0, 20), (20, 20), (20, 60)):
        for piece in columns.between(first, last):
            owner = np.repeat(np.arange(piece.indptr.size - 1), np.diff(piece.indptr)) + first
            first += piece.indptr.size - 1
            at = time[piece.edge_id] if timed else np.zeros_like(piece.edge_id)
            found += list(zip(owner.tolist(), at.tolist(), piece.source.tolist(), piece.edge_id.tolist(), strict=True))
    assert found == wanted
    assert columns.indptr[-1] == 4000


def test_unsorted_symmetric_columns_hold_both_directions() -> None:
    source, target, _ = skewed(500)
    for small in (0, 10**9):
        view = EdgeView(source, target, None, None, 60, 60, symmetric=True)
        columns = SortedColumns(view, sort=False, limit=100, small=small)
        for _ in range(2):  # streamed again
            found, first = [], 0
            for piece in columns.between(0, 60):
                owner = np.repeat(np.arange(piece.indptr.size - 1), np.diff(piece.indptr)) + first
                first += piece.indptr.size - 1
                found += list(zip(owner.tolist(), piece.source.tolist(), strict=True))
            pairs = list(zip(source.tolist(), target.tolist(), strict=True))
            assert sorted(found) == sorted(pairs + [(t, s) for s, t in pairs])


def test_edges_outside_the_graph_are_named() -> None:
    view = EdgeView(np.array([0, 1]), np.array([2, -1]), None, None, 2, 3, origin="edges.tsv")
    with pytest.raises(DataError, match=r"edges.tsv: the target of edge 1 is -1, and there are 3 such nodes"):
        view.check()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_store_of_memory_maps_equals_one_of_tensors(
    tmp_path: Path, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file byte for byte; the maps sorted by the kernels in many ranges and small chunks."""
    source, target, time = skewed()
    weight = np.random.default_rng(1).random((4000, 2), dtype=np.float32)
    x = np.random.default_rng(2).random((60, 3))
    parts = random_parts(60, num_parts)
    tensors = {"edge_time": time, "edge_attr": weight}
    data = Data(edge_index=torch.from_numpy(np.stack([source, target])), x=torch.from_numpy(x), num_nodes=60)
    data.update({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    data.val_edge_index = torch.tensor([[0, 1], [2, 3]])
    options = {"source": {}, "facts": {}, "partitioner": "file", "seed": 0, "buckets": True}
    plain = write_store(tmp_path / "plain", data, parts, num_parts, **options)

    monkeypatch.setattr("gtrain.graph.store.files.CHUNK_ROWS", 500)
    monkeypatch.setattr("gtrain.graph.store.files.CHUNK_BYTES", 3000)
    monkeypatch.setattr(csc, "RANGE_EDGES", 600)
    monkeypatch.setattr(csc, "SMALL_EDGES", 0)
    monkeypatch.setattr(csc, "RELEASE_EVERY", 2)
    for name, array in {"source": source.astype(np.int32), "target": target.astype(np.int32), **tensors}.items():
        np.save(tmp_path / f"{name}.npy", array)
    maps = {path.stem: np.load(path, mmap_mode="r") for path in tmp_path.glob("*.npy")}
    arrays = EdgeArrays(
        60,
        maps["source"],
        maps["target"],
        {name: maps[name] for name in tensors},
        {"x": x},
        {"val": {"source": np.array([0, 1]), "target": np.array([2, 3])}},
    )
    mapped = write_store(tmp_path / "mapped", arrays, parts, num_parts, **options)
    assert mapped.manifest.checksums == plain.manifest.checksums
    assert mapped.manifest.edge_types == plain.manifest.edge_types
    assert mapped.manifest.partition == plain.manifest.partition
    for part in range(num_parts):
        mapped.verify(part)


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    for dtype in (np.int32, np.float16, np.bool_, np.complex64):
        array = (np.arange(24) % 2).astype(dtype).reshape(12, 2)
        file = ArrayFile(tmp_path / "a.npy", dtype, (12, 2))
        for piece in (array[:5], array[5:5], array[5:]):
            file.append(piece)
        file.close()
        np.save(tmp_path / "b.npy", array)
        assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
        assert (file.crc, file.size) == (file_crc(tmp_path / "b.npy"), (tmp_path / "b.npy").stat().st_size)
    file = ArrayFile(tmp_path / "c.npy", np.int32, (3,))
    file.append(np.arange(2))
    with pytest.raises(ValueError, match="1 elements of the array were not written"):
        file.close()


def resident(address: int) -> int:
    """Bytes of this process's memory in the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            low, high = (int(word, 16) for word in line.split()[0].split("-"))
            inside = low <= address < high
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


def test_released_maps_take_no_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1 << 20))
    shared = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert shared.sum() == (1 << 19) * ((1 << 20) - 1)
    assert resident(shared.ctypes.data) >= 8 << 20
    release(shared[10:][::2])
    assert resident(shared.ctypes.data) <= 4 * mmap.PAGESIZE
    assert shared[77] == 77
    private = np.load(tmp_path / "a.npy", mmap_mode="c")
    private[5] = -1
    release(private[3:])
    assert private[5] == -1, "a page that was written to exists nowhere else"
