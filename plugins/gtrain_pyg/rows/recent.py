"""Which remote rows the last few batches asked for, so that they are not asked for again, and what is asked for now."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.rows import kernels
from gtrain_pyg.rows.requests import Missing, chunk_rows
from gtrain_pyg.rows.tables import Table

Array = NDArray[Any]

WIDE_BYTES = 32
"""Rows of fewer bytes are asked for by each batch: to look them up costs more than they do."""
LAST_TURN = 1 << 22
"""A turn and an id have to fit into 63 bits."""


class Recent:
    """The remote rows of one kind that successive batches ask for.

    Rows that a batch asks for lie in segments that are the batch's own until as many batches have begun as are at most
    looked back over. A hash map tells the place of each row and the batch, by its *turn*, that asked for it; places of
    earlier turns are as good as none.

    Args:
        tables: the tensors of a row.
        dtypes: in which dtype the values of each travel.
        offsets: int64 ``[P + 1]``; part p has the rows ``offsets[p] .. offsets[p+1]-1``.
        first: the first segment that is not a part or the cache.
        batches: how many ask for a row once, together, at most; 1: each asks for what it needs.
        pool: memory of requests.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        dtypes: Mapping[str, torch.dtype],
        offsets: Array,
        first: int,
        batches: int,
        pool: BufferPool,
    ) -> None:
        self._tables, self._dtypes, self._offsets, self._pool = tables, dtypes, offsets, pool
        self._first, self._batches = first, batches
        self._parts = offsets.size - 1
        self._chunk = chunk_rows(tables)
        self._wide = sum(table.row_bytes for table in tables.values()) >= WIDE_BYTES
        self._each = 1  # segments of each owner and batch
        self._sizes: deque[int] = deque(maxlen=batches)  # rows that the last batches asked for
        self._used = 0  # slots of the map that are not empty
        self._map: Array = np.zeros((0, 2), np.int64)

    @property
    def segments(self) -> int:
        """How many segments there are, with those of parts, cache, and all batches."""
        return self._first + self._batches * self._parts * self._each

    def ask(self, ids: Array, place: Array, missed: int, turn: int, floor: int) -> Missing:
        """Give the rows that are not here places, and list those that are to be asked for.

        Args:
            ids: int64 ``[n]``.
            place: int64 ``[n]`` of :func:`gtrain_pyg.rows.kernels.find`; where below 0, replaced.
            missed: how many are below 0.
            turn: number of the batch, 1 to :data:`LAST_TURN`, ascending.
            floor: the earliest batch whose rows can still be read; below 1: any.
        """
        floor = max(1, floor)
        self._make_room(missed, floor)
        first = self._first + turn % self._batches * self._parts * self._each
        segments = np.array([first, self._each, self._chunk.bit_length() - 1], np.int64)
        unique, owners = self._pool.take(missed, np.int64), self._pool.take(missed, np.int32)
        counts = np.zeros(self._parts + 1, np.int64)
        if self._wide:
            self._used += kernels.number(ids, place, self._map, turn, floor, unique, owners, counts, segments)
        else:
            kernels.enlist(ids, place, unique, owners, counts, segments)
        total = int(counts[-1])
        self._sizes.append(total)
        return self._missing(unique[:total], owners[:total], counts[:-1], first)

    def forget(self) -> None:
        """Remember nothing; turns may begin anew."""
        self._map, self._used = self._map[:0], 0
        self._sizes.clear()

    def _make_room(self, missed: int, floor: int) -> None:
        """Have segments and slots of the map for so many rows more."""
        each = max(1, -(-missed // self._chunk))
        if each > self._each:
            self._each = 1 << (each - 1).bit_length()
            self.forget()  # the segments of earlier turns are numbered otherwise
        if not self._wide or self._used + missed <= self._map.shape[0] * 3 // 4:
            return
        larger = np.zeros((1 << (2 * (sum(self._sizes) + missed)).bit_length(), 2), np.int64)
        self._used = kernels.rehash(self._map, floor, larger)
        self._map = larger

    def _missing(self, unique: Array, owners: Array, counts: Array, first: int) -> Missing:
        starts = np.cumsum(counts) - counts
        narrow = int(np.diff(self._offsets).max()) < 1 << 31
        dealt = self._pool.take(unique.size, np.int32 if narrow else np.int64)
        kernels.deal(unique, owners, self._offsets, starts.copy(), dealt)
        rows = {p: dealt[starts[p] : starts[p] + counts[p]] for p in range(self._parts) if counts[p]}
        shape = self._parts * self._each
        bases = {name: np.zeros((table.bases.shape[0], shape), np.int64) for name, table in self._tables.items()}
        return Missing(self._tables, self._dtypes, self._chunk, first, self._each, rows, bases)
