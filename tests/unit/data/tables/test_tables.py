"""Graphs from tables: keys, features, labels, splits and edges, and what is said of wrong ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from gtrain.callbacks.predictions import NodeIds, write_parquet
from gtrain.data.sources.tables import TablesData
from gtrain.errors import DataError, GtrainError

Write = Callable[[str, str], str]

PEOPLE = "id,age,city,label,part\nann,20,Rome,x,train\nbob,,Oslo,y,val\ncy,40,,x,test\ndee,30,Rome,,\n"
KNOWS = "source,target,weight\nann,bob,1\nbob,cy,2.5\ncy,ann,0.5\n"


def data(tmp_path: Path, **settings: Any) -> TablesData:
    return TablesData(store=str(tmp_path / "stores"), **settings)


def people(write: Write, text: str = PEOPLE, **entry: Any) -> dict[str, Any]:
    return {"path": write("people.csv", text), "label": "label", "split": "part", **entry}


def test_a_graph_of_one_type(write: Write, tmp_path: Path) -> None:
    source = data(tmp_path, nodes=people(write), edges={"path": write("knows.csv", KNOWS), "weight": "weight"})
    graph = source.read()
    assert isinstance(graph, Data)
    assert graph.edge_index.tolist() == [[0, 1, 2], [1, 2, 0]] and graph.edge_weight.tolist() == [1, 2.5, 0.5]
    assert graph.y.tolist() == [0, 1, 0, -1] and source.extra_facts()["label_values"] == ["x", "y"]
    masks = [graph[f"{split}_mask"].tolist() for split in ("train", "val", "test")]
    assert masks == [[True, False, False, False], [False, True, False, False], [False, False, True, False]]
    # age: mean 30, deviation sqrt(200 / 3), and a column for the missing one; city: Oslo, Rome, missing
    deviation = (200 / 3) ** 0.5
    expected = [[-10 / deviation, 0, 0, 1, 0], [0, 1, 1, 0, 0], [10 / deviation, 0, 0, 0, 1], [0, 0, 0, 1, 0]]
    torch.testing.assert_close(graph.x, torch.tensor(expected))
    assert source.names()["node"].to_pylist() == ["ann", "bob", "cy", "dee"]


def test_the_store_has_names_schema_and_split(write: Write, tmp_path: Path) -> None:
    source = data(tmp_path, nodes=people(write), edges=write("knows.csv", KNOWS))
    source.prepare_data()
    store = source.open_store()
    assert store.names("node").decode([2, 0]) == ["cy", "ann"]
    assert store.facts["split"]["kind"] == "public" and store.facts["split"]["sizes"] == {
        "train": 1,
        "val": 1,
        "test": 1,
    }
    kinds = [(column["name"], column["kind"]) for column in store.facts["schema"]["nodes node"]]
    assert kinds == [("age", "number"), ("city", "category")]
    assert store.facts["keys"]["node"] == {"columns": ["id"], "types": ["string"]}


def test_several_types_with_keys_of_two_columns_and_labels_apart(write: Write, tmp_path: Path) -> None:
    nodes = {
        "author": {
            "path": write("authors.csv", "first,last,born\nAda,L,1815-12-10\nAlan,T,1912-06-23\n"),
            "key": ["first", "last"],
        },
        "paper": {
            "path": write("papers.tsv", "paper\tyear\n7\t1950\n9\t1843\n8\t1936\n"),
            "key": "paper",
            "time": "year",
            "labels": {"path": write("venues.csv", "paper,venue\n9,B\n7,A\n"), "key": "paper", "label": "venue"},
        },
        "topic": {"path": write("topics.csv", "id\nlogic\n")},
    }
    writes = {"path": write("w.csv", "f,l,p\nAlan,T,7\nAda,L,9\nAlan,T,8\n"), "source": ["f", "l"], "target": "p"}
    writes |= {"source_type": "author", "target_type": "paper", "undirected": True}
    graph = data(tmp_path, nodes=nodes, edges={"writes": writes}).read()
    assert isinstance(graph, HeteroData)
    assert graph["author", "writes", "paper"].edge_index.tolist() == [[1, 0, 1], [0, 1, 2]]
    assert graph["paper", "rev_writes", "author"].edge_index.tolist() == [[0, 1, 2], [1, 0, 1]]
    assert graph["paper"].time.tolist() == [1950, 1843, 1936] and graph["paper"].y.tolist() == [0, 1, -1]
    assert graph["topic"].num_nodes == 1 and "x" not in graph["paper"]
    torch.testing.assert_close(graph["author"].x, torch.tensor([[-1.0], [1.0]]))


def test_nodes_may_be_those_that_edges_name(write: Write, tmp_path: Path) -> None:
    text = "src,dst,kind,when\n5,3,a,2020-01-02\n3,9,b,2020-01-01\n"
    source = data(tmp_path, edges={"path": write("e.csv", text), "relation": "kind", "time": "when"}, task="link")
    graph = source.read()
    assert graph.num_nodes == 3 and graph.edge_index.tolist() == [[0, 1], [1, 2]]
    assert graph.edge_type.tolist() == [0, 1] and source.names()["relation"] == ["a", "b"]
    assert graph.edge_time.tolist() == [1577923200, 1577836800]
    assert source.names()["node"].to_pylist() == ["5", "3", "9"]
    assert source.extra_facts()["keys"]["node"]["types"] == ("int64",)


def test_targets_may_be_lists(tmp_path: Path) -> None:
    """The weight of a row is that of each of its edges; an empty list, or none, has no edge."""
    table = pa.table({"src": [5, 6, 7, 8], "dst": [[6, 7], [], None, [5]], "w": [1.0, 2.0, 3.0, 4.0]})
    source = data(tmp_path, edges={"frame": table, "weight": "w"}, task="link")
    graph = source.read()
    assert graph.edge_index.tolist() == [[0, 0, 1], [2, 3, 0]] and graph.edge_weight.tolist() == [1.0, 1.0, 4.0]
    assert source.names()["node"].to_pylist() == ["5", "8", "6", "7"]
    two = {"frame": table.append_column("of", [["a"] * 4]), "source": "src", "target": ["dst", "of"]}
    with pytest.raises(DataError, match="the key has 2 columns, dst and of, of which one has lists"):
        data(tmp_path, edges=two).read()


def test_lists_vectors_dates_and_several_labels_of_parquet(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": pa.array([10, 20, 30], pa.int64()),
            "tags": [["a", "b"], [], ["b"]],
            "vector": pa.array([[1.0, 2.0], [3.0, 4.0], None], pa.list_(pa.float32())),
            "at": pa.array([0, 10, 20], pa.timestamp("s")),
            "label": [["p", "q"], None, ["q"]],
        }
    )
    pq.write_table(table, tmp_path / "n.parquet")
    source = data(tmp_path, nodes={"path": str(tmp_path / "n.parquet"), "label": "label"})
    graph = source.read()
    assert graph.y.tolist() == [[1, 1], [-1, -1], [0, 1]] and source.extra_facts()["label_values"] == ["p", "q"]
    scaled = (1.5) ** 0.5
    expected = [[1, 1, 1, 2, -scaled], [0, 0, 3, 4, 0], [0, 1, 0, 0, scaled]]
    torch.testing.assert_close(graph.x, torch.tensor(expected))


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [(["7", "-3", "0"], "int64"), (["7", "007"], "string"), (["9" * 19, "1"], "string"), (["a", "1"], "string")],
)
def test_keys_of_text_files_are_written_as_integers_if_all_are(
    keys: list[str], dtype: str, write: Write, tmp_path: Path
) -> None:
    nodes = {"path": write("n.csv", "id,a\n" + "".join(f"{key},{number}\n" for number, key in enumerate(keys)))}
    edges = write("e.csv", "source,target\n" + "".join(f"{key},{keys[0]}\n" for key in keys))
    for tables in ({"nodes": nodes, "edges": edges}, {"edges": edges}):
        source = data(tmp_path, **tables)
        source.read()
        assert source.extra_facts()["keys"]["node"]["types"] == (dtype,)
        assert source.names()["node"].to_pylist() == keys
    parquet = {"frame": pa.table({"id": keys, "a": [*range(len(keys))]})}  # of strings there are strings
    source = data(tmp_path, nodes=parquet)
    source.read()
    assert source.extra_facts()["keys"]["node"]["types"] == ("string",)


def test_dates_with_and_without_time_zones_and_of_nanoseconds(write: Write, tmp_path: Path) -> None:
    same = ["2024-05-31T12:30:00Z", "2024-05-31 14:30:00+02:00", "2024-05-31 12:30:00.123456789", "2024-05-31 12:30"]
    rows = [f"{number},{date}" for number, date in enumerate([*same, "2024-06-01"])]
    source = data(tmp_path, nodes={"path": write("n.csv", "\n".join(["id,at", *rows]) + "\n"), "time": "at"})
    noon = 1717158600
    assert source.read().time.tolist() == [noon] * 4 + [1717200000]
    wrong = {"path": write("m.csv", "id,at\n1,2024-05-31T12:30:00Z\n2,2024-05-31x\n"), "time": "at"}
    with pytest.raises(DataError, match=r"m\.csv, line 3: .*'2024-05-31x' is not a date"):
        data(tmp_path, nodes=wrong).read()


def test_rare_values_share_a_column(write: Write, tmp_path: Path) -> None:
    nodes = {
        "path": write("n.csv", "id,c\n1,a\n2,a\n3,b\n4,b\n5,z\n6,y\n"),
        "columns": {"c": {"kind": "category", "max_values": 2}},
    }
    graph = data(tmp_path, nodes=nodes).read()
    assert graph.x.tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]


def test_an_encoder_of_texts(write: Write, tmp_path: Path) -> None:
    def lengths(texts: list[str | None]) -> np.ndarray:
        return np.array([[len(text or ""), 1.0] for text in texts])

    nodes = {
        "path": write("n.csv", "id,text\n1,hello\n2,\n"),
        "columns": {"text": {"kind": "text", "encoder": lengths}},
    }
    assert data(tmp_path, nodes=nodes).read().x.tolist() == [[5, 1], [0, 1]]


def test_wide_features_are_sparse(write: Write, tmp_path: Path) -> None:
    text = "id,c\n" + "".join(f"{i},v{i % 50}\n" for i in range(200))
    graph = data(tmp_path, nodes={"path": write("n.csv", text), "columns": {"c": "category"}}).read()
    assert graph.x.layout == torch.sparse_csr and graph.x.to_dense().sum(1).tolist() == [1] * 200


WRONG = {
    "id,age\nann,20\nann,30\n": "people.csv, line 3: the key 'ann' occurs twice, first in",
    "id,age\nann,20\n,30\n": "people.csv, line 3: the key 'id' has no value",
    "id,part\nann,train\nbob,tset\n": "people.csv, line 3: the column 'part' has 'tset', which is no split",
    "id,age\n": "people.csv has no rows",
    "id,age": "people.csv has no rows",
    "id,age\nann,20\nbob,30,40\n": "people.csv, line 3: expected 2 columns, got 3: 'bob,30,40'",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_node_is_named_with_its_line(text: str, write: Write, tmp_path: Path) -> None:
    entry = {"path": write("people.csv", text), **({"split": "part"} if "part" in text else {})}
    with pytest.raises(DataError) as refused:
        data(tmp_path, nodes=entry).read()
    assert WRONG[text] in str(refused.value)


def test_a_table_of_edges_without_rows_is_named(write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes, edges = write("people.csv", "id,age\nann,20\nbob,30\n"), write("knows.csv", "source,target\n")
    assert data(tmp_path, nodes={"path": nodes}, edges={"path": edges}).read().edge_index.shape == (2, 0)
    assert "knows.csv has no rows: there are no such edges" in caplog.text
    edges = write("bare.csv", "source,target")
    assert data(tmp_path, nodes={"path": nodes}, edges={"path": edges}).read().edge_index.shape == (2, 0)
    assert "bare.csv has no rows: there are no such edges" in caplog.text
    alone = {"path": write("alone.csv", "ann"), "header": ["id"]}
    assert data(tmp_path, nodes=alone).read().num_nodes == 1


def test_wrong_values_of_declared_kinds(write: Write, tmp_path: Path) -> None:
    nodes = {"path": write("n.csv", "id,age,born\n1,20,1999-01-01\n2,old,1999-13-01\n")}
    for column, kind, said in (
        ("age", "number", "'old' is not a number"),
        ("born", "date", "'1999-13-01' is not a date"),
    ):
        with pytest.raises(DataError, match=f"n.csv, line 3: the column '{column}': {said}"):
            data(tmp_path, nodes={**nodes, "features": [column], "columns": {column: kind}}).read()


@pytest.mark.parametrize(
    ("kind", "column", "said"),
    [
        ("category", "tags", "holds list<.*: string>, and single values are expected"),
        ("date", "tags", "holds list<.*: string>, and dates are expected"),
        ("vector", "tags", "holds list<.*: string>, and lists of numbers are expected"),
        ("vector", "name", "holds string, and lists of numbers are expected"),
        ("date", "size", "holds double, and dates are expected"),
    ],
)
def test_types_that_do_not_suit_a_declared_kind(kind: str, column: str, said: str, tmp_path: Path) -> None:
    frame = pa.table({"id": [1, 2], "tags": [["a"], ["b"]], "name": ["x", "y"], "size": [1.5, 2.5]})
    with pytest.raises(DataError, match=f"data.nodes: the column '{column}' {said}"):
        data(tmp_path, nodes={"frame": frame, "columns": {column: kind}}).read()


def test_a_single_wrong_text_among_numbers_or_dates_is_logged(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"{i},{i * 3},2020-01-{i + 1:02d},{'ab'[i % 2]}{i % 3}" for i in range(20)]
    rows[4], rows[7] = "4,?,2020-01-05,a1", "7,21,2020-13-05,b1"
    nodes = {"path": write("n.csv", "id,age,born,code\n" + "\n".join(rows) + "\n")}
    data(tmp_path, nodes=nodes).read()
    age, born = "line 6: the column 'age' is taken as category, because '?'", "'2020-13-05' is not a date"
    assert age in caplog.text and born in caplog.text and "the column 'code'" not in caplog.text
    assert data(tmp_path, nodes={**nodes, "missing": ["?", "2020-13-05"]}).read().x.shape == (20, 10)


def test_columns_of_one_name_are_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="n.csv has two columns 'a'"):
        data(tmp_path, nodes=write("n.csv", "id,a,a\n1,2,3\n")).read()


def test_labels_of_text_files(write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whole numbers may be written as pandas does if some are missing; several labels need their separator."""
    source = data(tmp_path, nodes={"path": write("n.csv", "id,y\n1,3.0\n2,\n3,0.0\n"), "label": "y"})
    assert source.read().y.tolist() == [1, -1, 0] and source.extra_facts()["label_values"] == [0, 3]
    assert "texts of numbers" not in caplog.text
    entry = {"path": write("m.csv", "id,y\n1,b| a\n2,\n3,b\n"), "label": "y", "label_separator": "|"}
    source = data(tmp_path, nodes=entry)
    assert source.outline is None or source.outline["multilabel"]
    assert source.read().y.tolist() == [[1, 1], [-1, -1], [0, 1]] and source.extra_facts()["label_values"] == ["a", "b"]
    with pytest.raises(GtrainError, match="label_separator='|' was set with label_kind=number"):
        data(tmp_path, nodes={**entry, "label_kind": "number"}).read()


