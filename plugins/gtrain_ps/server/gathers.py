"""What workers say to each other through a server: each one's tensors, to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gtrain.wire import Message
from gtrain_ps.server.memory import Region

INDEX_BITS = 32


def place(step: int, index: int) -> int:
    """One number for the ``index``-th exchange after ``step`` steps; later ones are larger."""
    return step << INDEX_BITS | index


class Gathers:
    """Exchanges among the workers, by their :func:`place`; results are kept for a worker that comes back.

    Called by the server's loop alone.

    Args:
        workers: K.
        region: where is kept how far the workers have come together.
        oldest: the first step to which a worker may have to go back.
        note: is told how far the workers have come, before they are.
    """

    def __init__(
        self,
        workers: int,
        region: Region,
        oldest: Callable[[], int],
        note: Callable[[int], None] = lambda passed: None,
    ) -> None:
        self._workers, self._oldest, self._note = workers, oldest, note
        self._passed = region.tensor("gathers/passed", (1,), torch.int64)
        self._given: dict[int, dict[int, Tensor]] = {}
        self._waiting: dict[int, list[Future[Message | None]]] = {}

    @property
    def passed(self) -> int:
        """The last exchange that all workers took part in, plus 1."""
        return int(self._passed[0])

    def give(self, worker: int, where: int, tensors: Sequence[Tensor]) -> Future[Message | None]:
        """Take a worker's tensor; the answer is those of all workers in the order of their ranks.

        Args:
            worker: who gives it.
            where: which exchange.
            tensors: its own; or those of all, from one who had the answer before this server died. These count: a
                worker that comes back may have asked servers that are a step ahead, and gives something else.
        """
        answer: Future[Message | None] = Future()
        given = self._given.setdefault(where, {})
        if len(tensors) == 1:
            given.setdefault(worker, tensors[0])
        else:
            given.update(enumerate(tensors))
        self._waiting.setdefault(where, []).append(answer)
        if len(given) == self._workers:
            if where >= self.passed:
                self.pass_to(where + 1)
                self._note(where + 1)
            for each in self._waiting.pop(where):
                each.set_result(Message({}, [given[rank] for rank in range(self._workers)]))
            self._forget(place(self._oldest(), 0))
        return answer

    def pass_to(self, passed: int) -> None:
        """Note how far the workers have come."""
        self._passed[0] = passed

    def drop(self, worker: int) -> None:
        """Forget what a former life of a worker gave and the others have not answered."""
        for given in self._given.values():
            if len(given) < self._workers:
                given.pop(worker, None)

    def missing(self) -> set[int]:
        """Workers that others wait for."""
        open_ones = [given for given in self._given.values() if 0 < len(given) < self._workers]
        return {rank for given in open_ones for rank in range(self._workers) if rank not in given}

    def _forget(self, before: int) -> None:
        for where in [where for where in self._given if where < before and where not in self._waiting]:
            del self._given[where]
