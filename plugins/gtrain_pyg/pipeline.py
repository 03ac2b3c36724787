"""Batches made ahead of the step that trains on them: sampled, then fetched, then assembled, each in its own threads.

While step i trains, batch i+1 is assembled, the remote rows of the window after it are on their way, and the batches
after that are sampled. What a batch holds does not depend on any of this.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

Job = TypeVar("Job")
Sample = TypeVar("Sample")
Rows = TypeVar("Rows")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Stages(Generic[Job, Sample, Rows, Made]):
    """What is done for each batch.

    Attributes:
        sample: called by several threads at once, for different jobs.
        begin: asks for what the batches of a window need together; called for one window after the other.
        finish: makes batch i of a window from its job, its sample and the window's rows; called in order.
    """

    sample: Callable[[Job], Sample]
    begin: Callable[[list[Sample]], Rows]
    finish: Callable[[Job, Sample, Rows, int], Made]


class Pipeline(Generic[Job, Sample, Rows, Made]):
    """Runs the stages ahead of whoever iterates, and no further ahead than asked.

    Args:
        stages: what is done.
        threads: that sample.
        ahead: batches sampled ahead of the window that is fetched; 0: nothing is done ahead, and no thread is started.
        window: batches whose rows are asked for together.
    """

    def __init__(
        self, stages: Stages[Job, Sample, Rows, Made], *, threads: int = 1, ahead: int = 2, window: int = 1
    ) -> None:
        self._stages, self._threads, self._ahead, self._window = stages, threads, ahead, window

    def run(self, jobs: Iterable[Job]) -> Generator[Made]:
        """Yield a batch for each job, in order. What a stage raises is raised here."""
        return self._threaded(jobs) if self._ahead else self._at_once(iter(jobs))

    def _at_once(self, jobs: Iterator[Job]) -> Generator[Made]:
        while window := list(itertools.islice(jobs, self._window)):
            samples = [self._stages.sample(job) for job in window]
            rows = self._stages.begin(samples)
            for i, (job, sample) in enumerate(zip(window, samples, strict=True)):
                yield self._stages.finish(job, sample, rows, i)

    def _threaded(self, jobs: Iterable[Job]) -> Generator[Made]:
        """One batch is complete, or being completed, while the one before it is in use."""
        samplers = ThreadPoolExecutor(self._threads, "gtrain-sample")
        fetcher, maker = ThreadPoolExecutor(1, "gtrain-fetch"), ThreadPoolExecutor(1, "gtrain-make")
        made = self._made(iter(jobs), samplers, fetcher)
        try:
            following = maker.submit(next, made, None)
            while (batch := following.result()) is not None:
                following = maker.submit(next, made, None)
                yield batch
                del batch  # so that its memory serves the batch after the next
        finally:
            for pool in (samplers, fetcher, maker):  # a thread may still wait for a peer's answer; its deadline ends it
                pool.shutdown(wait=False, cancel_futures=True)

    def _made(
        self, jobs: Iterator[Job], samplers: ThreadPoolExecutor, fetcher: ThreadPoolExecutor
    ) -> Iterator[Made | None]:
        """The batches, one at a time; the next window is asked for when the current one is half used up."""
        sampled: deque[tuple[Job, Future[Sample]]] = deque()

        def start() -> tuple[list[tuple[Job, Future[Sample]]], Future[Rows]] | None:
            missing = self._ahead + self._window - len(sampled)
            sampled.extend((job, samplers.submit(self._stages.sample, job)) for job in itertools.islice(jobs, missing))
            window = [sampled.popleft() for _ in range(min(self._window, len(sampled)))]
            if not window:
                return None
            futures = [future for _, future in window]
            return window, fetcher.submit(lambda: self._stages.begin([future.result() for future in futures]))

        current = start()
        while current is not None:
            window, begun = current
            for i, (job, future) in enumerate(window):
                if i == len(window) // 2:
                    current = start()
                yield self._stages.finish(job, future.result(), begun.result(), i)
