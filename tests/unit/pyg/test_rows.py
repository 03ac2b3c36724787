"""Rows of nodes and edges over parts: what arrives is what the source data has, whoever hosts it.

Remote parts are served by real servers of the wire on the loopback, one for each part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyg_ranks import NAMES, NODES, PARTS, LoopbackPeers, Ranks, edge_ids, hetero_graph, orig_ids
from small_graphs import messy_graph, random_parts, stored
from torch import Tensor
from torch_geometric.data import Data

from gtrain.errors import DataError, StoreError
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE
from gtrain.graph.store.writer import write_store
from gtrain.nn.compressed import as_dense, is_compressed
from gtrain.strategy.counters import rss_bytes
from gtrain.wire import Message, RemoteError, WireError
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features import feature_store, kernels
from gtrain_pyg.features import requests as row_requests
from gtrain_pyg.features.cache import FeatureCache, expected_visits, fill_cache, most_visited
from gtrain_pyg.features.feature_store import FeatureStore, RowCounts
from gtrain_pyg.features.tables import DenseFeatureTable


def check(store: Store, data: Data, batch: dict[Any, Any], made: dict[Any, dict[str, Tensor]]) -> None:
    """Compare all tensors of a batch with the source data."""
    orig, edge = orig_ids(store)[batch["node"]], edge_ids(store)[batch[EDGE_TYPE]]
    for name, tensor in made["node"].items():
        expected = torch.from_numpy(orig) if name == "orig_id" else data[name][orig]
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name
    for name, tensor in made[EDGE_TYPE].items():
        expected = torch.from_numpy(edge) if name == "edge_id" else data[name][edge]
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name


def some_batches(count: int, seed: int = 0, nodes: int = NODES, edges: int = 300) -> list[dict[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [{"node": rng.integers(0, nodes, 40), EDGE_TYPE: rng.integers(0, edges, 70)} for _ in range(count)]


@pytest.fixture
def data() -> Data:
    return messy_graph(NODES)


@pytest.fixture
def ranks(tmp_path: Path, data: Data) -> Iterator[Ranks]:
    found = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    yield found
    found.close()


@pytest.mark.parametrize("hosted", [hosted for n in (1, 2, 3) for hosted in itertools.combinations(range(3), n)])
def test_rows_are_those_of_the_source_whoever_hosts_them(ranks: Ranks, data: Data, hosted: tuple[int, ...]) -> None:
    ranks.serve(NAMES)
    rows, peers = ranks.rows(hosted, NAMES)
    window = some_batches(3)
    made = rows.get(window)
    for batch, tensors in zip(window, made, strict=True):
        assert list(tensors) == ["node", EDGE_TYPE] and list(tensors["node"]) == list(NAMES["node"])
        check(ranks.store, data, batch, tensors)
    assert {part for part, *_ in peers.asked} == {part for part in range(PARTS) if part not in hosted}
    assert len(peers.asked) <= 3 * (PARTS - len(hosted))


def test_one_request_an_owner_for_distinct_rows(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow rows are asked for as often as they are named: edges here, until they count as wide."""
    ranks.serve(NAMES)
    rows, peers = ranks.rows([0], NAMES)
    window = some_batches(1)
    rows.get(window)
    assert max(np.unique(tensors[1], return_counts=True)[1].max() for *_, tensors in peers.asked) > 1
    monkeypatch.setattr(row_requests, "WIDE_BYTES", 0)
    peers.asked.clear()
    rows.counts = RowCounts()
    rows.get(window)
    for part, method, fields, tensors in peers.asked:
        assert (
            method == "rows"
            and fields["part"] == part
            and [want["kind"] for want in fields["wants"]]
            == [
                "node node",
                "edge node__to__node",
            ]
        )
        for kind, asked in zip(("node", EDGE_TYPE), tensors, strict=True):
            ids = np.unique(np.concatenate([batch[kind] for batch in window]))
            start, stop = ranks.book.range(kind, part)
            expected = ids[(ids >= start) & (ids < stop)] - start
            assert asked.dtype == torch.int32 and sorted(asked.tolist()) == expected.tolist()
    ids = np.concatenate([batch[kind] + (kind != "node") * 1000 for batch in window for kind in ("node", EDGE_TYPE)])
    remote = np.concatenate([rows.is_remote(kind, batch[kind]) for batch in window for kind in ("node", EDGE_TYPE)])
    assert rows.counts.missed == remote.sum() and rows.counts.hosted == (~remote).sum()
    assert rows.counts.fetched == np.unique(ids[remote]).size < rows.counts.missed
    nodes = np.unique(np.concatenate([batch["node"] for batch in window]))
    assert rows.counts.fetched_nodes == rows.is_remote("node", nodes).sum()


