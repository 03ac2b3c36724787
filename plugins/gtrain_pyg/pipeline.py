"""Batches made ahead of the step that trains on them: sampled, then fetched, then assembled.

While step i trains, the remote rows of batch i+1 are on their way, and the batches after that are sampled, in threads.
A batch is assembled when it is asked for, or beside the step where that is told to be worth the memory of a second one.
What a batch holds does not depend on any of this.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from gtrain.data.batches.loader import prefetched

Job = TypeVar("Job")
Sample = TypeVar("Sample")
Rows = TypeVar("Rows")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Stages(Generic[Job, Sample, Rows, Made]):
    """What is done for each batch.

    Attributes:
        sample: called by several threads at once, for different jobs.
        begin: asks for what a batch needs; called in the order of the jobs.
        finish: makes a batch from its job, its sample and its rows; called in the order of the jobs.
    """

    sample: Callable[[Job], Sample]
    begin: Callable[[Sample], Rows]
    finish: Callable[[Job, Sample, Rows], Made]


class Pipeline(Generic[Job, Sample, Rows, Made]):
    """Runs the stages ahead of whoever iterates, and no further ahead than asked.

    Args:
        stages: what is done.
        threads: that sample.
        ahead: batches that are sampled and fetched ahead; 0: nothing is done ahead, and no thread is started.
        beside: finish a batch while the one before it is in use, in a thread; else when it is asked for.
    """

    def __init__(
        self, stages: Stages[Job, Sample, Rows, Made], *, threads: int = 1, ahead: int = 2, beside: bool = False
    ) -> None:
        self._stages, self._threads, self._ahead, self._beside = stages, threads, ahead, beside

    def run(self, jobs: Iterable[Job]) -> Generator[Made]:
        """Yield a batch for each job, in order. What a stage raises is raised here."""
        return self._threaded(jobs) if self._ahead else self._at_once(jobs)

    def _at_once(self, jobs: Iterable[Job]) -> Generator[Made]:
        for job in jobs:
            sample = self._stages.sample(job)
            yield self._stages.finish(job, sample, self._stages.begin(sample))

    def _threaded(self, jobs: Iterable[Job]) -> Generator[Made]:
        samplers = ThreadPoolExecutor(self._threads, "gtrain-sample")
        fetcher = ThreadPoolExecutor(1, "gtrain-fetch")
        made = self._made(iter(jobs), samplers, fetcher)
        try:
            yield from prefetched(made, 1, "gtrain-make", joined=False) if self._beside else made
        finally:
            for pool in (samplers, fetcher):  # a thread may still wait for a peer's answer; its deadline ends it
                pool.shutdown(wait=False, cancel_futures=True)

    def _made(self, jobs: Iterator[Job], samplers: ThreadPoolExecutor, fetcher: ThreadPoolExecutor) -> Generator[Made]:
        """The batches, one at a time; the rows of one more are under way, and the rest of those ahead are sampled."""
        sampled: deque[tuple[Job, Future[Sample]]] = deque()
        begun: deque[tuple[Job, Future[Sample], Future[Rows]]] = deque()

        def begin(sample: Future[Sample]) -> Rows:
            return self._stages.begin(sample.result())

        def move_on() -> None:
            missing = self._ahead - len(begun) - len(sampled)
            sampled.extend((job, samplers.submit(self._stages.sample, job)) for job in itertools.islice(jobs, missing))
            if sampled and not begun:
                job, sample = sampled.popleft()
                begun.append((job, sample, fetcher.submit(begin, sample)))

        move_on()
        while begun:
            ready = begun.popleft()
            move_on()
            yield self._finish(*ready)
            del ready

    def _finish(self, job: Job, sample: Future[Sample], rows: Future[Rows]) -> Made:
        begun = rows.result()
        return self._stages.finish(job, sample.result(), begun)
