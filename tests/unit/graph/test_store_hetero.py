"""gtrain.graph: stores of graphs with types, times, sparse features, held-out edges, buckets and names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from small_graphs import messy_graph, random_parts, stored
from torch_geometric.data import Data
from typed_library import BY, CITES, WRITES, library, library_parts, write

from gtrain.errors import DataError, StoreError
from gtrain.graph.shard import load_shard, load_whole
from gtrain.graph.shard.whole import held_out_edges, load_whole_hetero
from gtrain.graph.store import Store
from gtrain.graph.store.names import Names
from gtrain.graph.store.tables import EdgeArrays
from gtrain.run.report import print_partition


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_graph_with_types_comes_back_whole(tmp_path: Path, num_parts: int) -> None:
    data, parts = library(), library_parts(num_parts)
    store = write(tmp_path / "s", data, parts, num_parts)
    assert store.is_hetero and store.node_types == tuple(data.node_types) and store.edge_types == tuple(data.edge_types)
    assert (store.num_nodes, store.num_edges) == (82, 509)
    assert (store.num_nodes_of("paper"), store.num_edges_of(CITES)) == (50, 300)
    whole = load_whole_hetero(Store.open(tmp_path / "s"))
    orig = {kind: whole[kind].orig_id for kind in data.node_types}
    for kind in data.node_types:
        assert sorted(orig[kind].tolist()) == list(range(data[kind].num_nodes)) and whole[kind].num_nodes
        owner = parts[kind][orig[kind]]
        assert store.offsets_of(kind).tolist() == [0, *owner.bincount(minlength=num_parts).cumsum(0).tolist()]
        assert owner.tolist() == sorted(owner.tolist())
    assert torch.equal(whole["author"].x, data["author"].x[orig["author"]])
    assert whole["paper"].x.layout == torch.sparse_csr
    assert torch.equal(whole["paper"].x.to_dense(), data["paper"].x.to_dense()[orig["paper"]])
    for name in ("y", "train_mask", "time"):
        assert torch.equal(whole["paper"][name], data["paper"][name][orig["paper"]])
    for kind in data.edge_types:
        source, target = whole[kind].edge_index
        assert torch.equal(
            torch.stack([orig[kind[0]][source], orig[kind[2]][target]]), data[kind].edge_index[:, whole[kind].edge_id]
        )
    assert torch.equal(whole[WRITES].edge_weight, data[WRITES].edge_weight[whole[WRITES].edge_id])
    assert torch.equal(whole[CITES].edge_attr, data[CITES].edge_attr[whole[CITES].edge_id].float())
    assert whole[BY].edge_index.shape == (2, 0)


def test_edges_with_times_are_ordered_by_target_time_source_position(tmp_path: Path) -> None:
    whole = load_whole_hetero(write(tmp_path / "s", library(), library_parts(3), 3))
    edges = whole[CITES]
    columns = (edges.edge_index[1], edges.edge_time, edges.edge_index[0], edges.edge_id)
    keys = list(zip(*(column.tolist() for column in columns), strict=True))
    assert keys == sorted(keys)
    assert torch.equal(edges.edge_time, library()[CITES].edge_time[edges.edge_id])
    edges = whole[WRITES]
    keys = list(zip(*(c.tolist() for c in (edges.edge_index[1], edges.edge_index[0], edges.edge_id)), strict=True))
    assert keys == sorted(keys)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_held_out_edges_lie_with_their_target(tmp_path: Path, num_parts: int) -> None:
    data, parts = library(), library_parts(num_parts)
    store = write(tmp_path / "s", data, parts, num_parts)
    assert store.held_out_size("val", WRITES) == 30
    assert store.held_out_size("test", WRITES) == store.held_out_size("val", CITES) == 0
    assert store.held_out_tensors("val", WRITES) == ("source", "target", "edge_weight", "edge_id")
    orig = {k: torch.cat([store.node("orig_id", p, k) for p in range(num_parts)]) for k in ("author", "paper")}
    for p in range(num_parts):
        target, ids = store.held_out("target", p, "val", WRITES), store.held_out("edge_id", p, "val", WRITES)
        first, last = store.offsets_of("paper")[p : p + 2].tolist()
        assert ((target >= first) & (target < last)).all() and ids.tolist() == sorted(ids.tolist())
    found = held_out_edges(store, "val", WRITES)
    assert torch.equal(
        torch.stack([orig["author"][found["source"]], orig["paper"][found["target"]]]), data[WRITES].val_edge_index
    )
    assert torch.equal(found["edge_weight"], data[WRITES].val_edge_weight)
    assert held_out_edges(store, "val", CITES) == {}
    whole = load_whole_hetero(store)
    assert torch.equal(whole[WRITES].val_edge_index, torch.stack([found["source"], found["target"]]))
    assert torch.equal(whole[WRITES].val_edge_weight, found["edge_weight"])
    assert whole[WRITES].test_edge_index.shape == (2, 0)
    with pytest.raises(StoreError, match="no val edges of the type paper__cites__paper"):
        store.held_out("source", 0, "val", CITES)


def test_held_out_edges_of_a_homogeneous_graph(tmp_path: Path) -> None:
    """As many held-out edges as nodes, and as training edges: names decide, not numbers of rows."""
    data = Data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), edge_type=torch.tensor([0, 1, 0]), num_nodes=3)
    data.update({"val_edge_index": torch.tensor([[2, 1, 1], [1, 0, 2]]), "val_edge_type": torch.tensor([1, 0, 1])})
    data.update({"val_mask": torch.tensor([True, False, False]), "size": torch.tensor([7, 8, 9])})
    store = stored(tmp_path / "s", data, torch.tensor([1, 0, 1]))
    assert store.node_tensors() == ("orig_id", "val_mask", "size")
    assert store.edge_tensors() == ("indices", "edge_id", "edge_type")
    found = held_out_edges(store, "val")
    orig = torch.cat([store.node("orig_id", p) for p in range(2)])
    assert orig[found["source"]].tolist() == [2, 1, 1] and orig[found["target"]].tolist() == [1, 0, 2]
    assert found["edge_type"].tolist() == [1, 0, 1]
    assert store.held_out("source", 0, "val").tolist() == found["source"][:1].tolist()
    data.val_edge_type = torch.tensor([1, 0])
    with pytest.raises(DataError, match="val_edge_type has 2 rows, and val_edge_index has 3 edges"):
        stored(tmp_path / "t", data, torch.tensor([1, 0, 1]))


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_sparse_features(tmp_path: Path, num_parts: int) -> None:
    data = messy_graph()
    dense = torch.where(torch.rand(40, 9, generator=torch.Generator().manual_seed(3)) < 0.3, torch.randn(40, 9), 0.0)
    dense[5] = 0
    data.x = dense.to_sparse_csr()
    store = stored(tmp_path / "s", data, random_parts(40, num_parts))
    assert store.manifest.node_types["node"].tensors["x"].layout == "csr"
    for part in range(num_parts):
        x, rows = store.node("x", part), store.node("orig_id", part)
        assert x.layout == torch.sparse_csr and torch.equal(x.to_dense(), dense[rows])
        assert torch.equal(load_shard(store, part).node_data["x"].to_dense(), dense[rows])
    whole = load_whole(store).node_data
    assert torch.equal(whole["x"].to_dense(), dense[whole["orig_id"]])


def test_rows_without_edges_are_a_graph(tmp_path: Path) -> None:
    data = Data(x=torch.eye(6).to_sparse_csr(), y=torch.arange(6), edge_index=torch.empty(2, 0, dtype=torch.int64))
    store = stored(tmp_path / "s", data, torch.tensor([0, 1, 0, 1, 0, 1]))
    assert (store.num_nodes, store.num_edges) == (6, 0)
    assert store.node("x", 1).to_dense().argmax(1).tolist() == store.node("y", 1).tolist() == [1, 3, 5]


@pytest.mark.parametrize("num_parts", [1, 3])
def test_buckets_are_the_edges_by_pair_of_parts(tmp_path: Path, num_parts: int) -> None:
    data, parts = messy_graph(), random_parts(40, num_parts)
    data.edge_type = torch.arange(300)  # shows the order
    store = write(tmp_path / "s", data, parts, num_parts, buckets=True)
    seen = 0
    for i in range(num_parts):
        for j in range(num_parts):
            bucket = store.bucket(i, j)
            wanted = ((parts[data.edge_index[0]] == i) & (parts[data.edge_index[1]] == j)).nonzero().flatten()
            assert bucket["edge_type"].tolist() == wanted.tolist()
            assert bucket["source"].dtype == torch.int32
            source, target = (
                store.node("orig_id", i)[bucket["source"].long()],
                store.node("orig_id", j)[bucket["target"].long()],
            )
            assert torch.equal(torch.stack([source, target]), data.edge_index[:, wanted])
            assert torch.equal(bucket["edge_attr"], data.edge_attr[wanted])
            seen += wanted.numel()
    assert seen == 300 and set(bucket) == {"source", "target", "edge_type", "edge_weight", "edge_attr"}
    store.verify(0)


def test_buckets_of_a_graph_with_types(tmp_path: Path) -> None:
    data, parts = library(), library_parts(3)
    store = write(tmp_path / "s", data, parts, 3, buckets=True)
    counts = np.array(store.manifest.edge_types["author__writes__paper"].buckets)
    source, target = data[WRITES].edge_index
    wanted = torch.bincount(parts["author"][source] * 3 + parts["paper"][target], minlength=9).reshape(3, 3)
    assert counts.tolist() == wanted.tolist()
    rows = ((parts["author"][source] == 2) & (parts["paper"][target] == 1)).nonzero().flatten()
    assert torch.equal(store.bucket(2, 1, WRITES)["edge_weight"], data[WRITES].edge_weight[rows])
    assert store.bucket(0, 0, BY)["source"].numel() == 0
    with pytest.raises(StoreError, match="no edge buckets"):
        write(tmp_path / "t", data, parts, 3).bucket(0, 0, WRITES)


def test_types_have_to_be_named(tmp_path: Path) -> None:
    store = write(tmp_path / "s", library(), library_parts(2), 2)
    with pytest.raises(StoreError, match=r"3 node types, and none was named(.|\n)*author, paper, a/b"):
        store.node("x", 0)
    with pytest.raises(StoreError, match="4 edge types, and none was named"):
        store.edge("indices", 0)
    with pytest.raises(StoreError, match="edge types, and none was named"):
        load_whole(store)
    with pytest.raises(StoreError, match="no node type 'venue'"):
        store.node("x", 0, "venue")
    with pytest.raises(StoreError, match="no edge type 'a__b__c'"):
        store.edge("indices", 0, ("a", "b", "c"))
    with pytest.raises(StoreError, match=r"no node tensor of author called 'y'; it has orig_id, x"):
        store.node("y", 0, "author")


def test_the_report_counts_all_types(tmp_path: Path) -> None:
    data, parts = library(), library_parts(3)
    report = write(tmp_path / "s", data, parts, 3).manifest.partition
    cut = {
        "__".join(k): int((parts[k[0]][data[k].edge_index[0]] != parts[k[2]][data[k].edge_index[1]]).sum())
        for k in (WRITES, CITES)
    }
    for key, value in cut.items():
        assert report.edge_cut_by_type[key] == value
    assert report.edge_cut == sum(report.edge_cut_by_type.values())
    for p in range(3):
        remote = {
            (kind[0], int(s))
            for kind in data.edge_types
            for s, t in data[kind].edge_index.t().tolist()
            if parts[kind[2]][t] == p and parts[kind[0]][s] != p
        }
        assert report.halo[p] == len(remote)
        assert report.nodes[p] == sum(int((ids == p).sum()) for ids in parts.values())
        assert report.train_nodes[p] == int(data["paper"].train_mask[parts["paper"] == p].sum())
    assert report.nodes_by_type["a/b"] == (0, 0, 2)


def test_edges_and_nodes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    parts = torch.tensor([0, 1, 0])
    with pytest.raises(DataError, match="the target of edge 1 is 3, and there are 3 such nodes"):
        write(tmp_path / "s", EdgeArrays(3, np.array([0, 1]), np.array([1, 3])), parts, 2)
    with pytest.raises(DataError, match="edge_time is float32 of shape .2., and times are integers"):
        arrays = EdgeArrays(3, np.array([0, 1]), np.array([1, 2]), {"edge_time": np.zeros(2, np.float32)})
        write(tmp_path / "s", arrays, parts, 2)
    with pytest.raises(DataError, match="edge_weight has 3 rows, and there are 2 edges"):
        arrays = EdgeArrays(3, np.array([0, 1]), np.array([1, 2]), {"edge_weight": np.zeros(3)})
        write(tmp_path / "s", arrays, parts, 2)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ names

WORDS = ["Anna", "", "Übergröße", "anna", "Anna ", "x" * 300, "日本", "b", "Bob", "b"]


@pytest.mark.parametrize(
    "make", [list, pa.array, lambda w: pa.array(w, pa.large_string()), lambda w: pa.chunked_array([w[:3], w[3:]])]
)
def test_names(tmp_path: Path, make: Callable[[list[str]], Any]) -> None:
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=10)
    store = write(tmp_path / "s", data, torch.arange(10) % 2, 2, names={"node": make(WORDS), "relation": ["likes"]})
    names = Store.open(store.path).names("node")
    assert isinstance(names, Names) and len(names) == 10
    assert names.decode([3, 0, 0, 9, 5]) == ["anna", "Anna", "Anna", "b", "x" * 300]
    assert names.decode(torch.arange(10)) == WORDS
    assert names.encode(["日本", "nobody", "", "b", "Anna", "xx", "Übergröße"]).tolist() == [6, -1, 1, 7, 0, -1, 2]
    assert names.encode([]).tolist() == [] and names.decode([]) == []
    assert store.names("relation").encode(["likes", "hates"]).tolist() == [0, -1]
    assert store.names("class") is None
    with pytest.raises(DataError, match="no name for id 10"):
        names.decode([10])


def test_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several pieces, and found again in another order."""
    monkeypatch.setattr("gtrain.graph.store.names.STEP", 1000)
    words = [f"entity/{i * 7919 % 10007}" for i in range(5000)]
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=5000)
    names = write(tmp_path / "s", data, torch.zeros(5000, dtype=torch.int64), 1, names={"node": words}).names("node")
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(names.encode([words[i] for i in order]), order)
    assert names.decode(order[:50]) == [words[i] for i in order[:50]]