def test_nothing_is_asked_where_everything_is_hosted(ranks: Ranks, data: Data) -> None:
    rows = FeatureStore(ranks.store, ranks.book, range(PARTS), None, ranks.pool, NAMES)
    (batch,) = some_batches(1)
    check(ranks.store, data, batch, rows.get([batch])[0])


def test_empty_batches_and_kinds(ranks: Ranks) -> None:
    ranks.serve(NAMES)
    rows, peers = ranks.rows([1], NAMES)
    none = np.empty(0, np.int64)
    made = rows.get([{"node": none, EDGE_TYPE: none}, {"node": np.array([3])}, {}])
    assert made[0]["node"]["x"].shape == (0, 5) and made[0][EDGE_TYPE]["edge_attr"].shape == (0, 2)
    assert list(made[1]) == ["node"] and made[2] == {}
    assert rows.get([]) == [] and len(peers.asked) <= 1


def test_batches_of_a_window_can_be_made_in_any_order_once(ranks: Ranks, data: Data) -> None:
    ranks.serve(NAMES)
    rows, _ = ranks.rows([2], NAMES)
    window = some_batches(3)
    prefetcher = rows.prefetcher(3)
    pending = [prefetcher.prefetch(batch) for batch in window]
    for i in (2, 0, 1):
        check(ranks.store, data, window[i], pending[i].get())
    with pytest.raises(ValueError, match="was called before on this batch"):
        pending[0].get()


@pytest.mark.parametrize("lookahead", [1, 2, 5])
def test_what_a_batch_asked_for_serves_those_after_it(
    ranks: Ranks, data: Data, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ``lookahead`` successive batches one asks for each row; after that it is asked for again."""
    monkeypatch.setattr(feature_store, "HELD_BATCHES", 9)
    ranks.serve(NAMES)
    rows, peers = ranks.rows([2], NAMES)
    prefetcher, asked = rows.prefetcher(lookahead), []
    batches = some_batches(40)
    for batch in batches:
        peers.asked.clear()
        pending = prefetcher.prefetch(batch)
        nodes = [
            row + ranks.book.range("node", part)[0]
            for part, _, fields, tensors in peers.asked
            if fields["wants"][0]["kind"] == "node node"
            for row in tensors[0].tolist()
        ]
        asked.append(set(nodes))
        assert len(asked[-1]) == len(nodes)
        wanted = set(batch["node"][rows.is_remote("node", batch["node"])].tolist())
        known: set[int] = set().union(*asked[max(0, len(asked) - lookahead) : -1])
        assert asked[-1] == wanted - known
        check(ranks.store, data, batch, pending.get())


def test_no_more_is_kept_than_the_rows_of_one_batch(ranks: Ranks) -> None:
    """The largest batch has 20 rows, all remote: once more than these are kept the earliest are forgotten."""
    names = {"node": NAMES["node"]}
    ranks.serve(names)
    rows, _ = ranks.rows([2], names)
    remote = np.flatnonzero(rows.is_remote("node", np.arange(NODES)))
    most, some, few = remote[:20], remote[20:28], remote[28:32]
    prefetcher = rows.prefetcher(9)
    for ids, asked in [(most, 20), (some, 8), (most, 20), (few, 4), (some, 8), (few, 0), (most, 20)]:
        before = rows.counts.fetched
        prefetcher.prefetch({"node": ids}).get()
        assert rows.counts.fetched - before == asked


def test_batches_grow_and_turns_run_out(ranks: Ranks, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are numbered anew while batches wait to be made; kinds come and go."""
    monkeypatch.setattr(feature_store, "MAX_SEQUENCE", 7)
    monkeypatch.setattr(row_requests, "CHUNK_BYTES", 256)
    ranks.serve(NAMES)
    rows, _ = ranks.rows([2], NAMES)
    prefetcher, rng = rows.prefetcher(4), np.random.default_rng(0)
    sizes = [5, 9, 0, 9, 30, 30, 7, 60, 60, 60, 100, 3, 100, 10, 10, 100, 100, 10]
    batches = [{"node": rng.integers(0, NODES, size), EDGE_TYPE: rng.integers(0, 300, size)} for size in sizes]
    for i in (8, 9, 10, 11):
        del batches[i]["node"]
    for start in range(0, len(batches), 3):
        pending = [prefetcher.prefetch(batch) for batch in batches[start : start + 3]]
        for batch, handle in zip(batches[start:], pending, strict=False):
            made = {"node": {}, EDGE_TYPE: {}, **handle.get()}
            check(ranks.store, data, {"node": np.empty(0, np.int64), **batch}, made)


def test_threads_share_rows(ranks: Ranks, data: Data) -> None:
    ranks.serve(NAMES)
    rows, _ = ranks.rows([1], NAMES)

    def work(seed: int) -> None:
        for turn in range(15):
            window = some_batches(2, 100 * seed + turn)
            for batch, made in zip(window, rows.get(window), strict=True):
                check(ranks.store, data, batch, made)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_ids_that_may_not_be_written_to_and_other_integers(ranks: Ranks, data: Data) -> None:
    ranks.serve(NAMES)
    rows, _ = ranks.rows([1], NAMES)
    (batch,) = some_batches(1)
    batch["node"].flags.writeable = False
    check(ranks.store, data, batch, rows.get([batch | {EDGE_TYPE: batch[EDGE_TYPE].astype(np.int32)}])[0])
    assert batch[EDGE_TYPE].flags.writeable


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1000])
def test_many_chunks_and_requests(ranks: Ranks, data: Data, chunk_bytes: int, monkeypatch) -> None:
    monkeypatch.setattr(row_requests, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(row_requests, "MAX_REQUEST_CHUNKS", 3)
    monkeypatch.setattr(row_requests, "MAX_REQUEST_TENSORS", 12)
    ranks.serve(NAMES)
    rows, peers = ranks.rows([0], NAMES)
    window = some_batches(2)
    for batch, made in zip(window, rows.get(window), strict=True):
        check(ranks.store, data, batch, made)
    assert len(peers.asked) > PARTS - 1
    assert max(len(answer.tensors) for answer in peers.answers) <= 12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float32])
