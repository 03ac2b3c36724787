"""Jobs of strategy=pyg within one process: ranks that are threads, and real servers on the loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from helpers import LIMIT

from gtrain.graph.sampling import Columns
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.graph_structure import GraphStructure
from gtrain_pyg.peers import Hosting, PartBook, Peers, SharedArrays, detect_hosting
from gtrain_pyg.sampling.hop import METHOD, serve_sampling
from gtrain_pyg.sampling.sampler import DistributedSampler

Result = TypeVar("Result")


class ThreadGroup:
    """The part of :class:`gtrain.strategy.group.Group` that set-up uses, for ranks that are threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._values = barrier, values

    def all_gather_object(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(LIMIT)
        gathered = list(self._values)
        self._barrier.wait(LIMIT)
        return gathered

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self.all_gather_object(value)[source]

    def watch(self, rank: int, done_within: Callable[[float], bool]) -> None:
        assert done_within(LIMIT), f"waited {LIMIT} s for rank {rank}"


def together(size: int, act: Callable[[Any], Result]) -> list[Result]:
    """Call ``act`` with the group of each rank, each in a thread; returns what they return, in rank order."""
    barrier, values = threading.Barrier(size), [None] * size

    def one(rank: int) -> Result:
        try:
            return act(ThreadGroup(rank, barrier, values))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return [done.result() for done in [threads.submit(one, rank) for rank in range(size)]]


@dataclass
class Rank:
    """What one rank has after set-up."""

    hosting: Hosting
    peers: Peers
    structure: GraphStructure
    pool: BufferPool
    sharing: SharedArrays


@contextmanager
def job_of(
    store: Store, transport: str = "tcp", *, hops: int | None = 0, timeout: float = LIMIT, silent: Sequence[int] = ()
) -> Iterator[list[Rank]]:
    """All ranks of a job over a store, one for each part, with open connections.

    Args:
        store: the store.
        transport: see :func:`gtrain_pyg.peers.host`.
        hops: of structure that is copied.
        timeout: of a request, seconds.
        silent: ranks that do not answer for their part.
    """

    def make(group: Any) -> Rank:
        hosting, pool = detect_hosting(group, transport), BufferPool()
        peers, sharing = Peers(group, hosting, timeout=timeout), SharedArrays.create(group, hosting)
        structure = GraphStructure(store, PartBook.of(store), hosting, sharing, hops=hops)
        if group.rank in silent:
            peers.handle(METHOD, lambda message: Future())
        else:
            serve_sampling(structure, peers, pool)
        peers.open()
        return Rank(hosting, peers, structure, pool, sharing)

    made = together(store.num_parts, make)
    try:
        yield made
    finally:
        for rank in made:
            rank.peers.close()
            rank.sharing.close()


def samplers(job: list[Rank], options: SamplingOptions, seed: int = 0) -> list[DistributedSampler]:
    """A sampler of each rank; made at the same time, since ranks of a machine wait for what another one computes."""

    def make(rank: Rank) -> DistributedSampler:
        return DistributedSampler(rank.structure, rank.peers, rank.pool, options, seed)

    with ThreadPoolExecutor(len(job)) as threads:
        return list(threads.map(make, job))


def whole_columns(store: Store, *names: str) -> dict[Any, Columns]:
    """The columns of the whole graph by global ids: all parts laid end to end, whose positions are the global ones.

    Args:
        store: the store.
        names: what the columns take besides, as ``weight=edge_weight``, where an edge type has it.
    """
    given = dict(name.split("=") for name in names)
    columns = {}
    for kind in store.edge_types:
        parts = range(store.num_parts)
        indptr = np.concatenate([[0]] + [np.diff(store.edge("indptr", part, kind).numpy()) for part in parts]).cumsum()

        def joined(name: str, kind: Any = kind) -> np.ndarray:
            return np.concatenate([store.edge(name, part, kind).numpy() for part in range(store.num_parts)])

        more = {field: joined(name) for field, name in given.items() if name in store.edge_tensors(kind)}
        columns[kind] = Columns(indptr, joined("indices"), num_sources=store.num_nodes_of(kind[0]), **more)
    return columns


def whole_nodes(store: Store, name: str, kind: str) -> np.ndarray:
    """A node tensor of all parts, by global id."""
    return np.concatenate([store.node(name, part, kind).numpy() for part in range(store.num_parts)])
