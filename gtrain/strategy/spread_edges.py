"""Batches of scored edges over nodes that several ranks own, for full-batch training and for evaluation."""

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
    """This rank's edges of one split: those whose target is in its part. All ranks create it together.

    Args:
        group: the ranks; rank p owns part p.
        loader: describes the split.
        time: only the edges with this time, and for filtered ranking only those known at it; None: all edges.
        timed: finds edges by time; those that are created for several times share it.
    """

    def __init__(
        self, group: Group, loader: SeedLoader, time: int | None = None, timed: TimedEdges | None = None
    ) -> None:
        self._group, self._store = group, loader.store
        self._edge_type = target_edge_type(loader.store)
        timed = timed or TimedEdges(loader.store, group.rank)
        self._edges = timed.at(time, loader.split)
        self._negatives = loader.negatives()
        self._known = None if loader.split == "train" else _known_edges(group, loader.store, timed, time)

    def __len__(self) -> int:
        return self._edges.source.numel()

    def batch(self, graph: Batch, epoch: int) -> Batch:
        """Return a shallow copy of a rank's graph with its edges of this split. All ranks call this together.

        Args:
            graph: the rank's nodes first, in the order of their global ids.
            epoch: number of the epoch, from which negatives are drawn.

        Returns:
            A batch with the entries of :meth:`~gtrain.data.batches.scored_edges.ScoredEdges.entries`, whose ids are
            rows of the result of ``spread.rows``; ``spread``, see :class:`~gtrain.protocols.Spread`; ``seeds`` and
            ``batch_size``.
        """
        edges = self._edges
        if self._negatives is not None and edges.edge_id is not None:
            edges = self._negatives(edges, edges.edge_id, epoch)
        batch, is_hetero = copy.copy(graph), isinstance(graph, HeteroData)
        batch.spread = SpreadNodes(self._group, self._store, self._edge_type, edges, self._known)
        batch.spread.local(edges).put_into(batch, self._edge_type if is_hetero else None)
        batch.seeds, batch.batch_size = torch.arange(len(self)), len(self)
        if is_hetero:
            batch.target = self._edge_type
        return batch


class SpreadNodes:
    """The sources and targets of a batch's edges; implements :class:`~gtrain.protocols.Spread`.

    Args:
        group: the ranks.
        store: the graph.
        edge_type: type of the edges.
        edges: this rank's edges, with global ids.
        known: true edges, for filtered ranking; None on the train split.
    """

    def __init__(
        self, group: Group, store: Store, edge_type: EdgeType, edges: ScoredEdges, known: KnownEdges | None
    ) -> None:
        self.rank, self.size = group.rank, group.size
        self.all_gather, self.all_reduce = group.all_gather, group.all_reduce
        self.source, self.target = edges.source, edges.target
        self._group, self._known = group, known
        source_type, _, target_type = edge_type
        offsets = store.offsets_of(source_type), store.offsets_of(target_type)
        self.first = int(offsets[0][group.rank]), int(offsets[1][group.rank])
        sources, targets = edges.at_sources(), edges.at_targets()
        # One exchange: a node that is source of one edge and target of another is sent once.
        if source_type == target_type:
            exchange = RowExchange(group, offsets[0], torch.cat([sources, targets]))
            self._exchanges = exchange, exchange
        else:
            self._exchanges = RowExchange(group, offsets[0], sources), RowExchange(group, offsets[1], targets)
        self.num_own = self._exchanges[0].num_own, self._exchanges[1].num_own

    def local(self, edges: ScoredEdges) -> ScoredEdges:
        """Return the edges with ids that are rows of the result of :meth:`rows`."""
        sources, targets = self._exchanges
        return edges.renumbered(sources.local(edges.at_sources()), targets.local(edges.at_targets()))

    def rows(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        sources, targets = self._exchanges
        source_rows = self._exchange(sources, source)
        return source_rows, source_rows if source is target else self._exchange(targets, target)

    def known_targets(self, source: Tensor, relation: Tensor | None) -> Lists:
        assert self._known is not None
        return self._known.tails(source, relation)

    def known_sources(self, relation: Tensor | None) -> Lists:
        assert self._known is not None
        return self._known.heads(self.target, relation)

    def _exchange(self, exchange: RowExchange, own: Tensor) -> Tensor:
        """Return the rank's rows and the remote ones; count the bytes that any strategy must send for them.

        Rows travel to their readers once, and their gradients back to the owners once.
        """
        counters = self._group.counters
        if counters.bound_bytes is not None:
            row_bytes = own[:0].flatten(1).size(1) * own.element_size()
            counters.needed(row_bytes * (exchange.num_served + own.requires_grad * exchange.remote_ids.numel()))
        return exchange.rows(own)


class TimedEdges:
    """The edges of each split that point at the nodes of a part, by time; the times are sorted once.

    Args:
        store: the graph.
        part: the part.
    """

    def __init__(self, store: Store, part: int) -> None:
        self._store, self._part = store, part
        self._sorted: dict[str, tuple[Tensor, Tensor]] = {}

    def at(self, time: int | None, split: str) -> ScoredEdges:
        """Return the edges of a split with this time; None: all. Their order is that of the part."""
        edges = PartEdges(self._store, target_edge_type(self._store), split, [self._part])
        chosen = None if time is None or not len(edges) else self._find(time, split, edges)
        return replace(edges.select(chosen), edge_id=edges.edge_id(chosen))

    def _find(self, time: int, split: str, edges: PartEdges) -> Tensor:
        if split not in self._sorted:
            self._sorted[split] = edges.select().extra["time"].sort(stable=True)
        times, order = self._sorted[split]
        return order[int(torch.searchsorted(times, time)) : int(torch.searchsorted(times, time, right=True))]


def _known_edges(group: Group, store: Store, timed: TimedEdges, time: int | None) -> KnownEdges:
    """Return the true edges that filtered ranking of held-out edges needs.

    They are this rank's edges of all splits, with a time those that have it; of the training edges, those with the
    source of any rank's held-out edge or the target of one of its held-out edges.
    """
    splits = [timed.at(time, split) for split in ("val", "test")]
    sources = torch.cat(group.all_gather(torch.cat([edges.source for edges in splits]).unique())).unique()
    targets = torch.cat([edges.target for edges in splits]).unique()
    train = timed.at(time, "train")
    needed = torch.isin(train.source, sources) | torch.isin(train.target, targets)
    train = ScoredEdges(train.source[needed], train.target[needed], {n: v[needed] for n, v in train.extra.items()})
    known = [train, *splits]
    index = torch.stack([torch.cat([edges.source for edges in known]), torch.cat([edges.target for edges in known])])
    types = [edges.extra["type"] for edges in known if "type" in edges.extra]  # missing in a split without edges
    return KnownEdges(index, torch.cat(types) if types else None, int(store.facts.get("num_relations") or 1))
