"""Sample the neighbourhoods of seeds over all parts, hop by hop; the rank that hosts a part chooses its edges."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gtrain.errors import DataError
from gtrain.graph.sampling import batch_key, scratch
from gtrain.graph.sampling.hop import Choice, Frontier, checked_ids, checked_times, choose
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.sampling.scratch import EdgeBuffer
from gtrain.graph.store.manifest import EdgeType
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.graph_structure import GraphStructure, SamplingGraph, SamplingInputs
from gtrain_pyg.peers import Array, Peers
from gtrain_pyg.sampling import kernels
from gtrain_pyg.sampling.hop import HopOptions, HopSampler
from gtrain_pyg.sampling.state import SamplerState

__all__ = ["DistributedSampler", "Subgraph"]
log = logging.getLogger(__name__)
_REVERSE = "rev_"


@dataclass(frozen=True)
class Subgraph:
    """A sampled subgraph, by type; every node type and edge type of the graph is listed. All arrays are int64.

    A *local id* numbers the n sampled nodes of a type in order of discovery: the seeds first, then hop by hop. Within a
    hop, the e edges of a type are ordered by the part that owns the target, then by the target's local id; so the
    order does not depend on the rank that samples. A homogeneous graph has the node type ``node`` and the edge type
    ``(node, to, node)``.

    Attributes:
        node: ``[n]``, global ids. Disjoint: a node is listed once per subgraph.
        edge_index: ``[2, e]``, local ids; row 0 the sources, of the edge type's first node type, row 1 the targets, of
            its last.
        edge: ``[e]``, global edge positions. Bidirectional: an added edge has the position of the sampled edge
            whose reverse it is; an edge type that was completed from another one is not listed.
        batch: ``[n]``, the seed whose subgraph a node is in, counted through the seeds' types in order; None unless
            disjoint.
        seeds: ``[s]``, local ids of the seeds in the caller's order, by the seeds' node types: ``0 .. s-1``, unless the
            subgraphs are not disjoint and the seeds contain duplicates, which are listed once.
        num_sampled_nodes: number of hops + 1 entries: distinct seeds, then the new nodes of each hop.
        num_sampled_edges: edges of each hop; only the total unless directional.
    """

    node: dict[str, Array]
    edge_index: dict[EdgeType, Array]
    edge: dict[EdgeType, Array]
    batch: dict[str, Array] | None
    seeds: dict[str, Array]
    num_sampled_nodes: dict[str, list[int]]
    num_sampled_edges: dict[EdgeType, list[int]]


class DistributedSampler:
    """Samples subgraphs around seeds of a partitioned graph.

    Several threads should share a sampler: while one waits for a peer's reply the others sample. A sample depends on
    (seed, epoch, batch), the seeds and the options alone, not on the number of threads or on which rank requests,
    hosts or replies. Without replacement, weights or times it has the edges that
    :class:`gtrain.graph.sampling.HeteroNeighborSampler` chooses, in another order.

    Args:
        structure: the edges that this rank reads.
        peers: the other ranks, each of which has called :func:`gtrain_pyg.sampling.hop.serve_sampling`.
        pool: memory of the subgraphs.
        options: how to sample.
        seed: of the random numbers.

    Raises:
        ConfigError: the options leave out an edge type, or name an unknown one.
        DataError: weights or times are missing, or cannot be used.
    """

    def __init__(
        self, structure: GraphStructure, peers: Peers, pool: BufferPool, options: SamplingOptions, seed: int
    ) -> None:
        self.options = options
        self._structure, self._pool, self._seed = structure, pool, seed
        fan_out = options.fan_out(structure.store.edge_types)
        self._counts = [
            {edge_type: fan_out[edge_type][hop] for edge_type in fan_out} for hop in range(options.num_hops)
        ]
        graph = structure.graph(SamplingInputs.of(options))
        self._hops = HopSampler(structure, peers, pool, graph)
        load_kernels(structure, graph, options)
        bidirectional = options.subgraph_type == "bidirectional"
        self._reverse = ReverseEdges(structure.store.edge_types) if bidirectional else None
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
            seeds: by node type, int64 global ids, of any part.
            epoch: seed of the random numbers, with ``batch`` and the sampler's seed.
            batch: number of the batch in the epoch.
            seed_time: by node type, int64, the time of each seed; nothing later is sampled. None: the seeds' times in
                the store, if nodes have times and this rank hosts the seeds.

        Raises:
            DataError: a seed is out of range, or its time is missing.
            RemoteError: another rank failed; has its message.
            DeadlineError: another rank did not reply in time.
        """
        if not hasattr(self._threads, "state"):
            self._threads.state = SamplerState(self._structure, self.options.disjoint, self._pool)
        state: SamplerState = self._threads.state
        key = batch_key(self._seed, epoch, batch)
        checked = self._checked(seeds)
        times = self._seed_times(checked, seed_time) if self.options.temporal is not None else None
        state.begin(sum(ids.size for ids in checked.values()) if self.options.disjoint else 1, times)
        seed_ids = self._number_seeds(state, checked)
        num_nodes = {name: [nodes.count] for name, nodes in state.nodes.items()}
        num_edges: dict[EdgeType, list[int]] = {edge_type: [] for edge_type in state.edges}
        low = dict.fromkeys(num_nodes, 0)
        for hop, counts in enumerate(self._counts):
            high = {name: nodes.count for name, nodes in state.nodes.items()}
            before = {edge_type: edges.size for edge_type, edges in state.edges.items()}
            self._hops.sample(state, HopOptions(key, hop, counts), low, high)
            for edge_type, edges in state.edges.items():
                num_edges[edge_type].append(edges.size - before[edge_type])
            for name, nodes in state.nodes.items():
                num_nodes[name].append(nodes.count - high[name])
            low = high
        without_position: set[EdgeType] = set()
        if self.options.subgraph_type == "induced":
            self._hops.induce(state)
        elif self._reverse is not None:
            without_position = self._reverse.complete(state.edges)
        if self.options.subgraph_type != "directional":
            num_edges = {edge_type: [edges.size] for edge_type, edges in state.edges.items()}
        output = {edge_type: edges.hand_over() for edge_type, edges in state.edges.items()}
        return Subgraph(
            node={name: self._copy(nodes.node[: nodes.count]) for name, nodes in state.nodes.items()},
            edge_index={edge_type: index for edge_type, (index, _) in output.items()},
            edge={t: position for t, (_, position) in output.items() if t not in without_position},
            batch={name: self._copy(nodes.batch[: nodes.count]) for name, nodes in state.nodes.items()}
            if self.options.disjoint
            else None,
            seeds=seed_ids,
            num_sampled_nodes=num_nodes,
            num_sampled_edges=num_edges,
        )

    def _checked(self, seeds: Mapping[str, Any]) -> dict[str, Array]:
        book, node_types = self._structure.book, self._structure.store.node_types
        for name in seeds:
            if name not in node_types:
                raise DataError(
                    f"seeds of type {name!r} were given.", hint=f"the node types are {', '.join(node_types)}."
                )
        return {name: checked_ids(ids, book.count(name), "seeds") for name, ids in seeds.items()}

    def _seed_times(self, seeds: dict[str, Array], given: Mapping[str, Any] | None) -> Array:
        """Return the time of each seed: the caller's, or else the store's."""
        seed_times = [np.empty(0, np.int64)]
        for name, ids in seeds.items():
            times, stored = None, self.options.node_time
            if given is not None and name in given:
                times = checked_times(given[name], ids.size, "seed_time")
            elif stored is not None and stored in self._structure.store.node_tensors(name):
                times = self._structure.node_time(stored, name, ids)
            if times is None:
                raise DataError(
                    f"temporal sampling needs the time of each seed, and this rank does not know the times of {name}.",
                    hint="give seed_time=...",
                )
            seed_times.append(times)
        return np.concatenate(seed_times)

    def _number_seeds(self, state: SamplerState, seeds: dict[str, Array]) -> dict[str, Array]:
        """Give the seeds local ids; disjoint: each in a separate subgraph."""
        local_ids, first = {}, 0
        for name, ids in seeds.items():
            subgraph = np.arange(first, first + ids.size) if self.options.disjoint else np.zeros(ids.size, np.int64)
            local_ids[name] = self._copy(ids)
            state.nodes[name].number(local_ids[name], np.arange(ids.size), subgraph)
            first += ids.size
        return local_ids

    def _copy(self, array: Array) -> Array:
        copy = self._pool.take(array.shape)
        copy[:] = array
        return copy


