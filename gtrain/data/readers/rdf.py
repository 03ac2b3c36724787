"""Reading RDF graphs in N-Triples, numbered by the file alone."""

from __future__ import annotations

import contextlib
import gzip
import logging
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.data.readers.extras import require
from gtrain.errors import DataError


@dataclass(frozen=True)
class RDFGraph:
    """An RDF graph.

    Attributes:
        nodes: the name of each node, in the order in which the file first mentions them: an IRI as it is, a literal
            and a blank node as N-Triples writes them.
        predicates: the IRI of each predicate, the most frequent first, and by name where they are as frequent.
        triples: subject, predicate and object numbers, each triple once, int64 ``[3, T]``.
    """

    nodes: list[str]
    predicates: list[str]
    triples: NDArray[np.int64]


class _Numbering:
    """What rdflib's parser hands its triples to: numbers for terms, and triples without duplicates."""

    def __init__(self) -> None:
        self.nodes: dict[object, int] = {}
        self.predicates: dict[object, int] = {}
        self.triples: dict[tuple[int, int, int], None] = {}

    def triple(self, subject: object, predicate: object, target: object) -> None:
        source = self.nodes.setdefault(subject, len(self.nodes))
        relation = self.predicates.setdefault(predicate, len(self.predicates))
        self.triples[source, relation, self.nodes.setdefault(target, len(self.nodes))] = None


def read_ntriples(path: Path, source: str) -> RDFGraph:
    """Read an N-Triples file; ``.gz`` is unpacked.

    Args:
        path: the file.
        source: what asks for it, for messages.

    Raises:
        ConfigError: rdflib is not installed.
        DataError: names the line that is malformed.
    """
    parsing = require("rdflib", source, module="rdflib.plugins.parsers.ntriples", extra="entities")
    sink, blank_nodes = _Numbering(), dict[str, object]()
    parser = parsing.W3CNTriplesParser(sink)
    number = 0
    try:
        with _text(path) as file, _quiet():
            for line in file:
                number += 1
                parser.parsestring(line, bnode_context=blank_nodes)
    except parsing.ParseError as err:
        raise DataError(
            f"{path}, line {number}: no N-Triples statement: {line.strip()[:80]!r}",
            hint="write each line as <subject> <predicate> <object> . in N-Triples, or download the file again",
        ) from err
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as err:
        raise DataError(f"{path} cannot be read: {err}", hint="copy or download the file again") from err
    if not sink.triples:
        raise DataError(f"{path} is empty", hint="copy or download the file again")
    return _ordered(sink, {term: f"_:{label}" for label, term in blank_nodes.items()})


def _text(path: Path) -> Any:
    encoding = "utf-8-sig"  # some editors put a byte order mark in front
    return gzip.open(path, "rt", encoding=encoding) if path.suffix == ".gz" else path.open(encoding=encoding)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep rdflib from telling of each literal that its type does not fit, such as dates that are none."""
    logger = logging.getLogger("rdflib.term")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _ordered(sink: _Numbering, blank_nodes: dict[object, str]) -> RDFGraph:
    triples = np.array(list(sink.triples), dtype=np.int64).T
    count = Counter(triples[1].tolist())
    names = [str(predicate) for predicate in sink.predicates]
    order = sorted(range(len(names)), key=lambda relation: (-count[relation], names[relation]))
    triples[1] = np.argsort(order)[triples[1]]
    return RDFGraph(
        [blank_nodes.get(term) or _name(term) for term in sink.nodes], [names[relation] for relation in order], triples
    )


def _name(term: object) -> str:
    """Return an IRI as it is, and a literal in quotes, so that the two never have the same name."""
    text = str(term)
    return text if type(term).__name__ == "URIRef" else str(getattr(term, "n3", lambda: text)())
