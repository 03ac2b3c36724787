"""gtrain.data.sources.ogb: the Open Graph Benchmark's files, made small."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gtrain.data.sources import ogb
from gtrain.data.sources.ogb import OGBData
from gtrain.errors import ConfigError, DataError


def write(folder: Path, name: str, rows: list[Any]) -> None:
    """Write rows as OGB does: no names of columns, packed."""
    lines = [",".join(map(str, row)) if isinstance(row, (list, tuple)) else str(row) for row in rows]
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


def write_nodes(folder: Path, split: str) -> Path:
    """A graph of 4 nodes with 3 edges, labels and a split."""
    write(folder, "raw/edge.csv.gz", [(0, 1), (1, 2), (3, 3)])
    write(folder, "raw/num-node-list.csv.gz", [4])
    write(folder, "raw/num-edge-list.csv.gz", [3])
    write(folder, "raw/node-feat.csv.gz", [(0.5, -1), (1, 2), (3, 4e-1), (5, 6)])
    write(folder, "raw/node-label.csv.gz", [1, 0, 2, 1])
    write(folder, "raw/node_year.csv.gz", [2011, 2013, 2012, 2010])
    for name, nodes in (("train", [3, 0]), ("valid", [2]), ("test", [1])):
        write(folder, f"split/{split}/{name}.csv.gz", nodes)
    return folder


def write_links(folder: Path, split: str, valid: dict[str, Any], test: dict[str, Any], **options: Any) -> Path:
    write(folder, "raw/edge.csv.gz", [(0, 1), (1, 2)])
    write(folder, "raw/num-node-list.csv.gz", [4])
    (folder / "split" / split).mkdir(parents=True)
    for name, arrays in (("valid", valid), ("test", test)):
        torch.save(arrays, folder / "split" / split / f"{name}.pt", **options)
    return folder


def test_arxiv(tmp_path: Path) -> None:
    write_nodes(tmp_path / "ogb" / "ogbn_arxiv", "time")
    module = OGBData(root=str(tmp_path))
    data = module.read()
    assert data.edge_index.tolist() == [[0, 1, 3], [1, 2, 3]]
    assert np.allclose(data.x, [[0.5, -1], [1, 2], [3, 0.4], [5, 6]]) and data.x.dtype == torch.float32
    assert (data.y.tolist(), data.time.tolist(), data.num_nodes) == ([1, 0, 2, 1], [2011, 2013, 2012, 2010], 4)
    masks = [data[f"{split}_mask"].nonzero().flatten().tolist() for split in ("train", "val", "test")]
    assert masks == [[0, 3], [2], [1]]
    assert module.task == "node" and "train_mask" not in OGBData(root=str(tmp_path), split="time").read()
    assert OGBData(root=str(tmp_path), undirected=True).read().edge_index.tolist() == [
        [0, 1, 3, 1, 2, 3],
        [1, 2, 3, 0, 1, 3],
    ]


def test_products_has_both_directions(tmp_path: Path) -> None:
    """The archive's own name of the folder will do as well."""
    write_nodes(tmp_path / "products", "sales_ranking")
    assert OGBData(name="ogbn-products", root=str(tmp_path)).read().num_edges == 6
    assert OGBData(name="ogbn-products", root=str(tmp_path), undirected=False).read().num_edges == 3


def test_several_labels_and_edge_features(tmp_path: Path) -> None:
    folder = write_nodes(tmp_path / "ogbn_proteins", "species")
    write(folder, "raw/node-label.csv.gz", [(1, 0), (0, 0), (1, 1), (0, 1)])
    write(folder, "raw/edge-feat.csv.gz", [(0.1, 0.2), (0.3, 0.4), (0.5, 0.6)])
    data = OGBData(name="ogbn-proteins", root=str(tmp_path)).read()
    assert data.y.tolist() == [[1, 0], [0, 0], [1, 1], [0, 1]]
    assert data.edge_attr.shape == (6, 2) and torch.equal(data.edge_attr[:3], data.edge_attr[3:])


