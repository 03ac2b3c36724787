"""Entity classification in RDF graphs: AIFB, MUTAG, BGS and AM."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.config import EntitiesConfig
from gtrain.data.module import OUTLINE, known_name
from gtrain.data.readers.rdf import RDFGraph, read_ntriples
from gtrain.data.sources.feature_rows import row_masks
from gtrain.data.sources.pyg import PyGData
from gtrain.errors import DataError

COLUMNS = {
    "AIFB": ("person", "label_affiliation"),
    "MUTAG": ("bond", "label_mutagenic"),
    "BGS": ("rock", "label_lithogenesis"),
    "AM": ("proxy", "label_cateogory"),  # the file spells it so
}
"""The columns of entities and of labels in the tables of each data set."""


class EntitiesData(PyGData):
    """An RDF graph in which some nodes have classes (Schlichtkrull et al. 2018, section 5.1).

    PyG's ``Entities`` downloads the files. This class numbers nodes, relations and classes from the files alone: PyG
    numbers them in the order of Python's sets, which differs between processes, and drops their names. Labels that are
    numbers are compared by value, as pandas reads them: ``1`` in one table is ``1.0`` in another. Each triple becomes
    an edge of the relation 2r and a reverse edge of the relation 2r + 1. Literals are nodes, and nodes have no
    features. Needs rdflib.

    Its settings are those of :class:`~gtrain.data.config.EntitiesConfig`.
    """

    outline = {**OUTLINE, "num_features": None, "num_relations": 2}

    settings_type = EntitiesConfig
    settings: EntitiesConfig

    def __init__(self, settings: EntitiesConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self._dataset = self.options["name"]
        self._graph: RDFGraph | None = None

    def dataset(self) -> tuple[str, dict[str, Any]]:
        return "Entities", {"name": known_name("Entities", self.settings.name, tuple(COLUMNS))}

    def identity(self) -> dict[str, Any]:
        """Return the data set, the stamps of its raw files, and what the public split depends on."""
        masks = [self.split.val_fraction, self.split.seed] if self.split.kind == "public" else None
        return {**super().identity(), "public": masks}

    @property
    def search_folders(self) -> list[Path]:
        """The folders that may have ``aifb/raw``, the preferred one first."""
        named = [self.root / name for name in ("entities", "Entities", "rdf")]
        return [*(folder for folder in named if folder.is_dir()), self.root]

    def read(self) -> Data:
        """Read the triples and the tables of labels."""
        triples, complete, train, test = self.raw_files()
        self._graph = graph = read_ntriples(triples, "data=entities")
        subject, relation, target = torch.from_numpy(graph.triples)
        edge_index = torch.stack([torch.cat([subject, target]), torch.cat([target, subject])])
        edge_type = torch.cat([2 * relation, 2 * relation + 1])
        order = torch.from_numpy(np.lexsort((edge_type.numpy(), edge_index[1].numpy(), edge_index[0].numpy())))
        data = Data(edge_index=edge_index[:, order], edge_type=edge_type[order], num_nodes=len(graph.nodes))
        labels = {label for label in self._table(complete)[1] if label is not None}
        classes = {label: number for number, label in enumerate(sorted(labels, key=_order))}
        self._label(data, classes, self._table(train), self._table(test))
        return data

    def names(self) -> dict[str, Any]:
        """Return IRIs and literals of the nodes, and IRIs of the relations; ``^`` marks reverse edges."""
        assert self._graph is not None  # read
        relations = [name for predicate in self._graph.predicates for name in (predicate, f"^{predicate}")]
        return {"node": self._graph.nodes, "relation": relations}

    def extra_facts(self) -> dict[str, Any]:
        """Return the number of relations, including reverse ones."""
        assert self._graph is not None  # read
        return {"num_relations": 2 * len(self._graph.predicates)}

    def _table(self, path: Path) -> tuple[list[str], list[str | None]]:
        """Return the entities and the labels of a table; None for an entity without a label."""
        columns = COLUMNS[self._dataset]
        try:
            table = pa.csv.read_csv(
                path,
                parse_options=pa.csv.ParseOptions(delimiter="\t"),
                convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string())),
            )
        except (pa.ArrowInvalid, OSError) as err:
            raise DataError(
                f"{path} cannot be read: {str(err).splitlines()[0]}", hint="copy or download the file again"
            ) from err
        missing = [column for column in columns if column not in table.column_names]
        if missing:
            raise DataError(
                f"{path} has no column {missing[0]!r}; it has {', '.join(table.column_names)}",
                hint="copy or download the file again",
            )
        if not len(table):
            raise DataError(f"{path} has no rows", hint="copy or download the file again")
        return table[columns[0]].to_pylist(), _labels(table[columns[1]].to_pylist())

    def _label(self, data: Data, classes: dict[str, int], *tables: tuple[list[str], list[str | None]]) -> None:
        """Set ``y`` and the masks from the training and the test table."""
        assert self._graph is not None  # read
        numbers = {name: node for node, name in enumerate(self._graph.nodes)}
        data.y = torch.full((len(numbers),), -1)
        nodes: list[Tensor] = []
        for path, (entities, labels) in zip(self.raw_files()[2:], tables, strict=True):
            for line, (entity, label) in enumerate(zip(entities, labels, strict=True), start=2):
                if entity not in numbers:
                    raise DataError(
                        f"{path}, line {line}: the entity {entity!r} does not occur in the graph",
                        hint=f"take the tables and {self.raw_files()[0].name} from the same archive",
                    )
                if label is None:
                    raise DataError(
                        f"{path}, line {line}: the entity {entity!r} has no label",
                        hint="give it a label, or remove the line",
                    )
                if label not in classes:
                    raise DataError(
                        f"{path}, line {line}: the label {label!r} does not occur in completeDataset.tsv, whose "
                        f"labels are {', '.join(map(repr, list(classes)[:10]))}",
                        hint="correct the label, or add the entity to completeDataset.tsv: its labels are the classes",
                    )
            nodes.append(torch.tensor([numbers[entity] for entity in entities], dtype=torch.int64))
            data.y[nodes[-1]] = torch.tensor([classes[label or ""] for label in labels], dtype=torch.int64)
        rows = torch.cat(nodes)
        for name, mask in row_masks(rows.numel(), nodes[0].numel(), self.split).items():
            data[name] = torch.zeros(len(numbers), dtype=torch.bool)
            data[name][rows[mask]] = True


def _labels(fields: list[str]) -> list[str | None]:
    """Return the labels of a table in a canonical spelling; None for rows without a label.

    If every label is a number, ``1``, ``1.0`` and ``+1`` are the same label, and ``nan`` means no label, as in a column
    that pandas reads. An empty field means no label.
    """
    numbers: list[float] = []
    for field in fields:
        try:
            numbers.append(float(field) if field.strip() else math.nan)
        except ValueError:
            return [field or None for field in fields]
    return [None if math.isnan(number) else repr(number + 0.0).removesuffix(".0") for number in numbers]


def _order(label: str) -> tuple[bool, float, str]:
    """Return the sort key of a label: numbers by value, before other labels."""
    try:
        return False, float(label), label
    except ValueError:
        return True, 0.0, label
