"""Successive batches whose remote rows were asked for, and which read what those before them asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain_pyg.ranks.parts import Kind
from gtrain_pyg.rows.recent import LAST_TURN, Recent
from gtrain_pyg.rows.requests import Missing, Requests
from gtrain_pyg.rows.tables import DenseTable, Table

if TYPE_CHECKING:
    from gtrain_pyg.rows.access import Rows

Array = NDArray[Any]
Ids = Mapping[Kind, Any]
Tables = Mapping[Kind, Mapping[str, Table]]

KEPT_BATCHES = 1
"""What batches asked for is kept for later ones as long as it takes no more bytes than so many batches' rows."""


@dataclass
class Wanted:
    """What one batch needs of one kind: its ids, the places of their rows, and how many of these are not here."""

    ids: Array
    place: Array
    missed: int


class Stream:
    """Batches in their order; made by :meth:`gtrain_pyg.rows.access.Rows.stream`. One thread begins them.

    Args:
        rows: that serve them.
        tables: the tensors wanted, by kind and name.
        recent: by kind, what was asked for lately.
        batches: that ask for a row once, together, at most.
        dtype: of floating tensors; None: as stored.
    """

    def __init__(
        self, rows: Rows, tables: Tables, recent: Mapping[Kind, Recent], batches: int, dtype: torch.dtype | None
    ) -> None:
        self._rows, self._tables, self._recent, self._dtype = rows, tables, recent, dtype
        self._batches = batches
        self._before: deque[Requests | None] = deque()
        self._kept = self._largest = 0.0  # bytes: of the rows that those before asked for, and of the largest batch
        self._row_bytes = {kind: sum(table.row_bytes for table in tables[kind].values()) for kind in recent}
        self._turn = 0

    def begin(self, batch: Ids) -> Begun:
        """Ask for the remote rows of the next batch, as far as those before it have not.

        Args:
            batch: int64 ids by kind; kinds without names are passed over.

        Raises:
            DataError: an id is out of range.
            WireError: an owner cannot be asked.
        """
        wanted = {kind: self._rows.find(kind, batch[kind]) for kind in self._recent if kind in batch}
        self._take_turn()
        self._largest = max(self._largest, sum(self._row_bytes[kind] * here.ids.size for kind, here in wanted.items()))
        self._let_go()
        floor = self._turn - len(self._before)
        missing: dict[Kind, Missing] = {}
        segments: dict[Kind, int] = {}
        for kind, here in wanted.items():
            if here.missed:
                missing[kind] = self._recent[kind].ask(here.ids, here.place, here.missed, self._turn, floor)
                segments[kind] = self._recent[kind].segments
        self._before.append(self._rows.request(missing) if missing else None)
        self._kept += sum(each.nbytes for each in missing.values())
        requests = tuple(before for before in self._before if before is not None) if missing else ()
        return Begun(self._rows, self._tables, wanted, requests, segments, self._dtype)

    def _let_go(self) -> None:
        """Forget what the earliest batches asked for, where that is too much."""
        while self._before and (len(self._before) >= self._batches or self._kept > KEPT_BATCHES * self._largest):
            earliest = self._before.popleft()
            if earliest is not None:
                self._kept -= sum(missing.nbytes for missing in earliest.missing.values())

    def _take_turn(self) -> None:
        if self._turn == LAST_TURN:
            self._turn = 0
            for recent in self._recent.values():
                recent.forget()
        self._turn += 1


class Begun:
    """A batch whose remote rows were asked for; made by :meth:`Stream.begin`. Rows are held until it is made.

    Args:
        rows: that serve it.
        tables: the tensors wanted, by kind and name.
        wanted: what of them.
        requests: what has its remote rows, the batches' before it too; () where it has none.
        segments: how many there are of each kind that has remote rows.
        dtype: of floating tensors; None: as stored.
    """

    def __init__(
        self,
        rows: Rows,
        tables: Tables,
        wanted: dict[Kind, Wanted],
        requests: tuple[Requests, ...],
        segments: Mapping[Kind, int],
        dtype: torch.dtype | None,
    ) -> None:
        self._rows, self._tables, self._segments, self._dtype = rows, tables, segments, dtype
        self._wanted: dict[Kind, Wanted] | None = wanted
        self._requests = requests

    def make(self) -> dict[Kind, dict[str, Tensor]]:
        """Make the tensors, once, in the order of the batch's ids.

        Raises:
            WireError: an owner failed to answer.
            ValueError: it was made before.
        """
        if self._wanted is None:
            raise ValueError("the batch was made before, and its ids are forgotten")
        wanted, self._wanted = self._wanted, None
        waits = not all(requests.arrived for requests in self._requests)  # or all is copied in one go
        begun = {kind: self._hosted(kind, here) if waits and here.missed else {} for kind, here in wanted.items()}
        for requests in self._requests:
            requests.receive()
        made = {kind: self._all(kind, here, begun[kind]) for kind, here in wanted.items()}
        self._requests = ()
        return made

    def _hosted(self, kind: Kind, wanted: Wanted) -> dict[str, Tensor]:
        """Copy what is here, while the rest is on its way: of dense tensors whose dtype does not change."""
        outs: dict[str, Tensor] = {}
        for name, table in self._tables[kind].items():
            if isinstance(table, DenseTable) and table.goes_as(self._dtype) == table.dtype:
                outs[name] = table.empty(wanted.place.size, self._rows.pool, table.dtype)
                table.fill(outs[name], wanted.place, table.bases, 0, table.bases.shape[1])
        return outs

    def _all(self, kind: Kind, wanted: Wanted, begun: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy what was not copied yet."""
        made: dict[str, Tensor] = {}
        for name, table in self._tables[kind].items():
            bases = self._bases(kind, name, table) if wanted.missed else table.bases
            if name in begun:
                assert isinstance(table, DenseTable)
                made[name] = begun[name]
                table.fill(made[name], wanted.place, bases, table.bases.shape[1], bases.shape[1])
            else:
                pieces = table.gather(wanted.place, bases, self._rows.pool, table.goes_as(self._dtype))
                made[name] = table.finish(pieces)
        return made

    def _bases(self, kind: Kind, name: str, table: Table) -> Array:
        """The addresses of all segments: parts and cache, and what the batches asked for."""
        bases = np.zeros((table.bases.shape[0], self._segments[kind]), np.int64)
        bases[:, : table.bases.shape[1]] = table.bases
        for requests in self._requests:
            missing = requests.missing.get(kind)
            if missing is not None:  # those of the latest come last, and prevail where segments were numbered anew
                bases[:, missing.first : missing.first + missing.bases[name].shape[1]] = missing.bases[name]
        return bases
