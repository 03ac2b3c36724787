"""Compiled loops over an undirected graph. Import this module inside the functions that need it, never before a fork.

A graph is ``starts`` (int64 ``[N + 1]``) and ``adjacent`` (int32), see :class:`.adjacency.Adjacency`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]


@njit(cache=True, nogil=True)
def count_neighbours(source: Ints, target: Ints, counts: Ints) -> None:
    """Add the number of edge ends at each node to ``counts``, without self-loops."""
    for e in range(source.size):
        if source[e] != target[e]:
            counts[source[e]] += 1
            counts[target[e]] += 1


@njit(cache=True, nogil=True)
def place_neighbours(source: Ints, target: Ints, cursor: Ints, adjacent: Ints32) -> None:
    """Write the two ends of each edge to each other's list of neighbours.

    Args:
        source, target: the edges, ``[e]``; self-loops are left out.
        cursor: ``[N]``, next free slot of each node's list; advanced.
        adjacent: output, the lists.
    """
    for e in range(source.size):
        s, t = source[e], target[e]
        if s != t:
            adjacent[cursor[s]] = t
            cursor[s] += 1
            adjacent[cursor[t]] = s
            cursor[t] += 1


@njit(cache=True, nogil=True)
def transpose(starts: Ints, adjacent: Ints32, out: Ints32, ends: Ints) -> None:
    """Transpose a symmetric graph, which sorts the lists, and leave out repeated neighbours.

    Args:
        starts, adjacent: the graph; lists in any order, with repetitions.
        out: output, lists that begin at ``starts``, ascending and without repetitions.
        ends: ``[N]``, a copy of ``starts[:-1]``; then the end of each list in ``out``.
    """
    for u in range(starts.size - 1):
        for e in range(starts[u], starts[u + 1]):
            v = adjacent[e]
            end = ends[v]
            if end == starts[v] or out[end - 1] != u:
                out[end] = u
                ends[v] = end + 1


@njit(cache=True, nogil=True)
def close_gaps(starts: Ints, ends: Ints, adjacent: Ints32) -> int:
    """Move lists ``starts[v] .. ends[v]-1`` next to each other, in place, and return their total length."""
    slot = 0
    for v in range(ends.size):
        first = starts[v]
        starts[v] = slot
        for e in range(first, ends[v]):
            adjacent[slot] = adjacent[e]
            slot += 1
    starts[ends.size] = slot
    return slot


@njit(cache=True, nogil=True)
def induce(starts: Ints, adjacent: Ints32, nodes: Ints, offset: Ints32, out_starts: Ints, out: Ints32) -> int:
    """Write the graph between some nodes, and return the number of its entries.

    Args:
        starts, adjacent: the graph.
        nodes: ``[n]``, the nodes.
        offset: ``[N]``, position of a node in ``nodes``, or -1.
        out_starts: output, ``[n + 1]``; the first entry is 0.
        out: output, lists of positions; at least as long as the lists of ``nodes`` together.
    """
    slot = 0
    for i in range(nodes.size):
        for e in range(starts[nodes[i]], starts[nodes[i] + 1]):
            if offset[adjacent[e]] >= 0:
                out[slot] = offset[adjacent[e]]
                slot += 1
        out_starts[i + 1] = slot
    return slot


class Weighted(NamedTuple):
    """A graph with weights.

    Attributes:
        starts, adjacent: the graph.
        edges: ``[starts[-1]]``, weight of each entry of ``adjacent``; empty if all weights are 1.
        sizes: ``[N]``, weight of each node.
    """

    starts: Ints
    adjacent: Ints32
    edges: Ints32
    sizes: Ints32


@njit(cache=True, nogil=True)
def propagate(graph: Weighted, limit: int, rounds: int) -> Ints32:
    """Cluster the nodes by label propagation.

    Each node in turn joins the cluster to which it has the heaviest edges (of several the one with the lightest nodes),
    unless that is its own or the cluster's nodes would weigh more than ``limit``. A round in which few nodes move is
    the last.

    Returns:
        The cluster of each node, ``[N]``, a number below N.
    """
    starts, adjacent, edges, sizes = graph
    count = starts.size - 1
    cluster = np.arange(count).astype(np.int32)
    total = sizes.copy()
    weight_to = np.zeros(count, np.int32)  # of the edges from the current node to each cluster
    touched = np.empty(count, np.int32)  # the clusters with such edges
    for _ in range(rounds):
        moved = 0
        for v in range(count):
            own, touching = cluster[v], 0
            for e in range(starts[v], starts[v + 1]):
                c = cluster[adjacent[e]]
                if weight_to[c] == 0:
                    touched[touching] = c
                    touching += 1
                weight_to[c] += edges[e] if edges.size > 0 else 1
            best = own
            for i in range(touching):
                c = touched[i]
                if c == own or total[c] + sizes[v] > limit or weight_to[c] < weight_to[best]:
                    continue
                if weight_to[c] > weight_to[best] or (best != own and total[c] < total[best]):
                    best = c
            for i in range(touching):
                weight_to[touched[i]] = 0
            if best != own:
                cluster[v] = best
                total[own] -= sizes[v]
                total[best] += sizes[v]
                moved += 1
        if 50 * moved < count:
            break
    return cluster


@njit(cache=True, nogil=True)
def renumber(cluster: Ints32) -> int:
    """Number the clusters by their first nodes, in place; return the number of clusters."""
    number = np.full(cluster.size, -1, np.int32)
    count = 0
    for v in range(cluster.size):
        if number[cluster[v]] < 0:
            number[cluster[v]] = count
            count += 1
        cluster[v] = number[cluster[v]]
    return count


@njit(cache=True, nogil=True)
def contract(graph: Weighted, cluster: Ints32, count: int) -> Weighted:
    """Return the graph whose nodes are the clusters ``0 .. count-1``; edges within a cluster are dropped."""
    starts, adjacent, edges, sizes = graph
    first = np.zeros(count + 1, np.int64)  # of each cluster's members
    out_sizes = np.zeros(count, np.int32)
    for v in range(cluster.size):
        first[cluster[v] + 1] += 1
        out_sizes[cluster[v]] += sizes[v]
    first = np.cumsum(first)
    members, cursor = np.empty(cluster.size, np.int32), first.copy()
    for v in range(cluster.size):
        members[cursor[cluster[v]]] = v
        cursor[cluster[v]] += 1
    out_starts = np.zeros(count + 1, np.int64)
    out_adjacent, out_edges = np.empty(adjacent.size, np.int32), np.empty(adjacent.size, np.int32)
    entry = np.full(count, -1, np.int64)  # of each cluster in the list that is being written, or in an earlier one
    end = 0
    for c in range(count):
        for i in range(first[c], first[c + 1]):
            for e in range(starts[members[i]], starts[members[i] + 1]):
                other = cluster[adjacent[e]]
                if other == c:
                    continue
                if entry[other] < out_starts[c]:
                    entry[other] = end
                    out_adjacent[end], out_edges[end] = other, 0
                    end += 1
                out_edges[entry[other]] += edges[e] if edges.size > 0 else 1
        out_starts[c + 1] = end
    return Weighted(out_starts, out_adjacent[:end].copy(), out_edges[:end].copy(), out_sizes)


@njit(cache=True, nogil=True)
def refine(
    starts: Ints, adjacent: Ints32, weights: Ints32, parts: Ints, load: Ints, limit: float, loss: float, patience: int
) -> int:
    """Move nodes between parts, also with fewer neighbours there, and keep the parts with the fewest cut edges.

    Jet (Gilbert et al., SIAM J. Sci. Comput. 2024, Jet: Multilevel Graph Partitioning on GPUs), algorithm 4.2, on the
    finest level, with limited weights of the parts instead of its rebalancing. In each round every node that did not
    move in the last one chooses another part with most of its neighbours, and loses fewer than ``loss`` times its
    neighbours in its own part. It moves if it does not lose any, provided that the choosers with a larger gain move.

    Args:
        starts, adjacent: the symmetric graph.
        weights: ``[N]``, weight of each node.
        parts: ``[N]``, the part of each node; replaced by the best parts.
        load: ``[P]``, weight of each part.
        limit: largest weight of a part that a node moves to.
        loss: between 0 and 1.
        patience: rounds without fewer cut edges after which no further one follows.

    Returns:
        By how many undirected edges the cut has become smaller.
    """
    count, num_parts = starts.size - 1, load.size
    neighbours = np.zeros((count, num_parts), np.int32)  # of each node in each part
    for v in range(count):
        for e in range(starts[v], starts[v + 1]):
            neighbours[v, parts[adjacent[e]]] += 1
    choice, gain = np.full(count, -1, np.int32), np.zeros(count, np.int32)
    moved, chosen = np.zeros(count, np.bool_), np.empty(count, np.int32)
    best, saved, best_saved, idle = parts.copy(), 0, 0, 0
    while idle <= patience:
        choosers = 0
        for v in range(count):
            choice[v] = -1
            if moved[v]:
                moved[v] = False
                continue
            own, most = parts[v], 0
            for part in range(num_parts):
                if part != own and neighbours[v, part] > most:
                    choice[v], most = part, neighbours[v, part]
            gain[v] = most - neighbours[v, own]
            if most > 0 and (gain[v] >= 0 or -gain[v] < loss * neighbours[v, own]):
                chosen[choosers] = v
                choosers += 1
            else:
                choice[v] = -1
        movers = 0
        for i in range(choosers):
            v, difference = chosen[i], 0
            for e in range(starts[v], starts[v + 1]):
                u = adjacent[e]
                there = parts[u]
                if choice[u] >= 0 and (gain[u] > gain[v] or (gain[u] == gain[v] and u < v)):
                    there = choice[u]
                difference += (there == choice[v]) - (there == parts[v])
            if difference >= 0:
                chosen[movers] = v
                movers += 1
        any_moved = False
        for i in range(movers):
            v = chosen[i]
            own, other = parts[v], choice[v]
            if load[other] + weights[v] > limit:
                continue
            saved += neighbours[v, other] - neighbours[v, own]
            load[own] -= weights[v]
            load[other] += weights[v]
            parts[v], moved[v], any_moved = other, True, True
            for e in range(starts[v], starts[v + 1]):
                neighbours[adjacent[e], own] -= 1
                neighbours[adjacent[e], other] += 1
        if not any_moved:
            break
        idle += 1
        if saved > best_saved:
            best_saved, idle = saved, 0
            best[:] = parts
    parts[:] = best
    return best_saved