def test_wrong_edges_and_labels(write: Write, tmp_path: Path) -> None:
    nodes = people(write)
    for text, said in {
        "source,target\nann,eve\n": "e.csv, line 2: the 'target' 'eve' is not in the node table data.nodes",
        "source,target\nann,\n": "e.csv, line 2: the key 'target' has no value",
        "source,target,weight\nann,bob,much\n": "e.csv, line 2: the weight is 'much', which is not a number",
    }.items():
        edges = {"path": write("e.csv", text), **({"weight": "weight"} if "weight" in text else {})}
        with pytest.raises(DataError, match=said):
            data(tmp_path, nodes=nodes, edges=edges).read()
    apart = {
        "path": write("p.csv", "id\n1\n2\n"),
        "labels": {"path": write("l.csv", "id,y\n1,a\n2,b\n1,b\n"), "label": "y"},
    }
    with pytest.raises(
        DataError, match="l.csv, line 4: the label 'b'; the same node has the label 'a' in .*l.csv, line 2"
    ):
        data(tmp_path, nodes=apart).read()
    write("l.csv", "id,y\n1,a\n3,b\n")
    with pytest.raises(DataError, match="the 'id' '3' is not in the node table data.nodes\n.*data.nodes.labels=null"):
        data(tmp_path, nodes=apart).read()


