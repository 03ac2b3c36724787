"""Prepare batches ahead of the training step: sample the subgraph, fetch its remote rows, assemble the batch.

While step i trains, the remote rows of batch i+1 are in transit and threads sample the batches after it. A batch is
assembled when the trainer asks for it or, with ``overlap``, beside the previous step, which needs memory for a second
batch. The settings of the pipeline do not change the content of a batch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from gtrain.data.batches.loader import prefetched

Job = TypeVar("Job")
Sample = TypeVar("Sample")
Rows = TypeVar("Rows")
Batch = TypeVar("Batch")


def pipelined(
    jobs: Iterable[Job],
    sample: Callable[[Job], Sample],
    prefetch: Callable[[Sample], Rows],
    assemble: Callable[[Job, Sample, Rows], Batch],
    *,
    threads: int = 1,
    ahead: int = 2,
    overlap: bool = False,
) -> Generator[Batch]:
    """Yield a batch for each job, in order; exceptions of the stages are raised here.

    Args:
        jobs: what to make batches of.
        sample: called by several threads at once, for different jobs.
        prefetch: sends the requests of a batch; called in the order of the jobs.
        assemble: makes a batch from its job, its sample and its rows; called in the order of the jobs.
        threads: sampling threads.
        ahead: batches that are sampled and fetched ahead; 0 prepares each batch on demand and starts no thread.
        overlap: assemble a batch in a thread while the previous one is in use.
    """
    if not ahead:
        for job in jobs:
            drawn = sample(job)
            yield assemble(job, drawn, prefetch(drawn))
        return
    samplers, fetcher = ThreadPoolExecutor(threads, "gtrain-sample"), ThreadPoolExecutor(1, "gtrain-fetch")
    queue = iter(jobs)
    sampled: deque[tuple[Job, Future[Sample]]] = deque()
    fetching: deque[tuple[Job, Future[Sample], Future[Rows]]] = deque()  # at most one

    def refill() -> None:
        missing = ahead - len(fetching) - len(sampled)
        sampled.extend((job, samplers.submit(sample, job)) for job in itertools.islice(queue, missing))
        if sampled and not fetching:
            job, drawn = sampled.popleft()
            fetching.append((job, drawn, fetcher.submit(lambda: prefetch(drawn.result()))))

    def assembled() -> Generator[Batch]:
        refill()
        while fetching:
            job, drawn, rows = fetching.popleft()
            refill()
            yield assemble(job, drawn.result(), rows.result())
            del drawn, rows  # their memory serves a later batch

    try:
        yield from prefetched(assembled(), 1, "gtrain-make", joined=False) if overlap else assembled()
    finally:
        for pool in (samplers, fetcher):  # a thread may still wait for a peer's reply; the request's deadline ends it
            pool.shutdown(wait=False, cancel_futures=True)
