"""The symmetric simple graph under directed edges, which METIS and KaMinPar partition, and the weights of its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import DataError
from gtrain.graph.store.csc import SMALL_EDGES, EdgeView
from gtrain.graph.store.files import chunks, release

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Adjacency:
    """An undirected graph in CSR form: each edge in both directions, without self-loops and parallel edges.

    Attributes:
        starts: int64 ``[N + 1]``; node i has the neighbours ``adjacent[starts[i]] .. adjacent[starts[i+1] - 1]``.
        adjacent: int32 ``[2E]``, neighbours in ascending order.
    """

    starts: Ints
    adjacent: NDArray[np.int32]

    @property
    def num_nodes(self) -> int:
        return self.starts.size - 1

    @classmethod
    def of(cls, source: NDArray[Any], target: NDArray[Any], num_nodes: int, *, small: int | None = None) -> Adjacency:
        """Make the graph under directed edges.

        Args:
            source, target: the edges, ``[E]`` integer each; may be memory maps.
            num_nodes: N.
            small: number of edges up to which numpy sorts; None means
                :data:`~gtrain.graph.store.csc.SMALL_EDGES`.
        """
        if num_nodes >= 2**31:
            raise DataError(
                f"the partitioner numbers nodes in 32 bits, and the graph has {num_nodes}",
                hint="set data.partitioner=ldg",
            )
        by_numpy = len(source) <= (SMALL_EDGES if small is None else small)
        return cls(*(_sorted_keys if by_numpy else _two_passes)(source, target, num_nodes))

    def part(self, parts: NDArray[Any], part: int) -> tuple[Ints, Adjacency]:
        """Return the nodes of a part, ascending, and the graph between them, numbered in this order."""
        from gtrain.graph.partition import kernels

        nodes = np.flatnonzero(parts == part)
        offset = np.full(parts.size, -1, dtype=np.int32)
        offset[nodes] = np.arange(nodes.size, dtype=np.int32)
        starts = np.zeros(nodes.size + 1, dtype=np.int64)
        adjacent = np.empty(int((self.starts[nodes + 1] - self.starts[nodes]).sum()), dtype=np.int32)
        count = kernels.induce(self.starts, self.adjacent, nodes, offset, starts, adjacent)
        return nodes, Adjacency(starts, adjacent[:count])


def node_weights(target: NDArray[Any], num_nodes: int, train_mask: NDArray[np.bool_] | None) -> NDArray[np.int32]:
    """Return the weight of each node, ``[N]``: ``a + b * in_degree + c * is_train``.

    The factors make the three terms equal on average over the nodes. The in-degree counts because a part stores the
    edges that point at its nodes.
    """
    terms = [np.ones(num_nodes), np.bincount(target, minlength=num_nodes).astype(float)]
    if train_mask is not None:
        terms.append(train_mask.astype(float))
    total = np.sum([term / term.mean() for term in terms if term.any()], axis=0)
    # METIS sums the weights in 32 bits, so their total must stay below 2^31.
    scale = min(100.0, 2**29 / float(total.sum()))
    return np.maximum(1, np.rint(total * scale)).astype(np.int32)


def _sorted_keys(source: NDArray[Any], target: NDArray[Any], num_nodes: int) -> tuple[Ints, NDArray[np.int32]]:
    no_loop = np.asarray(source != target)
    source, target = source[no_loop].astype(np.int64), target[no_loop].astype(np.int64)
    # One int64 key per directed edge: a single sort orders by source and finds duplicates next to each other.
    keys = np.concatenate([source * num_nodes + target, target * num_nodes + source])
    keys.sort()
    if keys.size:
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
    starts = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys // num_nodes, minlength=num_nodes), out=starts[1:])
    return starts, (keys % num_nodes).astype(np.int32)


def _two_passes(source: NDArray[Any], target: NDArray[Any], num_nodes: int) -> tuple[Ints, NDArray[np.int32]]:
    """Return what :func:`_sorted_keys` returns, by compiled kernels in time linear in the edges.

    The first pass collects the neighbours of each node in any order. The second appends u = 0, 1, ... to the list of
    each neighbour of u, so that every list is ascending and repetitions of u are next to each other.
    """
    from gtrain.graph.partition import kernels

    EdgeView(source, target, None, None, num_nodes, num_nodes).check()  # the kernels do not
    starts = np.zeros(num_nodes + 1, dtype=np.int64)
    for sources, targets in _pieces(source, target):
        kernels.count_neighbours(sources, targets, starts[1:])
    np.cumsum(starts, out=starts)
    unsorted = np.empty(starts[-1], dtype=np.int32)
    cursor = starts[:-1].copy()
    for sources, targets in _pieces(source, target):
        kernels.place_neighbours(sources, targets, cursor, unsorted)
    adjacent, ends = np.empty_like(unsorted), starts[:-1].copy()
    kernels.transpose(starts, unsorted, adjacent, ends)
    del unsorted
    count = kernels.close_gaps(starts, ends, adjacent)
    return starts, adjacent[:count]


def _pieces(source: NDArray[Any], target: NDArray[Any]) -> Any:
    """Yield pieces of the edges as int64 arrays, for which the kernels are compiled."""
    for rows in chunks(0, len(source)):
        yield np.array(source[rows], dtype=np.int64), np.array(target[rows], dtype=np.int64)
        release(source)
        release(target)
