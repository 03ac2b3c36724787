"""Whole subgraphs of graphs with types: several hops, with nodes numbered in order of discovery."""

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
from gtrain.graph.sampling.hop import Choice, Frontier, choose, pieces
from gtrain.graph.sampling.output import EdgeType, HeteroSample
from gtrain.graph.sampling.rules import Rule, batch_key, check_count, checked_ids, checked_times, hop_key

Array = NDArray[Any]


@dataclass
class _Batch:
    """What one call knows: the key, the seeds by type, their times in the order of the subgraphs, and the memory."""

    key: int
    seeds: dict[str, Array]
    seed_time: Array | None
    nodes: dict[str, scratch.Nodes]
    edges: dict[EdgeType, scratch.Edges]
    work: scratch.Spans


class HeteroNeighborSampler:
    """Samples subgraphs around seeds of a heterogeneous graph.

    Threads may share a sampler; each has memory of its own. What is sampled follows from (seed, epoch, batch) and the
    arguments alone.

    Args:
        graph: the edges of each type, whose targets are nodes of the type's last word. The order of the types counts:
            edge types are sampled in it, and random numbers depend on it.
        num_nodes: nodes of each type.
        num_neighbors: fan-out of each hop, -1 all: one list for all edge types, or a list of each.
        replace: see :class:`Rule`.
        temporal: see :class:`Rule`. Subgraphs are then disjoint. An edge type without times is sampled without them.
        node_time: times of the nodes by type (of some types, or all); None: times are those of the edges.
        disjoint: a subgraph of its own for each seed, so that a node may occur several times.
        induced: return every edge between sampled nodes (of one subgraph, not later than its seed), not the chosen
            edges alone.
        seed: of the random numbers.

    Raises:
        ConfigError: a fan-out is below -1, or lists have different lengths or leave an edge type out.
        DataError: numbers of nodes and columns contradict each other, or times are missing.
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
        self.fan_out = _fan_out(num_neighbors, list(self.graph))
        self.num_hops = len(next(iter(self.fan_out.values()), ()))
        self.rule = Rule(replace, temporal)
        self.disjoint, self.induced, self.seed = disjoint or temporal is not None, induced, seed
        self.node_time = None
        _check_graph(self.graph, self.num_nodes)
        if temporal is not None and node_time is not None:
            self.node_time = {name: readable(times, "node_time", ("i8",)) for name, times in node_time.items()}
            for kind, columns in self.graph.items():
                if kind[0] in self.node_time:
                    self.graph[kind] = columns.timed_by_sources(self.node_time[kind[0]])
        self._rules = self._rule_of_each()
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
            epoch: with ``batch`` and the sampler's seed, names the random numbers.
            batch: number of the batch in the epoch.
            seed_time: by node type, the time of each seed; nothing later is sampled. None: the seeds' own times, where
                nodes have times.
            copy: False: arrays are views of this thread's memory, overwritten by its next call.

        Raises:
            DataError: a seed is out of range, or its time is missing.
        """
        run = self._begin(seeds, seed_time, batch_key(self.seed, epoch, batch))
        locals_of_seeds = self._number_seeds(run)
        found_nodes = {name: [nodes.count] for name, nodes in run.nodes.items()}
        found_edges: dict[EdgeType, list[int]] = {kind: [] for kind in self.graph}
        low = dict.fromkeys(self.num_nodes, 0)
        for hop in range(self.num_hops):
            high = {name: nodes.count for name, nodes in run.nodes.items()}
            for relation, kind in enumerate(self.graph):
                found_edges[kind].append(self._hop(run, hop, relation, low[kind[2]], high[kind[2]]))
            for name, nodes in run.nodes.items():
                found_nodes[name].append(nodes.count - high[name])
            low = high
        if self.induced:
            found_edges = {kind: [self._induce(run, kind)] for kind in self.graph}
        return self._output(run, locals_of_seeds, found_nodes, found_edges, copy)

    # ------------------------------------------------------------------------------------------------------- set-up

    def _rule_of_each(self) -> dict[EdgeType, Rule]:
        """The rule of each edge type: temporal where it has times."""
        if self.rule.temporal is None:
            return dict.fromkeys(self.graph, self.rule)
        rules = {}
        for kind, columns in self.graph.items():
            has_times = columns.loose_time is not None or (self.node_time is None and columns.edge_time is not None)
            rules[kind] = self.rule if has_times else Rule(self.rule.replace)
        if not any(rule.temporal for rule in rules.values()):
            raise DataError(
                f"temporal={self.rule.temporal} was set, and neither edges nor source nodes have times.",
                hint="give Columns(edge_time=...) or node_time=..., or set temporal=None.",
            )
        for kind, columns in self.graph.items():
            rules[kind].check(columns)
        return rules

    def _begin(self, seeds: Mapping[str, Any], seed_time: Mapping[str, Any] | None, key: int) -> _Batch:
        for name in seeds:
            if name not in self.num_nodes:
                raise DataError(
                    f"seeds of type {name!r} were given.", hint=f"the node types are {', '.join(self.num_nodes)}."
                )
        checked = {name: checked_ids(ids, self.num_nodes[name], "seeds") for name, ids in seeds.items()}
        times = self._seed_times(checked, seed_time) if self.rule.temporal is not None else None
        memory = self._memory
        if not hasattr(memory, "nodes"):
            hashed = {name: self.disjoint or size > scratch.DENSE_LIMIT for name, size in self.num_nodes.items()}
            memory.nodes = {name: scratch.Nodes(size, hashed[name]) for name, size in self.num_nodes.items()}
            memory.edges = {kind: scratch.Edges() for kind in self.graph}
            memory.work = scratch.Spans()
        width = max(1, sum(ids.size for ids in checked.values())) if self.disjoint else 1
        for nodes in memory.nodes.values():
            nodes.begin(width)
        for edges in memory.edges.values():
            edges.size = 0
        return _Batch(key, checked, times, memory.nodes, memory.edges, memory.work)

    def _seed_times(self, seeds: dict[str, Array], given: Mapping[str, Any] | None) -> Array:
        found = [np.empty(0, np.int64)]
        for name, ids in seeds.items():
            if given is not None and name in given:
                found.append(checked_times(given[name], ids.size, "seed_time"))
            elif self.node_time is not None and name in self.node_time:
                found.append(self.node_time[name][ids])
            else:
                raise DataError("sampling by times needs the time of each seed.", hint="give seed_time=...")
        return np.concatenate(found)

    def _number_seeds(self, run: _Batch) -> dict[str, Array]:
        """Give the seeds their local ids; disjoint: each in a subgraph of its own."""
        result, first = {}, 0
        for name, ids in run.seeds.items():
            result[name] = ids.copy()
            subgraph = np.arange(first, first + ids.size) if self.disjoint else np.zeros(ids.size, np.int64)
            run.nodes[name].number(result[name], np.arange(ids.size), subgraph)
            first += ids.size
        return result

    # --------------------------------------------------------------------------------------------------------- hops

    def _frontier(self, run: _Batch, kind: EdgeType, low: int, high: int) -> Frontier:
        nodes = run.nodes[kind[2]]
        subgraph = nodes.batch[low:high] if self.disjoint else nodes.batch[:0]
        if self._rules[kind].temporal is None:
            return Frontier(nodes.node[low:high], subgraph, run.work.numbers(low, high))
        assert run.seed_time is not None
        return Frontier(nodes.node[low:high], subgraph, run.work.numbers(low, high), run.seed_time[subgraph])

    def _hop(self, run: _Batch, hop: int, relation: int, low: int, high: int) -> int:
        """Sample one edge type; returns the number of new edges."""
        kind = list(self.graph)[relation]
        count = self.fan_out[kind][hop]
        if low == high or count == 0:
            return 0
        columns, edges = self.graph[kind], run.edges[kind]
        start = edges.size
        choice = Choice(count, hop_key(run.key, hop, relation), self._rules[kind])
        choose(columns, self._frontier(run, kind, low, high), choice, edges, run.work)
        new = slice(start, edges.size)
        run.nodes[kind[0]].number(edges.row[new], edges.column[new], run.nodes[kind[2]].batch)
        return edges.size - start

    def _induce(self, run: _Batch, kind: EdgeType) -> int:
        """Replace the chosen edges of a type by all that lead from sampled nodes to sampled nodes."""
        columns, edges, targets = self.graph[kind], run.edges[kind], run.nodes[kind[2]]
        edges.size = 0
        whole = self._frontier(run, kind, 0, targets.count)
        choice = Choice(-1, np.uint64(0), self._rules[kind])
        for piece in pieces(columns.indptr[whole.node + 1] - columns.indptr[whole.node]):
            start = edges.size
            choose(columns, whole[piece], choice, edges, run.work)
            new = slice(start, edges.size)
            found = (edges.row[new], edges.column[new], edges.position[new])
            edges.size = start + run.nodes[kind[0]].keep(*found, targets.batch)
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
        known = {kind: self.graph[kind].edge_id for kind in self.graph}
        return HeteroSample(
            node={name: take(nodes.node, nodes.count) for name, nodes in run.nodes.items()},
            row={kind: take(found.row, found.size) for kind, found in edges},
            col={kind: take(found.column, found.size) for kind, found in edges},
            edge={kind: take(found.position, found.size) for kind, found in edges},
            edge_id={
                kind: ids[run.edges[kind].position[: run.edges[kind].size]]
                for kind, ids in known.items()
                if ids is not None
            },
            batch={name: take(nodes.batch, nodes.count) for name, nodes in run.nodes.items()}
            if self.disjoint
            else None,
            seeds=seeds,
            num_sampled_nodes=num_nodes,
            num_sampled_edges=num_edges,
        )


