"""gtrain.data.sources.entities: RDF graphs whose entities are classified."""

from __future__ import annotations

import gzip
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.datasets import Entities

from gtrain.data.sources.entities import EntitiesData
from gtrain.errors import ConfigError, DataError

Real = Callable[[str], Path]

TRIPLES = """\
<http://x/a> <http://x/likes> <http://x/b> .
<http://x/b> <http://x/likes> _:n1 .
# a comment
<http://x/a> <http://x/age> "4"^^<http://www.w3.org/2001/XMLSchema#integer> .
<http://x/a> <http://x/likes> <http://x/b> .
_:n1 <http://x/age> "4" .
<http://x/b> <http://x/likes> <http://x/c> .
"""
TABLES = {"complete": "a\tyes\nb\tno\nc\tyes\n", "training": "a\tyes\nb\tno\n", "test": "c\tyes\n"}


def write(folder: Path, triples: str = TRIPLES, **tables: str) -> str:
    raw = folder / "entities" / "mutag" / "raw"
    raw.mkdir(parents=True)
    (raw / "mutag_stripped.nt.gz").write_bytes(gzip.compress(triples.encode()))
    for table, name in (("complete", "completeDataset"), ("training", "trainingSet"), ("test", "testSet")):
        rows = "".join(f"http://x/{line}\n" for line in {**TABLES, **tables}[table].splitlines())
        (raw / f"{name}.tsv").write_text("bond\tlabel_mutagenic\n" + rows)
    return str(folder)


def test_a_small_graph(tmp_path: Path) -> None:
    module = EntitiesData(name="mutag", root=write(tmp_path))
    data = module.read()
    nodes, relations = module.names()["node"], module.names()["relation"]
    integer = '"4"^^<http://www.w3.org/2001/XMLSchema#integer>'
    assert nodes == ["http://x/a", "http://x/b", "_:n1", integer, '"4"', "http://x/c"]
    assert relations == ["http://x/likes", "^http://x/likes", "http://x/age", "^http://x/age"]
    edges = [
        (nodes[s], relations[r], nodes[t])
        for (s, t), r in zip(data.edge_index.t().tolist(), data.edge_type, strict=True)
    ]
    forward = {
        ("http://x/a", "http://x/likes", "http://x/b"),
        ("http://x/b", "http://x/likes", "_:n1"),
        ("http://x/b", "http://x/likes", "http://x/c"),
        ("http://x/a", "http://x/age", integer),
        ("_:n1", "http://x/age", '"4"'),
    }
    assert len(edges) == 10 and set(edges) == forward | {(t, f"^{r}", s) for s, r, t in forward}
    assert (data.y.tolist(), data.train_mask.nonzero().flatten().tolist()) == ([1, 0, -1, -1, -1, 1], [0, 1])
    assert (data.test_mask.nonzero().flatten().tolist(), int(data.val_mask.sum())) == ([5], 0)
    assert (module.extra_facts(), module.unlabelled) == ({"num_relations": 4}, -1)
    some = EntitiesData(name="MUTAG", root=str(tmp_path), val_fraction=0.5)
    assert [int(some.read()[f"{split}_mask"].sum()) for split in ("train", "val", "test")] == [1, 1, 1]
    assert some.identity() != module.identity()


