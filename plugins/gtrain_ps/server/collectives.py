"""Collectives of the workers through a server: each one's tensors, to all of them; results outlive the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gtrain.wire import Message
from gtrain_ps.packing import prepare, unpack
from gtrain_ps.server.memory import Region
from gtrain_ps.server.replay import GrowingMemory

INDEX_BITS = 32
_HEAD = 64
"""Bytes before each exchange, which say how long it is; tensors behind them begin where torch would have them begin."""
Keep = Callable[[int, Sequence[Tensor]], None]


def collective_id(step: int, index: int) -> int:
    """One number for the ``index``-th exchange after ``step`` steps; later ones are larger."""
    return step << INDEX_BITS | index


class CollectiveResults:
    """Results of exchanges among the workers, by their :func:`collective_id`.

    A worker that comes back goes through the exchanges since its step once more. It may read servers that are a step
    ahead by then, and give something else than its life before: what all workers had given is what counts, also when
    the server died meanwhile. So a result is kept before anybody is told of it. Those of one step are kept behind one
    another in the slot of the step, whose ``heads`` say which step it is (plus 1) and how many bytes count.

    Args:
        count: steps that are kept.
        region: where.
    """

    def __init__(self, count: int, region: Region) -> None:
        self._count, self._rooms = count, GrowingMemory("exchanges", region)
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


class Collectives:
    """Exchanges among the workers, by their :func:`~gtrain_ps.server.collectives.collective_id`.

    Called by the server's loop alone.

    Args:
        workers: K.
        exchanges: those that all workers took part in.
        keep: puts a result there.
    """

    def __init__(self, workers: int, exchanges: CollectiveResults, keep: Keep | None = None) -> None:
        self._workers, self._exchanges = workers, exchanges
        self._keep: Keep = keep or exchanges.keep
        self._given: dict[int, dict[int, Tensor]] = {}
        self._waiting: dict[int, list[Future[Message | None]]] = {}

    @property
    def passed(self) -> int:
        """The last exchange that all workers took part in, plus 1."""
        return self._exchanges.passed

    def give(self, worker: int, where: int, tensor: Tensor) -> Future[Message | None]:
        """Take a worker's tensor; the answer is those of all workers in the order of their ranks.

        Args:
            worker: who gives it.
            where: which exchange. If all workers took part in it before, that is what is answered.
            tensor: its own.
        """
        answer: Future[Message | None] = Future()
        known = self._exchanges.of(where)
        if known is not None:
            answer.set_result(Message({}, known))
            return answer
        given = self._given.setdefault(where, {})
        given.setdefault(worker, tensor)
        self._waiting.setdefault(where, []).append(answer)
        if len(given) == self._workers:
            del self._given[where]
            rows = [given[rank] for rank in range(self._workers)]
            self._keep(where, rows)
            for each in self._waiting.pop(where):
                each.set_result(Message({}, rows))
        return answer

    def drop(self, worker: int) -> None:
        """Forget what a former life of a worker gave and the others have not answered."""
        for given in self._given.values():
            given.pop(worker, None)

    def missing(self) -> set[int]:
        """Workers that others wait for."""
        return {rank for given in self._given.values() if given for rank in range(self._workers) if rank not in given}
