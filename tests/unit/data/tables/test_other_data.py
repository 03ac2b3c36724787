"""Data beside those of a training, in other orders and formats, with other values; several tables of one kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse
import torch

from gtrain.data.module import GraphDataModule, training_of
from gtrain.data.sources.tables import TablesData
from gtrain.errors import GtrainError

Write = Callable[[str, str], str]


def data(tmp_path: Path, **settings: Any) -> TablesData:
    return TablesData(store=str(tmp_path / "stores"), **settings)


def following(source: GraphDataModule[Any], new: TablesData, *, applied: bool = True) -> Any:
    """Return the new data as a model trained on the source reads them."""
    source.prepare_data()
    new.follow(training_of(source.open_store()), applied=applied)
    return new.read()


def test_classes_are_those_of_the_type_that_is_predicted(write: Write, tmp_path: Path) -> None:
    nodes = {
        "author": {"path": write("a.csv", "id,dept\n1,bio\n2,art\n3,cs\n4,bio\n"), "label": "dept"},
        "paper": {"path": write("p.csv", "id,field\n1,x\n2,y\n"), "label": "field"},
    }
    edges = {"writes": {"path": write("e.csv", "source,target\n1,1\n2,2\n"), "source_type": "author"}}
    edges["writes"]["target_type"] = "paper"
    source = data(tmp_path, nodes=nodes, edges=edges, target="author")
    source.read()
    assert source.extra_facts()["label_values"] == ["art", "bio", "cs"]


def test_tables_of_edges_share_the_numbers_of_relations(write: Write, tmp_path: Path) -> None:
    edges = {
        "one": {"path": write("1.csv", "source,target,kind\na,b,p\nb,a,q\n"), "relation": "kind"},
        "two": {"path": write("2.csv", "source,target,kind\na,b,q\nb,a,z\n"), "relation": "kind"},
    }
    source = data(tmp_path, edges=edges)
    graph = source.read()
    assert [graph[kind].edge_type.tolist() for kind in graph.edge_types] == [[0, 1], [1, 2]]
    assert source.names()["relation"] == ["p", "q", "z"] and source.extra_facts()["num_relations"] == 3


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("b,a,q\na,b,p\n", [1, 0]),
        ("b,a,q\n", [1]),
        ("", []),
        ("b,a,q\na,b,new\n", "new.csv, line 3: the relation 'new' is none of the checkpoint's 2 relations: p, q"),
    ],
)
def test_relations_keep_the_numbers_of_the_training(
    rows: str, expected: list[int] | str, write: Write, tmp_path: Path
) -> None:
    nodes, head = write("n.csv", "id,x\na,1\nb,2\n"), "source,target,kind\n"
    source = data(tmp_path, nodes=nodes, edges={"path": write("e.csv", f"{head}a,b,p\nb,a,q\n"), "relation": "kind"})
    new = data(tmp_path, nodes=nodes, edges={"path": write("new.csv", head + rows), "relation": "kind"})
    if isinstance(expected, str):
        with pytest.raises(GtrainError, match=expected):
            following(source, new)
        return
    assert following(source, new).edge_type.tolist() == expected and new.extra_facts()["num_relations"] == 2


def test_further_training_keeps_columns_and_classes_and_splits_as_usual(write: Write, tmp_path: Path) -> None:
    text = "id,city,label\n" + "".join(
        f"{i},{'Oslo' if i % 2 else 'Rome'},{'x' if i % 3 else 'y'}\n" for i in range(20)
    )
    source = data(tmp_path, nodes={"path": write("n.csv", text), "label": "label"})
    more = {"path": write("more.csv", text + "20,Aden,y\n21,Aden,x\n"), "label": "label"}
    new = data(tmp_path, nodes=more)
    following(source, new, applied=False)
    new.prepare_data()
    x = new.open_store().node("x", 0)
    assert x.tolist()[:3] == [[0, 1], [1, 0], [0, 1]] and x.tolist()[20:] == [[0, 0]] * 2
    assert new.facts["split"]["sizes"]["train"] > 0 and new.facts["label_values"] == ["x", "y"]
    for applied in (True, False):  # the checkpoint of this training, and the same data
        same = data(tmp_path, nodes=more)
        same.follow(training_of(new.open_store()), applied=applied)
        assert same.store_path == new.store_path and not same.applied
    wrong = data(tmp_path, nodes={"path": write("wrong.csv", text + "20,Oslo,z\n"), "label": "label"})
    with pytest.raises(GtrainError, match=r"wrong.csv, line 22: the label 'z' is none of the checkpoint's 2 classes"):
        following(source, wrong, applied=False)


def test_a_type_without_a_table_beside_others_is_said(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edges = {"path": write("e.csv", "source,target\n1,2\n"), "source_type": "nodde", "target_type": "node"}
    data(tmp_path, nodes=write("n.csv", "id,x\n1,1\n2,2\n"), edges=edges).read()
    assert "the type 'nodde' has no node table" in caplog.text and "did you mean node?" in caplog.text


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("trained_on", ["csv", "frame"])
def test_truth_values_are_the_same_in_text_and_in_frames(
    trained_on: str, labels: bool, write: Write, tmp_path: Path
) -> None:
    truth = [True, False, None, True, True]
    text = "id,ok,y\n" + "".join(f"{i},{'' if v is None else v},{i % 2 == 0}\n" for i, v in enumerate(truth))
    frame = pa.table({"id": range(5), "ok": truth, "y": [i % 2 == 0 for i in range(5)]})
    label = {"label": "y"} if labels else {"ignore": ["y"]}
    both = {"csv": {"path": write("n.csv", text), **label}, "frame": {"frame": frame, **label}}
    source = data(tmp_path, nodes=both.pop(trained_on))
    graph = following(source, data(tmp_path, nodes=both.popitem()[1]))
    expected = source.read()
    assert torch.equal(graph.x, expected.x) and expected.x[:, 0].tolist() == [1, 0, 0, 1, 1]
    assert not labels or torch.equal(graph.y, expected.y)


def test_whole_numbers_as_categories_may_be_written_with_a_fraction(write: Write, tmp_path: Path) -> None:
    columns = {"code": "category"}
    source = data(tmp_path, nodes={"path": write("n.csv", "id,code\n1,10\n2,7\n3,7\n"), "columns": columns})
    new = data(tmp_path, nodes={"path": write("new.csv", "id,code\n1,7.0\n2,\n3,10.0\n"), "columns": columns})
    assert following(source, new).x.tolist() == [[0, 1], [0, 0], [1, 0]]


def test_whole_numbers_as_dates_are_seconds(write: Write, tmp_path: Path) -> None:
    source = data(tmp_path, nodes=write("n.csv", "id,at\n1,1970-01-01\n2,1970-01-03\n"))
    frame = pa.table({"id": [1, 2], "at": [0, 2 * 86400]})
    assert following(source, data(tmp_path, nodes={"frame": frame})).x.tolist() == [[-1], [1]]


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("m.tsv", "1\tHello, my, big, world\t2\n2\ty\t3\n", 3),
        ("m.csv", '1;"a, b, c, d";2\n2;y;3\n', 3),
        ("m.txt", "1|x|2\n2|y|3\n", 3),
    ],
)
def test_separators(name: str, text: str, columns: int, write: Write, tmp_path: Path) -> None:
    nodes = {"path": write(name, text), "header": [str(i) for i in range(columns)]}
    assert data(tmp_path, nodes=nodes).read().num_nodes == 2


@pytest.mark.parametrize("separator", ["::", "pipe", ""])
def test_a_separator_is_one_character(separator: str, write: Write, tmp_path: Path) -> None:
    nodes = {"path": write("m.txt", "1::x\n"), "header": ["id", "name"], "separator": separator}
    with pytest.raises(GtrainError, match=rf"data.nodes.separator='{separator}' was set"):
        data(tmp_path, nodes=nodes).read()


def _fails(values: list[Any]) -> Any:
    raise ValueError("no such model")


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({"frame": pa.table({"id": [[1], [2]]})}, "the key 'id' holds list<"),
        ({"frame": pa.table({"id": [b"\xff", b"a"]})}, "the key 'id' of type binary cannot be read"),
        ({"frame": pa.table({"a": ["x", "x\x1fy"], "b": ["y\x1fz", "z"]}), "key": ["a", "b"]}, "joins keys of several"),
        (
            {"frame": pa.table({"id": [1, 2], "y": pa.array([1, 2**63], pa.uint64())}), "label": "y"},
            "the label is 9223372036854775808",
        ),
        ({"frame": pa.table({"id": [1], "a": [[[1]]]}), "columns": {"a": "list"}}, "lists of values are expected"),
        (
            {"frame": pa.table({"id": [1], "a": ["t"]}), "columns": {"a": {"kind": "text", "encoder": _fails}}},
            "the encoder of 'a' failed: ValueError: no such model",
        ),
        ({"frame": pa.table({"id": [1], "a": ["t"]}), "columns": {"a": {"max_values": -1}}}, "max_values=-1 was set"),
    ],
)
def test_tables_that_cannot_be_read_are_refused_in_a_sentence(nodes: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(GtrainError, match=said):
        data(tmp_path, nodes=nodes).read()


def test_objects_that_are_no_graphs(tmp_path: Path) -> None:
    networkx, pandas = pytest.importorskip("networkx"), pytest.importorskip("pandas")
    with pytest.raises(GtrainError, match="without nodes"):
        GraphDataModule.from_networkx(networkx.Graph())
    with pytest.raises(GtrainError, match="ndarray was given"):
        GraphDataModule.from_scipy(np.eye(3))
    assert GraphDataModule.from_scipy(scipy.sparse.eye_array(3)) is not None
    sparse = pandas.DataFrame({"id": [1, 2], "a": pandas.arrays.SparseArray([0.0, 1.0])})
    with pytest.raises(GtrainError, match="cannot be read"):
        GraphDataModule.from_frames(nodes=sparse)


def test_labels_in_lists_are_named_by_their_rows(write: Write, tmp_path: Path) -> None:
    column = pa.array([[1.0, 2.0], [], [3.0, 2.5]])
    frame = pa.table({"id": [1, 2, 3], "labels": column})
    nodes = {"things": {"frame": frame, "label": "labels"}}
    edges = {"links": {"path": write("e.csv", "source,target\n1,2\n")}}
    with pytest.raises(GtrainError, match=r"row 2 \(from 0\): the label is 2\.5"):
        data(tmp_path, nodes=nodes, edges=edges).read()


def test_a_column_of_empty_lists_is_left_out(write: Write, tmp_path: Path) -> None:
    frame = pa.table({"id": [1, 2], "size": [1.0, 2.0], "words": pa.array([[], []], pa.list_(pa.float32()))})
    edges = {"links": {"path": write("e.csv", "source,target\n1,2\n")}}
    graph = data(tmp_path, nodes={"things": {"frame": frame}}, edges=edges).read()
    assert graph.x.shape == (2, 1)