def _fan_out(
    given: Sequence[int] | Mapping[EdgeType, Sequence[int]], kinds: list[EdgeType]
) -> dict[EdgeType, list[int]]:
    """The fan-out list of each edge type."""
    if not isinstance(given, Mapping):
        return {kind: [check_count(count) for count in given] for kind in kinds}
    missing, unknown = [kind for kind in kinds if kind not in given], [kind for kind in given if kind not in kinds]
    if missing or unknown:
        wrong = f"leaves out {missing[0]}" if missing else f"names {unknown[0]}, which the graph does not have"
        raise ConfigError(f"num_neighbors {wrong}.", hint=f"give a list for each of {', '.join(map(str, kinds))}.")
    lists = {kind: [check_count(count) for count in given[kind]] for kind in kinds}
    if len({len(counts) for counts in lists.values()}) > 1:
        lengths = ", ".join(f"{kind}: {len(counts)}" for kind, counts in lists.items())
        raise ConfigError(
            f"num_neighbors has lists of different lengths: {lengths}.",
            hint="give one number for each hop; 0 takes none.",
        )
    return lists


def _check_graph(graph: dict[EdgeType, Columns], num_nodes: dict[str, int]) -> None:
    for kind, columns in graph.items():
        for name, found, role in ((kind[0], columns.num_sources, "sources"), (kind[2], columns.num_targets, "targets")):
            if num_nodes.get(name) != found:
                raise DataError(
                    f"the edges {kind} have {found} {role}, and there are {num_nodes.get(name, 'no')} nodes of {name}.",
                    hint="give num_nodes and Columns the same numbers.",
                )