def test_files_of_a_table_have_the_same_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "a": [1.5]}), tmp_path / "part-0.parquet")
    pq.write_table(pa.table({"id": [2], "a": ["x"]}), tmp_path / "part-1.parquet")
    with pytest.raises(
        DataError, match="the column 'a' holds double in .*part-0.parquet and string in .*part-1.parquet"
    ):
        data(tmp_path, nodes=str(tmp_path / "part-*.parquet")).read()
    pq.write_table(pa.table({"id": [2]}), tmp_path / "part-1.parquet")
    with pytest.raises(DataError, match="part-0.parquet has the column 'a', and .*part-1.parquet has not"):
        data(tmp_path, nodes=str(tmp_path / "part-*.parquet")).read()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "neither data.nodes nor data.edges"),
        ({"nodes": {"path": "n.csv", "labl": "y"}}, "did you mean label"),
        ({"nodes": {"path": "n.csv", "duckdb": "SELECT 1"}}, "data.nodes has path and duckdb"),
        ({"nodes": {"path": "n.csv", "columns": {"a": "numbr"}}}, "the kind is numbr"),
        ({"nodes": {"path": "n.csv", "columns": {"a": "text"}}}, "there is no encoder"),
        ({"nodes": {"a": "a.csv", "b": "b.csv"}, "edges": {"r": "e.csv"}}, "data.edges.r has no source_type"),
        ({"nodes": {"path": "missing.csv"}}, "data.nodes.path=missing.csv: no such file"),
        ({"edges": {"path": "e.csv", "undirected": "no"}}, "data.edges.undirected='no' was set.\n.*true or false"),
        ({"edges": {"path": "e.csv", "optional": 1}}, "data.edges.optional=1 was set.\n.*true or false"),
        ({"nodes": {"path": "n.csv", "missing": {"x": "?"}}}, "data.nodes.missing=.* was set.\n.*a list of texts"),
    ],
)
def test_what_a_user_may_mistype(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(GtrainError, match=said):
        data(tmp_path, **settings).check_inputs()


def test_columns_are_described(write: Write, tmp_path: Path) -> None:
    source = data(tmp_path, nodes=people(write), edges={"path": write("knows.csv", KNOWS), "weight": "weight"})
    found = [(fact.table, fact.name, fact.role) for fact in source.columns()]
    assert found == [
        *[
            ("data.nodes", n, r)
            for n, r in zip(
                ["id", "age", "city", "label", "part"], ["key", "number", "category", "label", "split"], strict=True
            )
        ],
        *[
            ("data.edges", n, r)
            for n, r in zip(["source", "target", "weight"], ["source: node", "target: node", "weight"], strict=True)
        ],
    ]


@pytest.mark.parametrize("engine", ["duckdb", "polars"])
def test_a_query(engine: str, write: Write, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    path = write("people.csv", PEOPLE)
    table = f"'{path}'" if engine == "duckdb" else f"read_csv('{path}')"
    graph = data(tmp_path, nodes={engine: f"SELECT id, age FROM {table} WHERE age IS NOT NULL"}).read()
    assert graph.num_nodes == 3 and graph.x.shape == (3, 1)
    with pytest.raises(DataError, match="data.nodes: the query fails"):
        data(tmp_path, nodes={engine: "SELECT nothing FROM nowhere"}).read()


def test_new_data_follow_the_training(write: Write, tmp_path: Path) -> None:
    from gtrain.data.module import training_of

    trained = data(tmp_path, nodes=people(write), edges=write("knows.csv", KNOWS))
    trained.prepare_data()
    training = training_of(trained.open_store())
    same = data(tmp_path, nodes=people(write), edges=write("knows.csv", KNOWS))
    same.follow(training)
    assert same.trained is None
    new = {"path": write("new.csv", "id,age,city\nzoe,60,Paris\nyan,30,\n"), "label": "label", "split": "part"}
    other = data(tmp_path, nodes=new, edges=write("new_edges.csv", "source,target,weight\nzoe,yan,1\n"))
    other.follow(training)
    other.prepare_data()
    store = other.open_store()
    assert store.facts["num_classes"] == 2 and store.facts["label_values"] == ["x", "y"]
    deviation = (200 / 3) ** 0.5
    x = torch.cat([torch.as_tensor(np.array(store.node("x", p))) for p in range(store.num_parts)])
    torch.testing.assert_close(x, torch.tensor([[30 / deviation, 0, 0, 0, 0], [0, 0, 0, 0, 1]]))


def test_labelled_new_data_are_the_test_split(write: Write, tmp_path: Path) -> None:
    from gtrain.data.module import training_of

    trained = data(tmp_path, nodes=people(write), edges=write("knows.csv", KNOWS))
    trained.prepare_data()
    new = {"path": write("new.csv", "id,age,city,label\nzoe,60,Rome,y\nyan,30,Rome,\n"), "label": "label"}
    other = data(tmp_path, nodes=new)
    other.follow(training_of(trained.open_store()))
    other.prepare_data()
    assert other.facts["split"]["sizes"] == {"train": 0, "val": 0, "test": 1}
    write("new.csv", "id,age,city,label\nzoe,60,Rome,z\n")
    wrong = data(tmp_path, nodes=new)
    wrong.follow(training_of(trained.open_store()))
    with pytest.raises(DataError, match="new.csv, line 2: the label 'z' is none of the checkpoint's 2 classes: x, y"):
        wrong.prepare_data()


def test_new_values_unlike_those_of_training_are_warned_of(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from gtrain.data.module import training_of

    rows = [
        f"n{i},{20 + i},2024-01-{i + 1:02d},{'Rome' if i % 2 else 'Oslo'},{'x' if i % 3 else 'y'}" for i in range(20)
    ]
    head = "id,age,since,city,label\n"
    trained = data(tmp_path, nodes={"path": write("n.csv", head + "\n".join(rows)), "label": "label"})
    trained.prepare_data()
    caplog.clear()
    later = [f"m{i},{(20 + i) * 12},2031-01-{i + 1:02d},{'ROME' if i % 4 else 'Oslo'}," for i in range(20)]
    for new, warned in ((rows[:3], []), (later, ["age", "since", "city"])):
        other = data(tmp_path, nodes={"path": write("new.csv", head + "\n".join(new))})
        other.follow(training_of(trained.open_store()))
        other.prepare_data()
        messages = [record.getMessage() for record in caplog.records]
        assert [re.findall("column '(.*?)'", message)[0] for message in messages] == warned
    assert "of 20 values of the column 'city', 15 did not occur in the training data" in caplog.text
    assert "of 20 values of the column 'age', 20 are far outside of the training data (mean 29.5" in caplog.text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('id,city,age\nann,"New\nYork",20\nbob,Rome,old\n', 4),
        ("id,age\n\nann,20\n\n\nbob,old\n", 6),
        ('city,id,age\r\n"a\r\n\r\nnn",ann,20\r\n\r\nRome,bob,old\r\n', 6),
        ('id,age\n"a\nnn",20\n\nbob,1,2\n', 5),
        ('\nid,age\n"a""\nnn",20\nbob,1,2\n', 5),
    ],
)
def test_lines_are_counted_as_an_editor_counts_them(write: Write, tmp_path: Path, text: str, line: int) -> None:
    nodes = {"path": write("n.csv", text), "columns": {"age": {"kind": "number"}}}
    with pytest.raises(DataError, match=f"n.csv, line {line}: "):
        data(tmp_path, nodes=nodes).prepare_data()


def test_new_labels_of_another_type_than_the_classes(write: Write, tmp_path: Path) -> None:
    from gtrain.data.module import training_of

    train = {"path": write("n.csv", "id,y\n1,7\n2,x\n3,8\n4,x\n"), "label": "y"}
    trained = data(tmp_path, nodes=train)
    trained.prepare_data()

    def read(column: Any) -> Any:
        other = data(tmp_path, nodes={"frame": pa.table({"id": [5, 6], "y": column}), "label": "y"})
        other.follow(training_of(trained.open_store()))
        return other.read().y.tolist()

    assert read(["8", "7"]) == read([8, 7]) == [1, 0]  # these texts alone are whole numbers
    assert read(pa.nulls(2)) == [-1, -1]
    with pytest.raises(DataError, match="the label '9' is none of the checkpoint's 3 classes: 7, 8, x"):
        read([9, 7])


def test_new_columns_without_any_value(tmp_path: Path) -> None:
    from gtrain.data.module import training_of

    frame = {
        "id": [1, 2],
        "tags": [["a"], ["b"]],
        "name": ["x", "y"],
        "size": [1.0, 3.0],
        "v": [[1.0, 2.0], [3.0, 4.0]],
    }
    train = pa.table({**frame, "note": [1, 2], "y": ["a", "b"]})
    trained = data(tmp_path, nodes={"frame": train, "label": "y", "ignore": ["note"]}, split="random")
    trained.prepare_data()
    new = pa.table({"id": [3], **{name: pa.nulls(1) for name in ("tags", "name", "size", "v")}})
    other = data(tmp_path, nodes={"frame": new, "label": "y", "ignore": ["note"]})  # which the new table lacks
    other.follow(training_of(trained.open_store()))
    other.check_files()
    assert other.read().x.tolist() == [[0.0] * 7]


def test_columns_of_labels_in_a_table_of_their_own_are_described(write: Write, tmp_path: Path) -> None:
    labels = {"path": write("l.csv", "id,kind\n1,a\n2,b\n"), "label": "kind"}
    nodes = {"path": write("n.csv", "id,at\n1,2020-01-01\n2,2020-01-02\n"), "time": "at", "labels": labels}
    found = [(fact.table, fact.name, fact.role) for fact in data(tmp_path, nodes=nodes).columns()]
    own, apart = "data.nodes", "data.nodes.labels"
    assert found == [(own, "id", "key"), (own, "at", "time"), (apart, "id", "key"), (apart, "kind", "label")]


def test_line_breaks_in_quotes_of_a_large_file(write: Write, tmp_path: Path) -> None:
    """Blocks of the reader end within quotes."""
    note = "".join(f"{number},ab,note\n" for number in range(80))
    rows = "".join(f'k{row},{"xy"[row % 2]},"{note}"\n' for row in range(6000))
    nodes = {"path": write("notes.csv", "id,team,note\n" + rows), "label": "team", "columns": {"note": "ignore"}}
    source = data(tmp_path, nodes=nodes)
    assert source.read().num_nodes == 6000 and source.extra_facts()["label_values"] == ["x", "y"]


def test_a_node_has_one_split(write: Write, tmp_path: Path) -> None:
    labels = write("labels.csv", "id,part\nann,val\nbob,train\ncy,\nann,val\nann,test\n")
    nodes = {"path": write("nodes.csv", "id\nann\nbob\ncy\n"), "labels": {"path": labels, "split": "part"}}
    with pytest.raises(DataError, match=r"labels.csv, line 6: the node is in the split test, and in val by .*, line 5"):
        data(tmp_path, nodes=nodes).read()


def test_texts_that_begin_with_zeros_are_classes_of_their_own(write: Write, tmp_path: Path) -> None:
    nodes = {"path": write("codes.csv", "id,code\na,01\nb,1\nc,2\n"), "label": "code"}
    source = data(tmp_path, nodes=nodes)
    assert source.read().y.tolist() == [0, 1, 2] and source.extra_facts()["label_values"] == ["01", "1", "2"]


def test_nan_is_a_missing_category(tmp_path: Path) -> None:
    table = pa.table({"id": range(6), "code": pa.array([1.0, 2.0, float("nan"), None, 1.0, 2.0])})
    pq.write_table(table, tmp_path / "codes.parquet")
    nodes = {"path": str(tmp_path / "codes.parquet"), "columns": {"code": "category"}}
    rows = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert data(tmp_path, nodes=nodes).read().x.tolist() == rows


def test_large_keys_lists_of_lists_and_absolute_patterns(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    keys = pa.array([2**63 + 5, 2**64 - 1, 7], pa.uint64())
    table = pa.table({"id": keys, "deep": [[[1]], [[2]], []], "size": [1.0, 2.0, 3.0]})
    pq.write_table(table, tmp_path / "deep.parquet")
    source = data(tmp_path, nodes={"duckdb": f"SELECT * FROM '{tmp_path}/dee*.parquet' WHERE 'x' <> '*'"})
    source.prepare_data()
    store = source.open_store()
    assert store.facts["keys"]["node"]["types"] == ["uint64"]
    assert NodeIds.of(store, "node").arrays(np.arange(3))[0].equals(keys)
    assert [column["kind"] for column in store.facts["schema"]["nodes node"]] == ["number"]


@pytest.mark.parametrize("options", [{"missing": ["?"]}, {"header": ["id", "x"]}, {"separator": "comma"}])
def test_how_text_is_read_makes_another_store(options: dict[str, Any], write: Write, tmp_path: Path) -> None:
    nodes, edges = write("n.csv", "id,x\na,?\nb,1\n"), write("e.csv", "source,target\na,b\n")
    plain = data(tmp_path, nodes=nodes, edges=edges)
    labels = {"path": write("l.csv", "id,y\na,1\n"), "label": "y"}
    apart = data(tmp_path, nodes={"path": nodes, "labels": labels}, edges=edges)
    changed = [
        data(tmp_path, nodes={"path": nodes, **options}, edges=edges),
        data(tmp_path, nodes=nodes, edges={"path": edges, **options}),
        data(tmp_path, nodes={"path": nodes, "labels": {**labels, **options}}, edges=edges),
    ]
    assert len({source.store_path for source in (plain, apart, *changed)}) == 5
    assert "reading" not in plain.identity()["nodes"]["node"], "stores of earlier releases are found"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("n.csv", 'id,x\nann,1\n"bob,2\ncy,3\ndee",4\n', "n.csv, line 3: the column 'id' has a value with a line end"),
        ("n.csv", 'id,x\r"ann\rbob",2\r', "line 2: the column 'id' has a value with a line end in it: 'ann.rbob'"),
        (
            "n.tsv",
            'id\tx\ty\nann\t"1\t2\nbob"\t3\ncy\t5\t6\n',
            "n.tsv, line 2: the column 'x' has a value with a tab in it",
        ),
    ],
)
def test_an_open_quote_does_not_hide_rows(name: str, text: str, said: str, write: Write, tmp_path: Path) -> None:
    nodes = {"path": write(name, text), "features": []}
    with pytest.raises(DataError, match=f"{said}(.|\n)*is a double quote not closed"):
        data(tmp_path, nodes=nodes).read()


