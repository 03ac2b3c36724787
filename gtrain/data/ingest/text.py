"""Edges from text, one for each line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from gtrain.data.ingest.format import EdgeFormat
from gtrain.data.ingest.layout import TextLayout
from gtrain.data.ingest.lines import LineReader, Piece
from gtrain.data.ingest.rows import Ints, Keys, Rows

_NO_WEIGHT = "; if the column holds no weights, name those to take: data.columns=[0,1]"
_ORDER = ("source", "target", "weight", "relation", "time")


class TextReader:
    """Reads one text file of an edge list.

    Args:
        path: the file.
        options: how it is written.
        layout: its columns.
    """

    def __init__(self, path: Path, options: EdgeFormat, layout: TextLayout) -> None:
        self._kinds = layout.kinds
        order = sorted(layout.roles, key=_ORDER.index)
        self._slots = {role: slot for slot, role in enumerate(order)}
        strings = {"source", "target"} if layout.kinds.ids == "string" else set()
        strings |= {"relation"} if layout.kinds.relation == "string" else set()
        types = {role: pa.string() if role in strings else pa.int64() for role in order} | {"weight": pa.float64()}
        columns = {layout.roles[role]: types[role] for role in order}
        self._lines = LineReader(path, layout.separator, layout.header, layout.num_columns, columns, options.comments)

    @property
    def comments(self) -> int:
        """Comment lines seen so far."""
        return self._lines.skipped

    def read(self) -> Iterator[Rows]:
        """Yield the edges, some hundred thousand at a time.

        Raises:
            DataError: names the first line that is malformed.
        """
        for piece in self._lines.pieces():
            names = self._kinds.ids == "string"
            ids = piece.keys(0, 2) if names else piece.integers(0, 2, "; names need data.ids=string")
            weight, time = self._slots.get("weight"), self._slots.get("time")
            yield Rows(
                ids=ids,
                relation=self._relation(piece),
                weight=None if weight is None else piece.finite(weight, "weight", _NO_WEIGHT).astype(np.float32),
                time=None if time is None else piece.integers(time, time + 1),
                read=piece.block.read,
                place=piece.place,
            )

    def _relation(self, piece: Piece) -> Keys | Ints | None:
        slot = self._slots.get("relation")
        if slot is None:
            return None
        return piece.keys(slot, slot + 1) if self._kinds.relation == "string" else piece.integers(slot, slot + 1)
