"""Outlines: what each source says of its graph from names, headers and metadata, before it reads the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_biggraph as biggraph
import test_dgl_partition as dgl
import test_entities as entities
import test_heco as heco
import test_musae as musae
import test_ogb as ogb
import test_parquet as parquet
import test_pyg_partition as pyg
import torch
from hydra.utils import get_class
from relational import amounts, purchases, recommendations

from gtrain.data.config import SCHEMAS
from gtrain.data.module import GraphDataModule
from gtrain.data.prepare.layout import expected_facts, lay_out
from gtrain.data.prepare.validate import validate_graph
from gtrain.data.sources.biggraph import BigGraphData
from gtrain.data.sources.dgl_partition import DGLPartitionData
from gtrain.data.sources.edges import EdgesData
from gtrain.data.sources.entities import EntitiesData
from gtrain.data.sources.heco import HeCoData
from gtrain.data.sources.musae import MusaeData
from gtrain.data.sources.ogb import OGBData
from gtrain.data.sources.parquet import ParquetData
from gtrain.data.sources.pyg_partition import PyGPartitionData
from gtrain.data.sources.relbench import RelBenchData
from gtrain.data.sources.tables import TablesData
from gtrain.data.sources.temporal import TemporalData
from gtrain.errors import GtrainError
from gtrain.graph.store.tables import EdgeArrays

partition = pyg.partition
Make = Callable[[Path], GraphDataModule]


def form(facts: dict[str, Any]) -> dict[str, Any]:
    """What of some facts decides the layers of a model: which parts there are, not how many of each."""
    sizes, widths = facts["num_nodes"], facts["num_features"]
    return {
        "types": sorted(sizes) if isinstance(sizes, dict) else None,
        "features": {name: width is not None for name, width in widths.items()}
        if isinstance(widths, dict)
        else widths is not None,
        "labels": facts["num_classes"] is not None,
        "relations": facts.get("num_relations") is not None,
        **{key: bool(facts.get(key)) for key in ("multilabel", "label_scale")},
        **{key: facts.get(key) for key in ("sparse_features", "target", "entity_types", "relation_ends")},
    }


def mag(folder: Path) -> OGBData:
    """Two node types, the second with features and labels."""
    place = folder / "ogbn_mag"
    ogb.write(place, "raw/num-node-dict.csv.gz", ["author,work", "2,3"])
    ogb.write(place, "raw/triplet-type-list.csv.gz", ["author,writes,work"])
    ogb.write(place, "raw/relations/author___writes___work/edge.csv.gz", [(0, 1), (1, 2)])
    ogb.write(place, "raw/node-feat/work/node-feat.csv.gz", [(1, 2), (3, 4), (5, 6)])
    ogb.write(place, "raw/node-label/work/node-label.csv.gz", [0, 1, 0])
    return OGBData(name="ogbn-mag", root=str(folder), split="random")


def proteins(folder: Path) -> OGBData:
    place = ogb.write_nodes(folder / "ogbn_proteins", "species")
    (place / "raw" / "node-feat.csv.gz").unlink()
    ogb.write(place, "raw/node-label.csv.gz", [(1, 0), (0, 0), (1, 1), (0, 1)])
    return OGBData(name="ogbn-proteins", root=str(folder))


def wikikg(folder: Path) -> OGBData:
    ends = {"head": np.array([0]), "tail": np.array([1]), "relation": np.array([0])}
    place = ogb.write_links(folder / "ogbl_wikikg2", "time", ends, ends)
    ogb.write(place, "raw/edge_reltype.csv.gz", [0, 1])
    return OGBData(name="ogbl-wikikg2", root=str(folder))


def small_dblp(folder: Path) -> HeCoData:
    heco.dblp(folder / "heco" / "dblp")
    return HeCoData(name="dblp", root=str(folder), per_class=40)


def one_file(folder: Path) -> HeCoData:
    np.savez(folder / "one.npz", **heco.dblp(folder / "files"))
    return HeCoData(name="dblp", path="one.npz", root=str(folder), per_class=40)


def arxiv(folder: Path) -> OGBData:
    ogb.write_nodes(folder / "ogbn_arxiv", "time")
    return OGBData(root=str(folder))


def rows(folder: Path) -> ParquetData:
    return ParquetData(path=parquet.write(folder / "rows.parquet"), dense=["price"], ids="ids", values="weights")


def small_edges(folder: Path) -> EdgesData:
    (folder / "edges.tsv").write_text("a\tb\tr\nb\tc\ts\n")
    torch.save(torch.ones(3, 2), folder / "x.pt")
    return EdgesData(path="edges.tsv", relation=2, features="x.pt", root=str(folder))


def joined(folder: Path) -> BigGraphData:
    counts = {"user": [2, 2], "item": [3, 1]}
    biggraph.write_entities(folder / "graph", counts)
    edges = {(i, j): biggraph.columns([0], [0], [0]) for i in range(2) for j in range(2)}
    biggraph.write_edges(folder / "graph", edges)
    relations = [{"name": "buys", "lhs": "user", "rhs": "item"}]
    return BigGraphData(path=str(folder / "graph"), relations=relations, joint_types=True)


def users(folder: Path) -> BigGraphData:
    biggraph.write_entities(folder / "graph", {"user": [4, 4]})
    biggraph.write_edges(folder / "graph", biggraph.TRAIN)
    return BigGraphData(path=str(folder / "graph"))


def table(folder: Path) -> TablesData:
    """Nodes whose features are numbers, and edges with relations."""
    pq.write_table(pa.table({"id": ["a", "b", "c"], "age": [1, 2, 3], "label": ["x", "x", "y"]}), folder / "n.parquet")
    (folder / "e.csv").write_text("source,target,kind\na,b,r\nb,c,s\n")
    nodes, edges = {"path": "n.parquet", "label": "label"}, {"path": "e.csv", "relation": "kind"}
    return TablesData(nodes=nodes, edges=edges, root=str(folder))


def typed_tables(folder: Path) -> TablesData:
    """Users without features, with several labels, and items with features from text of a kind that was named."""
    users = {"id": [1, 2], "label": [["x"], ["x", "y"]]}
    pq.write_table(pa.table(users), folder / "users.parquet")
    (folder / "items.csv").write_text("id,color\nq,red\nr,blue\n")
    (folder / "buys.csv").write_text("user,item\n1,q\n2,r\n")
    nodes = {
        "user": {"path": "users.parquet", "label": "label"},
        "item": {"path": "items.csv", "columns": {"color": "category"}},
    }
    ends = {"source": "user", "target": "item", "source_type": "user", "target_type": "item", "undirected": True}
    return TablesData(nodes=nodes, edges={"buys": {"path": "buys.csv", **ends}}, root=str(folder))


def ages(folder: Path) -> TablesData:
    """Nodes whose labels are numbers to predict."""
    pq.write_table(pa.table({"id": ["a", "b", "c"], "age": [1, 2, None], "size": [1, 2, 3]}), folder / "n.parquet")
    (folder / "e.csv").write_text("source,target\na,b\nb,c\n")
    nodes = {"path": "n.parquet", "label": "age", "label_kind": "number"}
    return TablesData(nodes=nodes, edges="e.csv", root=str(folder))


def events(folder: Path) -> TemporalData:
    (folder / "events.txt").write_text("0 1 5\n1 2 6\n")
    return TemporalData(path="events.txt", root=str(folder))


SOURCES: dict[str, Make] = {
    "arxiv": arxiv,
    "mag": mag,
    "proteins": proteins,
    "wikikg": wikikg,
    "heco": small_dblp,
    "heco, one file": one_file,
    "parquet": rows,
    "edges": small_edges,
    "entities": lambda folder: EntitiesData(name="mutag", root=entities.write(folder)),
    "musae": lambda folder: MusaeData(name="DE", path=musae.write(folder / "DE")),
    "biggraph": users,
    "biggraph, joint types": joined,
    "temporal": events,
    "tables": table,
    "tables, types": typed_tables,
    "tables, numbers": ages,
    "relbench": lambda folder: RelBenchData(path=str(purchases(folder, "past", users=4)), name="large"),
    "relbench, links": lambda folder: RelBenchData(
        path=str(recommendations(folder, "past", users=10)), name="next", task="link"
    ),
    "relbench, numbers": lambda folder: RelBenchData(path=str(amounts(folder, users=4)), name="amount"),
    "dgl": lambda _: DGLPartitionData(path=f"{dgl.ASSETS}/homogeneous/small.json"),
    "dgl, types": lambda _: DGLPartitionData(path=f"{dgl.ASSETS}/heterogeneous/small.json"),
}


def check(module: GraphDataModule, layout: str = "auto") -> None:
    """Compare the outline, made while nothing may be read, with the facts of the graph that is read after that."""
    module.check_inputs()
    outline = expected_facts(module.outline or {}, layout)
    graph = module.read()
    assert not isinstance(graph, EdgeArrays)
    if not module.sparse_rows:
        lay_out(graph, layout)
    numbers = module.number_labels
    facts = validate_graph(graph, unlabelled=module.unlabelled, number_labels=numbers) | module.extra_facts()
    facts["label_scale"] = {"mean": 0.0, "deviation": 1.0} if facts.get("target", "node") in numbers else None
    facts["target"] = facts.get("target") if module.task == "node" else None
    assert form(outline) == form(facts)
    if "edge_types" in outline:
        assert sorted(outline["edge_types"]) == sorted(graph.edge_types)


@pytest.mark.parametrize("source", SOURCES)
def test_an_outline_has_the_form_of_the_graph(source: str, tmp_path: Path) -> None:
    check(SOURCES[source](tmp_path))


@pytest.mark.parametrize("source", ["heco", "musae", "edges", "parquet", "biggraph"])
def test_an_outline_of_sparse_features(source: str, tmp_path: Path) -> None:
    check(SOURCES[source](tmp_path), "sparse")


@pytest.mark.parametrize("hetero", [False, True])
def test_the_outline_of_a_folder_of_pygs_partitioner(hetero: bool, partition: Any, tmp_path: Path) -> None:
    folder, _ = partition(pyg.heterogeneous() if hetero else pyg.homogeneous())
    np.save(tmp_path / "y.npy", np.arange(30) % 2)
    check(PyGPartitionData(path=str(folder), labels=f"{'b=' * hetero}{tmp_path}/y.npy"))
    (folder / "edge_map.pt" if not hetero else folder / "edge_map" / "b__bb__b.pt").unlink()
    with pytest.raises(GtrainError, match="edge_map.* is missing"):
        PyGPartitionData(path=str(folder)).check_inputs()


def test_the_outline_of_a_data_set_that_is_to_be_downloaded(tmp_path: Path) -> None:
    for name, features, relations in (("ogbn-products", True, False), ("ogbl-wikikg2", False, True)):
        outline = OGBData(name=name, root=str(tmp_path)).outline
        assert (outline["num_features"] is not None, outline["num_relations"] is not None) == (features, relations)
    outline = OGBData(name="ogbn-mag", root=str(tmp_path)).outline
    assert len(outline["edge_types"]) == 8 and outline["target"] == "paper"


@pytest.mark.parametrize("source", SCHEMAS)
def test_every_source_has_an_outline(source: str) -> None:
    """But for the classes of PyG by name, whose graphs only their constructors know."""
    module = get_class(SCHEMAS[source]._target_)
    assert (source == "pyg") == (vars(module).get("outline", getattr(module, "outline", None)) is None)


@pytest.mark.parametrize(("column", "known"), [([1, 1, 1], False), (["a", "b", "c"], False), ([1, 2, 1], True)])
def test_an_outline_of_tables_is_not_a_guess(column: list[Any], known: bool, tmp_path: Path) -> None:
    """A column with equal values, or of strings that are all different, is left out of the features."""
    pq.write_table(pa.table({"id": ["a", "b", "c"], "value": column}), tmp_path / "n.parquet")
    (tmp_path / "e.csv").write_text("source,target\na,b\n")
    data = TablesData(nodes="n.parquet", edges="e.csv", root=str(tmp_path))
    assert (data.outline is not None) == known


def remove(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (path,) = folder.rglob(name)
        path.unlink()

    return change


def unpaired(folder: Path) -> None:
    ogb.write(folder / "ogbn_arxiv", "raw/edge.csv.gz", [(0, 1, 2)])


WRONG: dict[str, tuple[Make, Callable[[Path], None] | dict[str, Any], str]] = {
    "a split of OGB": (arxiv, remove("valid.csv.gz"), "valid.csv.gz.* is missing"),
    "labels of OGB": (arxiv, remove("node-label.csv.gz"), "node-label.csv.gz.* is missing"),
    "columns of OGB": (arxiv, unpaired, r"edge.csv.gz, line 1: 3 columns, and 2 were expected"),
    "held-out edges of OGB": (wikikg, remove("valid.pt"), "valid.pt.* is missing"),
    "edges of a type of OGB": (mag, remove("edge.csv.gz"), "edge.csv.gz.* is missing"),
    "a list of HeCo": (small_dblp, remove("pc.txt"), "pc.txt.* is missing"),
    "a split of HeCo": (one_file, {"per_class": 20}, "has no array 'train_20'; it has"),
    "labels of Parquet": (rows, {"label": "city2"}, "has no column 'city2'; it has"),
    "a column of Parquet": (rows, {"_dense": ["city"]}, "the column 'city' holds string, and numbers were expected"),
    "lists of Parquet": (rows, {"ids": "price"}, "the column 'price' holds double, and lists were expected"),
    "categories of Parquet": (rows, {"_categorical": ["price"]}, "strings or whole numbers were expected"),
    "a column of edges": (small_edges, {"format.relation": 3}, "has 3 columns, but data.relation is column 3"),
    "the column of times": (events, {"time_column": 3}, r"data.time_column=3, and .* has the columns 0..2"),
    "buckets": (users, remove("edges_1_0.h5"), "has no edges_1_0.h5"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_before_the_graph_is_read(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, change, message = WRONG[what]
    module = make(tmp_path)
    if callable(change):
        change(tmp_path)
    else:
        for name, value in change.items():
            if name == "format.relation":
                object.__setattr__(module.format, "relation", value)  # type: ignore[attr-defined]
            else:
                monkeypatch.setattr(module if name in vars(module) else module.settings, name, value)

    def read(_: object) -> None:
        raise AssertionError("the graph was read")

    monkeypatch.setattr(type(module), "read", read)
    with pytest.raises(GtrainError, match=message):
        module.prepare_data()
