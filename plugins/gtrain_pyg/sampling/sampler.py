"""Sampling the neighbourhoods of seeds over all parts, hop by hop; each part's edges are chosen by who hosts it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import DataError
from gtrain.graph.sampling import batch_key, scratch
from gtrain.graph.sampling.hop import Choice, Frontier, choose
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.sampling.rules import checked_ids, checked_times
from gtrain.graph.sampling.scratch import Edges
from gtrain.graph.store.manifest import EdgeType
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.sampling.hop import Hop, HopSampler
from gtrain_pyg.sampling.kernels import by_owner, count, merge, rows_of, spread
from gtrain_pyg.sampling.state import SamplerState
from gtrain_pyg.sampling.subgraph import Subgraph
from gtrain_pyg.structure.hosted import Graph, Structure
from gtrain_pyg.structure.needs import Needs

__all__ = ["DistributedSampler", "Subgraph"]

Array = NDArray[Any]
log = logging.getLogger(__name__)
_REVERSE = "rev_"
_NUMBERS, _SHORT = np.zeros(1, np.int64), np.zeros(1, np.int32)


class DistributedSampler:
    """Samples subgraphs around seeds of a graph in parts.

    Threads may share a sampler, and had better: while one waits for a peer's answer others sample. What is sampled
    follows from (seed, epoch, batch), the seeds and the options alone: not from the number of threads, nor from which
    rank asks, hosts or answers. Without replacement, weights or times are as in
    :class:`gtrain.graph.sampling.HeteroNeighborSampler`, and so are the edges chosen, in another order.

    Args:
        structure: what this rank reads by itself.
        peers: the other ranks, each of which has called :func:`gtrain_pyg.sampling.remote.serve_sampling`.
        pool: where the arrays of the subgraphs come from; see ``gtrain_pyg.buffers.BufferPool``.
        options: how to sample.
        seed: of the random numbers.

    Raises:
        ConfigError: the options leave out an edge type, or name one that the graph does not have.
        DataError: weights or times are missing, or cannot be used.
    """

    def __init__(self, structure: Structure, peers: Peers, pool: Any, options: SamplingOptions, seed: int) -> None:
        self.options = options
        self._structure, self._pool, self._seed = structure, pool, seed
        fan_out = options.fan_out(structure.edge_types)
        self._counts = [{kind: fan_out[kind][hop] for kind in fan_out} for hop in range(options.num_hops)]
        graph = structure.graph(Needs.of(options))
        self._hops = HopSampler(structure, peers, pool, graph)
        load_kernels(structure, graph, options)
        bidirectional = options.subgraph_type == "bidirectional"
        self._bidirectional = Bidirectional(structure.edge_types) if bidirectional else None
        self._threads = threading.local()

    def sample(
        self,
        seeds: Mapping[str, Any],
        *,
        epoch: int,
        batch: int,
        seed_time: Mapping[str, Any] | None = None,
    ) -> Subgraph:
        """Sample around seeds.

        Args:
            seeds: int64, global ids, by node type; of any part.
            epoch: with ``batch`` and the sampler's seed, names the random numbers.
            batch: number of the batch in the epoch.
            seed_time: int64, by node type, the time of each seed; nothing later is sampled. None: the seeds' own, where
                nodes have times and this rank hosts the seeds.

        Raises:
            DataError: a seed is out of range, or its time is missing.
            RemoteError: another rank failed to answer; has its message.
            DeadlineError: it did not answer in time.
        """
        state = self._state()
        key = batch_key(self._seed, epoch, batch)
        checked = self._checked(seeds)
        times = self._seed_times(checked, seed_time) if self.options.temporal is not None else None
        state.begin(sum(ids.size for ids in checked.values()) if self.options.disjoint else 1, times)
        seed_ids = self._number_seeds(state, checked)
        num_nodes = {name: [nodes.count] for name, nodes in state.nodes.items()}
        num_edges: dict[EdgeType, list[int]] = {kind: [] for kind in state.edges}
        low = dict.fromkeys(num_nodes, 0)
        for hop, counts in enumerate(self._counts):
            high = {name: nodes.count for name, nodes in state.nodes.items()}
            before = {kind: edges.size for kind, edges in state.edges.items()}
            self._hops.sample(state, Hop(key, hop, counts), low, high)
            for kind, edges in state.edges.items():
                num_edges[kind].append(edges.size - before[kind])
            for name, nodes in state.nodes.items():
                num_nodes[name].append(nodes.count - high[name])
            low = high
        unlisted = self._complete(state, num_edges)
        return self._output(state, seed_ids, num_nodes, num_edges, unlisted)

    # ------------------------------------------------------------------------------------------ seeds

    def _state(self) -> SamplerState:
        if not hasattr(self._threads, "state"):
            self._threads.state = SamplerState(self._structure, self.options.disjoint, self._pool)
        return self._threads.state

    def _checked(self, seeds: Mapping[str, Any]) -> dict[str, Array]:
        for name in seeds:
            if name not in self._structure.node_types:
                known = ", ".join(self._structure.node_types)
                raise DataError(f"seeds of type {name!r} were given.", hint=f"the node types are {known}.")
        return {name: checked_ids(ids, self._structure.book.count(name), "seeds") for name, ids in seeds.items()}

    def _seed_times(self, seeds: dict[str, Array], given: Mapping[str, Any] | None) -> Array:
        seed_times = [np.empty(0, np.int64)]
        for name, ids in seeds.items():
            times = None
            if given is not None and name in given:
                times = checked_times(given[name], ids.size, "seed_time")
            elif (own := self.options.node_time) is not None and own in self._structure.store.node_tensors(name):
                times = self._structure.node_time(own, name, ids)
            if times is None:
                raise DataError(
                    f"sampling by times needs the time of each seed, and those of {name} are not known here.",
                    hint="give seed_time=...",
                )
            seed_times.append(times)
        return np.concatenate(seed_times)

    def _number_seeds(self, state: SamplerState, seeds: dict[str, Array]) -> dict[str, Array]:
        """Give the seeds their local ids; disjoint: each in a subgraph of its own."""
        result, first = {}, 0
        for name, ids in seeds.items():
            subgraph = np.arange(first, first + ids.size) if self.options.disjoint else np.zeros(ids.size, np.int64)
            result[name] = self._pool.take(ids.shape, np.int64)
            result[name][:] = ids
            state.nodes[name].number(result[name], np.arange(ids.size), subgraph)
            first += ids.size
        return result

    # ------------------------------------------------------------------------------------------ the result

    def _complete(self, state: SamplerState, num_edges: dict[EdgeType, list[int]]) -> set[EdgeType]:
        """Turn the chosen edges into those asked for; tell of which edge types positions mean nothing."""
        unlisted: set[EdgeType] = set()
        if self.options.subgraph_type == "induced":
            self._hops.induce(state)
        elif self._bidirectional is not None:
            unlisted = self._bidirectional.complete(state.edges)
        if self.options.subgraph_type != "directional":
            num_edges.update({kind: [edges.size] for kind, edges in state.edges.items()})
        return unlisted

    def _output(
        self,
        state: SamplerState,
        seeds: dict[str, Array],
        num_nodes: dict[str, list[int]],
        num_edges: dict[EdgeType, list[int]],
        unlisted: set[EdgeType],
    ) -> Subgraph:
        index, edge = {}, {}
        for kind, edges in state.edges.items():
            index[kind], position = edges.hand_out()
            if kind not in unlisted:
                edge[kind] = position
        batch = None
        if self.options.disjoint:
            batch = {name: self._kept(nodes.batch, nodes.count) for name, nodes in state.nodes.items()}
        return Subgraph(
            node={name: self._kept(nodes.node, nodes.count) for name, nodes in state.nodes.items()},
            edge_index=index,
            edge=edge,
            batch=batch,
            seeds=seeds,
            num_sampled_nodes=num_nodes,
            num_sampled_edges=num_edges,
        )

    def _kept(self, array: Array, size: int) -> Array:
        """A copy in the pool's memory."""
        kept = self._pool.take((size,), np.int64)
        kept[:] = array[:size]
        return kept


