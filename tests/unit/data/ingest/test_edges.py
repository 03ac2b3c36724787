"""gtrain.data.sources.edges: names, columns, Parquet, several files, lists that stay on disk, and their errors."""

from __future__ import annotations

import gzip
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from gtrain.data.ingest import blocks, columns, edge_list, parquet
from gtrain.data.sources import edges as edges_module
from gtrain.data.sources.edges import EdgesData
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store.tables import EdgeArrays

NAMED = [("ann", "bob"), ("bob", "Zoë"), ("ann", "日本"), ("Zoë", "ann"), ("bob", "ann")]
NAMES = ["ann", "bob", "Zoë", "日本"]
IDS = [[0, 1, 0, 2, 1], [1, 2, 3, 0, 0]]


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every list one that is too large for memory, read in many blocks."""
    monkeypatch.setattr(edges_module, "IN_MEMORY_EDGES", 1)
    monkeypatch.setattr(columns, "IN_MEMORY", 0)
    monkeypatch.setattr(columns, "CHUNK", 3)
    monkeypatch.setattr(blocks, "BLOCK", 40)
    monkeypatch.setattr(parquet, "BATCH", 2)


def write(folder: Path, name: str, text: str) -> str:
    data = text.encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(folder / name)


def write_parquet(folder: Path, name: str, **arrays: Any) -> str:
    pyarrow.parquet.write_table(pa.table(arrays), folder / name, row_group_size=4)
    return str(folder / name)


def names_of(module: EdgesData, kind: str = "node") -> list[str]:
    return module.names()[kind].to_pylist()


# -------------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize("glue", ["\t", ",", ";", " ", " \t "])
@pytest.mark.parametrize("first", ["", "# made by hand\n", "source{}target\n", "Head{}Tail\n"])
@pytest.mark.parametrize("file", ["e", "e.gz"])
def test_names_are_numbered_in_order_of_first_appearance(glue: str, first: str, file: str, tmp_path: Path) -> None:
    path = write(tmp_path, file, first.format(glue) + "".join(f"{a}{glue}{b}\n" for a, b in NAMED))
    module = EdgesData(path=path)
    assert module.read().edge_index.tolist() == IDS
    assert names_of(module) == NAMES


def test_names_that_hold_blanks_commas_and_marks(tmp_path: Path) -> None:
    tabs = EdgesData(path=write(tmp_path, "t", "New York\tSmith, John\n#1\t New York \n"), comments="")
    assert tabs.read().edge_index.tolist() == [[0, 2], [1, 0]] and names_of(tabs) == ["New York", "Smith, John", "#1"]
    commas = EdgesData(path=write(tmp_path, "c", 'from,to,weight\n"Smith, John",b,2\nb,"c d",3\n'))
    assert commas.read().edge_weight.tolist() == [2, 3] and names_of(commas) == ["Smith, John", "b", "c d"]
    bars = EdgesData(path=write(tmp_path, "b", "a|b c\nb c|a\n"), separator="|")
    assert bars.read().edge_index.tolist() == [[0, 1], [1, 0]]


def test_what_is_a_header(tmp_path: Path) -> None:
    ids = write(tmp_path, "i", "name other\n5 6\n6 5\n")
    assert EdgesData(path=ids).read().num_edges == 2  # numbers below words
    assert EdgesData(path=ids, ids="string", header=False).read().num_edges == 3
    words = write(tmp_path, "w", "alice bob\ncarol alice\n")
    assert EdgesData(path=words).read().num_edges == 2  # words below words
    assert EdgesData(path=words, header=True).read().num_edges == 1
    weights = write(tmp_path, "n", "alice,bob,strength\ncarol,alice,2\n")
    assert EdgesData(path=weights).read().edge_weight.tolist() == [2]  # a number below a word


def test_sparse_integers_as_names(tmp_path: Path) -> None:
    text = "18446744073709551615 7\n7 007\n"
    module = EdgesData(path=write(tmp_path, "e", text), ids="string")
    assert module.read().edge_index.tolist() == [[0, 1], [1, 2]]
    assert names_of(module) == ["18446744073709551615", "7", "007"]


COLUMNS = "when\tfrom\tlikes\tto\thow\n5\ta\tx\tb\t0.5\n4\tb\ty\ta\t2\n4\ta\ty\tc\t1e-3\n"


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ({"columns": ["from", "to"], "weight": "how", "relation": "likes", "time": "when"}, COLUMNS),
        ({"columns": [1, 3], "weight": 4, "relation": 2, "time": 0}, COLUMNS),
        ({"columns": [1, 3], "weight": 4, "relation": 2, "time": 0}, COLUMNS.split("\n", 1)[1]),
    ],
)
def test_columns_by_name_and_by_position(places: dict[str, Any], text: str, tmp_path: Path) -> None:
    module = EdgesData(path=write(tmp_path, "e", text), **places)
    data = module.read()
    assert data.edge_index.tolist() == [[0, 1, 0], [1, 0, 2]]
    assert data.edge_weight.tolist() == pytest.approx([0.5, 2, 1e-3]) and data.edge_weight.dtype == torch.float32
    assert data.edge_type.tolist() == [0, 1, 1] and names_of(module, "relation") == ["x", "y"]
    assert data.edge_time.tolist() == [5, 4, 4] and data.edge_time.dtype == torch.int64
    assert names_of(module) == ["a", "b", "c"]


def test_integer_relations_have_no_names(tmp_path: Path) -> None:
    module = EdgesData(path=write(tmp_path, "e", "0 3 1\n1 0 0\n"), columns=[0, 2], relation=1)
    assert module.read().edge_type.tolist() == [3, 0] and module.names() == {}


def test_parquet_holds_what_text_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "BATCH", 2)
    source, target = ([pair[end] for pair in NAMED] for end in (0, 1))
    more = {"how": pa.array([1, 2, 3, 4, 5], pa.float32()), "when": pa.array([9, 8, 7, 6, 5], pa.int32())}
    kinds = [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
    for kind in kinds:
        path = write_parquet(
            tmp_path, "e.parquet", dst=pa.array(target).cast(kind), src=pa.array(source).cast(kind), **more
        )
        module = EdgesData(path=path, columns=["src", "dst"], weight="how", time="when")
        data = module.read()
        assert data.edge_index.tolist() == IDS and names_of(module) == NAMES
        assert data.edge_weight.tolist() == [1, 2, 3, 4, 5] and data.edge_time.tolist() == [9, 8, 7, 6, 5]
    ids = write_parquet(tmp_path, "i", a=pa.array([0, 1, 5], pa.uint8()), b=pa.array([1, 5, 0]), w=[0.5, 1, 2])
    data = EdgesData(path=ids).read()
    assert data.edge_index.tolist() == [[0, 1, 5], [1, 5, 0]] and data.edge_weight.tolist() == [0.5, 1, 2]
    module = EdgesData(path=ids, ids="string")
    assert module.read().edge_index.tolist() == [[0, 1, 2], [1, 2, 0]] and names_of(module) == ["0", "1", "5"]


def test_several_files(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for name, rows in (("a.tsv", NAMED[:2]), ("b.tsv.gz", NAMED[2:4]), ("c.tsv", NAMED[4:])):
        write(tmp_path / "parts", name, "source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in rows))
    write(tmp_path / "parts", "_SUCCESS", "")
    write(tmp_path / "parts", "b2.tsv", "# no edges today\n")
    for path in ("parts", "parts/*.tsv*", ["parts/a.tsv", "parts/b.tsv.gz", "parts/c.tsv"]):
        module = EdgesData(path=path, root=str(tmp_path))
        assert module.read().edge_index.tolist() == IDS and names_of(module) == NAMES
    write(tmp_path / "parts", "d.tsv", "source\ttarget\nann\n")
    with pytest.raises(DataError, match=r"d\.tsv, line 2: 1 columns, and the lines before have 2"):
        EdgesData(path="parts", root=str(tmp_path)).read()


# ---------------------------------------------------------------------------------------------------- labels, x


def test_features_and_labels_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "e", "a b\nb c\n")
    write(tmp_path, "y", "name\tlabel\nc\t2\na\t0\n")
    write(tmp_path, "x", "b,1,2\nc,3,4\na,5,6.5\n")
    module = EdgesData(path=path, features="x", labels="y", root=str(tmp_path), unlabelled=-1)
    data = module.read()
    assert data.x.tolist() == [[5, 6.5], [1, 2], [3, 4]] and data.y.tolist() == [0, -1, 2]
    np.save(tmp_path / "x.npy", np.eye(3))
    assert EdgesData(path=path, features="x.npy", root=str(tmp_path)).read().x.tolist() == np.eye(3).tolist()


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("labels", "a\t0\nb\t1\n", "y has labels for 2 nodes, and the graph has 3(.|\n)*unlabelled"),
        ("labels", "a\t0\nq\t1\n", "y, line 2: values for 'q', and no edge has a node of that name"),
        ("labels", "a\t0\nb\t1\n\na\t1\n", "y, line 4: 'a' already has a line: .*y, line 1"),
        ("labels", "a\t0\nb\t1.5\nc\t2\n", "has the label 1.5; a class is a whole number"),
        ("labels", "a\t0\t1\nb\t1\t1\nc\t2\t1\n", "2 numbers after a name"),
        ("labels", "a\t0\nb\tx\n", "line 2: 'x' is not a number"),
        ("labels", "a\t0\nb\tnan\n", "line 2: the value is nan"),
        ("labels", "a\nb\n", "line 1: 1 column, and 2 or more were expected"),
        ("labels", "# x\n", "y has no lines other than comments"),
        ("features", "a\t0\t1\nb\t1\t1\n", "features for 2 nodes, and the graph has 3; 'c' has none"),
    ],
)
def test_wrong_tables_of_names(option: str, text: str, message: str, tmp_path: Path) -> None:
    files: dict[str, Any] = {"path": write(tmp_path, "e", "a b\nb c\n"), option: write(tmp_path, "y", text)}
    with pytest.raises(DataError, match=message):
        EdgesData(**files).read()


# ------------------------------------------------------------------------------------------------------ on disk


def many(count: int) -> tuple[np.ndarray, str]:
    pairs = np.random.default_rng(2).integers(0, 30, (count, 2))
    return pairs, "# comment\n" + "".join(f"n{a},n{b},{a + b / 8},{100 - a}\n" for a, b in pairs.tolist())


def test_a_list_on_disk_is_the_list_in_memory(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pairs, text = many(200)
    options: dict[str, Any] = {"columns": [0, 1], "weight": 2, "time": 3, "features": "degree"}
    module = EdgesData(path=write(tmp_path, "e.gz", text), store=str(tmp_path / "s"), **options)
    data, names = module.read(), names_of(module)
    assert [[names[i] for i in edge] for edge in data.edge_index.t().tolist()] == [[f"n{a}", f"n{b}"] for a, b in pairs]
    request.getfixturevalue("on_disk")
    arrays = module.read()
    assert isinstance(arrays, EdgeArrays) and isinstance(arrays.source, np.memmap)
    assert names_of(module) == names and arrays.num_nodes == data.num_nodes
    assert [arrays.source.tolist(), arrays.target.tolist()] == data.edge_index.tolist()
    assert arrays.edge_tensors["edge_weight"].tolist() == data.edge_weight.tolist()
    assert arrays.edge_tensors["edge_time"].tolist() == data.edge_time.tolist()
    assert torch.equal(arrays.node_tensors["x"], data.x)
    assert not list((tmp_path / "s").iterdir()), "temporary files have no names"


def test_both_directions_on_disk(tmp_path: Path, on_disk: None) -> None:
    path = write(tmp_path, "e", "0 1 0.5\n2 2 1\n1 0 2\n0 1 4\n3 0 8\n")
    arrays = EdgesData(path=path, undirected=True, store=str(tmp_path)).read()
    assert arrays.source.tolist() == [0, 2, 1, 0, 3, 1, 0, 1, 0]
    assert arrays.target.tolist() == [1, 2, 0, 1, 0, 0, 1, 0, 3]
    assert arrays.edge_tensors["edge_weight"].tolist() == [0.5, 1, 2, 4, 8, 0.5, 2, 4, 8]


def test_both_directions_with_times_are_kept_in_memory_too(tmp_path: Path) -> None:
    data = EdgesData(path=write(tmp_path, "e", "0 1 5\n0 1 6\n"), columns=[0, 1], time=2, undirected=True).read()
    assert data.edge_index.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]] and data.edge_time.tolist() == [5, 6, 5, 6]


def test_a_store_keeps_the_names(tmp_path: Path, on_disk: None) -> None:
    pairs, text = many(300)
    path = write(tmp_path, "e", text)
    module = EdgesData(path=path, columns=[0, 1], store=str(tmp_path / "s"), num_parts=3, partitioner="random")
    module.prepare_data()
    store = module.open_store()
    assert (store.num_edges, store.num_nodes) == (300, 30)
    names = store.names("node")
    global_names = names.decode(torch.cat([store.node("orig_id", part) for part in range(3)]))
    found = []
    for part in range(3):
        indptr, sources = store.edge("indptr", part), store.edge("indices", part)
        targets = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff()) + store.offsets[part]
        found += [(global_names[a], global_names[b]) for a, b in zip(sources.tolist(), targets.tolist(), strict=True)]
    assert sorted(found) == sorted((f"n{a}", f"n{b}") for a, b in pairs.tolist())


def test_progress_is_logged(
    tmp_path: Path, on_disk: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(edge_list, "PROGRESS_SECONDS", 0.0)
    path = write(tmp_path, "e", "# c\n" + "0 1\n" * 100)
    with caplog.at_level(logging.INFO, logger="gtrain"):
        EdgesData(path=path, store=str(tmp_path)).read()
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("reading e: 19 edges, ") and line.endswith(" %") for line in lines), lines
    assert lines[-2] == "skipped as comments (data.comments=#%): 1 lines"
    assert lines[-1].startswith("read e: 100 edges between 2 nodes in ")


# -------------------------------------------------------------------------------------------------------- wrong


GOOD = "".join(f"{i % 9} {i % 7}\n" for i in range(50))
NAMED_GOOD = "".join(f"n{i % 9}\tm{i % 7}\n" for i in range(50))


@pytest.mark.parametrize("name", ["e", "e.gz"])
@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (GOOD + "# c\n1 x\n" + GOOD, {}, "line 52: 'x' is not an integer: '1 x'(.|\n)*data.ids=string"),
        (GOOD + "1\n" + GOOD, {}, "line 51: 1 columns, and the lines before have 2: '1'"),
        (GOOD + "1 -2\n" + GOOD, {}, r"line 51: the edge 1 -> -2 names node -2, and ids start at 0 \(the largest id\)"),
        (GOOD + "1 9\n" + GOOD, {"num_nodes": 9}, r"line 51: the edge 1 -> 9 names node 9, .* \(data.num_nodes=9\)"),
        (
            GOOD + "1 123456789012\n" + GOOD,
            {},
            "line 51: the id 123456789012 means 123456789013 nodes(.|\n)*ids=string",
        ),
        (NAMED_GOOD + "\nn1\t\n" + NAMED_GOOD, {}, "line 52: a field is empty: 'n1'"),
        (NAMED_GOOD + "n1\n" + NAMED_GOOD, {}, "line 51: 1 columns, and the lines before have 2"),
        ("0,1,2\n" * 50 + "0,1,nan\n", {}, "line 51: the weight is nan: '0,1,nan'"),
        ("0,1,2\n" * 50 + "0,1,\n", {}, "line 51: '' is not a number"),
        ("0,1,2\n" * 50 + "0,1,1.5\n", {"columns": [0, 1], "time": 2}, "line 51: '1.5' is not an integer"),
        ("0,1,2\n" * 50 + "0,1,-1\n", {"columns": [0, 1], "relation": 2}, "line 51: the relation is -1"),
        ("h,t\n" + "0,1\n" * 50, {"columns": ["h", "q"]}, "has no column 'q', which data.columns names.* are h, t"),
        ("0,1\n" * 50, {"weight": 2}, "has 2 columns, but data.weight is column 2"),
        ("a,b,c\n" * 50, {}, "line 1: 'c' is not a number(.|\n)*data.columns=\\[0,1\\]"),
        ("0 1 2 3\n", {}, "line 1: 4 columns, and 2 or 3 were expected(.|\n)*data.columns"),
        ("source target\n", {}, "has no edges"),
        ("", {}, "has no lines other than comments"),
        ("a b\n", {"num_nodes": 3}, "data.num_nodes=3 was set, but the ids are names"),
    ],
)
def test_the_wrong_line_is_named_in_any_block(
    name: str, text: str, options: dict[str, Any], message: str, tmp_path: Path, on_disk: None
) -> None:
    module = EdgesData(path=write(tmp_path, name, text), store=str(tmp_path / "s"), **options)
    with pytest.raises((DataError, ConfigError), match=message) as caught:
        module.prepare_data()
    assert "HINT: " in str(caught.value)
    assert not (tmp_path / "s").exists(), "nothing is left behind"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "e").write_bytes(NAMED_GOOD.encode() + "Zoë\tann\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"e, line 51: the bytes b'\\xeb' are not UTF-8(.|\n)*iconv"):
        EdgesData(path=str(tmp_path / "e")).read()


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"a": [0], "b": [1]}, {"columns": ["a", "c"]}, "has no column 'c', which data.columns names.* are a, b"),
        ({"a": [0, 1, None], "b": [1, 2, 3]}, {}, r"row 2 \(from 0\): the column 'a' has no value"),
        ({"a": ["x", "y"], "b": ["y", ""]}, {}, r"row 1 \(from 0\): the name in the column 'b' has 0 bytes"),
        ({"a": [0, 1, 2], "b": [1, 0, -4]}, {}, r"row 2 \(from 0\): the edge 2 -> -4 names node -4"),
        ({"a": [0], "b": [1], "w": [float("nan")]}, {}, r"row 0 \(from 0\): the weight is nan"),
        ({"a": [0], "b": [1], "w": ["x"]}, {}, "the column 'w' holds string, and numbers are expected"),
        ({"a": ["x"], "b": ["y"]}, {"ids": "int"}, "'a' holds string, and integers are expected(.|\n)*data.ids=string"),
        ({"a": [0.5], "b": [1.5]}, {}, "'a' holds double, and strings or integers are expected"),
        ({"a": [0], "b": [1], "t": [1.5]}, {"time": "t"}, "'t' holds double, and integers are expected"),
        ({"a": pa.array([2**63], pa.uint64()), "b": [1]}, {}, "a number that does not fit int64(.|\n)*data.ids=string"),
        ({"a": pa.array([b"\xff"]), "b": ["y"]}, {}, "'a' holds bytes that are not UTF-8"),
        ({"a": [0], "b": [1], "c": [1], "d": [1]}, {}, "has 4 columns: a, b, c, d; 2 or 3 were expected"),
        ({"a": pa.array([], pa.int64()), "b": pa.array([], pa.int64())}, {}, "has no edges"),
    ],
)
def test_wrong_parquet(arrays: Any, options: dict[str, Any], message: str, tmp_path: Path, on_disk: None) -> None:
    with pytest.raises(DataError, match=message):
        EdgesData(path=write_parquet(tmp_path, "e.parquet", **arrays), store=str(tmp_path), **options).read()


def test_what_is_no_file_of_edges(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a Parquet file, or is damaged"):
        EdgesData(path=write(tmp_path, "e.parquet", "a b\n")).read()
    with pytest.raises(DataError, match="no file matches the pattern"):
        EdgesData(path=str(tmp_path / "*.csv")).read()
    with pytest.raises(DataError, match="data.path is an empty list"):
        EdgesData(path=[]).read()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder has no files"):
        EdgesData(path=str(tmp_path / "empty")).read()
    (tmp_path / "cut.gz").write_bytes(gzip.compress(os.urandom(999).hex().encode())[:-50])
    with pytest.raises(DataError, match=r"cut\.gz cannot be decompressed"):
        EdgesData(path=str(tmp_path / "cut.gz")).read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": "names"}, "data.ids=names was set(.|\n)*int: (.|\n)*string: (.|\n)*auto: "),
        ({"columns": [0]}, "the columns source=0 are not valid"),
        ({"columns": [0, 0]}, "source=0, target=0 are not valid"),
        ({"columns": [0, -1]}, "target=-1 are not valid"),
        ({"columns": [0, 1], "weight": 1}, "weight=1 are not valid"),
        ({"separator": "||"}, r"data.separator='\|\|' is not a separator"),
        ({"comments": "é"}, "is not ASCII"),
        ({"ids": "string", "num_nodes": 3}, "data.num_nodes=3 with data.ids=string"),
        ({"undirected": True, "relation": 2}, "a relation has a direction"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EdgesData(path="e", **options)


def test_a_real_list_as_names_is_the_list_by_number(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    path = str(real_data("edges/soc-Epinions1.txt.gz"))
    numbers = EdgesData(path=path, ids="int").read().edge_index
    module = EdgesData(path=path, ids="string")
    found = module.read().edge_index
    names = np.array(module.names()["node"].to_pylist(), dtype=np.int64)
    assert (names[found.numpy()] == numbers.numpy()).all() and len(names) == 75879
