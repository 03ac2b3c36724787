"""gtrain.data.sources.dgl_partition: folders that DGL 1.1.3 wrote (tests/assets/dgl/write.py), read without DGL."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import REPO
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.readers.dgl import read_graph, read_tensors
from gtrain.data.sources.dgl_partition import DGLPartitionData
from gtrain.errors import ConfigError, DataError

ASSETS = REPO / "tests" / "assets" / "dgl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ASSETS / "homogeneous", tmp_path / "dgl")
    return tmp_path / "dgl"


def pairs(edge_index: Tensor) -> set[tuple[int, int]]:
    return {(int(source), int(target)) for source, target in edge_index.T}


def test_homogeneous() -> None:
    """The feature says which node it is, so that the edges are known by formula."""
    module = DGLPartitionData(path=f"{ASSETS}/homogeneous/small.json", edge_weights="weight")
    data = module.read()
    assert isinstance(data, Data) and module.num_parts == 3
    node = data.x[:, 0].long()
    assert torch.equal(node.sort().values, torch.arange(24)) and torch.equal(data.x[:, 1], data.x[:, 0] / 2)
    assert torch.equal(data.y, node % 3)
    assert torch.equal(data.train_mask, node < 12) and torch.equal(data.test_mask, node >= 18)
    source, target = node[data.edge_index]
    assert data.num_edges == 48
    weight = data.edge_weight.long()  # edges 0..23 go to 3i + 1, the others to 5i + 2
    assert torch.equal(weight.sort().values, torch.arange(48)) and torch.equal(weight % 24, source)
    assert torch.equal(target, torch.where(weight < 24, 3 * source + 1, 5 * source + 2) % 24)
    book = json.loads((ASSETS / "homogeneous" / "small.json").read_text())["node_map"]["_N"]
    assert module.assignment().bincount().tolist() == [last - first for first, last in book]


def test_heterogeneous() -> None:
    module = DGLPartitionData(path=f"{ASSETS}/heterogeneous/small.json")
    data = module.read()
    assert isinstance(data, HeteroData) and data.validate()
    assert data.node_types == ["author", "paper"] and "y" not in data["author"]
    author, paper = data["author"].x[:, 0].long(), data["paper"].x[:, 0].long() // 10
    assert author.tolist() != list(range(12)) and torch.equal(author.sort().values, torch.arange(12))
    assert torch.equal(data["paper"].y, paper % 2)
    source, target = data["author", "writes", "paper"].edge_index
    writes = torch.stack([author[source], paper[target]])
    assert pairs(writes) == {(i, (i + step) % 18) for i in range(12) for step in (0, 5)}
    target, source = data["paper", "by", "author"].edge_index
    assert pairs(torch.stack([author[source], paper[target]])) == pairs(writes)
    cites = data["paper", "cites", "paper"]
    assert torch.equal(paper[cites.edge_index[1]], (7 * paper[cites.edge_index[0]] + 3) % 18)
    assert torch.equal(cites.year, 1990 + paper[cites.edge_index[0]])
    parts = module.assignment()
    assert isinstance(parts, dict) and (parts["author"].numel(), parts["paper"].numel()) == (12, 18)
    assert all((part.diff() >= 0).all() and int(part.max()) == 1 for part in parts.values())


def test_the_store(tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": "small.json", "root": f"{ASSETS}/homogeneous", "store": str(tmp_path)}
    module = DGLPartitionData(**options)
    module.prepare_data()
    store = module.open_store()
    data = module.read()
    assert store.num_parts == 3 and store.offsets.diff().tolist() == module.assignment().bincount().tolist()
    for part in range(3):
        assert torch.equal(store.node("x", part), data.x[store.node("orig_id", part)])
    assert module.facts["split"]["sizes"] == {"train": 12, "val": 6, "test": 6}
    joined = DGLPartitionData(**options, num_parts=1)
    joined.prepare_data()
    assert joined.open_store().num_parts == 1 and joined.store_path != module.store_path
    other = DGLPartitionData(**options, features=None)
    assert other.store_path != module.store_path and "x" not in other.read()


@pytest.mark.parametrize("key", ["features", "labels", "edge_weights"])
def test_a_feature_that_is_not_there(key: str) -> None:
    options: dict[str, Any] = {key: "zz"}
    with pytest.raises(DataError, match=rf"data\.{key}=zz names a missing feature; the nodes have .*train_mask"):
        DGLPartitionData(path=f"{ASSETS}/homogeneous/small.json", **options).read()


def test_another_number_of_parts() -> None:
    module = DGLPartitionData(path=f"{ASSETS}/homogeneous/small.json", num_parts=2)
    with pytest.raises(DataError, match=r"has 3 parts, and 2 ranks need one each: 3 != 2\nHINT: run on 3 ranks"):
        module.prepare_data()


@pytest.mark.parametrize("saved", ["coo", "csr", "csc", ["csr", "csc"], ["coo", "csr", "csc"]])
@pytest.mark.parametrize("bits", [32, 64])
def test_against_dgl(saved: str | list[str], bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format that DGL saves graphs in."""
    monkeypatch.setenv("HOME", str(tmp_path))  # DGL writes its settings there
    monkeypatch.setenv("DGLBACKEND", "pytorch")
    dgl = pytest.importorskip("dgl", reason="compares with DGL itself: pip install dgl==1.1.3 (Python 3.11)")
    graph = dgl.rand_graph(30, 200)
    graph = graph.int() if bits == 32 else graph.long()
    graph.ndata["a"], graph.edata["b"] = torch.randn(30, 2), torch.arange(200)
    dgl.save_graphs(str(tmp_path / "g"), [graph], formats=saved)
    dgl.data.utils.save_tensors(str(tmp_path / "t"), {"x/y": torch.randn(3, 4).half(), "z": torch.ones(0)})
    ours = read_graph(tmp_path / "g")
    source, target = graph.edges(order="eid")
    assert torch.equal(ours.source, source.long()) and torch.equal(ours.target, target.long())
    assert torch.equal(ours.node_data["a"], graph.ndata["a"]) and torch.equal(ours.edge_data["b"], graph.edata["b"])
    theirs = dgl.data.utils.load_tensors(str(tmp_path / "t"))
    assert all(torch.equal(value, theirs[name]) for name, value in read_tensors(tmp_path / "t").items())