class Bidirectional:
    """Completes sampled edges; of edges that are there several times one is kept.

    Which edges are each other's reverse follows PyG (``HeteroSamplerOutput.to_bidirectional``): those of a relation
    and of ``rev_`` and its name complete each other; otherwise a relation within one node type is completed from
    itself, and any other from the one relation that leads back, if there is one.

    Args:
        kinds: the edge types.
    """

    def __init__(self, kinds: Sequence[EdgeType]) -> None:
        self._from = {kind: _reverse(kind, kinds) for kind in kinds}
        for kind in [kind for kind, other in self._from.items() if other is None]:
            log.warning("subgraph_type=bidirectional: no edge type is the reverse of %s, which stays as it is", kind)

    def complete(self, edges: Mapping[EdgeType, Edges]) -> set[EdgeType]:
        """Add edges to all types, ordered by target and then source.

        Args:
            edges: by type; ``row`` and ``column`` are local ids.

        Returns:
            The types whose ``position`` no longer says which edges they hold, since some came from another type.
        """
        before = {kind: tuple(a[: e.size].copy() for a in (e.row, e.column, e.position)) for kind, e in edges.items()}
        for kind, other in self._from.items():
            if other is not None:
                row, column, position = before[kind]
                back = before[other]
                _keep(edges[kind], np.r_[row, back[1]], np.r_[column, back[0]], np.r_[position, back[2]])
        return {kind for kind, other in self._from.items() if other not in (None, kind)}


