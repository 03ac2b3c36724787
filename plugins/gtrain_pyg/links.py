"""Edges as seeds: the nodes that a batch of edges is grown around, and what the batch says of the edges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from gtrain_pyg.batches import Seeds
from gtrain_pyg.epoch import Step
from gtrain_pyg.sampling.subgraph import Array, Subgraph
from gtrain_pyg.seeds import NodeSeeds, Roots, SeedSource

Batch: TypeAlias = Data | HeteroData
_LATEST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class _Grown:
    """A step's edges, and where their ends are among the roots.

    Attributes:
        edges: by global ids.
        sources, targets: int64, for each of ``edges.at_sources()`` and ``edges.at_targets()`` its place among the roots
            of its type.
    """

    edges: ScoredEdges
    sources: Tensor
    targets: Tensor


class LinkSeeds(SeedSource):
    """Edges of the type that is predicted.

    The roots are the ends of the true and of the false edges, each node once in the order of first occurrence: sources,
    then targets, then false ends. Where subgraphs are disjoint (as with times) a node is a root for each edge that it
    is an end of.

    Args:
        edges: what the rank draws from.
        edge_type: their type.
        negatives: draws false edges; None: there are none.
        order: int64 ``[count]``, the position in ``edges`` of each seed; None: the same.
        total: seeds of all ranks.
        owner: see :class:`SeedSource`.
        timed: whether a subgraph holds nothing but what was before its edge.
        disjoint: whether each root has a subgraph of its own; so it is where ``timed``.
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
        self._grown: dict[int, _Grown] = {}

    def roots(self, step: Step) -> Roots:
        edges = self.scored(step)
        at_source, at_target = edges.at_sources(), edges.at_targets()
        source, _, target = self.edge_type
        if source == target:
            ids, place = self._unique(torch.cat([at_source, at_target]))
            ends, places = {source: ids}, place.split([at_source.numel(), at_target.numel()])
        else:
            (heads, head_place), (tails, tail_place) = self._unique(at_source), self._unique(at_target)
            ends, places = {source: heads, target: tails}, (head_place, tail_place)
        self._grown[step.number] = _Grown(edges, *places)
        return Roots(ends, self._times(edges) if self._timed else None)

    def describe(self, step: Step, subgraph: Subgraph) -> Seeds:
        grown = self._grown.pop(step.number)
        source, _, target = self.edge_type
        heads, tails = (torch.from_numpy(np.asarray(subgraph.seeds[kind])) for kind in (source, target))
        local = grown.edges.renumbered(heads[grown.sources], tails[grown.targets])
        entries = {"seeds": step.seeds, "batch_size": step.seeds.numel()}
        return Seeds(self.edge_type, entries, step.seeds, local.extra.get("time") if self._timed else None, local)

    def scored(self, step: Step) -> ScoredEdges:
        """The edges of a step by global ids, true and false."""
        chosen = step.seeds if self._order is None else self._order[step.seeds]
        edge_id = self.edges.edge_id(chosen)
        edges = replace(self.edges.select(chosen), edge_id=edge_id)
        return edges if self.negatives is None else self.negatives(edges, edge_id, step.epoch)

    def _unique(self, ids: Tensor) -> tuple[Array, Tensor]:
        """The nodes to grow from, and the place of each id among them."""
        if self._disjoint:
            return ids.numpy(), torch.arange(ids.numel())
        unique, first, inverse = np.unique(ids.numpy(), return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        return unique[order], torch.from_numpy(place[inverse])

    def _times(self, edges: ScoredEdges) -> dict[str, Array]:
        """The time of each root, up to which is sampled: just before its edge, which else would be its neighbour."""
        time, (source, _, target) = edges.extra["time"].long() - 1, self.edge_type
        heads, tails = (
            time[torch.arange(ends.numel()) % max(time.numel(), 1)].numpy()
            for ends in (edges.at_sources(), edges.at_targets())
        )
        return {source: np.concatenate([heads, tails])} if source == target else {source: heads, target: tails}


def link_seeds(
    loader: SeedLoader, group: Group, *, everybody: bool, timed: bool = False, disjoint: bool = False
) -> LinkSeeds:
    """Return the seeds of a loader over edges. Sends nothing.

    Args:
        loader: names the store and the split, and says which false edges are drawn.
        group: the ranks; rank p owns part p and the edges that point at its nodes.
        everybody: take the edges of all ranks, in the order of the source data.
        timed: whether a subgraph is to hold nothing but what was before its edge.
        disjoint: whether each root has a subgraph of its own.

    Raises:
        DataError: edges have no times.
    """
    store, kind = loader.store, target_edge_type(loader.store)
    if timed and "edge_time" not in store.edge_tensors(kind):
        raise DataError(
            f"sampling by times needs the time of each seed, and edges of the type {','.join(kind)} have no edge_time.",
            hint="set data.temporal_strategy=null, or give the edges times.",
        )
    parts = range(store.num_parts) if everybody else [group.rank]
    edges = PartEdges(store, kind, loader.split, parts)
    order = edges.edge_id().argsort() if everybody else None
    return LinkSeeds(
        edges,
        kind,
        loader.negatives(),
        order=order,
        total=loader.num_seeds,
        owner=None if order is None else edges.owner[order],
        timed=timed,
        disjoint=disjoint,
    )


class LinkEvaluation:
    """One batch: this rank's held-out edges of a split, with ``node_batches`` in which its nodes are encoded.

    See :meth:`gtrain.model.link_predictor.LinkPredictor.embeddings` for these, and
    :meth:`gtrain.strategy.spread_edges.SpreadEdges.batch` for the rest. All ranks make it together.

    Args:
        group: the ranks.
        loader: describes the split.
        node_batches: of each node type at an end of the edges, all own nodes.
        ready: called with each of the node batches before the model has it; returns the batch to hand over.
    """

    def __init__(
        self,
        group: Group,
        loader: SeedLoader,
        node_batches: Mapping[str, Iterable[Batch]],
        ready: Callable[[Batch], Batch],
    ) -> None:
        self._ready, self._node_batches = ready, node_batches
        self._batch = SpreadEdges(group, loader).batch(HeteroData() if loader.store.is_hetero else Data(), 0)
        self._batch.node_batches = {kind: self._opener(kind) for kind in node_batches}

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Batch]:
        yield self._batch

    def _opener(self, kind: str) -> Callable[[], Iterator[Batch]]:
        return lambda: map(self._ready, self._node_batches[kind])


def own_nodes(loader: SeedLoader, rank: int, *, timed: bool) -> dict[str, NodeSeeds]:
    """Return all nodes of a rank, of each type at an end of the predicted edges.

    Args:
        loader: names the store.
        rank: the rank, and its part.
        timed: whether sampling goes by times: the nodes are encoded as they are after the last of all.
    """
    store, (source, _, target) = loader.store, target_edge_type(loader.store)
    seeds = {}
    for kind in (source, target):
        ids = torch.arange(*store.offsets_of(kind)[rank : rank + 2].tolist())
        times = torch.full_like(ids, _LATEST) if timed else None
        seeds[kind] = NodeSeeds(ids, kind, times, store.num_nodes_of(kind), None)
    return seeds