def test_an_open_quote_in_the_key_of_an_edge(write: Write, tmp_path: Path) -> None:
    edges = write("e.csv", 'source,target\na,b\n"b,c\nc",d\n')
    with pytest.raises(DataError, match=r"e\.csv, line 3: the column 'source' has a value with a line end"):
        data(tmp_path, edges=edges).read()


def test_values_with_line_ends_are_read(write: Write, tmp_path: Path) -> None:
    text = 'id\tnote\tx\na\t"two\nlines ""quoted"""\t1\nb\tone\t3\n'
    graph = data(tmp_path, nodes={"path": write("n.tsv", text), "columns": {"note": "category"}}).read()
    assert graph.x.tolist() == [[0, 1, -1], [1, 0, 1]]


def test_whole_times_are_exact(write: Write, tmp_path: Path) -> None:
    times = [2**53 + 1, 2**60 + 7, -(2**53) - 1]
    text = "source,target,time\n" + "".join(f"a,b,{time}\n" for time in times)
    frame = pa.table({"source": [1, 1, 1], "target": [2, 2, 2], "time": times})
    for table in ({"path": write("e.csv", text)}, {"frame": frame}):
        assert data(tmp_path, edges={**table, "time": "time"}).read().edge_time.tolist() == times
    large = pa.table({"source": [1], "target": [2], "time": [-(2**63)]})
    with pytest.raises(DataError, match="is too large for a time"):
        data(tmp_path, edges={"frame": large, "time": "time"}).read()