def test_floats_change_their_dtype_and_nothing_else_does(ranks: Ranks, data: Data, dtype: torch.dtype) -> None:
    ranks.serve(NAMES)
    rows, _ = ranks.rows([0], NAMES, dtype=dtype)
    (batch,) = some_batches(1)
    made = rows.get([batch])[0]
    changed = data.clone()
    changed.x, changed.edge_weight = data.x.to(dtype), data.edge_weight.to(dtype)
    check(ranks.store, changed, batch, made)


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
def test_features_are_rounded_on_the_wire_alone(ranks: Ranks, data: Data, wire: torch.dtype) -> None:
    ranks.serve(NAMES)
    rows, peers = ranks.rows([0], NAMES, wire_dtype=wire)
    (batch,) = some_batches(1)
    made = rows.get([batch])[0]
    rounded = data.clone()
    here = torch.isin(torch.arange(NODES), ranks.store.node("orig_id", 0))
    rounded.x = torch.where(here[:, None], data.x, data.x.to(wire).float())
    check(ranks.store, rounded, batch, made)
    sent = [tensor.dtype for answer in peers.answers for tensor in answer.tensors]
    assert sent.count(wire) == 2 and sent.count(torch.float32) == 2  # x; edge_weight


def test_float32_on_the_wire_leaves_float64_alone(tmp_path: Path) -> None:
    data = messy_graph(NODES)
    data.x = data.x.double() + 1e-12
    ranks = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    ranks.serve(NAMES)
    rows, _ = ranks.rows([0], NAMES, wire_dtype=torch.float32)
    (batch,) = some_batches(1)
    check(ranks.store, data, batch, rows.get([batch])[0])
    ranks.close()


def test_features_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    data = messy_graph(NODES)
    data.x[:, 2] = 1e5
    ranks = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    ranks.serve(NAMES)
    rows, _ = ranks.rows([0], NAMES, wire_dtype=torch.float16)
    with pytest.raises(RemoteError, match="features reach 1e\\+05, and the largest float16, .*, is 65504") as caught:
        rows.get(some_batches(1))
    assert caught.value.hint == "set strategy.wire_dtype=bfloat16, or scale the features"
    ranks.close()


