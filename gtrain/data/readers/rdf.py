"""Read RDF graphs in N-Triples; the numbering depends only on the file."""

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
    encoding = "utf-8-sig"  # some editors write a byte order mark
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