def _reverse(kind: EdgeType, kinds: Sequence[EdgeType]) -> EdgeType | None:
    source, relation, target = kind
    named = relation.removeprefix(_REVERSE) if relation.startswith(_REVERSE) else _REVERSE + relation
    if (target, named, source) in kinds:
        return target, named, source
    if source == target:
        return kind
    back = [other for other in kinds if (other[0], other[2]) == (target, source)]
    return back[0] if len(back) == 1 else None


def _keep(edges: Edges, row: Array, column: Array, position: Array) -> None:
    """Keep the first edge of each pair of ends."""
    key = column * (int(row.max(initial=0)) + 1) + row
    _, first = np.unique(key, return_index=True)
    edges.size = 0
    edges.reserve(first.size)
    for kept, array in zip(edges.extend(first.size), (row, column, position), strict=True):
        np.take(array, first, out=kept, mode="clip")


def load_kernels(structure: Structure, graph: Graph, options: SamplingOptions) -> None:
    """Call each kernel that sampling and answering with these options will call, on next to nothing."""
    for kind, by_part in graph.columns.items():
        columns, rule = next(iter(by_part.values())), graph.rules[kind]
        if columns.num_targets:
            frontier = Frontier(_NUMBERS, _NUMBERS[: int(options.disjoint)], _NUMBERS, _NUMBERS)
            for number in {*options.fan_out([*graph.columns])[kind], -1 if options.subgraph_type == "induced" else 1}:
                choice = Choice(number, np.uint64(0), rule)
                choose(columns, frontier.under(rule), choice, scratch.Edges(), scratch.Spans())
    nodes = scratch.Nodes(1, options.disjoint)
    nodes.begin(1)
    nodes.number(_NUMBERS.copy(), _NUMBERS, _NUMBERS)
    if options.subgraph_type == "induced":
        nodes.keep(_NUMBERS.copy(), _NUMBERS.copy(), _NUMBERS.copy(), _NUMBERS)
    if structure.book.num_parts > 1:
        by_owner(_NUMBERS, 0, np.array([0, 1]), np.zeros(1, np.int16), np.zeros(2, np.int64), *_outputs(2))
    if len(structure.parts) < structure.book.num_parts:
        count(_NUMBERS, _SHORT.copy())
        spread(_SHORT, _NUMBERS, *_outputs(1))
    if graph.replicas:
        rows_of(_NUMBERS, scratch.read_only(np.zeros(1, np.uint64)), scratch.read_only(_NUMBERS), *_outputs(1))
        own, told = (_NUMBERS, _NUMBERS, _NUMBERS[:0]), (_SHORT, _SHORT, _SHORT)
        merge(_NUMBERS - 1, scratch.read_only(_NUMBERS), *own, *told, _NUMBERS, 0, *_outputs(3))


def _outputs(number: int) -> list[np.ndarray]:
    return [np.zeros(1, np.int64) for _ in range(number)]
