"""Entity classification in RDF graphs: AIFB, MUTAG, BGS and AM."""

from __future__ import annotations

import contextlib
import gzip
import logging
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.config import EntitiesConfig
from gtrain.data.module import OUTLINE
from gtrain.data.readers.files import require
from gtrain.data.sources.feature_rows import row_masks
from gtrain.data.sources.pyg import PyGData
from gtrain.errors import DataError, unreadable

COLUMNS = {
    "AIFB": ("person", "label_affiliation"),
    "MUTAG": ("bond", "label_mutagenic"),
    "BGS": ("rock", "label_lithogenesis"),
    "AM": ("proxy", "label_cateogory"),  # the file spells it so
}
"""The columns of entities and of labels in the tables of each data set."""


class EntitiesData(PyGData[EntitiesConfig]):
    """An RDF graph in which some nodes have classes (Schlichtkrull et al. 2018, section 5.1).

    PyG's ``Entities`` downloads the files. This class numbers nodes, relations and classes from the files alone: PyG
    numbers them in the order of Python's sets, which differs between processes, and drops their names. Labels that are
    numbers are compared by value, as pandas reads them: ``1`` in one table is ``1.0`` in another. Each triple becomes
    an edge of the relation 2r and a reverse edge of the relation 2r + 1. Literals are nodes, and nodes have no
    features. Needs rdflib.

    Its settings are those of :class:`~gtrain.data.config.EntitiesConfig`.
    """

    published = "Entities", tuple(COLUMNS)
    outline = {**OUTLINE, "num_features": None, "num_relations": 2}

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
        graph = read_ntriples(triples, "data=entities")
        subject, relation, target = torch.from_numpy(graph.triples)
        edge_index = torch.stack([torch.cat([subject, target]), torch.cat([target, subject])])
        edge_type = torch.cat([2 * relation, 2 * relation + 1])
        # PyG's order: by source, target and relation.
        order = torch.from_numpy(np.lexsort((edge_type.numpy(), edge_index[1].numpy(), edge_index[0].numpy())))
        data = Data(edge_index=edge_index[:, order], edge_type=edge_type[order], num_nodes=len(graph.nodes))
        labels = {label for label in self._table(complete)[1] if label is not None}
        classes = {label: number for number, label in enumerate(sorted(labels, key=_order))}
        self._label(data, graph, classes, self._table(train), self._table(test))
        relations = [name for predicate in graph.predicates for name in (predicate, f"^{predicate}")]  # ^: reverse
        self._names = {"node": graph.nodes, "relation": relations}
        self._facts = {"num_relations": len(relations)}
        return data

    def _table(self, path: Path) -> tuple[list[str], list[str | None]]:
        """Return the entities and the labels of a table; None for an entity without a label."""
        columns, hint = COLUMNS[self.options["name"]], "copy or download the file again"
        with unreadable(f"{path} cannot be read", hint, pa.ArrowInvalid, OSError):
            table = pa.csv.read_csv(
                path,
                parse_options=pa.csv.ParseOptions(delimiter="\t"),
                convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string())),
            )
        missing = [column for column in columns if column not in table.column_names]
        if missing:
            raise DataError(f"{path} has no column {missing[0]!r}; it has {', '.join(table.column_names)}", hint=hint)
        if not len(table):
            raise DataError(f"{path} has no rows", hint=hint)
        return table[columns[0]].to_pylist(), [_label_of(field) for field in table[columns[1]].to_pylist()]

    def _label(
        self, data: Data, graph: RDFGraph, classes: dict[str, int], *tables: tuple[list[str], list[str | None]]
    ) -> None:
        """Set ``y`` and the masks from the training and the test table."""
        numbers = {name: node for node, name in enumerate(graph.nodes)}
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


