"""Collectives of the workers through a server: every worker gets the tensors of all. Results survive the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gtrain.wire import Message
from gtrain_ps.packing import prepare, unpack
from gtrain_ps.server.memory import ServerMemory
from gtrain_ps.server.replay import GrowingMemory

INDEX_BITS = 32
_HEAD = 64
"""Bytes before each result, which hold its length; the tensors behind them stay aligned."""
StoreResult = Callable[[int, Sequence[Tensor]], None]


def collective_id(step: int, index: int) -> int:
    """Return one number for the ``index``-th collective after ``step`` steps; later collectives have larger ones."""
    return step << INDEX_BITS | index


class CollectiveResults:
    """Results of the workers' collectives, by their :func:`collective_id`.

    A restarted worker repeats the collectives since its step. By then it may read tables that are a step ahead, and
    contribute other values than the process before it. The first complete result counts, also if the server died in
    between: a result is stored before any worker receives it. The results of one step lie one behind another in the
    step's slot; ``heads`` says which step that is (plus 1) and how many bytes count.

    Args:
        count: number of steps that are kept.
        memory: holds the results.
    """

    def __init__(self, count: int, memory: ServerMemory) -> None:
        self._count, self._slots = count, GrowingMemory("exchanges", memory)
        self._heads = memory.tensor("exchanges/heads", (count, 2), torch.int64)
        self._passed = memory.tensor("exchanges/passed", (1,), torch.int64)
        self._results: dict[int, list[Tensor]] = {}
        for slot in range(count):
            self._read(slot)
        self._passed[0] = max([self.passed, *(collective + 1 for collective in self._results)])

    @property
    def passed(self) -> int:
        """The last completed collective, plus 1."""
        return int(self._passed[0])

    def get(self, collective: int) -> list[Tensor] | None:
        """Return every worker's tensor in rank order; None before all workers have contributed."""
        return self._results.get(collective)

    def store(self, collective: int, tensors: Sequence[Tensor]) -> None:
        """Store a result. Repetitions have no effect."""
        if collective not in self._results:
            self._write(collective, tensors)
        self._passed[0] = max(self.passed, collective + 1)

    def _write(self, collective: int, tensors: Sequence[Tensor]) -> None:
        step = collective >> INDEX_BITS
        slot, packed = step % self._count, prepare([collective, list(tensors)])
        if int(self._heads[slot, 0]) != step + 1:
            self._clear(slot, step)
        start = int(self._heads[slot, 1])
        end = start + _HEAD + packed.nbytes
        memory = self._slots.allocate(slot, end, preserve=start)[start:end]
        memory[:8] = torch.tensor([packed.nbytes]).view(torch.uint8)
        packed.write(memory[_HEAD:])
        # The commit: until this store, a restarted server ignores the bytes behind the former end.
        self._heads[slot, 1] = end
        self._results[collective] = unpack(memory[_HEAD:])[1]

    def _clear(self, slot: int, step: int) -> None:
        """Give a slot to a later step."""
        previous = int(self._heads[slot, 0]) - 1
        # In this order a kill leaves an empty slot, never old results under a new step.
        self._heads[slot, 0], self._heads[slot, 1] = 0, 0
        self._heads[slot, 0] = step + 1
        self._results = {number: result for number, result in self._results.items() if number >> INDEX_BITS != previous}

    def _read(self, slot: int) -> None:
        if not int(self._heads[slot, 0]):
            return
        start, end, memory = 0, int(self._heads[slot, 1]), self._slots.allocate(slot)
        while start < end:
            nbytes = int(memory[start : start + 8].view(torch.int64))
            collective, tensors = unpack(memory[start + _HEAD : start + _HEAD + nbytes])
            self._results[collective] = tensors
            start += _HEAD + nbytes


class Collectives:
    """The workers' collectives, by their :func:`collective_id`. Only the server's loop calls it.

    Args:
        workers: K.
        results: the completed collectives.
        store: stores a result there; default: ``results.store``.
    """

    def __init__(self, workers: int, results: CollectiveResults, store: StoreResult | None = None) -> None:
        self._workers, self._results = workers, results
        self._store: StoreResult = store or results.store
        self._contributions: dict[int, dict[int, Tensor]] = {}
        self._waiting: dict[int, list[Future[Message | None]]] = {}

    def contribute(self, worker: int, collective: int, tensor: Tensor) -> Future[Message | None]:
        """Add a worker's tensor; the reply holds those of all workers in rank order.

        Args:
            worker: rank of the worker.
            collective: the collective's id; the reply of a completed one is its stored result.
            tensor: the worker's contribution.
        """
        reply: Future[Message | None] = Future()
        result = self._results.get(collective)
        if result is not None:
            reply.set_result(Message({}, result))
            return reply
        contributions = self._contributions.setdefault(collective, {})
        # The first contribution counts: a restarted worker may compute another value.
        contributions.setdefault(worker, tensor)
        self._waiting.setdefault(collective, []).append(reply)
        if len(contributions) == self._workers:
            del self._contributions[collective]
            tensors = [contributions[rank] for rank in range(self._workers)]
            replies = self._waiting.pop(collective)
            try:
                self._store(collective, tensors)
            except BaseException as error:
                for waiting in replies:
                    waiting.set_exception(error)
                raise
            for waiting in replies:
                waiting.set_result(Message({}, tensors))
        return reply

    def drop(self, worker: int) -> None:
        """Forget the contributions of a worker that was restarted to collectives that are not complete."""
        for contributions in self._contributions.values():
            contributions.pop(worker, None)

    def missing(self) -> set[int]:
        """Return the ranks that other workers wait for."""
        incomplete = [contributions for contributions in self._contributions.values() if contributions]
        return {rank for contributions in incomplete for rank in range(self._workers) if rank not in contributions}
