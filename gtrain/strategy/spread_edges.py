"""Batches of scored edges over nodes of which each rank has its own: full batch, or evaluation after encoding."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.edge_seeds import KnownEdges
from gtrain.data.batches.loader import SeedLoader, target_edge_type
from gtrain.data.batches.part_edges import PartEdges
from gtrain.data.batches.scored_edges import EdgeType, ScoredEdges
from gtrain.graph.store import Store
from gtrain.strategy.group import Group
from gtrain.strategy.row_exchange import RowExchange

Batch = TypeVar("Batch", bound=Data | HeteroData)
Lists = tuple[Tensor, Tensor]


class SpreadEdges:
    """This rank's edges of one split: those that point at nodes of its part. All ranks make it together.

    Args:
        group: the ranks; rank p owns part p.
        loader: describes the split.
    """

    def __init__(self, group: Group, loader: SeedLoader) -> None:
        self._group, self._store = group, loader.store
        self._kind = target_edge_type(loader.store)
        part = PartEdges(loader.store, self._kind, loader.split, [group.rank])
        self._edge_id, self._negatives = part.edge_id(), loader.negatives()
        self._edges = replace(part.select(), edge_id=self._edge_id)
        self._known = None if loader.split == "train" else _known(group, loader.store, self._kind)

    def __len__(self) -> int:
        return self._edge_id.numel()

    def batch(self, graph: Batch, epoch: int) -> Batch:
        """Return a shallow copy of a rank's graph with its edges of this split. All ranks call it together.

        Args:
            graph: own nodes first, in the order of their global ids.
            epoch: number of the epoch, for the false edges.

        Returns:
            A batch with the entries of :meth:`~gtrain.data.batches.scored_edges.ScoredEdges.entries`, whose ids are
            rows of what ``spread.rows`` returns; ``spread``, see :class:`~gtrain.protocols.Spread`; ``seeds`` and
            ``batch_size``.
        """
        edges = self._edges if self._negatives is None else self._negatives(self._edges, self._edge_id, epoch)
        nodes = SpreadNodes(self._group, self._store, self._kind, edges, self._known)
        copied = copy.copy(graph)
        nodes.local(edges).put_into(copied, self._kind if isinstance(copied, HeteroData) else None)
        copied.spread = nodes
        copied.seeds, copied.batch_size = torch.arange(len(self)), len(self)
        if isinstance(copied, HeteroData):
            copied.target = self._kind
        return copied


class SpreadNodes:
    """The ends of a batch's edges; implements :class:`~gtrain.protocols.Spread`.

    Args:
        group: the ranks.
        store: the graph.
        edge_type: type of the edges.
        edges: this rank's, by global ids.
        known: true edges, for ranking; None on the train split.
    """

    def __init__(
        self, group: Group, store: Store, edge_type: EdgeType, edges: ScoredEdges, known: KnownEdges | None
    ) -> None:
        self.rank, self.size = group.rank, group.size
        self.source, self.target = edges.source, edges.target
        self._group, self._known = group, known
        kinds = edge_type[0], edge_type[2]
        offsets = [store.offsets_of(kind) for kind in kinds]
        self.first = int(offsets[0][group.rank]), int(offsets[1][group.rank])
        ends = [edges.at_sources(), edges.at_targets()]
        if kinds[0] == kinds[1]:
            exchange = RowExchange(group, offsets[0], torch.cat(ends))
            self._exchanges = exchange, exchange
        else:
            self._exchanges = RowExchange(group, offsets[0], ends[0]), RowExchange(group, offsets[1], ends[1])
        self.num_own = self._exchanges[0].num_own, self._exchanges[1].num_own

    def local(self, edges: ScoredEdges) -> ScoredEdges:
        """The edges by rows of what :meth:`rows` returns."""
        sources, targets = self._exchanges
        return edges.renumbered(sources.local(edges.at_sources()), targets.local(edges.at_targets()))

    def rows(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        sources, targets = self._exchanges
        if source is target:
            self._count(sources, source)
            both = sources.rows(source)
            return both, both
        for exchange, tensor in ((sources, source), (targets, target)):
            self._count(exchange, tensor)
        return sources.rows(source), targets.rows(target)

    def known_targets(self, source: Tensor, relation: Tensor | None) -> Lists:
        assert self._known is not None
        return self._known.tails(source, relation)

    def known_sources(self, relation: Tensor | None) -> Lists:
        assert self._known is not None
        return self._known.heads(self.target, relation)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._group.all_gather(tensor)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._group.all_reduce(tensor)

    def _count(self, exchange: RowExchange, own: Tensor) -> None:
        """The rows must travel once each way: part of the lower bound, where a strategy reckons one."""
        counters = self._group.counters
        if counters.bound_bytes is not None:
            row = own[:0].flatten(1).size(1) * own.element_size()
            counters.needed(row * (exchange.num_served + own.requires_grad * exchange.remote_ids.numel()))


def _known(group: Group, store: Store, kind: EdgeType) -> KnownEdges:
    """What is true of the nodes that held-out edges ask about: of all ranks' sources, and of the own targets."""
    splits = [PartEdges(store, kind, split, [group.rank]).select() for split in ("val", "test")]
    sources = torch.cat(group.all_gather(torch.cat([edges.source for edges in splits]).unique())).unique()
    targets = torch.cat([edges.target for edges in splits]).unique()
    train = PartEdges(store, kind, "train", [group.rank]).select()
    asked = torch.isin(train.source, sources) | torch.isin(train.target, targets)
    train = ScoredEdges(train.source[asked], train.target[asked], {n: v[asked] for n, v in train.extra.items()})
    everything = [train, *splits]
    index = torch.stack(
        [torch.cat([edges.source for edges in everything]), torch.cat([edges.target for edges in everything])]
    )
    types = [edges.extra["type"] for edges in everything if "type" in edges.extra]  # a split without edges has none
    return KnownEdges(index, torch.cat(types) if types else None, int(store.facts.get("num_relations") or 1))
