"""Validation and test of models that score edges against all nodes: every rank encodes its own nodes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.loader import SeedLoader, target_edge_type
from gtrain.strategy.group import Group
from gtrain.strategy.spread_edges import SpreadEdges
from gtrain_pyg.seeds import NodeSeeds

Batch: TypeAlias = Data | HeteroData
_LATEST = torch.iinfo(torch.int64).max


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
    found = {}
    for kind in (source, target):
        ids = torch.arange(*store.offsets_of(kind)[rank : rank + 2].tolist())
        times = torch.full_like(ids, _LATEST) if timed else None
        found[kind] = NodeSeeds(ids, kind, times, store.num_nodes_of(kind), None)
    return found
