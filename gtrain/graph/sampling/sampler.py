"""Neighbour samplers: subgraphs of several hops around seeds, with nodes numbered in order of discovery."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import ConfigError, DataError
from gtrain.graph.sampling import scratch
from gtrain.graph.sampling.columns import Columns, readable
from gtrain.graph.sampling.hop import (
    Choice,
    Frontier,
    Rule,
    batch_key,
    checked_ids,
    checked_times,
    choose,
    hop_key,
    pieces,
)
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.sampling.output import EdgeType, HeteroSample, Sample

Array = NDArray[Any]
_TYPE = "node"
_EDGE_TYPE: EdgeType = (_TYPE, "to", _TYPE)


@dataclass
class _Batch:
    """The state of one call: key, seeds by type, their times by subgraph, and this thread's buffers."""

    key: int
    seeds: dict[str, Array]
    seed_time: Array | None
    nodes: dict[str, scratch.NodeNumbering]
    edges: dict[EdgeType, scratch.EdgeBuffer]
    work: scratch.SpanBuffer


class HeteroNeighborSampler:
    """Samples subgraphs around seeds of a heterogeneous graph.

    Threads may share a sampler; each has separate buffers. The result depends only on (seed, epoch, batch) and the
    arguments.

    Args:
        graph: the edges by type (type of the sources, relation, type of the targets). Edge types are sampled in this
            order, and random numbers depend on it.
        num_nodes: number of nodes by type.
        num_neighbors: fan-out of each hop, -1 all: one list for all edge types, or one per edge type.
        replace: see :class:`Rule`.
        temporal: see :class:`Rule`; implies ``disjoint``. An edge type without times is sampled without them.
        node_time: times of the nodes by type (of some types, or all); None: use the times of the edges.
        disjoint: a separate subgraph for each seed, so that a node may occur several times.
        induced: return every edge between sampled nodes (of one subgraph, not later than its seed, of any weight), not
            only the chosen edges.
        seed: seed of the random numbers.

    Raises:
        ConfigError: a fan-out is below -1, or lists have different lengths or lack an edge type.
        DataError: the numbers of nodes and columns contradict each other, or times are missing.
    """

    def __init__(
        self,
        graph: Mapping[EdgeType, Columns],
        num_nodes: Mapping[str, int],
        num_neighbors: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        *,
        replace: bool = False,
        temporal: str | None = None,
        node_time: Mapping[str, Any] | None = None,
        disjoint: bool = False,
        induced: bool = False,
        seed: int = 0,
    ) -> None:
        self.graph, self.num_nodes = dict(graph), dict(num_nodes)
        fan_out = num_neighbors if isinstance(num_neighbors, Mapping) else tuple(num_neighbors)
        self.fan_out = SamplingOptions(num_neighbors=fan_out).fan_out(self.graph)  # type: ignore[arg-type]
        self.num_hops = len(next(iter(self.fan_out.values()), ()))
        self.rule = Rule(replace, temporal)
        self.disjoint, self.induced, self.seed = disjoint or temporal is not None, induced, seed
        self.node_time = None
        _check_graph(self.graph, self.num_nodes)
        if temporal is not None and node_time is not None:
            self.node_time = {name: readable(times, "node_time", ("i8",)) for name, times in node_time.items()}
            for edge_type, columns in self.graph.items():
                if edge_type[0] in self.node_time:
                    self.graph[edge_type] = columns.timed_by_sources(self.node_time[edge_type[0]])
        self._rules = self._rule_of_each()
        # Buffers and tables are per thread, so that threads sample without locks.
        self._memory = threading.local()

    def sample(
        self,
        seeds: Mapping[str, Any],
        *,
        epoch: int = 0,
        batch: int = 0,
        seed_time: Mapping[str, Any] | None = None,
        copy: bool = True,
    ) -> HeteroSample:
        """Sample around seeds.

        Args:
            seeds: numbers of nodes, by node type.
            epoch: number of the epoch; with ``batch`` and the sampler's seed it determines the random numbers.
            batch: number of the batch in the epoch.
            seed_time: the time of each seed, by node type; later edges or nodes are not sampled. None: the seeds'
                ``node_time``.
            copy: if false, arrays are views of this thread's buffers, which its next call overwrites.

        Raises:
            DataError: a seed is out of range, or its time is missing.
        """
        run = self._begin(seeds, seed_time, batch_key(self.seed, epoch, batch))
        local_seeds = self._number_seeds(run)
        num_nodes = {name: [nodes.count] for name, nodes in run.nodes.items()}
        num_edges: dict[EdgeType, list[int]] = {edge_type: [] for edge_type in self.graph}
        low = dict.fromkeys(self.num_nodes, 0)
        for hop in range(self.num_hops):
            # The frontier of this hop: the nodes that the last hop added, local ids low .. high-1.
            high = {name: nodes.count for name, nodes in run.nodes.items()}
            for relation, edge_type in enumerate(self.graph):
                num_edges[edge_type].append(self._hop(run, hop, relation, low[edge_type[2]], high[edge_type[2]]))
            for name, nodes in run.nodes.items():
                num_nodes[name].append(nodes.count - high[name])
            low = high
        if self.induced:
            num_edges = {edge_type: [self._induce(run, edge_type)] for edge_type in self.graph}
        return self._output(run, local_seeds, num_nodes, num_edges, copy)

    # ------------------------------------------------------------------------------------------------------- set-up

    def _rule_of_each(self) -> dict[EdgeType, Rule]:
        """Return the rule of each edge type: temporal if it has times."""
        if self.rule.temporal is None:
            return dict.fromkeys(self.graph, self.rule)
        rules = {}
        for edge_type, columns in self.graph.items():
            has_times = columns.source_time is not None or (self.node_time is None and columns.edge_time is not None)
            rules[edge_type] = self.rule if has_times else Rule(self.rule.replace)
        if not any(rule.temporal for rule in rules.values()):
            raise DataError(
                f"temporal={self.rule.temporal} is set, but neither edges nor source nodes have times.",
                hint="set Columns(edge_time=...) or node_time=..., or temporal=None.",
            )
        for edge_type, columns in self.graph.items():
            rules[edge_type].check(columns)
        return rules

    def _begin(self, seeds: Mapping[str, Any], seed_time: Mapping[str, Any] | None, key: int) -> _Batch:
        for name in seeds:
            if name not in self.num_nodes:
                raise DataError(
                    f"seeds of type {name!r}: the graph has no such node type.",
                    hint=f"the node types are {', '.join(self.num_nodes)}.",
                )
        checked = {name: checked_ids(ids, self.num_nodes[name], "seeds") for name, ids in seeds.items()}
        times = self._seed_times(checked, seed_time) if self.rule.temporal is not None else None
        memory = self._memory
        if not hasattr(memory, "nodes"):
            # Disjoint subgraphs number a node once per subgraph, which a table by node cannot do.
            hashed = {name: self.disjoint or size > scratch.DENSE_LIMIT for name, size in self.num_nodes.items()}
            memory.nodes = {name: scratch.NodeNumbering(size, hashed[name]) for name, size in self.num_nodes.items()}
            memory.edges = {edge_type: scratch.EdgeBuffer() for edge_type in self.graph}
            memory.work = scratch.SpanBuffer()
        width = max(1, sum(ids.size for ids in checked.values())) if self.disjoint else 1
        for nodes in memory.nodes.values():
            nodes.reset(width)
        for edges in memory.edges.values():
            edges.size = 0
        return _Batch(key, checked, times, memory.nodes, memory.edges, memory.work)

    def _seed_times(self, seeds: dict[str, Array], seed_time: Mapping[str, Any] | None) -> Array:
        times = [np.empty(0, np.int64)]
        for name, ids in seeds.items():
            if seed_time is not None and name in seed_time:
                times.append(checked_times(seed_time[name], ids.size, "seed_time"))
            elif self.node_time is not None and name in self.node_time:
                times.append(self.node_time[name][ids])
            else:
                raise DataError("sampling by times needs the time of each seed.", hint="set seed_time=...")
        return np.concatenate(times)

    def _number_seeds(self, run: _Batch) -> dict[str, Array]:
        """Return the local ids of the seeds by type; disjoint: each seed starts a separate subgraph."""
        local, first = {}, 0
        for name, ids in run.seeds.items():
            local[name] = ids.copy()
            subgraph = np.arange(first, first + ids.size) if self.disjoint else np.zeros(ids.size, np.int64)
            run.nodes[name].number(local[name], np.arange(ids.size), subgraph)
            first += ids.size
        return local

    # --------------------------------------------------------------------------------------------------------- hops

    def _frontier(self, run: _Batch, edge_type: EdgeType, low: int, high: int) -> Frontier:
        nodes = run.nodes[edge_type[2]]
        subgraph = nodes.batch[low:high] if self.disjoint else nodes.batch[:0]
        timed = self._rules[edge_type].temporal is not None and run.seed_time is not None
        limit = run.seed_time[subgraph] if timed else None  # type: ignore[index]
        return Frontier(nodes.node[low:high], subgraph, run.work.numbers(low, high), limit)

    def _hop(self, run: _Batch, hop: int, relation: int, low: int, high: int) -> int:
        """Sample one edge type; return the number of new edges."""
        edge_type = list(self.graph)[relation]
        count = self.fan_out[edge_type][hop]
        if low == high or count == 0:
            return 0
        columns, edges = self.graph[edge_type], run.edges[edge_type]
        start = edges.size
        choice = Choice(count, hop_key(run.key, hop, relation), self._rules[edge_type])
        choose(columns, self._frontier(run, edge_type, low, high), choice, edges, run.work)
        new = slice(start, edges.size)
        run.nodes[edge_type[0]].number(edges.row[new], edges.column[new], run.nodes[edge_type[2]].batch)
        return edges.size - start

    def _induce(self, run: _Batch, edge_type: EdgeType) -> int:
        """Replace the chosen edges of a type by all edges between sampled nodes; return their number."""
        columns, edges, targets = self.graph[edge_type], run.edges[edge_type], run.nodes[edge_type[2]]
        edges.size = 0
        whole = self._frontier(run, edge_type, 0, targets.count)
        # Count -1 takes all edges, so the key is not read.
        choice = Choice(-1, np.uint64(0), self._rules[edge_type], weighted=False)
        # All in-edges of all sampled nodes, piece by piece: only those with both ends in the batch are kept.
        for piece in pieces(columns.indptr[whole.node + 1] - columns.indptr[whole.node]):
            start = edges.size
            choose(columns, whole[piece], choice, edges, run.work)
            new = slice(start, edges.size)
            listed = (edges.row[new], edges.column[new], edges.position[new])
            edges.size = start + run.nodes[edge_type[0]].keep(*listed, targets.batch)
        return edges.size

    def _output(
        self,
        run: _Batch,
        seeds: dict[str, Array],
        num_nodes: dict[str, list[int]],
        num_edges: dict[EdgeType, list[int]],
        copy: bool,
    ) -> HeteroSample:
        def take(array: Array, size: int) -> Array:
            return array[:size].copy() if copy else array[:size]

        edges = run.edges.items()
        known = {edge_type: self.graph[edge_type].edge_id for edge_type in self.graph}
        return HeteroSample(
            node={name: take(nodes.node, nodes.count) for name, nodes in run.nodes.items()},
            row={edge_type: take(chosen.row, chosen.size) for edge_type, chosen in edges},
            col={edge_type: take(chosen.column, chosen.size) for edge_type, chosen in edges},
            edge={edge_type: take(chosen.position, chosen.size) for edge_type, chosen in edges},
            edge_id={
                edge_type: ids[run.edges[edge_type].position[: run.edges[edge_type].size]]
                for edge_type, ids in known.items()
                if ids is not None
            },
            batch={name: take(nodes.batch, nodes.count) for name, nodes in run.nodes.items()}
            if self.disjoint
            else None,
            seeds=seeds,
            num_sampled_nodes=num_nodes,
            num_sampled_edges=num_edges,
        )


