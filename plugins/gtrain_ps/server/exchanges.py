"""What all workers told each other in the last steps, in memory that outlives the server."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gtrain_ps.packing import prepare, unpack
from gtrain_ps.server.memory import Region
from gtrain_ps.server.slots import Rooms

INDEX_BITS = 32
_HEAD = 64
"""Bytes before each exchange, which say how long it is; tensors behind them begin where torch would have them begin."""


def place(step: int, index: int) -> int:
    """One number for the ``index``-th exchange after ``step`` steps; later ones are larger."""
    return step << INDEX_BITS | index


class Exchanges:
    """Results of exchanges among the workers, by their :func:`place`.

    A worker that comes back goes through the exchanges since its step once more. It may read servers that are a step
    ahead by then, and give something else than its life before: what all workers had given is what counts, also when
    the server died meanwhile. So a result is kept before anybody is told of it. Those of one step are kept behind one
    another in the slot of the step, whose ``heads`` say which step it is (plus 1) and how many bytes count.

    Args:
        count: steps that are kept.
        region: where.
    """

    def __init__(self, count: int, region: Region) -> None:
        self._count, self._rooms = count, Rooms("exchanges", region)
        self._heads = region.tensor("exchanges/heads", (count, 2), torch.int64)
        self._passed = region.tensor("exchanges/passed", (1,), torch.int64)
        self._known: dict[int, list[Tensor]] = {}
        for slot in range(count):
            self._read(slot)
        self._passed[0] = max([self.passed, *(where + 1 for where in self._known)])

    @property
    def passed(self) -> int:
        """The last exchange that is known, plus 1."""
        return int(self._passed[0])

    def of(self, where: int) -> list[Tensor] | None:
        """Every worker's tensor in the order of ranks; None where not all have given theirs."""
        return self._known.get(where)

    def keep(self, where: int, rows: Sequence[Tensor]) -> None:
        """Keep a result; once is enough, twice is the same."""
        if where not in self._known:
            self._write(where, rows)
        self._passed[0] = max(self.passed, where + 1)

    def _write(self, where: int, rows: Sequence[Tensor]) -> None:
        step = where >> INDEX_BITS
        slot, packed = step % self._count, prepare([where, list(rows)])
        if int(self._heads[slot, 0]) != step + 1:
            self._empty(slot, step)
        begin = int(self._heads[slot, 1])
        end = begin + _HEAD + packed.nbytes
        room = self._rooms.room(slot, end, begin)[begin:end]
        room[:8] = torch.tensor([packed.nbytes]).view(torch.uint8)
        packed.write(room[_HEAD:])
        self._heads[slot, 1] = end
        self._known[where] = unpack(room[_HEAD:])[1]

    def _empty(self, slot: int, step: int) -> None:
        """Give a slot to a later step."""
        before = int(self._heads[slot, 0]) - 1
        self._heads[slot, 0], self._heads[slot, 1] = 0, 0
        self._heads[slot, 0] = step + 1
        self._known = {where: rows for where, rows in self._known.items() if where >> INDEX_BITS != before}

    def _read(self, slot: int) -> None:
        if not int(self._heads[slot, 0]):
            return
        begin, end, room = 0, int(self._heads[slot, 1]), self._rooms.room(slot)
        while begin < end:
            nbytes = int(room[begin : begin + 8].view(torch.int64))
            where, rows = unpack(room[begin + _HEAD : begin + _HEAD + nbytes])
            self._known[where] = rows
            begin += _HEAD + nbytes