def test_equal_numbers_have_the_deviation_1(write: Write, tmp_path: Path) -> None:
    text = "id,x\n" + "".join(f"{row},{'' if row % 2 else 0.1}\n" for row in range(6))
    source = data(tmp_path, nodes=write("n.csv", text))
    source.read()
    (column,) = source.extra_facts()["schema"]["nodes node"]
    assert column["mean"] == pytest.approx(0.1) and "deviation" not in column


def test_edges_of_a_column_of_splits_are_kept_under_other_splits(write: Write, tmp_path: Path) -> None:
    text = "source,target,part\na,b,train\nb,c,val\nc,d,test\nd,e,\n"
    edges = {"path": write("e.csv", text), "split": "part"}
    public = data(tmp_path, edges=edges, task="link").read()
    assert public.edge_index.tolist() == [[0], [1]] and public.test_edge_index.tolist() == [[2], [3]]
    options = {"train_fraction": 0.5, "val_fraction": 0.25}
    source = data(tmp_path, edges=edges, task="link", split="random", **options)
    source.prepare_data()
    assert source.facts["split"]["sizes"] == {"train": 2, "val": 1, "test": 1}
    applied = data(tmp_path, edges=edges, task="link")
    applied.trained, applied.applied = {}, True
    applied.prepare_data()
    assert applied.facts["split"]["sizes"] == {"train": 4, "val": 0, "test": 0}