def test_aifb_is_the_graph_that_pyg_makes(real_data: Real, tmp_path: Path) -> None:
    module = EntitiesData(root=str(real_data("rdf").parent))
    data = module.read()
    assert (data.num_nodes, data.num_edges, module.extra_facts()["num_relations"]) == (8285, 58086, 90)
    assert [int(data[f"{split}_mask"].sum()) for split in ("train", "val", "test")] == [140, 0, 36]
    assert torch.bincount(data.y[data.y >= 0]).tolist() == [73, 28, 60, 15]
    assert not (real_data("rdf/aifb") / "processed").exists()
    pytest.importorskip("pandas", reason="PyG's own reader of these files needs pandas")
    shutil.copytree(real_data("rdf/aifb/raw"), tmp_path / "aifb" / "raw")
    theirs = Entities(str(tmp_path), "AIFB")[0]
    assert torch.equal(torch.bincount(data.edge_type).sort().values, torch.bincount(theirs.edge_type).sort().values)
    # PyG gives the edges of two literals that differ in their type alone to one of them, and leaves the other alone
    text = [name.split("^^")[0].strip('"') if name.startswith('"') else name for name in module.names()["node"]]
    last = {name: node for node, name in enumerate(text)}
    merged = torch.tensor([last[name] for name in text])[data.edge_index[1]]
    degrees = [np.sort(np.bincount(index, minlength=8285)) for index in (merged, theirs.edge_index[1])]
    assert np.array_equal(*degrees) and (degrees[0] == 0).sum() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"triples": TRIPLES + "<http://x/a> likes .\n"}, r"mutag_stripped\.nt\.gz, line 8: not an N-Triples .*likes"),
        ({"triples": ""}, r"mutag_stripped\.nt\.gz is empty"),
        ({"test": "z\tyes\n"}, r"testSet\.tsv, line 2: the entity 'http://x/z' does not occur in the graph"),
        ({"training": "a\tyes\nb\tmaybe\n"}, r"trainingSet\.tsv, line 3: the label 'maybe' does not occur"),
        ({"training": "a\tyes\nb\n"}, r"trainingSet\.tsv cannot be read: .*columns"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        EntitiesData(name="mutag", root=write(tmp_path, **change)).read()


def test_labels_that_are_numbers_are_compared_by_value(tmp_path: Path) -> None:
    """As in MUTAG: pandas reads 1.0 from one table and 1 from another."""
    tables = {"complete": "a\t1.0\nb\t0.0\nc\t1.0\n_\t\n", "training": "a\t1\nb\t0\n", "test": "c\t1\n"}
    assert EntitiesData(name="mutag", root=write(tmp_path / "1", **tables)).read().y.tolist() == [1, 0, -1, -1, -1, 1]
    tables = {name: table.replace("0", "10") for name, table in tables.items()}  # 1.10 and 10.10 are other numbers
    with pytest.raises(DataError, match=r"trainingSet\.tsv, line 2: the label '1' does not occur .* '1\.1', '10\.1'"):
        EntitiesData(name="mutag", root=write(tmp_path / "2", **tables)).read()
    names = {"complete": "a\t1.0\nb\tno\nc\t1.0\n", "training": "a\t1.0\nb\tno\n", "test": "c\t1\n"}
    # Also beside other labels: 1 comes before "no".
    assert EntitiesData(name="mutag", root=write(tmp_path / "3", **names)).read().y.tolist() == [0, 1, -1, -1, -1, 0]
    large = {
        "complete": "a\t9007199254740993\nb\t9007199254740992\nc\t1_0\n_\t10\n",
        "training": "b\t9007199254740992\n",
    }
    large |= {"training": "a\t9007199254740993\nb\t9007199254740992.0\n", "test": "c\t1_0\n"}
    assert EntitiesData(name="mutag", root=write(tmp_path / "5", **large)).read().y.tolist() == [3, 2, -1, -1, -1, 1]
    names = {"training": "a\tyes\nb\t\n"}
    with pytest.raises(DataError, match=r"trainingSet\.tsv, line 3: the entity 'http://x/b' has no label"):
        EntitiesData(name="mutag", root=write(tmp_path / "4", **names)).read()


def test_a_table_without_the_column(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "entities/mutag/raw/testSet.tsv").write_text("bond\tlabel\nhttp://x/a\tyes\n")
    with pytest.raises(DataError, match=r"testSet\.tsv has no column 'label_mutagenic'; it has bond, label"):
        EntitiesData(name="mutag", root=str(tmp_path)).read()


def test_rdflib_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdflib.plugins.parsers.ntriples", None)
    with pytest.raises(ConfigError, match=r"data=entities needs the package 'rdflib'(.|\n)*pip install rdflib"):
        EntitiesData(name="mutag", root=write(tmp_path)).read()


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"data\.name='mutagg'(.|\n)*did you mean MUTAG"):
        EntitiesData(name="mutagg")