class NeighborSampler:
    """Samples subgraphs around seeds of a homogeneous graph; see :class:`HeteroNeighborSampler`.

    Example:
        >>> import numpy as np
        >>> columns = Columns(indptr=np.array([0, 2, 3, 3]), indices=np.array([1, 2, 2]))
        >>> sample = NeighborSampler(columns, [-1, -1]).sample([0])
        >>> sample.node.tolist(), sample.row.tolist(), sample.col.tolist()
        ([0, 1, 2], [1, 2, 2], [0, 0, 1])

    Args:
        columns: the graph.
        num_neighbors: fan-out of each hop, -1 all.
        node_time: times of the nodes.
        options: ``replace, temporal, disjoint, induced, seed``.

    Raises:
        ConfigError, DataError: see :class:`HeteroNeighborSampler`.
    """

    def __init__(
        self, columns: Columns, num_neighbors: Sequence[int], *, node_time: Any = None, **options: Any
    ) -> None:
        if isinstance(num_neighbors, Mapping):
            raise ConfigError(
                "num_neighbors is set by edge type for a homogeneous graph.",
                hint="set a list with one number per hop.",
            )
        times = None if node_time is None else {_TYPE: node_time}
        self.typed = HeteroNeighborSampler(
            {_EDGE_TYPE: columns}, {_TYPE: columns.num_targets}, num_neighbors, node_time=times, **options
        )

    def sample(self, seeds: Any, *, epoch: int = 0, batch: int = 0, seed_time: Any = None, copy: bool = True) -> Sample:
        """Sample around seeds; arguments and errors as :meth:`HeteroNeighborSampler.sample`, without types."""
        times = None if seed_time is None else {_TYPE: seed_time}
        sample = self.typed.sample({_TYPE: seeds}, epoch=epoch, batch=batch, seed_time=times, copy=copy)
        return Sample(
            node=sample.node[_TYPE],
            row=sample.row[_EDGE_TYPE],
            col=sample.col[_EDGE_TYPE],
            edge=sample.edge[_EDGE_TYPE],
            edge_id=sample.edge_id.get(_EDGE_TYPE),
            batch=None if sample.batch is None else sample.batch[_TYPE],
            seeds=sample.seeds[_TYPE],
            num_sampled_nodes=sample.num_sampled_nodes[_TYPE],
            num_sampled_edges=sample.num_sampled_edges[_EDGE_TYPE],
        )


def _check_graph(graph: dict[EdgeType, Columns], num_nodes: dict[str, int]) -> None:
    for edge_type, columns in graph.items():
        source, _, target = edge_type
        for name, count, role in ((source, columns.num_sources, "sources"), (target, columns.num_targets, "targets")):
            if num_nodes.get(name) != count:
                known = num_nodes.get(name, "no")
                raise DataError(
                    f"the edges {edge_type} have {count} {role}, and there are {known} nodes of {name}.",
                    hint="pass the same numbers to num_nodes and Columns.",
                )
