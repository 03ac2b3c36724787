"""The batches of a split as Lightning iterates over them: sized, prepared ahead, and resumable within an epoch.

While step i trains, the remote rows of batch i+1 are in transit and threads sample the batches after it. A batch is
assembled when the trainer asks for it or, with ``overlap``, beside the previous step, which needs memory for a second
batch.

Batches for a GPU are sampled and assembled by threads, several at a time, and one thread copies them in order
(:mod:`gtrain_pyg.device`). The settings of the pipeline do not change the content of a batch.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.loader import SeedLoader, prefetched
from gtrain.memory.heap import trim_heap
from gtrain.strategy.counters import Counters
from gtrain_pyg.device import BatchMover, HostBatch
from gtrain_pyg.features.device_cache import CachedRows
from gtrain_pyg.features.feature_store import FeatureStore, PendingBatch, Prefetcher
from gtrain_pyg.peers import Array, NodeOrEdgeType
from gtrain_pyg.sampling.sampler import DistributedSampler, Subgraph
from gtrain_pyg.seeds import SeedSource, Step, global_shares, local_shares, make_batch, num_steps
from gtrain_pyg.threads import OrderedThreads

Job = TypeVar("Job")
Sample = TypeVar("Sample")
Rows = TypeVar("Rows")
Batch = TypeVar("Batch")
Moved = TypeVar("Moved")


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
        # A thread may still wait for a peer's reply; the request's deadline ends it.
        for pool in (samplers, fetcher):
            pool.shutdown(wait=False, cancel_futures=True)


def pipelined_copies(
    jobs: Iterable[Job],
    sample: Callable[[Job], Sample],
    prefetch: Callable[[Sample], Rows],
    assemble: Callable[[Job, Sample, Rows], Batch],
    move: Callable[[Batch], Moved],
    *,
    threads: int = 1,
    most_threads: int | None = None,
    ahead: int = 2,
    in_order: bool = True,
) -> Generator[Moved]:
    """Yield a batch on a device for each job, in order; exceptions of the stages are raised here.

    Of the batches that are not taken, ``ahead`` are with the thread that copies, and one for each thread is being made.
    A batch that is not ready when it is asked for starts another thread, up to ``most_threads``, and then none before
    as many batches were taken as were on their way: more threads than needed take memory bandwidth and caches from
    the thread that trains.

    Args:
        jobs: what to make batches of.
        sample, assemble: as for :func:`pipelined`; called by several threads at once, for different jobs.
        prefetch: sends the requests of a batch.
        move: copies a batch to the device; called in the order of the jobs.
        threads: threads that sample and assemble, at first.
        most_threads: the most of them; None: ``threads``.
        ahead: batches that are copied ahead; 0 prepares each batch on demand and starts no thread.
        in_order: call ``prefetch`` in the order of the jobs. Otherwise one call makes a batch; without requests, the
            order does not matter.
    """
    if not ahead:
        for job in jobs:
            drawn = sample(job)
            yield move(assemble(job, drawn, prefetch(drawn)))
        return

    def make(job: Job) -> Batch:
        drawn = sample(job)
        return assemble(job, drawn, prefetch(drawn))

    makers: _MakersInOrder[Job, Batch] | OrderedThreads[Job, Batch]
    makers = (
        _MakersInOrder(sample, prefetch, assemble, most_threads or threads)
        if in_order
        else OrderedThreads(make, threads, "gtrain-sample")
    )
    copier: OrderedThreads[None, Moved] = OrderedThreads(lambda _: move(makers.get()), 1, "gtrain-copy")
    queue = iter(jobs)
    made = copying = 0  # jobs that were started, and that the copying thread was asked for, less those taken
    taken = 0  # batches since the last thread was started

    def refill() -> None:
        nonlocal made, copying
        for job in itertools.islice(queue, ahead + threads - made):
            makers.put(job)
            made += 1
        while copying < min(made, ahead):
            copier.put(None)
            copying += 1

    try:
        refill()
        while copying:
            if taken > ahead + threads and threads < (most_threads or threads) and not copier.is_ready:
                makers.add_thread()
                threads, taken = threads + 1, 0
                refill()
            moved = copier.get()
            made, copying, taken = made - 1, copying - 1, taken + 1
            refill()
            yield moved
            del moved  # its memory serves a later batch
    finally:
        # A thread may still wait for a peer's reply; the request's deadline ends it.
        makers.close()
        copier.close()


class _MakersInOrder(Generic[Job, Batch]):
    """Threads that make batches, while another requests their rows in the order of the jobs. For the arguments, see
    :func:`pipelined`; for the methods, see :class:`OrderedThreads`.
    """

    def __init__(
        self,
        sample: Callable[[Job], Any],
        prefetch: Callable[[Any], Any],
        assemble: Callable[[Job, Any, Any], Batch],
        threads: int,
    ) -> None:
        self._sample, self._prefetch, self._assemble = sample, prefetch, assemble
        self._workers = ThreadPoolExecutor(threads, "gtrain-sample")
        self._fetcher = ThreadPoolExecutor(1, "gtrain-fetch")
        self._fetching: deque[Future[Future[Batch]]] = deque()

    def put(self, job: Job) -> None:
        self._fetching.append(self._fetcher.submit(self._fetch, job, self._workers.submit(self._sample, job)))

    def add_thread(self) -> None:
        """Nothing: as many threads start as there are batches to make."""

    def get(self) -> Batch:
        return self._fetching.popleft().result().result()

    def close(self) -> None:
        for pool in (self._workers, self._fetcher):
            pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, job: Job, drawn: Future[Any]) -> Future[Batch]:
        sampled = drawn.result()
        # Submitted from here, so that no worker waits for another.
        return self._workers.submit(self._assemble, job, sampled, self._prefetch(sampled))


@dataclass(frozen=True)
class PrefetchPlan:
    """How batches are prepared ahead.

    Attributes:
        threads: sampling threads, at most.
        first_threads: those that start with an epoch on a GPU, which starts more as they are needed; None: all.
        prefetch: batches that are sampled and whose remote rows are fetched ahead, or that are on the device ahead; 0
            prepares each on demand.
        lookahead: window of successive batches; a remote row that several of them need is requested once.
        overlap: assemble a batch while the previous one is in use.
        trim: whether layers may leave out what the seeds' results do not depend on.
        remote: whether rows may have to be requested from other ranks.
    """

    threads: int = 1
    first_threads: int | None = None
    prefetch: int = 2
    lookahead: int = 1
    overlap: bool = False
    trim: bool = True
    remote: bool = True


Fetched = tuple[PendingBatch, dict[NodeOrEdgeType, CachedRows]]
"""The rows of a batch that host memory provides, and those that the device has."""


class SampledBatches:
    """Batches of one split; each epoch has its own order if the loader shuffles.

    Args:
        loader: describes the split.
        source: its seeds.
        sampler: grows subgraphs from the seeds.
        features: fetches the subgraphs' node and edge tensors.
        plan: how batches are prepared ahead.
        ranks: this rank, and the number of ranks.
        counters: count the time spent waiting for a batch.
        on_batch: called with each batch just before it is yielded.
        mover: moves batches to a device; None: they stay in host memory.
    """

    def __init__(
        self,
        loader: SeedLoader,
        source: SeedSource,
        sampler: DistributedSampler,
        features: FeatureStore,
        plan: PrefetchPlan,
        ranks: tuple[int, int],
        counters: Counters,
        on_batch: Callable[[Data | HeteroData], None] = lambda batch: None,
        mover: BatchMover | None = None,
    ) -> None:
        self._loader, self._source, self._sampler, self._features = loader, source, sampler, features
        self._plan, self._counters, self._on_batch, self._mover = plan, counters, on_batch, mover
        self._rank, self._world = ranks
        self._skip = self._yielded = 0
        self._epoch = loader.epoch

    def __len__(self) -> int:
        """Return the steps of an epoch, the same on every rank."""
        return num_steps(self._source.total, self._loader.batch_size)

    def __iter__(self) -> Iterator[Data | HeteroData]:
        self._epoch = self._loader.next_epoch()
        self._yielded, self._skip = self._skip, 0
        trim_heap()
        with closing(self._batches(self.steps(self._epoch)[self._yielded :])) as batches:
            while True:
                with self._counters.span("wait: batch"):
                    batch = next(batches, None)
                if batch is None:
                    return
                self._yielded += 1
                self._on_batch(batch)
                yield batch
                del batch

    def steps(self, epoch: int) -> Sequence[Step]:
        """Return this rank's share of each step of an epoch."""
        loader, source = self._loader, self._source
        order = loader.seed + epoch if loader.shuffle else None
        if source.owner is None:
            shares = local_shares(source.count, len(self), order)
        else:
            shares = global_shares(source.owner, loader.batch_size, order, self._rank, self._world)
        epoch = epoch if loader.shuffle else 0
        return [Step(epoch, n, n * self._world + self._rank, share) for n, share in enumerate(shares)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch."""
        return {"epoch": self._epoch, "batches": self._yielded % len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume an epoch: the next iteration skips the batches that were yielded before."""
        self._skip = state["batches"]

    # -------------------------------------------------------------------------------------------------- stages

    def _batches(self, steps: Sequence[Step]) -> Generator[Data | HeteroData]:
        plan, mover = self._plan, self._mover
        if mover is None:
            yield from pipelined(
                steps,
                self._sample,
                partial(self._prefetch, self._features.prefetcher(plan.lookahead)),
                self._assemble,
                threads=plan.threads,
                ahead=plan.prefetch,
                overlap=plan.overlap,
            )
            return
        moved = pipelined_copies(
            steps,
            self._sample,
            partial(self._fetch, threading.local(), mover),
            self._assemble_for_device,
            mover,
            threads=plan.first_threads or plan.threads,
            most_threads=plan.threads,
            ahead=plan.prefetch,
            in_order=plan.remote,
        )
        with closing(moved):
            for batch in moved:
                yield batch.take()
                del batch

    def _sample(self, step: Step) -> Subgraph:
        roots = self._source.roots(step)
        return self._sampler.sample(roots.ids, epoch=step.epoch, batch=step.batch, seed_time=roots.time)

    def _prefetch(self, prefetcher: Prefetcher, subgraph: Subgraph) -> PendingBatch:
        ids: dict[NodeOrEdgeType, Array] = dict(subgraph.node.items())
        ids.update(subgraph.edge.items())
        pending = prefetcher.prefetch(ids)
        # The edge positions are not needed again: their memory serves another batch.
        subgraph.edge.clear()
        return pending

    def _assemble(self, step: Step, subgraph: Subgraph, pending: PendingBatch) -> Data | HeteroData:
        fields = self._source.fields(step, subgraph)
        hetero = self._loader.store.is_hetero
        return make_batch(subgraph, pending.get(), fields, hetero=hetero, trim=self._plan.trim)

    def _fetch(self, own: threading.local, mover: BatchMover, subgraph: Subgraph) -> Fetched:
        """Request the remote rows that the device does not have.

        Args:
            own: has the prefetcher of the calling thread. If there are requests, one thread calls this.
            mover: of the device.
            subgraph: its edge positions are removed.
        """
        if not hasattr(own, "prefetcher"):
            # The device converts rows, but for those that are narrower in the run's dtype.
            as_stored = self._features.dtype != torch.bfloat16
            own.prefetcher = self._features.prefetcher(self._plan.lookahead, as_stored=as_stored)
        ids: dict[NodeOrEdgeType, Array] = dict(subgraph.node.items())
        ids.update(subgraph.edge.items())
        subgraph.edge.clear()
        cached: dict[NodeOrEdgeType, CachedRows] = {}
        features = self._features
        if mover.cache is not None:
            needed = sum(rows.size for rows in ids.values())
            cached, ids = mover.cache.split(ids, features.pool)
            features.counts.on_device += needed - sum(rows.size for rows in ids.values())
        return own.prefetcher.prefetch(ids), cached

    def _assemble_for_device(self, step: Step, subgraph: Subgraph, fetched: Fetched) -> HostBatch:
        pending, cached = fetched
        fields = self._source.fields(step, subgraph)
        return HostBatch(subgraph, pending.get(), fields, self._loader.store.is_hetero, self._plan.trim, cached)
