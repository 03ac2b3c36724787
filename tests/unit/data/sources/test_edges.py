"""gtrain.data.sources.edges: graphs from edge lists, and the line that is wrong."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gtrain.data.sources.edges import EdgesData
from gtrain.errors import ConfigError, DataError


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    "text",
    [
        "0 1\n1 2\n2 0\n",
        "0\t1\n1\t2\n2\t0",
        "# made by hand\n% too\n0  1 \n\n 1\t 2\n#between\n2 0\n",
        "src,dst\n0,1\n1, 2\n2,0\n",
        "0;1\r\n1;2\r\n2;0\r\n",
        "source target\n0 1\n1 2\n2 0\n",
    ],
)
def test_forms_of_an_edge_list(text: str, tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(text.encode())
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("plain", "packed.gz"):
        data = EdgesData(path=name, root=str(tmp_path)).read()
        assert data.edge_index.tolist() == [[0, 1, 2], [1, 2, 0]]
        assert data.num_nodes == 3 and data.x is None and data.y is None


def test_weights_and_both_directions(tmp_path: Path) -> None:
    path = write(tmp_path, "e", "a b w\n0 1 0.5\n1 0 1.5\n2 2 3\n1 2 4\n")
    data = EdgesData(path=path).read()
    assert data.edge_weight.tolist() == [0.5, 1.5, 3, 4] and data.edge_weight.dtype == torch.float32
    both = EdgesData(path=path, undirected=True).read()
    found = {tuple(e): w for e, w in zip(both.edge_index.t().tolist(), both.edge_weight.tolist(), strict=True)}
    assert found == {(0, 1): 1.0, (1, 0): 1.0, (2, 2): 3.0, (1, 2): 4.0, (2, 1): 4.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n# x\n1 q\n", r"e, line 3: 'q' is not an integer: '1 q'"),
        ("# x\n\n0 1\n1 2 3\n", "line 4: 3 columns, and the lines before have 2"),
        ("0 1 2\n1 2 x\n", "line 2: 'x' is not a number"),
        ("0 1\n1.5 2\n", "line 2: '1.5' is not an integer"),
        ("0,1\n1,\n", "line 2: '' is not an integer"),
        ("0 1\n1 99999999999999999999\n", "line 2: '99999999999999999999' is not an integer"),
        ("0 1\n\n1 -2\n", "line 3: the edge 1 -> -2 names node -2"),
        (
            "h1 h2\n0 1\n1 9\n",
            r"line 3: the edge 1 -> 9 names node 9, and there are 4 nodes, 0\.\.3 \(data.num_nodes=4",
        ),
        ("0 1 2 3\n", "line 1: 4 columns, and 2 or 3 were expected"),
        ("# nothing\n", "no lines other than comments"),
    ],
)
def test_the_malformed_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        EdgesData(path=write(tmp_path, "e", text), num_nodes=4).read()


def test_files_of_other_columns(tmp_path: Path) -> None:
    (tmp_path / "list").mkdir()
    write(tmp_path, "list/a", "0 1\n")
    write(tmp_path, "list/b", "0 1 2\n")
    with pytest.raises(DataError, match=r"b has a column of weights, and the files before have none"):
        EdgesData(path=str(tmp_path / "list")).read()


def test_a_weight_beyond_32_bits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: the weight is 1e\+39"):
        EdgesData(path=write(tmp_path, "e", "0 1 1\n0 1 1e39\n")).read()


def test_features_and_labels(tmp_path: Path) -> None:
    path = write(tmp_path, "e", "0 1\n1 2\n0 2\n")
    x, y = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([1, 0, 1])
    np.save(tmp_path / "x.npy", x)
    torch.save(torch.from_numpy(x), tmp_path / "x.pt")
    write(tmp_path, "x.txt", "0 1\n2 3\n4 5\n")
    np.save(tmp_path / "y.npy", y)
    write(tmp_path, "y.txt", "1\n0\n1\n")
    write(tmp_path, "y.csv", "id,label\n2,1\n0,1\n1,0\n")
    for features in ("x.npy", "x.pt", "x.txt"):
        assert EdgesData(path=path, features=features, root=str(tmp_path)).read().x.tolist() == x.tolist()
    for labels in ("y.npy", "y.txt", "y.csv"):
        assert EdgesData(path=path, labels=labels, root=str(tmp_path)).read().y.tolist() == y.tolist()
    assert EdgesData(path=path, features="constant").read().x.tolist() == [[1], [1], [1]]
    degree = EdgesData(path=path, features="degree").read().x
    assert degree.flatten().expm1().tolist() == pytest.approx([0, 1, 2])


@pytest.mark.parametrize("text", ["2 1.5\n0 -4\n", "-4\nnan\n1.5\n"])
def test_labels_may_be_numbers(text: str, tmp_path: Path) -> None:
    path, labels = write(tmp_path, "e", "0 1\n1 2\n"), write(tmp_path, "y", text)
    data = EdgesData(path=path, labels=labels, label_kind="number")
    y = data.read().y
    assert data.number_labels == {"node"} and y.dtype == torch.float32
    assert y.isnan().tolist() == [False, True, False] and y[[0, 2]].tolist() == [-4, 1.5]
    assert data.store_path != EdgesData(path=path, labels=labels).store_path


def test_a_fraction_is_not_a_class(tmp_path: Path) -> None:
    path, names = write(tmp_path, "e", "a b\nb c\n"), write(tmp_path, "y", "a 1\nb 1.5\nc 0\n")
    with pytest.raises(DataError, match=r"has the label 1\.5; a class is(.|\n)*data\.label_kind=number"):
        EdgesData(path=path, labels=names).read()
    assert EdgesData(path=path, labels=names, label_kind="number").read().y.tolist() == [1, 1.5, 0]
    with pytest.raises(DataError, match=r"line 2: 0\.5 is not the id of a node"):
        EdgesData(
            path=write(tmp_path, "i", "0 1\n"), labels=write(tmp_path, "z", "1 1\n0.5 2\n"), label_kind="number"
        ).read()


def test_labels_of_some_nodes(tmp_path: Path) -> None:
    path, labels = write(tmp_path, "e", "0 1\n1 2\n"), write(tmp_path, "y", "2 1\n0 0\n")
    with pytest.raises(DataError, match="labels for 2 nodes, and the graph has 3(.|\n)*unlabelled=-1"):
        EdgesData(path=path, labels=labels).read()
    assert EdgesData(path=path, labels=labels, unlabelled=-1).read().y.tolist() == [0, -1, 1]
    with pytest.raises(DataError, match="line 2: node 0 already has a label"):
        EdgesData(path=path, labels=write(tmp_path, "z", "0 1\n0 0\n"), unlabelled=-1).read()
    np.save(tmp_path / "y.npy", np.array(1))
    with pytest.raises(DataError, match=r"data\.labels=.*y\.npy has shape \[\]; \[N\]"):
        EdgesData(path=path, labels=str(tmp_path / "y.npy")).read()
    with pytest.raises(DataError, match="line 1: a label for node 7, and the graph has 3 nodes"):
        EdgesData(path=path, labels=write(tmp_path, "z", "7 1\n0 0\n"), unlabelled=-1, num_nodes=3).read()


def test_counts_that_differ(tmp_path: Path) -> None:
    path = write(tmp_path, "e", "0 1\n1 2\n")
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    features = str(tmp_path / "x.npy")
    with pytest.raises(DataError, match=r"x\.npy has 3 rows, and data.num_nodes=5 says that there are 5"):
        EdgesData(path=path, features=features, num_nodes=5).read()
    with pytest.raises(DataError, match=r"y has 2 rows, and data\.features=.*x\.npy says that there are 3"):
        EdgesData(path=path, features=features, labels=write(tmp_path, "y", "0\n1\n")).read()


def test_nan_in_a_file_is_named(tmp_path: Path) -> None:
    path, features = write(tmp_path, "e", "0 1\n1 2\n"), write(tmp_path, "x.txt", "1 2\n3 nan\n4 5\n")
    with pytest.raises(DataError, match=r"data\.features=.*x\.txt.*x has nan at row 1, column 1"):
        EdgesData(path=path, features=features, store=str(tmp_path / "s")).prepare_data()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "edgs.txt"}, r"data\.path=edgs\.txt: no such file(.|\n)*there are edges\.txt"),
        ({"path": "edges.txt", "features": "f.npy"}, r"data\.features=f\.npy: no such file"),
        ({"path": "edges.txt", "labels": "l.npy"}, r"data\.labels=l\.npy: no such file"),
        ({"path": "edges.txt", "features": "dict.pt"}, "holds a dict; a single tensor is expected"),
        ({"path": "edges.txt", "features": "object.npy"}, "cannot be read as an array"),
        ({"path": "edges.txt", "features": "code.pt"}, "never unpickled"),
        ({"path": "broken.gz"}, "cannot be decompressed"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_wrong_files(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, "edges.txt", "0 1\n")
    write(tmp_path, "broken.gz", "0 1\n")
    torch.save({"a": 1}, tmp_path / "dict.pt")
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object))
    torch.save(print, tmp_path / "code.pt")
    module = EdgesData(root=str(tmp_path), store=str(tmp_path / "s"), **options)
    with pytest.raises(DataError, match=message):
        module.prepare_data()


def test_no_public_split() -> None:
    with pytest.raises(ConfigError, match="no masks"):
        EdgesData(path="e", split="public")


@pytest.mark.parametrize(
    ("file", "nodes", "edges", "first"),
    [("ego-twitter.txt.gz", 81307, 1768135, [1, 2]), ("soc-Epinions1.txt.gz", 75888, 508837, [0, 4])],
)
def test_real_edge_lists(
    file: str, nodes: int, edges: int, first: list[int], real_data: Callable[[str], Path], tmp_path: Path
) -> None:
    module = EdgesData(path=str(real_data(f"edges/{file}")), store=str(tmp_path), num_parts=2, partitioner="random")
    data = module.read()
    assert (data.num_nodes, data.num_edges) == (nodes, edges)
    assert data.edge_index[:, 0].tolist() == first
    module.prepare_data()
    store = module.open_store()
    assert store.num_edges == edges and module.facts["num_classes"] is None
    assert store.manifest.partition.edge_cut == pytest.approx(edges / 2, rel=0.02)


def test_names_that_start_with_a_comment_character(tmp_path: Path) -> None:
    path, features = write(tmp_path, "e", "#a b\nb %c\n"), write(tmp_path, "x", "%c 3\n#a 1\nb 2\n")
    labels = write(tmp_path, "y", "b 1\n#a 0\n%c 0\n")
    graph = EdgesData(path=path, features=features, labels=labels, comments="").read()
    assert graph.x.flatten().tolist() == [1, 2, 3] and graph.y.tolist() == [0, 1, 0]


def test_comments_of_files_of_numbers(tmp_path: Path) -> None:
    path, features = write(tmp_path, "e", "0 1\n"), write(tmp_path, "x", "! made\n1\n2\n")
    labels = write(tmp_path, "y", "! made\n0 1\n1 0\n")
    graph = EdgesData(path=path, features=features, labels=labels, comments="!").read()
    assert graph.x.flatten().tolist() == [1, 2] and graph.y.tolist() == [1, 0]


@pytest.mark.parametrize("kind", ["class", "number"])
def test_a_label_of_a_huge_id_is_named(kind: str, tmp_path: Path) -> None:
    path, labels = write(tmp_path, "e", "0 1\n"), write(tmp_path, "y", "0 1\n100000000000 0\n")
    options = {"path": path, "labels": labels, "label_kind": kind, "unlabelled": -1}
    with pytest.raises(DataError, match="y, line 2: a label for node 100000000000, and the edges name the nodes 0..1"):
        EdgesData(**options).read()
    write(tmp_path, "y", "0 1\n3 0\n")
    assert EdgesData(**options).read().num_nodes == 4


def test_folders_with_the_characters_of_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "set[1] *?"
    folder.mkdir()
    write(folder, "a.txt", "0 1\n")
    write(folder, "b.txt", "1 2\n")
    for options in ({"path": str(folder)}, {"path": folder.name, "root": str(tmp_path)}):
        assert EdgesData(**options).read().num_edges == 2
    for pattern in ("*.txt", "[b]*"):
        assert EdgesData(path=pattern, root=str(folder)).read().num_edges == (2 if pattern == "*.txt" else 1)
