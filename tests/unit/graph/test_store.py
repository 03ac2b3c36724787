"""gtrain.graph.{store,writer,manifest,lock}: the on-disk form."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import LIMIT
from small_graphs import messy_graph, random_parts, stored
from torch_geometric.data import Data

from gtrain.errors import StoreError
from gtrain.graph.store import Store
from gtrain.graph.store.lock import ensure_store, file_lock
from gtrain.graph.store.manifest import Manifest
from gtrain.memory.files import map_array


def test_layout_and_contents(tmp_path: Path) -> None:
    """Each edge, each edge tensor and each node tensor is found again, by way of orig_id and edge_id."""
    data, parts = messy_graph(), random_parts(40, 3)
    store = stored(tmp_path / "s", data, parts)
    seen = []
    orig = torch.cat([store.node("orig_id", p) for p in range(3)])
    for p in range(3):
        rows = store.node("orig_id", p)
        assert rows.tolist() == sorted(rows.tolist())
        assert (parts[rows] == p).all()
        for name in ("x", "y", "train_mask", "val_mask", "test_mask", "time"):
            assert torch.equal(store.node(name, p), data[name][rows])
        indptr, indices, edge_id = (store.edge(name, p) for name in ("indptr", "indices", "edge_id"))
        assert indptr.dtype == torch.int64 and indices.dtype == torch.int32 and indptr.numel() == rows.numel() + 1
        for name in ("edge_weight", "edge_attr"):
            assert torch.equal(store.edge(name, p), data[name][edge_id])
        for column in range(rows.numel()):
            sources = indices[indptr[column] : indptr[column + 1]].tolist()
            assert sources == sorted(sources)
            seen += [(int(orig[s]), int(rows[column])) for s in sources]
        assert torch.equal(orig[indices.long()], data.edge_index[0, edge_id])
    assert sorted(seen) == sorted(map(tuple, data.edge_index.t().tolist()))
    assert store.offsets.tolist() == [0, *parts.bincount().cumsum(0).tolist()]
    assert (store.num_nodes, store.num_edges, store.facts) == (40, 300, {"b": 2})


def test_quality_against_brute_force(tmp_path: Path) -> None:
    data, parts = messy_graph(), random_parts(40, 4)
    report = stored(tmp_path / "s", data, parts).manifest.partition
    edges = data.edge_index.t().tolist()
    assert report.edge_cut == sum(bool(parts[s] != parts[t]) for s, t in edges)
    for p in range(4):
        assert report.halo[p] == len({s for s, t in edges if parts[t] == p and parts[s] != p})
        assert report.edges[p] == sum(bool(parts[t] == p) for _, t in edges)
        assert report.nodes[p] == int((parts == p).sum())
        assert report.train_nodes[p] == int(data.train_mask[parts == p].sum())
    assert report.imbalance["edges"] == pytest.approx(max(report.edges) / (300 / 4))


def test_manifest_survives_json_and_notices_edits(tmp_path: Path) -> None:
    store = stored(tmp_path / "s", messy_graph(), random_parts(40, 2))
    text = store.manifest.to_json()
    assert Manifest.from_json(text) == store.manifest
    assert store.manifest.node_types["node"].tensors["x"].shape == (40, 5)
    assert store.manifest.edge_types["node__to__node"].tensors["indptr"].shape == (42,)
    assert sum(store.manifest.nbytes) == sum(f.stat().st_size for f in (tmp_path / "s").rglob("*.npy"))
    body = json.loads(text)
    with pytest.raises(StoreError, match="own checksum"):
        Manifest.from_json(json.dumps({**body, "num_parts": 3}))
    with pytest.raises(StoreError, match="format 99, and this gtrain reads formats 2, 3 and 4"):
        Manifest.from_json(json.dumps({**body, "format": 99}))
    with pytest.raises(StoreError, match="not a manifest"):
        Manifest.from_json(text[:-30])
    for damage in (text[:-30].encode(), b"\xff\xfe\xff"):
        (tmp_path / "s" / "manifest.json").write_bytes(damage)
        with pytest.raises(StoreError, match="s: manifest.json is not a manifest") as caught:
            Store.open(tmp_path / "s")
        assert str(caught.value).count("HINT: ") == 1
        assert f"delete the store's folder ({tmp_path / 's'})" in str(caught.value)


def test_a_flipped_byte_is_named(tmp_path: Path) -> None:
    store = stored(tmp_path / "s", messy_graph(), random_parts(40, 2))
    file = tmp_path / "s" / "part-1" / "nodes" / "node" / "x.npy"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 4
    file.write_bytes(raw)
    again = Store.open(store.path)
    again.verify(0)
    with pytest.raises(StoreError, match=r"part-1/nodes/node/x\.npy is damaged(.|\n)*HINT: delete"):
        again.verify(1)


def test_incomplete_stores_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        Store.open(tmp_path / "none")
    stored(tmp_path / "s", messy_graph(), random_parts(40, 2))
    file = tmp_path / "s" / "part-0" / "edges" / "node__to__node" / "indices.npy"
    raw = file.read_bytes()
    file.write_bytes(raw[:-4])
    with pytest.raises(StoreError, match=f"has {len(raw) - 4} bytes, and the manifest says {len(raw)}"):
        Store.open(tmp_path / "s")
    file.unlink()
    with pytest.raises(StoreError, match=r"indices\.npy is missing"):
        Store.open(tmp_path / "s")


def test_mapped_tensors_do_not_write_to_the_disk(tmp_path: Path) -> None:
    store = stored(tmp_path / "s", messy_graph(), random_parts(40, 2))
    store.node("x", 0).zero_()
    store.verify(0)


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(manifest: Manifest) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Manifest, "to_json", fail)
    path = tmp_path / "deep" / "stores" / "s"
    with pytest.raises(KeyboardInterrupt):
        ensure_store(path, lambda: stored(path, messy_graph(), random_parts(40, 2)), print)
    assert list(tmp_path.iterdir()) == []


def test_ensure_builds_once_and_clears_what_a_killed_builder_left(tmp_path: Path) -> None:
    path, built = tmp_path / "s", []
    said: list[str] = []
    (tmp_path / "s.tmp" / "part-0").mkdir(parents=True)

    def build() -> Store:
        built.append(1)
        return stored(path, messy_graph(), random_parts(40, 2))

    for _ in range(2):
        assert ensure_store(path, build, said.append).num_edges == 300
    assert built == [1]
    assert said == [f"using the store {path}"]
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_a_damaged_store_is_not_rebuilt(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with pytest.raises(StoreError, match="no manifest"):
        ensure_store(tmp_path / "s", lambda: pytest.fail("rebuilt"), print)


def test_the_second_builder_waits_and_says_so(tmp_path: Path) -> None:
    path, said, waiting = tmp_path / "s", [], threading.Event()

    def say(message: str) -> None:
        said.append(message)
        waiting.set()

    second = threading.Thread(target=lambda: ensure_store(path, lambda: pytest.fail("built twice"), say))
    with file_lock(tmp_path / "s.lock", print):
        second.start()
        assert waiting.wait(LIMIT)
        stored(path, messy_graph(), random_parts(40, 2))
    second.join(LIMIT)
    assert not second.is_alive()
    assert ["preparing the store" in said[0], said[1:]] == [True, [f"using the store {path}"]]
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_a_graph_without_edges_or_features(tmp_path: Path) -> None:
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=4)
    store = stored(tmp_path / "s", data, torch.tensor([1, 0, 1, 0]))
    assert store.edge("indptr", 0).tolist() == [0, 0, 0]
    assert store.edge("indices", 1).numel() == 0
    assert store.node("orig_id", 1).tolist() == [0, 2]
    assert store.manifest.partition.imbalance == {"nodes": 1.0, "edges": 0.0, "train_nodes": 0.0}
    assert np.load(tmp_path / "s" / "part-0" / "edges" / "node__to__node" / "edge_id.npy").shape == (0,)


def test_mapped_arrays_keep_no_file_open(tmp_path: Path) -> None:
    shapes = [(5, 3), (0, 3), (7,), ()]
    arrays = [
        np.arange(math.prod(shape)).astype(dtype).reshape(shape) for shape in shapes for dtype in ("f4", "i8", "?")
    ]
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    before = os.listdir("/proc/self/fd")
    mapped = [map_array(tmp_path / f"{number}.npy") for number in range(len(arrays))]
    assert len(os.listdir("/proc/self/fd")) == len(before)
    for array, original in zip(mapped, arrays, strict=True):
        assert array.dtype == original.dtype and array.shape == original.shape and (array == original).all()
    mapped[0][:] = -1
    assert (np.load(tmp_path / "0.npy") == arrays[0]).all()
    (tmp_path / "0.npy").write_bytes((tmp_path / "0.npy").read_bytes()[:-1])
    with pytest.raises(ValueError, match="bytes of"):
        map_array(tmp_path / "0.npy")


def test_headers_are_read_by_several_threads_at_once(tmp_path: Path) -> None:
    """numpy's reading of a header is not safe there: a garbage collection lets another thread run within it."""
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(5)
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            shapes = set(threads.map(lambda _: _read_beside_garbage(tmp_path / "a.npy"), range(8_000)))
    finally:
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert shapes == {(2, 3)}


def _read_beside_garbage(path: Path) -> tuple[int, ...]:
    class Cycle:
        def __del__(self) -> None:
            """Run Python code in the garbage collection, where another thread may take over."""
            sum(range(100))

    cycle = Cycle()
    cycle.itself = cycle  # type: ignore[attr-defined]
    return map_array(path).shape
