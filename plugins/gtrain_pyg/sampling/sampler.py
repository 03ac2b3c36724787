"""Sampling the neighbourhoods of seeds over all parts, hop by hop; each part's edges are chosen by who hosts it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import DataError
from gtrain.graph.sampling import batch_key
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.sampling.rules import checked_ids, checked_times
from gtrain.graph.store.manifest import EdgeType
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.sampling.bidirectional import Bidirectional
from gtrain_pyg.sampling.hop import Hop, HopSampler
from gtrain_pyg.sampling.subgraph import Subgraph
from gtrain_pyg.sampling.tables import Tables
from gtrain_pyg.sampling.warm import load_kernels
from gtrain_pyg.structure.hosted import Structure
from gtrain_pyg.structure.needs import Needs

__all__ = ["DistributedSampler", "Subgraph"]

Array = NDArray[Any]


class DistributedSampler:
    """Samples subgraphs around seeds of a graph in parts.

    Threads may share a sampler, and had better: while one waits for a peer's answer others sample. What is sampled
    follows from (seed, epoch, batch), the seeds and the options alone: not from the number of threads, nor from which
    rank asks, hosts or answers. Without replacement, weights or times are as in
    :class:`gtrain.graph.sampling.HeteroNeighborSampler`, and so are the edges chosen, in another order.

    Args:
        structure: what this rank reads by itself.
        peers: the other ranks, each of which has called :func:`gtrain_pyg.sampling.answering.serve_sampling`.
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
        tables = self._tables()
        key = batch_key(self._seed, epoch, batch)
        checked = self._checked(seeds)
        times = self._seed_times(checked, seed_time) if self.options.temporal is not None else None
        tables.begin(sum(ids.size for ids in checked.values()) if self.options.disjoint else 1, times)
        found = self._number_seeds(tables, checked)
        num_nodes = {name: [nodes.count] for name, nodes in tables.nodes.items()}
        num_edges: dict[EdgeType, list[int]] = {kind: [] for kind in tables.edges}
        low = dict.fromkeys(num_nodes, 0)
        for hop, counts in enumerate(self._counts):
            high = {name: nodes.count for name, nodes in tables.nodes.items()}
            before = {kind: edges.size for kind, edges in tables.edges.items()}
            self._hops.sample(tables, Hop(key, hop, counts), low, high)
            for kind, edges in tables.edges.items():
                num_edges[kind].append(edges.size - before[kind])
            for name, nodes in tables.nodes.items():
                num_nodes[name].append(nodes.count - high[name])
            low = high
        unlisted = self._complete(tables, num_edges)
        return self._output(tables, found, num_nodes, num_edges, unlisted)

    # ------------------------------------------------------------------------------------------ seeds

    def _tables(self) -> Tables:
        if not hasattr(self._threads, "tables"):
            self._threads.tables = Tables(self._structure, self.options.disjoint, self._pool)
        return self._threads.tables

    def _checked(self, seeds: Mapping[str, Any]) -> dict[str, Array]:
        for name in seeds:
            if name not in self._structure.node_types:
                known = ", ".join(self._structure.node_types)
                raise DataError(f"seeds of type {name!r} were given.", hint=f"the node types are {known}.")
        return {name: checked_ids(ids, self._structure.book.count(name), "seeds") for name, ids in seeds.items()}

    def _seed_times(self, seeds: dict[str, Array], given: Mapping[str, Any] | None) -> Array:
        found = [np.empty(0, np.int64)]
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
            found.append(times)
        return np.concatenate(found)

    def _number_seeds(self, tables: Tables, seeds: dict[str, Array]) -> dict[str, Array]:
        """Give the seeds their local ids; disjoint: each in a subgraph of its own."""
        result, first = {}, 0
        for name, ids in seeds.items():
            subgraph = np.arange(first, first + ids.size) if self.options.disjoint else np.zeros(ids.size, np.int64)
            result[name] = self._pool.take(ids.shape, np.int64)
            result[name][:] = ids
            tables.nodes[name].number(result[name], np.arange(ids.size), subgraph)
            first += ids.size
        return result

    # ------------------------------------------------------------------------------------------ the result

    def _complete(self, tables: Tables, num_edges: dict[EdgeType, list[int]]) -> set[EdgeType]:
        """Turn the chosen edges into those asked for; tell of which edge types positions mean nothing."""
        unlisted: set[EdgeType] = set()
        if self.options.subgraph_type == "induced":
            self._hops.induce(tables)
        elif self._bidirectional is not None:
            unlisted = self._bidirectional.complete(tables.edges)
        if self.options.subgraph_type != "directional":
            num_edges.update({kind: [edges.size] for kind, edges in tables.edges.items()})
        return unlisted

    def _output(
        self,
        tables: Tables,
        seeds: dict[str, Array],
        num_nodes: dict[str, list[int]],
        num_edges: dict[EdgeType, list[int]],
        unlisted: set[EdgeType],
    ) -> Subgraph:
        index, edge = {}, {}
        for kind, edges in tables.edges.items():
            index[kind], position = edges.hand_out()
            if kind not in unlisted:
                edge[kind] = position
        batch = None
        if self.options.disjoint:
            batch = {name: self._kept(nodes.batch, nodes.count) for name, nodes in tables.nodes.items()}
        return Subgraph(
            node={name: self._kept(nodes.node, nodes.count) for name, nodes in tables.nodes.items()},
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