def sparse_graph(dtype: torch.dtype = torch.float32) -> Data:
    data = messy_graph(NODES)
    dense = torch.randn(NODES, 30, generator=torch.Generator().manual_seed(3)).to(dtype)
    data.x = (dense * (dense.abs() > 1) * (torch.arange(NODES) % 7 > 0)[:, None]).to_sparse_csr()
    return data


@pytest.mark.parametrize("hosted", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("chunk_bytes", [100, 8 << 20])
def test_sparse_features(tmp_path: Path, hosted: tuple[int, ...], dtype: Any, chunk_bytes: int, monkeypatch) -> None:
    monkeypatch.setattr(row_requests, "CHUNK_BYTES", chunk_bytes)
    data = sparse_graph()
    ranks = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    names = {"node": ("x", "y")}
    ranks.serve(names)
    rows, _ = ranks.rows(hosted, names, dtype=dtype)
    window = [{"node": batch["node"]} for batch in some_batches(2)]
    if hosted == (0,):
        fill_cache(rows, {"node": np.arange(NODES)}, 2500)
        assert rows.cache is not None and "node" in rows.cache
    for batch, made in zip(window, rows.get(window), strict=True):
        x, orig = made["node"]["x"], orig_ids(ranks.store)[batch["node"]]
        assert x.layout == torch.sparse_csr and x.shape == (40, 30) and x.dtype == (dtype or torch.float32)
        assert torch.equal(x.to_dense(), data.x.to_dense()[orig].to(x.dtype))
    empty = rows.get([{"node": np.empty(0, np.int64)}])[0]["node"]["x"]
    assert empty.shape == (0, 30) and empty.values().numel() == 0
    ranks.close()


def bag_graph(*, ones: bool, dtype: torch.dtype = torch.float32) -> Data:
    """A graph whose features are dense for models, and have 3 of 60 elements in most rows."""
    data = messy_graph(NODES)
    generator = torch.Generator().manual_seed(3)
    data.x = torch.zeros(NODES, 60, dtype=dtype).scatter_(1, torch.randint(60, (NODES, 3), generator=generator), 1)
    data.x[::7] = 0
    data.x *= 1 if ones else torch.rand(NODES, 60, generator=generator).to(dtype)
    return data


@pytest.mark.parametrize("hosted", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("ones", [False, True])
def test_bags_of_words_stay_compressed(
    tmp_path: Path, hosted: tuple[int, ...], dtype: Any, ones: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_requests, "CHUNK_BYTES", 200)
    data = bag_graph(ones=ones)
    ranks = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    names = {"node": ("x", "y")}
    ranks.serve(names)
    rows, _ = ranks.rows(hosted, names, dtype=dtype)
    window = [{"node": batch["node"]} for batch in some_batches(2)]
    if hosted == (0,):
        fill_cache(rows, {"node": np.arange(NODES)}, 1500)
        assert rows.cache is not None and "node" in rows.cache
    for batch, made in zip(window, rows.get(window), strict=True):
        x, orig = made["node"]["x"], orig_ids(ranks.store)[batch["node"]]
        assert is_compressed(x) and (x.rows.values is None) == ones and x.dtype == (dtype or torch.float32)
        assert torch.equal(x @ torch.eye(60, dtype=x.dtype), data.x[orig].to(x.dtype)) and is_compressed(x)
    empty = rows.get([{"node": np.empty(0, np.int64)}])[0]["node"]["x"]
    assert is_compressed(empty) and empty.shape == (0, 60)
    # 8 bytes of each row, and of each entry 4 for its column and 4 for its value
    entries = int((data.x != 0).sum()) / NODES
    assert rows.row_bytes("node") == pytest.approx(8 + entries * (4 if ones else 8) + 8)
    ranks.close()


@pytest.mark.parametrize("ones", [False, True])
def test_values_of_bags_are_rounded_on_the_wire(tmp_path: Path, ones: bool) -> None:
    data = bag_graph(ones=ones, dtype=torch.float64)
    ranks = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    ranks.serve({"node": ("x",)})
    rows, _ = ranks.rows([0], {"node": ("x",)}, wire_dtype=torch.bfloat16)
    ids = np.flatnonzero(rows.is_remote("node", np.arange(NODES)))
    made = rows.get([{"node": ids}])[0]["node"]["x"]
    assert is_compressed(made) and torch.equal(as_dense(made), data.x[orig_ids(ranks.store)[ids]].bfloat16().double())
    ranks.close()


def test_sparse_values_are_rounded_on_the_wire(tmp_path: Path) -> None:
    data = sparse_graph(torch.float64)
    ranks = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    ranks.serve({"node": ("x",)})
    rows, _ = ranks.rows([0], {"node": ("x",)}, wire_dtype=torch.bfloat16)
    ids = np.flatnonzero(rows.is_remote("node", np.arange(NODES)))
    made = rows.get([{"node": ids}])[0]["node"]["x"]
    assert torch.equal(made.to_dense(), data.x.to_dense()[orig_ids(ranks.store)[ids]].bfloat16().double())
    ranks.close()


def test_rows_of_any_shape(tmp_path: Path) -> None:
    data = messy_graph(NODES)
    generator = torch.Generator().manual_seed(1)
    data.x = torch.randn(NODES, 3, 4, generator=generator)
    data.wide = torch.randint(0, 9, (NODES, 1, 1, 70), generator=generator, dtype=torch.int16)
    data.none = torch.empty(NODES, 0)
    data.half = torch.randn(NODES, 2, generator=generator).half()
    names = {"node": ("x", "wide", "none", "half"), EDGE_TYPE: ("edge_id",)}
    ranks = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    ranks.serve(names)
    rows, _ = ranks.rows([0], names)
    (batch,) = some_batches(1)
    check(ranks.store, data, batch, rows.get([batch])[0])
    ranks.close()


def test_types(tmp_path: Path) -> None:
    data = hetero_graph()
    parts = {kind: random_parts(int(data[kind].num_nodes), 2) for kind in data.node_types}
    parts["venue"][:] = 1  # part 0 has none
    store = write_store(tmp_path / "s", data, parts, 2, source={}, facts={}, partitioner="file", seed=0)
    names = {"paper": ("x", "orig_id"), "author": ("x", "y"), "venue": ("orig_id",)}
    names |= {kind: ("edge_attr", "edge_id") for kind in data.edge_types}
    ranks = Ranks(store)
    ranks.serve(names)
    rng = np.random.default_rng(0)
    for hosted in ([0], [1], [0, 1]):
        rows, _ = ranks.rows(hosted, names)
        batch: dict[Any, Any] = {kind: rng.integers(0, int(data[kind].num_nodes), 40) for kind in data.node_types}
        batch |= {kind: rng.integers(0, 80, 50) for kind in data.edge_types}
        (made,) = rows.get([batch])
        for kind in data.node_types:
            orig = orig_ids(store, kind)[batch[kind]]
            for name, tensor in made[kind].items():
                assert torch.equal(tensor, torch.from_numpy(orig) if name == "orig_id" else data[kind][name][orig])
        for kind in data.edge_types:
            edge = edge_ids(store, kind)[batch[kind]]
            assert torch.equal(made[kind]["edge_attr"], data[kind].edge_attr[edge])
    ranks.close()


def test_extra_tensors_are_served_like_the_stores_own(ranks: Ranks) -> None:
    degree = {part: ranks.store.edge("indptr", part).diff().double() for part in range(PARTS)}
    extra = {"node": {"in_degree": degree}}
    names = {"node": ("in_degree", "x")}
    ranks.serve(names, extra=extra, wire_dtype=torch.float16)
    rows, _ = ranks.rows([1], names, extra=extra, wire_dtype=torch.float16)
    (batch,) = some_batches(1)
    (made,) = rows.get([{"node": batch["node"]}])
    assert torch.equal(made["node"]["in_degree"], torch.cat(list(degree.values()))[batch["node"]])


# ------------------------------------------------------------------------------------------------------- mistakes


def test_an_extra_tensor_of_another_length_is_refused(ranks: Ranks) -> None:
    with pytest.raises(DataError, match=r"in_degree of node has 1 rows in part 0, which has \d+"):
        FeatureStore(
            ranks.store,
            ranks.book,
            [0],
            None,
            ranks.pool,
            {"node": ("in_degree",)},
            extra={"node": {"in_degree": {0: [1]}}},
        )


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ({"node": ("features",)}, StoreError, "no node tensor of node called 'features'; it has orig_id, x"),
        ({EDGE_TYPE: ("attr",)}, StoreError, "no edge tensor of node__to__node called 'attr'"),
        ({EDGE_TYPE: ("indptr",)}, DataError, "indptr of .* has no row per edge"),
        ({"paper": ("x",)}, DataError, "no node type or edge type 'paper'"),
    ],
)
def test_names_that_do_not_exist(ranks: Ranks, names: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        FeatureStore(ranks.store, ranks.book, range(PARTS), None, ranks.pool, names)


def test_parts_that_nobody_can_be_asked_for(ranks: Ranks) -> None:
    with pytest.raises(DataError, match=r"this rank hosts \[0, 2\] of 3 parts, and has no peers"):
        FeatureStore(ranks.store, ranks.book, [2, 0], None, ranks.pool, NAMES)


@pytest.mark.parametrize("wrong", [-1, NODES])
def test_ids_out_of_range(ranks: Ranks, wrong: int) -> None:
    rows = FeatureStore(ranks.store, ranks.book, range(PARTS), None, ranks.pool, NAMES)
    with pytest.raises(DataError, match=f"a batch names row {wrong} of node, which has {NODES} rows"):
        rows.prefetch({"node": np.array([3, wrong, 5])})


def test_another_store_is_refused_by_the_owner(tmp_path: Path, ranks: Ranks) -> None:
    ranks.serve(NAMES)
    other = Ranks(stored(tmp_path / "other", messy_graph(NODES, seed=1), random_parts(NODES, PARTS)))
    other.servers = ranks.servers
    rows, _ = other.rows([0], NAMES)
    with pytest.raises(RemoteError, match="rank . failed to answer 'rows': StoreError: this rank has the store with"):
        rows.get(some_batches(1))
    other.clients, ranks.clients = [], [*ranks.clients, *other.clients]


def test_rows_that_an_owner_does_not_have(ranks: Ranks) -> None:
    ranks.serve(NAMES)
    _, peers = ranks.rows([0], NAMES)
    fields = {"store": _store_of(ranks), "part": 1, "wants": [_want(["x"], ["float32"])]}
    with pytest.raises(RemoteError, match="received a request for rows -1 to 0 of node in part 1"):
        peers.request(1, "rows", fields, [torch.tensor([0, -1])]).result()
    with pytest.raises(RemoteError, match=r"received a request for rows of part 2; this rank hosts parts \[1\]"):
        peers.request(1, "rows", {**fields, "part": 2}, [torch.tensor([0])]).result()
    with pytest.raises(RemoteError, match="no node tensor of node called 'z'"):
        peers.request(1, "rows", {**fields, "wants": [_want(["z"], ["float32"])]}, [torch.tensor([0])]).result()


def _want(names: list[str], dtypes: list[str]) -> dict[str, Any]:
    return {"kind": "node node", "names": names, "dtypes": dtypes, "chunk": 16}


def _store_of(ranks: Ranks) -> int:
    from gtrain_pyg.features.tables import fingerprint

    return fingerprint(ranks.store)


class WrongPeers(LoopbackPeers):
    """Answers by what a test makes of the right answer."""

    def __init__(self, right: LoopbackPeers, change: Any) -> None:
        super().__init__()
        self.right, self.change = right, change

    def request(self, part: int, method: str, fields: Any = None, tensors: Any = ()) -> Future[Message]:
        future: Future[Message] = Future()
        future.set_result(Message({}, self.change(self.right.request(part, method, fields, tensors).result().tensors)))
        return future


@pytest.mark.parametrize(
    ("sparse", "change", "message"),
    [
        (False, lambda tensors: tensors[:-1], "1 tensors instead of 2"),
        (
            False,
            lambda tensors: [tensors[0][:-1], tensors[1]],
            r"float32 \[\d+, 5\], not torch.float32 \[\d+, 5\], as x",
        ),
        (False, lambda tensors: [tensors[0].double(), tensors[1]], "float64"),
        (True, lambda tensors: [tensors[0][:-1], *tensors[1:]], "sparse rows of"),
        (True, lambda tensors: [tensors[0].flip(0), *tensors[1:]], "sparse rows"),
        (True, lambda tensors: [tensors[0], tensors[1][1:], *tensors[2:]], "sparse rows of"),
        (True, lambda tensors: [tensors[0].int(), *tensors[1:]], "rows of"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for(tmp_path: Path, sparse: bool, change: Any, message: str) -> None:
    data = sparse_graph() if sparse else messy_graph(NODES)
    ranks = Ranks(stored(tmp_path / "store", data, random_parts(NODES, PARTS)))
    ranks.serve({"node": ("x", "y")})
    rows, peers = ranks.rows([0], {"node": ("x", "y")})
    rows._peers = WrongPeers(peers, change)
    with pytest.raises(WireError, match=f"rank 1 replied to a request for rows of its part with .*{message}"):
        rows.get([{"node": np.arange(NODES)}])
    ranks.close()


def test_an_owner_that_is_gone_raises_at_each_batch(ranks: Ranks) -> None:
    ranks.serve(NAMES)
    rows, peers = ranks.rows([0], NAMES)
    window = some_batches(2)
    rows.get(window)
    for client in peers.clients.values():
        client.close()
    with pytest.raises(WireError, match="the client of rank 1 is closed"):
        rows.prefetch(window[0])


# ---------------------------------------------------------------------------------------------------------- cache


def test_a_cache_serves_the_hottest_and_asks_for_the_rest(ranks: Ranks, data: Data) -> None:
    ranks.serve(NAMES)
    rows, peers = ranks.rows([0], NAMES)
    visits = np.random.default_rng(0).random(NODES)
    remote = np.flatnonzero(rows.is_remote("node", np.arange(NODES)))
    row_bytes = rows.row_bytes("node")
    assert row_bytes == 5 * 4 + 8 + 8 + 1 + 8
    cache = fill_cache(rows, {"node": visits}, int(10 * row_bytes) + 12)
    hottest = np.sort(remote[np.argsort(-visits[remote])][:10])
    assert most_visited(rows, {"node": visits}, int(10 * row_bytes) + 12)["node"].tolist() == hottest.tolist()
    assert cache.nbytes <= 10 * row_bytes + 2 * 12
    peers.asked.clear()
    before = rows.counts.cached
    window = some_batches(3)
    for batch, made in zip(window, rows.get(window), strict=True):
        check(ranks.store, data, batch, made)
    named = np.concatenate([batch["node"] for batch in window])
    assert rows.counts.cached - before == np.isin(named, hottest).sum() > 0
    for part, _, _, (asked, _) in peers.asked:
        assert not np.isin(asked.numpy() + ranks.book.range("node", part)[0], hottest).any()
    peers.asked.clear()
    assert torch.equal(rows.get([{"node": hottest}])[0]["node"]["x"], data.x[orig_ids(ranks.store)[hottest]])
    assert peers.asked == []


def test_a_cache_large_enough_has_all_remote_nodes(ranks: Ranks, data: Data) -> None:
    ranks.serve(NAMES)
    rows, peers = ranks.rows([0], NAMES, wire_dtype=torch.float16, dtype=torch.float64)
    fill_cache(rows, {"node": np.ones(NODES)}, 1 << 20)
    peers.asked.clear()
    (made,) = rows.get([{"node": np.arange(NODES)}])
    orig = orig_ids(ranks.store)
    here = ~torch.from_numpy(rows.is_remote("node", np.arange(NODES)))
    expected = torch.where(here[:, None], data.x[orig], data.x[orig].half().float()).double()
    assert torch.equal(made["node"]["x"], expected) and peers.asked == []


def test_no_room_no_cache(ranks: Ranks, data: Data) -> None:
    ranks.serve(NAMES)
    rows, _ = ranks.rows([0], NAMES)
    assert fill_cache(rows, {"node": np.ones(NODES)}, 20).arrays == {}
    (batch,) = some_batches(1)
    check(ranks.store, data, batch, rows.get([batch])[0])


def test_a_cache_is_shared_by_what_one_rank_made(ranks: Ranks, data: Data) -> None:
    ranks.serve(NAMES)
    first, _ = ranks.rows([0], NAMES)
    second, peers = ranks.rows([0], NAMES)
    made: dict[str, np.ndarray] = {}

    def keep(make: Any) -> dict[str, np.ndarray]:
        made.update(make())
        for array in made.values():
            array.flags.writeable = False
        return made

    fill_cache(first, {"node": np.ones(NODES)}, 1 << 20, keep)
    fill_cache(second, {"node": np.ones(NODES)}, 1 << 20, lambda make: made)
    (batch,) = some_batches(1)
    check(ranks.store, data, batch, second.get([batch])[0])
    assert [fields["wants"][0]["kind"] for _, _, fields, _ in peers.asked] == ["edge node__to__node"] * 2
    assert isinstance(second.cache, FeatureCache)


def test_visits_of_a_chain_reckoned_by_hand(tmp_path: Path) -> None:
    # 1 -> 0, 2 -> 0, 3 -> 0, 4 -> 1; both seeds 0 and 5 in each batch
    data = Data(edge_index=torch.tensor([[1, 2, 3, 4], [0, 0, 0, 1]]), num_nodes=6)
    store = stored(tmp_path / "store", data, torch.zeros(6, dtype=torch.int64))
    visits = expected_visits(store, {"node": np.array([0, 5])}, 2, {EDGE_TYPE: (2, -1)})["node"]
    first = 1 - np.exp(-2 / 3)
    assert visits == pytest.approx([1, first, first, first, 1 - np.exp(-first), 1], rel=1e-5)
    half = expected_visits(store, {"node": np.array([0, 5])}, 1, {EDGE_TYPE: (-1,)})["node"]
    reached = 1 - np.exp(-0.5)
    assert half == pytest.approx([0.5, reached, reached, reached, 0, 0.5], rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- memory


def test_a_batch_that_is_held_keeps_its_rows(ranks: Ranks, data: Data) -> None:
    ranks.serve(NAMES)
    rows, _ = ranks.rows([0], NAMES)
    rng, held = np.random.default_rng(0), []
    for _ in range(6):
        window = [{"node": rng.integers(0, NODES, 20_000), EDGE_TYPE: rng.integers(0, 300, 9000)} for _ in range(2)]
        held.append((window[1], rows.get(window)[1]))
    for batch, made in held:
        check(ranks.store, data, batch, made)


def test_memory_stays_flat_over_windows(ranks: Ranks) -> None:
    ranks.serve(NAMES)
    rows, peers = ranks.rows([0], NAMES)
    rng = np.random.default_rng(0)

    def windows(count: int) -> None:
        for _ in range(count):
            peers.asked.clear()
            peers.answers.clear()
            size = int(rng.integers(19_000, 21_000))
            rows.get([{"node": rng.integers(0, NODES, size), EDGE_TYPE: rng.integers(0, 300, size)}])

    windows(50)
    before = rss_bytes()
    windows(200)
    assert rss_bytes() - before < 4 << 20


@pytest.mark.parametrize("columns", [1, 3, 64])
def test_rows_are_rounded_to_bfloat16_as_torch_rounds(columns: int) -> None:
    """All that decides: ties, subnormal numbers, the largest ones, infinities, NaN."""
    bits = torch.randint(-(2**31), 2**31, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ties = (bits & -65536) | 0x8000
    special = torch.tensor([0, -(2**31), 1, 0x7F7FFFFF, 0x7F800000, -0x800000, 0x7F800001, 0x7FFFFFFF, 0x00018000])
    numbers = torch.cat([bits, ties, special.to(torch.int32)]).view(torch.float32)
    rows = numbers.repeat(columns)[: len(numbers) // columns * columns].view(-1, columns)
    location = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    out = torch.empty(len(rows), columns, dtype=torch.bfloat16)
    kernels.gather_bfloat16(location.numpy(), np.array([rows.data_ptr()]), out.view(torch.uint16).numpy())
    expected = rows[location].bfloat16()
    assert torch.equal(out.isnan(), expected.isnan()) and expected.isnan().any()
    assert torch.equal(out.nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16))


def test_no_rows_may_be_read_in_bfloat16() -> None:
    table = DenseFeatureTable(torch.zeros(1, 3), 1)
    (rows,) = table.gather(np.empty(0, np.int64), np.zeros((1, 1), np.int64), BufferPool(), torch.bfloat16)
    assert rows.shape == (0, 3) and rows.dtype == torch.bfloat16
