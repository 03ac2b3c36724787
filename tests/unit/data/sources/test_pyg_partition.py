"""gtrain.data.sources.pyg_partition: folders that PyG's own Partitioner writes, cut by the test and not METIS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.distributed import Partitioner
from torch_geometric.loader import ClusterData

from gtrain.data.sources.pyg_partition import PyGPartitionData
from gtrain.errors import ConfigError, DataError


@pytest.fixture
def partition(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that runs the Partitioner; METIS itself needs pyg-lib, which is not on PyPI."""
    parts: dict[str, Tensor] = {}

    def cut(self: ClusterData, _: Tensor, num_nodes: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        parts["all"] = torch.randint(0, self.num_parts, (num_nodes,), generator=generator)
        return parts["all"]

    monkeypatch.setattr(ClusterData, "_metis", cut)

    def run(data: Data | HeteroData, num_parts: int = 2) -> tuple[Path, Tensor]:
        Partitioner(data, num_parts, str(tmp_path / "parts")).generate_partition()
        return tmp_path / "parts", parts["all"]

    return run


def homogeneous() -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(30, 4, generator=generator),
        edge_index=torch.randint(0, 30, (2, 120), generator=generator),
        edge_attr=torch.randn(120, 2, generator=generator),
    )


def heterogeneous() -> HeteroData:
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(20, 3, generator=generator), torch.randn(30, 3, generator=generator)
    for source, target, count in (("a", "b", 50), ("b", "a", 70), ("b", "b", 9)):
        store = data[source, f"{source}{target}", target]
        sources = torch.randint(0, data[source].num_nodes, (count,), generator=generator)
        store.edge_index = torch.stack([sources, torch.randint(0, data[target].num_nodes, (count,))])
        store.edge_attr = torch.randn(count, 2, generator=generator)
    return data


def test_homogeneous(partition: Any) -> None:
    data = homogeneous()
    folder, parts = partition(data, 3)
    module = PyGPartitionData(path=str(folder))
    assert module.num_parts == 3
    back = module.read()
    assert isinstance(back, Data) and back.num_nodes == 30 and module.names() == {}
    assert torch.equal(back.x, data.x) and torch.equal(back.edge_index, data.edge_index)
    assert torch.equal(back.edge_attr, data.edge_attr)
    assert torch.equal(module.assignment(), parts)


@pytest.mark.parametrize("times", ["nodes", "edges"])
def test_times(times: str, partition: Any) -> None:
    data = homogeneous()
    if times == "nodes":
        data.time = torch.arange(30) * 7 % 30
    else:
        data.edge_time = torch.arange(120) * 7 % 120
    back = PyGPartitionData(path=str(partition(data)[0])).read()
    assert torch.equal(back.edge_index, data.edge_index) and torch.equal(back.edge_attr, data.edge_attr)
    if times == "nodes":
        assert torch.equal(back.time, data.time) and "edge_time" not in back
    else:
        assert torch.equal(back.edge_time, data.edge_time) and "time" not in back


def test_heterogeneous(partition: Any, tmp_path: Path) -> None:
    data = heterogeneous()
    folder, parts = partition(data)
    labels = torch.arange(20) % 3
    np.save(tmp_path / "labels.npy", labels.numpy())
    module = PyGPartitionData(path="parts", root=str(tmp_path), labels="a=labels.npy")
    back = module.read()
    assert isinstance(back, HeteroData) and back.validate()
    assert back.node_types == data.node_types and back.edge_types == data.edge_types
    for node_type in data.node_types:
        assert torch.equal(back[node_type].x, data[node_type].x)
    for edge_type in data.edge_types:
        assert torch.equal(back[edge_type].edge_index, data[edge_type].edge_index)
        assert torch.equal(back[edge_type].edge_attr, data[edge_type].edge_attr)
    assert torch.equal(back["a"].y, labels) and "y" not in back["b"]
    assignment = module.assignment()
    assert isinstance(assignment, dict)
    assert torch.equal(torch.cat([assignment["a"], assignment["b"]]), parts)


def test_more_features_of_the_parts(partition: Any) -> None:
    """Labels and masks that a user added to the parts."""
    folder, _ = partition(homogeneous())
    y = torch.arange(30) % 4
    for part in range(2):
        path = folder / f"part_{part}" / "node_feats.pt"
        found = torch.load(path)
        found["feats"] |= {"y": y[found["global_id"]], "train_mask": found["global_id"] < 10}
        torch.save(found, path)
    back = PyGPartitionData(path=str(folder), split="public").read()
    assert torch.equal(back.y, y) and back.train_mask.nonzero().flatten().tolist() == list(range(10))


def test_the_store(partition: Any, tmp_path: Path) -> None:
    data = homogeneous()
    folder, parts = partition(data)
    np.savetxt(tmp_path / "labels.txt", np.arange(30) % 3, fmt="%d")
    options: dict[str, Any] = {"path": str(folder), "labels": f"{tmp_path}/labels.txt", "store": f"{tmp_path}/s"}
    module = PyGPartitionData(**options)
    module.prepare_data()
    store = module.open_store()
    for part in range(2):
        own = (parts == part).nonzero().flatten()
        assert torch.equal(store.node("orig_id", part).sort().values, own)
        assert torch.equal(store.node("x", part), data.x[store.node("orig_id", part)])
    assert module.facts["num_classes"] == 3 and store.manifest.partition.partitioner == "given"
    joined = PyGPartitionData(**options, num_parts=1)
    joined.prepare_data()
    assert joined.open_store().num_parts == 1 and joined.store_path != module.store_path


