"""Threads that work on successive jobs, with results in the order of the jobs, at a small cost per job.

The thread that trains holds Python's interpreter lock most of the time, and waits while other threads run in Python. A
job here takes two operations of a queue that is implemented in C. With an executor, submitting it and waiting for its
future would take as long in Python as sampling a batch does.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
_END = object()
_POLL_SECONDS = 1.0  # between two looks at whether the interpreter exits


class OrderedThreads(Generic[Job, Result]):
    """Threads that call a function for each job, and take turns.

    One thread may call :meth:`put` and :meth:`add_thread`, and one :meth:`get` after the ``put`` of its job.

    Args:
        function: called with a job; by all threads at the same time, with different jobs.
        threads: their number.
        name: prefix of their names.

    Example:
        >>> squares = OrderedThreads(lambda number: number**2, 2, "square")
        >>> for number in range(4):
        ...     squares.put(number)
        >>> [squares.get() for _ in range(4)]
        [0, 1, 4, 9]
        >>> squares.close()
    """

    def __init__(self, function: Callable[[Job], Result], threads: int, name: str) -> None:
        self._function, self._name = function, name
        self._closed = threading.Event()
        self._lanes: list[tuple[SimpleQueue[Any], SimpleQueue[Any]]] = []
        self._expected: deque[SimpleQueue[Any]] = deque()  # the queues of the next results
        for _ in range(threads):
            self.add_thread()
        self._turn = 0

    def add_thread(self) -> None:
        """Start another thread, which takes the next job."""
        self._turn = len(self._lanes)
        self._lanes.append((SimpleQueue(), SimpleQueue()))
        arguments = (self._function, *self._lanes[-1], self._closed)
        threading.Thread(target=_serve, name=f"{self._name}_{len(self._lanes) - 1}", args=arguments).start()

    def put(self, job: Job) -> None:
        """Add a job."""
        jobs, results = self._lanes[self._turn]
        jobs.put(job)
        self._expected.append(results)
        self._turn = (self._turn + 1) % len(self._lanes)

    def get(self) -> Result:
        """Wait for the next job's result, and return it.

        Raises:
            BaseException: what the function raised.
            CancelledError: the threads were closed before the job was started, or the interpreter exits.
        """
        result, error = _next(self._expected.popleft())
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`get` would return at once."""
        return bool(self._expected) and not self._expected[0].empty()

    def close(self) -> None:
        """Let the threads end after their current jobs, without waiting for them."""
        self._closed.set()
        for jobs, _ in self._lanes:
            jobs.put(_END)


def _serve(
    function: Callable[[Any], Any], jobs: SimpleQueue[Any], results: SimpleQueue[Any], closed: threading.Event
) -> None:
    result: tuple[Any, BaseException | None]
    with contextlib.suppress(CancelledError):
        while (job := _next(jobs)) is not _END:
            try:
                if closed.is_set():
                    raise CancelledError
                result = function(job), None
            except BaseException as error:  # noqa: BLE001 - get() raises it
                result = None, error
            results.put(result)
            del job, result  # their memory serves a later batch


def _next(queue: SimpleQueue[Any]) -> Any:
    """Wait for an item. The interpreter waits for its threads at exit: without close(), they end then by themselves."""
    while True:
        try:
            return queue.get(timeout=_POLL_SECONDS)
        except Empty:
            if not threading.main_thread().is_alive():
                raise CancelledError from None
