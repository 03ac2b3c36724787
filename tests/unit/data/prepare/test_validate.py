"""gtrain.data.prepare.validate: graphs that cannot be used are named before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch_geometric.data import Data

from gtrain.data.prepare.validate import check_distinct, labelled_nodes, validate_graph
from gtrain.errors import DataError


def good() -> Data:
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    return Data(x=torch.ones(4, 2), y=torch.tensor([0, 1, 2, 0]), edge_index=edges, train_mask=torch.tensor([True] * 4))


def with_x(row: int, column: int, value: float) -> Callable[[Data], None]:
    return lambda data: data.x.__setitem__((row, column), value)


def with_value(name: str, value: object) -> Callable[[Data], None]:
    return lambda data: data.__setitem__(name, value)


def test_facts() -> None:
    sizes = {"num_nodes": 4, "num_relations": None, "sparse_features": False}
    assert validate_graph(good()) == {**sizes, "num_features": 2, "num_classes": 3, "multilabel": False}
    assert validate_graph(good(), num_classes=7)["num_classes"] == 7
    several = good()
    several.y = torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 1]])
    assert validate_graph(several) == {**sizes, "num_features": 2, "num_classes": 3, "multilabel": True}
    bare = Data(edge_index=good().edge_index, num_nodes=4)
    assert validate_graph(bare) == {**sizes, "num_features": None, "num_classes": None, "multilabel": None}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_x(2, 1, float("nan")), "the file: x has nan at row 2, column 1"),
        (with_x(0, 0, float("-inf")), "x has -inf at row 0, column 0"),
        (with_value("x", torch.ones(4)), "dense or sparse CSR tensor of shape"),
        (with_value("y", torch.tensor([0, 1, 2])), "y has 3 rows, and the graph has 4 nodes"),
        (with_value("y", torch.tensor([0, -1, 1, -1])), "node 1 has the label -1, and 2 of 4(.|\n)*unlabelled=-1"),
        (with_value("y", torch.tensor([0.0, 1.5, 1, 0])), "label of node 1 is 1.5"),
        (with_value("y", torch.tensor([0.0, 1, 1, float("nan")])), "label of node 3 is nan"),
        (with_value("y", torch.tensor([0.0, 0.5, 1, float("inf")])), "the label of node 1 is 0.5; .* 2 of 4 are not"),
        (with_value("y", torch.tensor([0.0, 1, 1, float("inf")])), "label of node 3 is inf"),
        (with_value("y", torch.tensor([7, 900, 7, 900])), "labels must be 0..C-1; the largest is 900 and only 2"),
        (with_value("y", torch.tensor([[0, 1], [0, 2], [0, 0], [1, 1]])), "has 2 at row 1, column 1"),
        (with_value("train_mask", torch.tensor([True] * 3)), "train_mask has 3 rows, and the graph has 4"),
        (with_value("train_mask", torch.tensor([0, 1, 2, 3])), "train_mask is not a mask"),
        (with_value("edge_index", torch.tensor([[0, 1], [1, 4]])), "edge 1 joins 1 and 4, and the graph has 4 nodes"),
        (with_value("edge_index", torch.tensor([[0, -1], [1, 2]])), "edge 1 joins -1 and 2"),
        (with_value("edge_index", torch.tensor([0, 1])), r"int64 of shape \[2, E\]"),
    ],
)
def test_what_is_wrong_is_named(spoil: Callable[[Data], None], message: str) -> None:
    data = good()
    spoil(data)
    data.num_nodes = 4
    with pytest.raises(DataError, match=message):
        validate_graph(data, origin="the file")


def test_classes_given() -> None:
    data = good()
    with pytest.raises(DataError, match="node 2 has the label 2, and data.num_classes=2"):
        validate_graph(data, num_classes=2)
    data.y = torch.tensor([0, 900, 7, 0])
    assert validate_graph(data, num_classes=901)["num_classes"] == 901


def test_unlabelled() -> None:
    data = good()
    data.y = torch.tensor([0, -1, 1, 5])
    with pytest.raises(DataError, match="the label -1"):
        validate_graph(data, unlabelled=5)
    data.y = torch.tensor([0, -1, 1, -1])
    assert validate_graph(data, unlabelled=-1)["num_classes"] == 2
    assert labelled_nodes(data.y, -1).tolist() == [True, False, True, False]
    data.y = torch.tensor([-1] * 4)
    with pytest.raises(DataError, match="none of the 4 nodes has a label; data.unlabelled=-1"):
        validate_graph(data, unlabelled=-1)


def test_no_nodes() -> None:
    with pytest.raises(DataError, match="no nodes"):
        validate_graph(Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=0))


def test_features_of_no_column_and_labels_of_one_class() -> None:
    graph = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    for empty in (torch.ones(3, 0), torch.ones(3, 0).to_sparse_csr()):
        graph.x = empty
        with pytest.raises(DataError, match=r"x has the shape \[3, 0\]: its rows have no columns"):
            validate_graph(graph)
    check_distinct(torch.tensor([2, -1, 3]), -1, "the data")
    check_distinct(torch.ones(3, 2), None, "the data")
    with pytest.raises(DataError, match="all 2 labels are 'blue', and a classifier needs two classes"):
        check_distinct(torch.tensor([1, -1, 1]), -1, "the data", ["red", "blue"])
    for y, unlabelled in ((torch.tensor([2, 2, 2]), None), (torch.tensor([-1, 0, 0]), -1)):
        with pytest.raises(DataError, match=r"all \d labels are \d, and a classifier needs two classes"):
            check_distinct(y, unlabelled, "the data")


def test_numbers_to_predict() -> None:
    data = good()
    data.y = torch.tensor([1.5, float("nan"), -3.0, 2.0])[: data.num_nodes]
    facts = validate_graph(data, number_labels=["node"])
    assert facts["num_classes"] is None and labelled_nodes(data.y, float("nan")).tolist()[:2] == [True, False]
    with pytest.raises(DataError, match=r"all 2 labels are 2.5, and a model needs two numbers"):
        check_distinct(torch.tensor([2.5, float("nan"), 2.5]), float("nan"), "the data")
    for y, said in (
        (torch.full((4,), float("nan")), "none of 4 nodes has a label"),
        (torch.tensor([1, float("inf"), 2, 3]), "with infinity"),
        (torch.tensor([1, 2, 3, 4]), "numbers to predict are expected"),
    ):
        data.y = y[: data.num_nodes]
        with pytest.raises(DataError, match=said):
            validate_graph(data, number_labels=["node"])
