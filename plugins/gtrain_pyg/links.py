"""Edges as seeds: the nodes that a batch of edges is grown around, and the batch's fields about the edges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.loader import SeedLoader, target_edge_type
from gtrain.data.batches.negatives import Negatives
from gtrain.data.batches.part_edges import PartEdges
from gtrain.data.batches.scored_edges import ScoredEdges
from gtrain.errors import DataError
from gtrain.graph.store.manifest import EdgeType
from gtrain.strategy.group import Group
from gtrain.strategy.spread_edges import SpreadEdges
from gtrain_pyg.batches import SeedFields
from gtrain_pyg.ranks.parts import Array
from gtrain_pyg.sampling.subgraph import Subgraph
from gtrain_pyg.seeds import NodeSeeds, Roots, SeedSource, Step

Batch: TypeAlias = Data | HeteroData
_LATEST = torch.iinfo(torch.int64).max


class LinkSeeds(SeedSource):
    """Edges of the type that is predicted.

    The roots are the endpoints of the true and of the false edges, each node once in the order of first occurrence:
    sources, then targets, then endpoints of false edges. With disjoint subgraphs (and so with times) a node is a root
    once for each of its edges.

    Args:
        edges: the edges that the rank draws from.
        edge_type: their type.
        negatives: draws false edges; None adds none.
        order: int64 ``[count]``, the position in ``edges`` of each seed; None keeps the order.
        total: seeds of all ranks.
        owner: see :class:`SeedSource`.
        timed: restrict a subgraph to what is earlier than its edge.
        disjoint: sample a separate subgraph for each root; implied by ``timed``.
    """

    def __init__(
        self,
        edges: PartEdges,
        edge_type: EdgeType,
        negatives: Negatives | None,
        *,
        order: Tensor | None,
        total: int,
        owner: Tensor | None,
        timed: bool,
        disjoint: bool,
    ) -> None:
        self.edges, self.edge_type, self.negatives = edges, edge_type, negatives
        self.count, self.total, self.owner = len(edges), total, owner
        self._order, self._timed, self._disjoint = order, timed, disjoint or timed
        # by step number: its edges by global ids, and the index of each source and each target among the roots
        self._pending: dict[int, tuple[ScoredEdges, Tensor, Tensor]] = {}

    def roots(self, step: Step) -> Roots:
        edges = self.scored(step)
        at_source, at_target = edges.at_sources(), edges.at_targets()
        source, _, target = self.edge_type
        if source == target:
            ids, index = self._unique(torch.cat([at_source, at_target]))
            nodes, (heads, tails) = {source: ids}, index.split([at_source.numel(), at_target.numel()])
        else:
            (source_ids, heads), (target_ids, tails) = self._unique(at_source), self._unique(at_target)
            nodes = {source: source_ids, target: target_ids}
        self._pending[step.number] = edges, heads, tails
        return Roots(nodes, self._times(edges) if self._timed else None)

    def fields(self, step: Step, subgraph: Subgraph) -> SeedFields:
        edges, heads, tails = self._pending.pop(step.number)
        source, _, target = self.edge_type
        sources, targets = (torch.from_numpy(np.asarray(subgraph.seeds[node_type])) for node_type in (source, target))
        local = edges.renumbered(sources[heads], targets[tails])
        entries = {"seeds": step.seeds, "batch_size": step.seeds.numel()}
        return SeedFields(self.edge_type, entries, step.seeds, local.extra.get("time") if self._timed else None, local)

    def scored(self, step: Step) -> ScoredEdges:
        """Return the true and false edges of a step by global ids."""
        chosen = step.seeds if self._order is None else self._order[step.seeds]
        edge_id = self.edges.edge_id(chosen)
        edges = replace(self.edges.select(chosen), edge_id=edge_id)
        return edges if self.negatives is None else self.negatives(edges, edge_id, step.epoch)

    def _unique(self, ids: Tensor) -> tuple[Array, Tensor]:
        """Return the roots, and the index of each id among them."""
        if self._disjoint:
            return ids.numpy(), torch.arange(ids.numel())
        unique, first, inverse = np.unique(ids.numpy(), return_index=True, return_inverse=True)
        order = np.argsort(first)
        return unique[order], torch.from_numpy(np.argsort(order)[inverse])

    def _times(self, edges: ScoredEdges) -> dict[str, Array]:
        """Return the latest time sampled for each root: just before its edge, or the edge would be its neighbour."""
        time, (source, _, target) = edges.extra["time"].long() - 1, self.edge_type
        heads, tails = (
            time[torch.arange(ids.numel()) % max(time.numel(), 1)].numpy()
            for ids in (edges.at_sources(), edges.at_targets())
        )
        return {source: np.concatenate([heads, tails])} if source == target else {source: heads, target: tails}


def link_seeds(
    loader: SeedLoader, group: Group, *, all_ranks: bool, timed: bool = False, disjoint: bool = False
) -> LinkSeeds:
    """Return the seeds of a loader over edges, without communication.

    Args:
        loader: names the store and the split, and configures false edges.
        group: the ranks; rank p owns part p and the edges that point at its nodes.
        all_ranks: take the edges of all ranks, in the order of the source data.
        timed: restrict a subgraph to what is earlier than its edge.
        disjoint: sample a separate subgraph for each root.

    Raises:
        DataError: the edges have no times.
    """
    store, edge_type = loader.store, target_edge_type(loader.store)
    if timed and "edge_time" not in store.edge_tensors(edge_type):
        raise DataError(
            f"temporal sampling needs the time of each seed, and edges of type {','.join(edge_type)} have no "
            "edge_time.",
            hint="set data.temporal_strategy=null, or add times to the edges.",
        )
    edges = PartEdges(store, edge_type, loader.split, range(store.num_parts) if all_ranks else [group.rank])
    order = edges.edge_id().argsort() if all_ranks else None
    return LinkSeeds(
        edges,
        edge_type,
        loader.negatives(),
        order=order,
        total=loader.num_seeds,
        owner=None if order is None else edges.owner[order],
        timed=timed,
        disjoint=disjoint,
    )


class LinkEvaluation:
    """One batch: this rank's held-out edges of a split, with ``node_batches`` in which its nodes are encoded.

    :meth:`gtrain.model.link_predictor.LinkPredictor.embeddings` reads ``node_batches``;
    :meth:`gtrain.strategy.spread_edges.SpreadEdges.batch` describes the other fields. Construction is collective.

    Args:
        group: the ranks.
        loader: describes the split.
        node_batches: for each node type at an end of the edges, batches of all nodes that the rank owns.
        prepare: called with each node batch before the model; returns the batch to use.
    """

    def __init__(
        self,
        group: Group,
        loader: SeedLoader,
        node_batches: Mapping[str, Iterable[Batch]],
        prepare: Callable[[Batch], Batch],
    ) -> None:
        def opener(batches: Iterable[Batch]) -> Callable[[], Iterator[Batch]]:
            return lambda: map(prepare, batches)

        self._batch = SpreadEdges(group, loader).batch(HeteroData() if loader.store.is_hetero else Data(), 0)
        self._batch.node_batches = {node_type: opener(batches) for node_type, batches in node_batches.items()}

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Batch]:
        yield self._batch


def local_nodes(loader: SeedLoader, rank: int, *, timed: bool) -> dict[str, NodeSeeds]:
    """Return all nodes of a rank, of each type at an end of the predicted edges.

    Args:
        loader: names the store.
        rank: the rank, and its part.
        timed: sampling is temporal: nodes are encoded as of the end of all times.
    """
    store, (source, _, target) = loader.store, target_edge_type(loader.store)
    seeds = {}
    for node_type in (source, target):
        ids = torch.arange(*store.offsets_of(node_type)[rank : rank + 2].tolist())
        times = torch.full_like(ids, _LATEST) if timed else None
        seeds[node_type] = NodeSeeds(ids, node_type, times, store.num_nodes_of(node_type), None)
    return seeds