def test_mag(tmp_path: Path) -> None:
    folder = tmp_path / "ogbn_mag"
    write(folder, "raw/num-node-dict.csv.gz", ["author,field_of_study,institution,paper", "2,3,1,4"])
    triplets = ["author,affiliated_with,institution", "author,writes,paper", "paper,cites,paper"]
    write(folder, "raw/triplet-type-list.csv.gz", triplets)
    edges = ([(0, 0), (1, 0)], [(0, 3), (1, 2), (1, 0)], [(0, 1)])
    for triplet, pairs in zip(triplets, edges, strict=True):
        write(folder, f"raw/relations/{triplet.replace(',', '___')}/edge.csv.gz", pairs)
    write(folder, "raw/node-feat/paper/node-feat.csv.gz", [(i, -i) for i in range(4)])
    write(folder, "raw/node-feat/paper/node_year.csv.gz", [2015, 2016, 2017, 2018])
    write(folder, "raw/node-label/paper/node-label.csv.gz", [0, 5, 2, 1])
    for name, nodes in (("train", [0, 1]), ("valid", [2]), ("test", [3])):
        write(folder, f"split/time/paper/{name}.csv.gz", nodes)
    graph = OGBData(name="ogbn-mag", root=str(tmp_path)).read()
    assert {node_type: graph[node_type].num_nodes for node_type in graph.node_types} == {
        "author": 2,
        "field_of_study": 3,
        "institution": 1,
        "paper": 4,
    }
    assert graph["author", "writes", "paper"].edge_index.tolist() == [[0, 1, 1], [3, 2, 0]]
    assert graph["paper", "rev_writes", "author"].edge_index.tolist() == [[3, 2, 0], [0, 1, 1]]
    assert len(graph.edge_types) == 6 and "x" not in graph["author"]
    paper = graph["paper"]
    assert (paper.y.tolist(), paper.time.tolist(), paper.x[2].tolist()) == (
        [0, 5, 2, 1],
        [2015, 2016, 2017, 2018],
        [2, -2],
    )
    assert [int(paper[f"{split}_mask"].sum()) for split in ("train", "val", "test")] == [2, 1, 1]
    assert len(OGBData(name="ogbn-mag", root=str(tmp_path), undirected=False).read().edge_types) == 3


def test_collab(tmp_path: Path) -> None:
    held = {"edge": np.array([[2, 3]]), "year": np.array([2018]), "weight": np.array([1]), "edge_neg": np.zeros((9, 2))}
    folder = write_links(tmp_path / "ogbl_collab", "time", held, {**held, "edge": torch.tensor([[0, 3]])})
    write(folder, "raw/edge_year.csv.gz", [2001, 2002])
    write(folder, "raw/edge_weight.csv.gz", [1, 3])
    module = OGBData(name="ogbl-collab", root=str(tmp_path))
    data = module.read()
    assert module.task == "link"
    assert data.edge_index.tolist() == [[0, 1, 1, 2], [1, 2, 0, 1]]
    assert (data.edge_time.tolist(), data.edge_weight.tolist()) == ([2001, 2002] * 2, [1, 3] * 2)
    assert (data.val_edge_index.tolist(), data.test_edge_index.tolist()) == ([[2], [3]], [[0], [3]])
    assert (data.val_edge_time.tolist(), data.val_edge_weight.tolist()) == ([2018], [1])