def test_another_number_of_parts(partition: Any) -> None:
    module = PyGPartitionData(path=str(partition(homogeneous(), 2)[0]), num_parts=3)
    with pytest.raises(DataError, match=r"has 2 parts, and 3 ranks need one each: 2 != 3\nHINT: run on 2 ranks"):
        module.prepare_data()


def change(path: Path, **values: Any) -> None:
    torch.save({**torch.load(path), **values}, path)


def broken(folder: Path, what: str) -> None:
    graph, nodes = folder / "part_1" / "graph.pt", folder / "part_1" / "node_feats.pt"
    found = torch.load(graph)
    if what == "no meta":
        (folder / "META.json").unlink()
    elif what == "meta":
        (folder / "META.json").write_text('{"num_parts": 2')
    elif what == "meta keys":
        (folder / "META.json").write_text('{"num_parts": 2}')
    elif what == "part missing":
        graph.unlink()
    elif what == "more parts":
        meta = json.loads((folder / "META.json").read_text())
        (folder / "META.json").write_text(json.dumps({**meta, "num_parts": 3}))
    elif what == "map missing":
        (folder / "node_map.pt").unlink()
    elif what == "map":
        torch.save(torch.full((30,), 2), folder / "node_map.pt")
    elif what == "map short":
        torch.save(torch.load(folder / "node_map.pt")[:20], folder / "node_map.pt")
    elif what == "node out of range":
        change(graph, col=found["col"].index_fill(0, torch.tensor([4]), 30))
    elif what == "negative node":
        change(graph, row=found["row"].index_fill(0, torch.tensor([4]), -1))
    elif what == "edges missing":
        change(graph, **{name: found[name][1:] for name in ("row", "col", "edge_id")})
        (folder / "part_0" / "edge_feats.pt").unlink()
        (folder / "part_1" / "edge_feats.pt").unlink()
    elif what == "edge twice":
        change(graph, edge_id=found["edge_id"].index_fill(0, torch.tensor([1]), int(found["edge_id"][0])))
    elif what == "rows":
        change(nodes, feats={"x": torch.load(nodes)["feats"]["x"][1:]})
    elif what == "width":
        change(nodes, feats={"x": torch.load(nodes)["feats"]["x"][:, 1:]})
    elif what == "features missing":
        nodes.unlink()
    elif what == "objects":
        change(nodes, time=Path("anywhere"))
    elif what == "no torch":
        nodes.write_bytes(b"nothing")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no meta", "has no META.json"),
        ("meta", "META.json cannot be read as PyG's Partitioner writes it"),
        ("meta keys", "META.json cannot be read as PyG's Partitioner writes it: no 'is_hetero'"),
        ("part missing", "has no part_1/graph.pt, and META.json says that there are 2 parts"),
        ("more parts", "has no part_2/graph.pt, and META.json says that there are 3 parts"),
        ("map missing", "node_map.pt is missing"),
        ("map", "node_map.pt names part 2; there are 2 parts"),
        ("map short", "id 2.; there are 20 nodes"),
        ("node out of range", "col names node 30; the 30 nodes are 0..29"),
        ("negative node", "row names node -1"),
        ("edges missing", "the parts have row of 119 edges; there are 120"),
        ("edge twice", "has an id of edges twice"),
        ("rows", "x has .* rows, and the part has .* nodes"),
        ("width", r"a row of x is torch.float32 \[3\], and in another part torch.float32 \[4\]"),
        ("features missing", "the parts have x of .* nodes; there are 30"),
        ("objects", "holds Python objects other than tensors and plain containers, which are never unpickled"),
        ("no torch", "cannot be loaded|never unpickled"),
    ],
)
def test_bad_folders(what: str, message: str, partition: Any) -> None:
    folder, _ = partition(homogeneous())
    broken(folder, what)
    with pytest.raises(DataError, match=message) as caught:
        PyGPartitionData(path=str(folder)).read()
    assert caught.value.hint


def test_loading_leaves_the_list_of_safe_classes_alone(partition: Any) -> None:
    before = set(torch.serialization.get_safe_globals())
    PyGPartitionData(path=str(partition(homogeneous())[0])).read()
    assert set(torch.serialization.get_safe_globals()) == before


def test_nan(partition: Any, tmp_path: Path) -> None:
    data = homogeneous()
    data.x[3, 1] = float("nan")
    with pytest.raises(DataError, match="x has nan at row 3, column 1"):
        PyGPartitionData(path=str(partition(data)[0]), store=f"{tmp_path}/s").prepare_data()


def test_settings(partition: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data.path=nowhere: no such folder, nor"):
        PyGPartitionData(path="nowhere", root=str(tmp_path)).read()
    with pytest.raises(ConfigError, match="partitioner=random was set, but pyg_partition keeps the parts"):
        PyGPartitionData(path="x", partitioner="random")
    folder, _ = partition(heterogeneous())
    torch.save(torch.zeros(7), tmp_path / "y.pt")
    with pytest.raises(ConfigError, match="data.labels=y.pt was set; the node types of the folder are a, b"):
        PyGPartitionData(path=str(folder), root=str(tmp_path), labels="y.pt").read()
    with pytest.raises(DataError, match="y.pt has 7 rows, and there are 30 nodes of b"):
        PyGPartitionData(path=str(folder), root=str(tmp_path), labels="b=y.pt").read()