def _label_of(field: str) -> str | None:
    """Return a label in a canonical spelling: ``1``, ``1.0`` and ``+1`` are the same.

    None for an empty field and for ``nan``, which mean no label, as in a column that pandas reads.
    """
    text = field.strip()
    if not text:
        return None
    if "_" in text:  # which Python reads in numbers
        return field
    try:
        return str(int(text))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return field
    if math.isnan(number):
        return None
    return str(int(number)) if number.is_integer() else repr(number)


def _order(label: str) -> tuple[bool, float, str]:
    """Return the sort key of a label: numbers by value, before other labels."""
    try:
        return False, float(label), label
    except ValueError:
        return True, 0.0, label


@dataclass(frozen=True)
class RDFGraph:
    """An RDF graph.

    Attributes:
        nodes: the name of each node, in the order of first mention: an IRI as it is, a literal or a blank node in
            N-Triples syntax.
        predicates: the IRI of each predicate, sorted by descending frequency, then by name.
        triples: subject, predicate and object numbers, without duplicates, int64 ``[3, T]``.
    """

    nodes: list[str]
    predicates: list[str]
    triples: NDArray[np.int64]


class _TripleSink:
    """Receives triples from rdflib's parser: numbers the terms and drops duplicate triples."""

    def __init__(self) -> None:
        self.nodes: dict[object, int] = {}
        self.predicates: dict[object, int] = {}
        self.triples: dict[tuple[int, int, int], None] = {}

    def triple(self, subject: object, predicate: object, target: object) -> None:
        source = self.nodes.setdefault(subject, len(self.nodes))
        relation = self.predicates.setdefault(predicate, len(self.predicates))
        self.triples[source, relation, self.nodes.setdefault(target, len(self.nodes))] = None


def read_ntriples(path: Path, source: str) -> RDFGraph:
    """Read an N-Triples file; ``.gz`` is decompressed.

    Args:
        path: the file.
        source: the source that reads it, for messages.

    Raises:
        ConfigError: rdflib is not installed.
        DataError: names the malformed line.
    """
    parsing = require("rdflib", source, module="rdflib.plugins.parsers.ntriples", extra="entities")
    sink, blank_nodes = _TripleSink(), dict[str, object]()
    parser = parsing.W3CNTriplesParser(sink)
    number = 0
    try:
        with _text(path) as file, _quiet():
            for line in file:
                number += 1
                parser.parsestring(line, bnode_context=blank_nodes)
    except parsing.ParseError as err:
        raise DataError(
            f"{path}, line {number}: not an N-Triples statement: {line.strip()[:80]!r}",
            hint="write each line as <subject> <predicate> <object> . in N-Triples, or download the file again",
        ) from err
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as err:
        raise DataError(f"{path} cannot be read: {err}", hint="copy or download the file again") from err
    if not sink.triples:
        raise DataError(f"{path} is empty", hint="copy or download the file again")
    return _ordered(sink, {term: f"_:{label}" for label, term in blank_nodes.items()})


def _text(path: Path) -> Any:
    # Some editors write a byte order mark.
    encoding = "utf-8-sig"
    return gzip.open(path, "rt", encoding=encoding) if path.suffix == ".gz" else path.open(encoding=encoding)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence rdflib's warnings about literals that do not match their type, such as malformed dates."""
    logger = logging.getLogger("rdflib.term")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _ordered(sink: _TripleSink, blank_nodes: dict[object, str]) -> RDFGraph:
    triples = np.array(list(sink.triples), dtype=np.int64).T
    count = Counter(triples[1].tolist())
    names = [str(predicate) for predicate in sink.predicates]
    order = sorted(range(len(names)), key=lambda relation: (-count[relation], names[relation]))
    triples[1] = np.argsort(order)[triples[1]]
    return RDFGraph(
        [blank_nodes.get(term) or _name(term) for term in sink.nodes], [names[relation] for relation in order], triples
    )


def _name(term: object) -> str:
    """Return an IRI as it is and a literal in quotes, so that their names differ."""
    text = str(term)
    return text if type(term).__name__ == "URIRef" else str(getattr(term, "n3", lambda: text)())