def test_wikikg2_as_an_old_torch_and_numpy_wrote_it(tmp_path: Path) -> None:
    held = {"head": np.array([0, 3]), "relation": np.array([1, 0]), "tail": np.array([2, 1])}
    folder = write_links(tmp_path / "ogbl_wikikg2", "time", held, held, _use_new_zipfile_serialization=False)
    for name in ("valid", "test"):
        path = folder / "split" / "time" / f"{name}.pt"
        text = path.read_bytes()
        assert b"numpy._core.multiarray" in text
        path.write_bytes(text.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    write(folder, "raw/edge_reltype.csv.gz", [1, 0])
    data = OGBData(name="ogbl-wikikg2", root=str(tmp_path)).read()
    assert (data.edge_type.tolist(), data.val_edge_type.tolist()) == ([1, 0], [1, 0])
    assert data.test_edge_index.tolist() == [[0, 3], [2, 1]] and data.num_edges == 2


def test_citation2(tmp_path: Path) -> None:
    held = {
        "source_node": np.array([3]),
        "target_node": np.array([0]),
        "target_node_neg": np.zeros((1, 5), dtype=np.int64),
    }
    write_links(tmp_path / "ogbl_citation2", "time", held, held)
    assert OGBData(name="ogbl-citation2", root=str(tmp_path)).read().val_edge_index.tolist() == [[3], [0]]


def test_a_split_that_would_run_code(tmp_path: Path) -> None:
    folder = write_links(tmp_path / "ogbl_ddi", "target", {"edge": np.array([[0, 1]])}, {"edge": print})
    with pytest.raises(DataError, match=r"test\.pt holds Python objects other than tensors"):
        OGBData(name="ogbl-ddi", root=str(tmp_path)).read()
    torch.save({"edges": torch.zeros(2, 2)}, folder / "split" / "target" / "test.pt")
    with pytest.raises(DataError, match=r"test\.pt holds edges, but no edges"):
        OGBData(name="ogbl-ddi", root=str(tmp_path)).read()
    (folder / "split" / "target" / "valid.pt").unlink()
    with pytest.raises(DataError, match=r"valid\.pt is missing"):
        OGBData(name="ogbl-ddi", root=str(tmp_path)).read()


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("raw/edge.csv.gz", [(0, 1), (1,)], r"edge\.csv\.gz, line 2: 1 columns"),
        ("raw/edge.csv.gz", [(0, 1), (1, -2)], r"edge\.csv\.gz, line 2: the edge 1 -> -2; there are 4"),
        ("raw/edge.csv.gz", [(0, 1), (1, 4)], r"edge\.csv\.gz, line 2: the edge 1 -> 4"),
        ("raw/edge.csv.gz", [(0, 1), (1, "x")], r"edge\.csv\.gz, line 2: 'x' is not an integer"),
        ("raw/edge.csv.gz", [(0, 1, 2)], r"edge\.csv\.gz, line 1: 3 columns, and 2 were expected"),
        ("raw/node-feat.csv.gz", [(0, 1), (1, "x")], r"node-feat\.csv\.gz, line 2: 'x' is not a number"),
        ("split/time/test.csv.gz", [1, 9], r"test\.csv\.gz, line 2: the node 9; there are 4 nodes"),
    ],
)
def test_the_malformed_line_is_named(name: str, rows: list[Any], message: str, tmp_path: Path) -> None:
    folder = write_nodes(tmp_path / "ogbn_arxiv", "time")
    write(folder, name, rows)
    with pytest.raises(DataError, match=message):
        OGBData(root=str(tmp_path)).read()


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    folder = write_nodes(tmp_path / "ogbn_arxiv", "time")
    (folder / "split" / "time" / "valid.csv.gz").unlink()
    with pytest.raises(DataError, match=r"valid\.csv\.gz is missing"):
        OGBData(root=str(tmp_path)).read()
    (folder / "raw" / "edge.csv.gz").write_text("0,1\n")
    with pytest.raises(DataError, match=r"edge\.csv\.gz cannot be unpacked"):
        OGBData(root=str(tmp_path)).read()
    with pytest.raises(ConfigError, match=r"data\.name='ogbn-arxive'(.|\n)*did you mean ogbn-arxiv"):
        OGBData(name="ogbn-arxive")


def test_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nodes(tmp_path / "made" / "arxiv", "time")
    (tmp_path / "site" / "nodeproppred").mkdir(parents=True)
    shutil.make_archive(str(tmp_path / "site" / "nodeproppred" / "arxiv"), "zip", tmp_path / "made")
    monkeypatch.setattr(ogb, "URL", f"file://{tmp_path}/site")
    options = {"root": str(tmp_path / "data"), "store": str(tmp_path / "stores")}
    module = OGBData(**options)  # type: ignore[arg-type]
    assert module.read().num_edges == 3
    assert sorted(file.name for file in (tmp_path / "data" / "ogb").iterdir()) == ["ogbn_arxiv"]
    assert [stamp[0] for stamp in module.identity()["files"]][:2] == ["raw/edge.csv.gz", "raw/node-feat.csv.gz"]
    missing = OGBData(name="ogbn-products", **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"ogbn_products is missing, and file:.*products\.zip could not be downloaded"):
        missing.fetch()
    assert sorted(file.name for file in (tmp_path / "data" / "ogb").iterdir()) == ["ogbn_arxiv"]
