"""What workers say to each other through a server: each one's tensors, to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from gtrain.wire import Message
from gtrain_ps.server.exchanges import Exchanges

Keep = Callable[[int, Sequence[Tensor]], None]


class Gathers:
    """Exchanges among the workers, by their :func:`~gtrain_ps.server.exchanges.place`.

    Called by the server's loop alone.

    Args:
        workers: K.
        exchanges: those that all workers took part in.
        keep: puts a result there.
    """

    def __init__(self, workers: int, exchanges: Exchanges, keep: Keep | None = None) -> None:
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