def test_equal_hashes_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtrain.graph.store.names._hashes", lambda offsets, data: np.zeros(len(offsets) - 1, np.uint64))
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=10)
    names = write(tmp_path / "s", data, torch.zeros(10, dtype=torch.int64), 1, names={"node": WORDS}).names("node")
    assert names.encode([*WORDS, "nobody"]).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 7, -1]


def test_names_are_checked(tmp_path: Path) -> None:
    data, parts = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2), torch.tensor([0, 1])
    with pytest.raises(DataError, match="3 names of node, and 2 ids"):
        write(tmp_path / "s", data, parts, 2, names={"node": ["a", "b", "c"]})
    with pytest.raises(DataError, match="name 1 of 2 is null"):
        write(tmp_path / "s", data, parts, 2, names={"node": pa.array(["a", None])})
    store = write(tmp_path / "s", data, parts, 2, names={"node": ["a", "b"]})
    file = tmp_path / "s" / "names" / "node" / "bytes.npy"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(StoreError, match=r"bytes\.npy is damaged"):
        store.names("node")


def test_what_partition_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = write(tmp_path / "s", library(), library_parts(3), 3)
    print_partition(store)
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    nodes = {kind: store.manifest.partition.nodes_by_type[kind] for kind in store.node_types}
    assert "a/b 2 0 0 2 3.000" in lines
    paper = nodes["paper"]
    assert f"paper 50 {paper[0]} {paper[1]} {paper[2]} {max(paper) * 3 / 50:.3f}" in lines
    cut = store.manifest.partition.edge_cut_by_type["paper__cites__paper"]
    assert f"paper cites paper 300 {cut} ({cut / 300:.1%})" in lines
    assert "val edges, held out: 30" in lines
    train = store.manifest.partition.train_nodes
    assert any(f"train_nodes {max(train) * 3 / sum(train):.3f}" in line for line in lines)
    assert store.split_size("train", "paper") == sum(train)