@pytest.mark.parametrize(
    ("codes", "classes"),
    [
        (["0x10", "16", "2"], ["0x10", "16", "2"]),
        (["100", "1E2", "1e2"], ["100", "1E2", "1e2"]),
        (["1.000000e+00", "2", "3.000000e+00"], [1, 2, 3]),
    ],
)
def test_hexadecimal_texts_and_those_with_an_exponent_are_classes(
    codes: list[str], classes: list[Any], write: Write, tmp_path: Path
) -> None:
    text = "id,code\n" + "".join(f"{row},{code}\n" for row, code in enumerate(codes))
    source = data(tmp_path, nodes={"path": write("codes.csv", text), "label": "code"})
    assert source.read().y.tolist() == [0, 1, 2] and source.extra_facts()["label_values"] == classes


def test_the_type_relation_is_reserved(write: Write, tmp_path: Path) -> None:
    nodes, edges = write("n.csv", "id\na\n"), write("e.csv", "source,target\na,a\n")
    ends = {"path": edges, "source_type": "item", "target_type": "relation"}
    for settings in ({"nodes": {"relation": nodes}}, {"nodes": {"item": nodes}, "edges": {"to": ends}}):
        with pytest.raises(GtrainError, match="the entity type name 'relation' is reserved"):
            data(tmp_path, **settings)


