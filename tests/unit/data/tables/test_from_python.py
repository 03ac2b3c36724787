"""Graphs from data frames and from graphs of PyG, networkx and scipy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from gtrain import GraphDataModule
from gtrain.errors import ConfigError, DataError

NODES = {"id": ["a", "b", "c"], "size": [1.0, 2.0, 3.0], "kind": ["x", "y", "x"]}
EDGES = {"source": ["a", "b"], "target": ["b", "c"]}


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_frames(library: str, tmp_path: Path) -> None:
    frames = pytest.importorskip(library)
    make = frames.table if library == "pyarrow" else frames.DataFrame
    nodes = {"frame": make(NODES), "label": "kind"}
    data = GraphDataModule.from_frames(nodes=nodes, edges=make(EDGES), store=str(tmp_path))
    graph = data.read()
    assert graph.edge_index.tolist() == [[0, 1], [1, 2]] and graph.y.tolist() == [0, 1, 0]
    torch.testing.assert_close(graph.x[:, 0], torch.tensor([-1.0, 0.0, 1.0]) * 1.5**0.5)
    again = GraphDataModule.from_frames(nodes=nodes, edges=make(EDGES), store=str(tmp_path))
    assert again.store_path == data.store_path
    other = GraphDataModule.from_frames(nodes=nodes, edges=make({**EDGES, "target": ["b", "a"]}), store=str(tmp_path))
    assert other.store_path != data.store_path


def test_frames_by_type(tmp_path: Path) -> None:
    nodes = {"user": pa.table({"id": [1, 2]}), "item": pa.table({"sku": ["p", "q"]})}
    edges = {"buys": {"frame": pa.table({"u": [2, 1], "i": ["p", "p"]}), "source": "u", "target": "i"}}
    edges["buys"] |= {"source_type": "user", "target_type": "item"}
    graph = GraphDataModule.from_frames(nodes=nodes, edges=edges, store=str(tmp_path)).read()
    assert graph["user", "buys", "item"].edge_index.tolist() == [[1, 0], [0, 0]]


def test_a_wrong_frame(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a list was given as a table"):
        GraphDataModule.from_frames(nodes=[1, 2])


@pytest.mark.parametrize("masks", [False, True])
def test_a_graph_of_pyg(masks: bool, tmp_path: Path) -> None:
    graph = Data(x=torch.rand(6, 2), y=torch.tensor([0, 1] * 3), edge_index=torch.tensor([[0, 1], [1, 2]]))
    if masks:
        graph.train_mask = torch.arange(6) < 2
    data = GraphDataModule.from_pyg(graph, store=str(tmp_path), num_parts=2)
    data.prepare_data()
    assert data.facts["split"]["kind"] == ("public" if masks else "random") and data.open_store().num_nodes == 6
    assert "test_mask" not in graph  # not changed
    changed = graph.clone()
    changed.x[0, 0] += 1
    paths = [GraphDataModule.from_pyg(g, store=str(tmp_path), num_parts=2).store_path for g in (graph.clone(), changed)]
    assert paths[0] == data.store_path != paths[1]


def test_a_heterogeneous_graph_of_pyg(tmp_path: Path) -> None:
    graph = HeteroData()
    graph["a"].x, graph["b"].num_nodes = torch.rand(3, 2), 2
    graph["a", "to", "b"].edge_index = torch.tensor([[0, 2], [1, 0]])
    data = GraphDataModule.from_pyg(graph, store=str(tmp_path), task="link")
    data.prepare_data()
    assert set(data.open_store().node_types) == {"a", "b"}


def test_a_graph_of_networkx(tmp_path: Path) -> None:
    networkx = pytest.importorskip("networkx")
    graph = networkx.Graph()
    graph.add_node("a", size=1, kind="x")
    graph.add_node("b", size=3, kind="y")
    graph.add_edge("a", "b", weight=2.0)
    data = GraphDataModule.from_networkx(graph, label="kind", store=str(tmp_path))
    read = data.read()
    assert read.edge_index.tolist() == [[0, 1], [1, 0]] and read.edge_weight.tolist() == [2, 2]
    assert read.y.tolist() == [0, 1] and read.x.tolist() == [[-1], [1]]
    assert data.names()["node"].to_pylist() == ["a", "b"]


def test_whole_numbers_above_64_bits_of_a_networkx_graph(tmp_path: Path) -> None:
    networkx = pytest.importorskip("networkx")
    graph = networkx.DiGraph([(2**70, 7), (7, -(2**63))])
    data = GraphDataModule.from_networkx(graph, store=str(tmp_path))
    assert data.read().edge_index.tolist() == [[0, 1], [1, 2]]
    assert data.names()["node"].to_pylist() == [str(2**70), "7", str(-(2**63))]
    graph.add_node(7, size=2**70)
    with pytest.raises(ConfigError, match="(?s)attributes of a networkx graph cannot be read.*at most 64 bits"):
        GraphDataModule.from_networkx(graph, store=str(tmp_path))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_matrix_of_scipy(sparse: bool, tmp_path: Path) -> None:
    scipy = pytest.importorskip("scipy.sparse")
    adjacency = scipy.csr_matrix(([1.0, 2.0], ([0, 1], [1, 2])), shape=(3, 3))
    x: Any = [[1, 0], [0, 0], [0, 3]]
    data = GraphDataModule.from_scipy(adjacency, scipy.csr_matrix(x) if sparse else x, [0, 1, 1], store=str(tmp_path))
    graph = data.read()
    assert graph.edge_index.tolist() == [[0, 1], [1, 2]] and graph.edge_weight.tolist() == [1, 2]
    assert graph.x.to_dense().tolist() == x and graph.y.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("y", "settings", "numbers"),
    [
        (torch.tensor([0.5, 1.5, 2.0, 4.0, torch.nan, 8.0], dtype=torch.float64), {}, True),
        (torch.tensor([[0.5], [1.5], [2.0], [4.0], [6.0], [8.0]]), {}, True),
        (torch.tensor([0.0, 1.0] * 3), {}, False),
        (torch.tensor([0, 3, 5, 5, 9, 2]), {"label_kind": "number"}, True),
        (torch.tensor([0, 1] * 3), {}, False),
    ],
)
def test_labels_of_a_graph_of_pyg_may_be_numbers(
    y: torch.Tensor, settings: dict[str, Any], numbers: bool, tmp_path: Path
) -> None:
    masks = {f"{name}_mask": torch.arange(6) // 2 == number for number, name in enumerate(("train", "val", "test"))}
    graph = Data(x=torch.rand(6, 2), y=y, edge_index=torch.tensor([[0, 1], [1, 2]]), **masks)
    data = GraphDataModule.from_pyg(graph, store=str(tmp_path), num_parts=1, **settings)
    data.prepare_data()
    scale = data.facts.get("label_scale")
    if not numbers:
        assert scale is None and data.facts["num_classes"] == 2
        return
    # The first two nodes train: their mean, and half of their difference.
    first, second = y.flatten()[:2].tolist()
    assert scale == {"mean": (first + second) / 2, "deviation": (second - first) / 2}
    store = data.open_store()
    assert store.node("y", 0).dtype == torch.float32 and torch.equal(graph.y, y) == (not y.isnan().any())
    # A node whose label is NaN is in no split.
    assert int(store.node("test_mask", 0).sum()) == int((~y[4:].isnan()).sum())


@pytest.mark.parametrize(("unlabelled", "columns"), [(None, 1), (None, 2), (9, 1)])
def test_nan_among_classes_is_no_label(unlabelled: int | None, columns: int, tmp_path: Path) -> None:
    y = torch.tensor([0.0, 1, torch.nan, 1, 0, torch.nan, 1, 0])
    given = y if columns == 1 else torch.stack([y, 1 - y], dim=1)
    graph = Data(x=torch.rand(8, 2), y=given, edge_index=torch.tensor([[0, 1], [1, 2]]))
    data = GraphDataModule.from_pyg(graph, store=str(tmp_path), num_parts=1, unlabelled=unlabelled)
    data.prepare_data()
    assert data.facts["num_classes"] == 2 and sum(data.facts["split"]["sizes"].values()) == 6
    assert graph.y is given and given.isnan().any()


def test_a_fraction_may_not_be_a_class(tmp_path: Path) -> None:
    graph = Data(x=torch.rand(4, 2), y=torch.tensor([0.5, 1, 2, 3]), edge_index=torch.tensor([[0], [1]]))
    data = GraphDataModule.from_pyg(graph, store=str(tmp_path), num_parts=1, label_kind="class")
    with pytest.raises(DataError, match="y"):
        data.prepare_data()
    typed = HeteroData({"house": {"x": torch.rand(4, 2), "y": torch.tensor([0.5, 1, 2, 3])}, "town": {"num_nodes": 2}})
    typed["house", "in", "town"].edge_index = torch.tensor([[0, 1], [1, 0]])
    data = GraphDataModule.from_pyg(typed, store=str(tmp_path), num_parts=1, train_fraction=0.5, val_fraction=0.25)
    data.prepare_data()
    assert data.facts["target"] == "house" and data.facts["label_scale"]["deviation"] > 0


def test_names_and_types_of_columns_identify_a_frame(tmp_path: Path) -> None:
    one = pa.table({"id": [0, 1, 2], "team": [0, 1, 0], "guess": [1, 1, 0]})
    others = [
        one.rename_columns(["id", "guess", "team"]),
        one.cast(pa.schema([(n, pa.uint64()) for n in one.schema.names])),
    ]
    make = [
        GraphDataModule.from_frames(nodes={"frame": t, "label": "team"}, store=str(tmp_path)) for t in (one, *others)
    ]
    assert len({data.store_path for data in make}) == 3
    assert [data.read().y.tolist() for data in make] == [[0, 1, 0], [1, 1, 0], [0, 1, 0]]


def test_what_an_encoder_computes_identifies_the_store(tmp_path: Path) -> None:
    class Encoder:
        def __init__(self, value: float) -> None:
            self.value = value

        def encode(self, texts: Any) -> np.ndarray:
            return np.full((len(texts), 2), self.value, np.float32)

        __call__ = encode

    def store(encoder: Any) -> Any:
        columns = {"kind": {"kind": "text", "encoder": encoder}}
        nodes = {"frame": pa.table(NODES), "columns": columns}
        return GraphDataModule.from_frames(nodes=nodes, store=str(tmp_path)).store_path

    paths = [store(e) for e in (Encoder(1).encode, Encoder(2).encode, Encoder(3), lambda t: Encoder(4).encode(t))]
    assert len(set(paths)) == 4 and store(Encoder(1).encode) == paths[0]


def test_an_index_of_pandas_is_a_column_or_refused(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"rank": [2, 1, 3], "team": list("rbr")}, index=pandas.Index([1, 2, 3], name="id"))
    edges = pandas.DataFrame({"source": [1, 2], "target": [2, 3]})
    nodes = {"frame": frame, "label": "team"}
    data = GraphDataModule.from_frames(nodes=nodes, edges=edges[edges.source > 0], store=str(tmp_path))
    assert data.read().edge_index.tolist() == [[0, 1], [1, 2]]
    for wrong in (frame.rename_axis("rank"), frame.set_axis(list("abc"))):
        with pytest.raises(ConfigError, match=r"index of a data frame|index without a name"):
            GraphDataModule.from_frames(nodes=wrong, store=str(tmp_path))


def test_names_of_networkx_do_not_collide(tmp_path: Path) -> None:
    networkx = pytest.importorskip("networkx")
    graph = networkx.grid_2d_graph(2, 2)
    for number, (node, values) in enumerate(graph.nodes(data=True)):
        values |= {"id": number + 100, "z": number % 3}
        graph.nodes[node]["id"] = number + 100
    networkx.set_edge_attributes(graph, 3.0, "source")
    data = GraphDataModule.from_networkx(graph, store=str(tmp_path))
    read = data.read()
    assert read.x.size(1) == 2 and read.edge_index.size(1) == 8
    assert data.names()["node"].to_pylist() == [str(node) for node in graph]
    with pytest.raises(ConfigError, match="two nodes"):
        GraphDataModule.from_networkx(networkx.Graph([(1, "1")]), store=str(tmp_path))


def test_labels_of_scipy_that_are_names(tmp_path: Path) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(ConfigError, match="labels of dtype <U1"):
        GraphDataModule.from_scipy(sparse.eye(3), None, np.array(["a", "b", "a"]), store=str(tmp_path)).read()