class ReverseEdges:
    """Adds the reverse of each sampled edge, and drops duplicates.

    Which edge types are each other's reverse follows PyG (``HeteroSamplerOutput.to_bidirectional``): a relation and
    the one named ``rev_`` and its name complete each other; otherwise a relation within one node type is completed
    from itself, and any other from the only relation in the opposite direction, if there is exactly one.

    Args:
        edge_types: of the graph.
    """

    def __init__(self, edge_types: Sequence[EdgeType]) -> None:
        self._reverse_of = {edge_type: _reverse(edge_type, edge_types) for edge_type in edge_types}
        for edge_type, reverse in self._reverse_of.items():
            if reverse is None:
                log.warning(
                    "subgraph_type=bidirectional: no edge type is the reverse of %s, which stays directional",
                    edge_type,
                )

    def complete(self, edges: Mapping[EdgeType, EdgeBuffer]) -> set[EdgeType]:
        """Add edges to all types, ordered by target and then source.

        Args:
            edges: by type; ``row`` and ``column`` are local ids.

        Returns:
            The types whose ``position`` no longer identifies the edges, since some came from another type.
        """
        # Copies: an edge type may be completed from one that has been completed already.
        before = {t: tuple(a[: e.size].copy() for a in (e.row, e.column, e.position)) for t, e in edges.items()}
        for edge_type, reverse in self._reverse_of.items():
            if reverse is not None:
                row, column, position = before[edge_type]
                back = before[reverse]
                _set_unique(edges[edge_type], np.r_[row, back[1]], np.r_[column, back[0]], np.r_[position, back[2]])
        return {edge_type for edge_type, reverse in self._reverse_of.items() if reverse not in (None, edge_type)}