def test_views_of_strings(tmp_path: Path) -> None:
    def view(*texts: str) -> Any:
        return pa.array(texts).cast(pa.string_view())

    tags = pa.array([["p"], ["p", "q"], []], pa.list_(pa.string_view()))
    nodes = {"frame": pa.table({"id": view("a", "b", "c"), "y": view("r", "s", "r"), "tags": tags}), "label": "y"}
    edges = {"frame": pa.table({"source": view("a", "b"), "target": view("b", "c")})}
    graph = data(tmp_path, nodes=nodes, edges=edges).read()
    assert graph.y.tolist() == [0, 1, 0] and graph.edge_index.tolist() == [[0, 1], [1, 2]]
    assert graph.x.tolist() == [[1, 0], [1, 1], [0, 0]]


@pytest.mark.parametrize("value", [1e20, float("inf")])
def test_floats_beyond_64_bits(value: float, tmp_path: Path) -> None:
    numbers = pa.array([1.0, value, 3.0])
    with pytest.raises(DataError, match=rf"row 1 \(from 0\): the key 'id' is {re.escape(str(value))}"):
        data(tmp_path, nodes={"frame": pa.table({"id": numbers})}).read()
    table = pa.table({"id": [1, 2, 3], "y": numbers})
    with pytest.raises(DataError, match=rf"row 1 \(from 0\): the label is {re.escape(str(value))}"):
        data(tmp_path, nodes={"frame": table, "label": "y"}).read()
    category = data(tmp_path, nodes={"frame": table, "columns": {"y": "category"}})
    assert category.read().x.sum(dim=1).tolist() == [1, 1, 1]
    assert len(category.extra_facts()["schema"]["nodes node"][0]["values"]) == 3