def rewrite(folder: Path, **changes: Any) -> None:
    book = json.loads((folder / "small.json").read_text())
    (folder / "small.json").write_text(json.dumps({**book, **changes}))


def broken(folder: Path, what: str) -> None:
    book = json.loads((folder / "small.json").read_text())
    nodes, graph = folder / "part1" / "node_feat.dgl", folder / "part1" / "graph.dgl"
    if what == "json":
        (folder / "small.json").write_text("{")
    elif what == "keys":
        (folder / "small.json").write_text("{}")
    elif what == "part":
        rewrite(folder, **{"part-2": None})
    elif what == "parts":
        rewrite(folder, num_parts=4)
    elif what == "old":
        rewrite(folder, node_map="node_map.npy")
    elif what == "cover":
        rewrite(folder, num_nodes=25)
    elif what == "graphbolt":
        part = {name: file for name, file in book["part-0"].items() if name != "part_graph"}
        rewrite(folder, **{"part-0": {**part, "part_graph_graphbolt": "part0/fused_csc_sampling_graph.pt"}})
    elif what == "file":
        nodes.unlink()
    elif what == "empty":
        nodes.write_bytes(b"")
    elif what == "short":
        graph.write_bytes(graph.read_bytes()[:-400])
    elif what == "magic":
        graph.write_bytes(b"Parquet." + graph.read_bytes()[8:])
    elif what == "rows":
        shutil.copy(folder / "part0" / "node_feat.dgl", nodes)
    elif what == "edges":
        shutil.copy(folder / "part0" / "graph.dgl", graph)
    elif what == "ends":  # the ids of two parts' nodes: an edge's end is no node of the graph
        content = graph.read_bytes()
        ids = read_graph(graph).node_data["_ID"]
        place = content.index(ids.numpy().tobytes())
        graph.write_bytes(content[:place] + (ids + 100).numpy().tobytes() + content[place + 8 * ids.numel() :])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("json", "cannot be read as DGL's partition book: Expecting"),
        ("keys", "cannot be read as DGL's partition book: no 'num_parts'"),
        ("part", "has no part-2, and num_parts is 3"),
        ("parts", "node_map has 3 ranges of _N; 4 ascending ones are expected"),
        ("old", "ids were not reassigned"),
        ("cover", r"do not cover 0..24 \(num_nodes=25\) once each"),
        ("graphbolt", "part-0 names no part_graph; it was written for GraphBolt"),
        ("file", "part1/node_feat.dgl is missing"),
        ("empty", "is truncated at 0 bytes"),
        ("short", "graph.dgl is truncated"),
        ("magic", "byte 0: a file of graphs of DGL starts with 0xdd2e4ff046b4a13f"),
        ("rows", "has . rows, and part 1 has .* of _N"),
        ("edges", "has 0 edges of _N:_E:_N, and part 1 owns the ids"),
        ("ends", "names node 1.., which is not a _N"),
    ],
)
def test_bad_folders(what: str, message: str, folder: Path) -> None:
    broken(folder, what)
    with pytest.raises(DataError, match=message) as caught:
        DGLPartitionData(path=f"{folder}/small.json").read()
    assert caught.value.hint


def test_every_cut_and_every_flipped_byte_is_answered(folder: Path) -> None:
    """A damaged file is a DataError, or reads as other numbers; never another exception, never a huge allocation."""
    path = folder / "part0" / "graph.dgl"
    content = path.read_bytes()
    for place in range(4096, len(content), 13):
        for damaged in (content[:place], content[:place] + b"\xff" + content[place + 1 :]):
            path.write_bytes(damaged)
            try:
                read_graph(path)
            except DataError as err:
                assert err.hint


def test_settings(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data.path=none.json: no such file"):
        DGLPartitionData(path="none.json", root=str(tmp_path)).prepare_data()
    with pytest.raises(ConfigError, match="partitioner=random was set, but dgl_partition keeps the parts"):
        DGLPartitionData(path="x", partitioner="random")