def _reverse(edge_type: EdgeType, edge_types: Sequence[EdgeType]) -> EdgeType | None:
    source, relation, target = edge_type
    named = relation.removeprefix(_REVERSE) if relation.startswith(_REVERSE) else _REVERSE + relation
    if (target, named, source) in edge_types:
        return target, named, source
    if source == target:
        return edge_type
    back = [other for other in edge_types if (other[0], other[2]) == (target, source)]
    return back[0] if len(back) == 1 else None


def _set_unique(edges: EdgeBuffer, row: Array, column: Array, position: Array) -> None:
    """Replace edges by the first of each pair of source and target."""
    # One integer per pair, ordered by target and then source.
    key = column * (int(row.max(initial=0)) + 1) + row
    _, first = np.unique(key, return_index=True)
    edges.size = 0
    edges.reserve(first.size)
    for out, array in zip(edges.extend(first.size), (row, column, position), strict=True):
        np.take(array, first, out=out, mode="clip")


def load_kernels(structure: GraphStructure, graph: SamplingGraph, options: SamplingOptions) -> None:
    """Load each kernel that sampling and replying with these options will call, by a call on arrays of one element.

    Compiling takes seconds; otherwise a peer's first request could meet its deadline meanwhile.
    """
    zero, short = np.zeros(1, np.int64), np.zeros(1, np.int32)  # read
    for edge_type, by_part in graph.columns.items():
        columns, rule = next(iter(by_part.values())), graph.rules[edge_type]
        if columns.num_targets:
            frontier = Frontier(zero, zero[: int(options.disjoint)], zero, zero)
            counts = options.fan_out([*graph.columns])[edge_type]
            choices = [Choice(number, np.uint64(0), rule) for number in {*counts, 1}]
            if options.subgraph_type == "induced":
                choices.append(Choice(-1, np.uint64(0), rule, weighted=False))
            for choice in choices:
                choose(columns, frontier.under(rule), choice, scratch.EdgeBuffer(), scratch.SpanBuffer())
    nodes = scratch.NodeNumbering(1, options.disjoint)
    nodes.reset(1)
    nodes.number(zero.copy(), zero, zero)
    if options.subgraph_type == "induced":
        nodes.keep(zero.copy(), zero.copy(), zero.copy(), zero)
    if structure.book.num_parts > 1:
        bounds = np.zeros(2, np.int64)
        kernels.group_by_owner(zero, 0, np.array([0, 1]), short.astype(np.int16), bounds, zero.copy(), zero.copy())
    if len(structure.parts) < structure.book.num_parts:
        kernels.count_edges(zero, short.copy())
        kernels.repeat_targets(short, zero, zero.copy())
    if graph.replicas:
        words, constant = scratch.read_only(np.zeros(1, np.uint64)), scratch.read_only(zero)
        kernels.replica_rows(zero, words, constant, zero.copy())
        copied, reply = kernels.EdgeColumns(zero, zero[:0], zero), kernels.SampleReply(short, short, short)
        out = kernels.EdgeColumns(zero.copy(), zero.copy(), zero.copy())
        kernels.merge_edges(zero - 1, constant, copied, reply, zero, 0, out)