@pytest.mark.parametrize(("missing", "value"), [("none", "none"), (-1, "-1"), ([-1, "?"], "-1")])
def test_a_missing_value_is_a_text_or_several(missing: Any, value: str, write: Write, tmp_path: Path) -> None:
    nodes = {"path": write("n.csv", f"id,x\na,3\nb,{value}\nc,5\n"), "missing": missing}
    scaled = data(tmp_path, nodes=nodes).read().x
    assert scaled.tolist() == [[-1, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("labels", "said"), [([["red"], [], ["red"], None], "the only label is 'red'"), ([[], None, []], "no row has")]
)
def test_lists_of_labels_have_two_of_them(labels: list[Any], said: str, tmp_path: Path) -> None:
    frame = pa.table({"id": range(len(labels)), "y": pa.array(labels, pa.list_(pa.string()))})
    nodes = {"frame": frame, "label": "y"}
    with pytest.raises(DataError, match=f"data.nodes: the column 'y' has lists of labels, and {said}"):
        data(tmp_path, nodes=nodes).read()
    edges = {"frame": pa.table({"source": [0], "target": [1]})}
    assert data(tmp_path, nodes=nodes, edges=edges, task="link").read().y.size(1) < 2


def test_classes_without_a_label_are_written_as_null(write: Write, tmp_path: Path) -> None:
    nodes = {"path": write("n.csv", "id,y\na,red\nb,blue\n"), "label": "y"}
    source = data(tmp_path, nodes=nodes, edges=write("e.csv", "source,target\na,b\n"), num_classes=3, num_parts=1)
    source.prepare_data()
    store, labels, scores = source.open_store(), source.facts["label_values"], np.eye(3, dtype=np.float32)[[2, 0]]
    write_parquet(tmp_path / "out.parquet", scores, NodeIds.of(store, "node"), "node", predicts="class", labels=labels)
    written = pq.read_table(tmp_path / "out.parquet")
    assert written["prediction"].to_pylist() == [2, 0] and written["label"].to_pylist() == [None, "blue"]


@pytest.mark.parametrize(
    ("source", "target", "names"),
    [
        (pa.array([5, 6]), pa.array(["x", "6"]), pa.array(["5", "6", "x"])),
        (pa.array(["x", "6"]), pa.array([5, 6]), pa.array(["x", "6", "5"])),
        (pa.array([5, -6]), pa.array([7, 8], pa.uint64()), pa.array([5, -6, 7, 8])),
        (pa.array([5, -6]), pa.array([7, 2**64 - 1], pa.uint64()), pa.array(["5", "-6", "7", str(2**64 - 1)])),
        (pa.array([5, 6], pa.int32()), pa.array([7, 8]), pa.array([5, 6, 7, 8])),
    ],
)
def test_edges_may_name_nodes_by_columns_of_different_types(
    source: Any, target: Any, names: Any, tmp_path: Path
) -> None:
    frame = pa.table({"source": source, "target": target})
    module = data(tmp_path, edges={"frame": frame}, task="link", split="random", num_parts=1)
    module.prepare_data()
    (written,) = NodeIds.of(module.open_store(), "node").arrays(np.arange(len(names)))
    assert written.equals(names)


@pytest.mark.parametrize("is_text", [False, True])
def test_missing_items_of_a_list_are_none(is_text: bool, write: Write, tmp_path: Path) -> None:
    nodes: dict[str, Any] = {"columns": {"tags": {"kind": "list", **({"separator": "|"} if is_text else {})}}}
    if is_text:
        nodes["path"] = write("n.csv", "id,tags\n1,a|b|\n2,NA\n3,NA| b\n4,?\n")
    else:
        nodes["frame"] = pa.table({"id": range(4), "tags": [["a", "b", ""], None, ["NA", "b"], ["?", None]]})
    source = data(tmp_path, nodes={**nodes, "missing": ["", "NA", "?"]})
    assert source.read().x.tolist() == [[1, 1], [0, 0], [0, 1], [0, 0]]
    assert source.extra_facts()["schema"]["nodes node"][0]["values"] == ("a", "b")


@pytest.mark.parametrize(
    ("role", "values", "said"),
    [
        ("time", pa.array([1, 2], pa.time32("s")), r"the column 'c' holds time32\[s\], and times are expected"),
        ("time", pa.array([1, 2], pa.duration("s")), r"the column 'c' holds duration\[s\], and times are expected"),
        ("time", pa.array([[1], [2]]), "the column 'c' holds list<.*>, and times are expected"),
        ("relation", pa.array([["a"], ["b"]]), "the column of relations 'c' holds list<.*>: "),
        ("relation", pa.array([b"a", b"\xff"]), "the column of relations 'c' holds binary: "),
        ("split", pa.array([["train"], ["val"]]), "the column 'c' holds list<.*>, and splits are expected"),
    ],
)
def test_types_that_do_not_suit_a_column_of_edges(role: str, values: Any, said: str, tmp_path: Path) -> None:
    frame = pa.table({"source": ["a", "b"], "target": ["b", "c"], "c": values})
    with pytest.raises(DataError, match=f"data.edges: .*{said}"):
        data(tmp_path, edges={"frame": frame, role: "c"}, task="link").read()


@pytest.mark.parametrize("kind", ["category", "list"])
def test_bytes_that_are_no_text_are_refused(kind: str, tmp_path: Path) -> None:
    values = [b"a", b"\xff"]
    frame = pa.table({"id": [1, 2], "c": values if kind == "category" else [values, values]})
    with pytest.raises(
        DataError, match="data.nodes: the column 'c' of type binary cannot be read as text: Invalid UTF8"
    ):
        data(tmp_path, nodes={"frame": frame, "columns": {"c": kind}}).read()


def test_weights_above_53_bits_are_rounded(tmp_path: Path) -> None:
    frame = pa.table({"source": ["a", "b"], "target": ["b", "a"], "w": [2**53 + 1, 3]})
    graph = data(tmp_path, edges={"frame": frame, "weight": "w"}, task="link").read()
    assert graph.edge_weight.tolist() == [2.0**53, 3.0]


@pytest.mark.parametrize("is_file", [False, True])
def test_lists_of_categories(is_file: bool, tmp_path: Path) -> None:
    lists = pa.array([["p"], ["p", "q"], None, ["q", None]], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    frame = pa.table({"id": range(4), "y": lists, "tags": lists})
    pq.write_table(frame, tmp_path / "n.parquet")
    place = {"path": str(tmp_path / "n.parquet")} if is_file else {"frame": frame}
    graph = data(tmp_path, nodes={**place, "label": "y"}).read()
    assert graph.y.tolist() == [[1, 0], [1, 1], [-1, -1], [0, 1]]
    assert graph.x.tolist() == [[1, 0], [1, 1], [0, 0], [0, 1]]
