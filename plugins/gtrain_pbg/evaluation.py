"""Batches of edges to rank, and of nodes to export: each worker has its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.batches.edge_seeds import KnownEdges
from gtrain.data.batches.loader import SeedLoader
from gtrain.graph.shard.whole import held_out_edges
from gtrain.graph.store import Store
from gtrain_pbg.tables import Partitioning

NODES = 1 << 16
"""Nodes of an export batch."""
EDGES = 1 << 20
"""Edges of the data that are compared at a time with the edges to rank."""
_ENDS = ("source", "target")
_OPTIONAL = ("edge_type", "edge_weight")


class EvaluationBatches:
    """A worker's share of a split's edges, or of all nodes for ``predict``; lost workers have no share.

    Args:
        loader: of the split.
        partitions: of the nodes.
        filtered: whether the model leaves out known edges.
        share: returns this worker's number among the workers that are not lost, and their number.
        one_batch: whether all edges come in one batch, because a pass through the table is expensive.
    """

    def __init__(
        self,
        loader: SeedLoader,
        partitions: Partitioning,
        filtered: bool,
        share: Callable[[], tuple[int, int]],
        one_batch: bool,
    ) -> None:
        self._loader, self._store, self._filtered, self._one_batch = loader, loader.store, filtered, one_batch
        self._orig_id = partitions.all_orig_ids
        self._edges = {} if loader.split == "predict" else held_out_edges(loader.store, loader.split)
        self._share = share
        self._take_share()

    def _take_share(self) -> None:
        """Choose this worker's edges, or nodes."""
        total = len(self._orig_id) if self._loader.split == "predict" else len(self._edges.get("source", ()))
        self._shared = worker, workers = self._share()
        self._mine = torch.arange(total).tensor_split(workers)[worker]
        self._known: KnownEdges | None = None

    def __len__(self) -> int:
        return -(-self._mine.numel() // self._size) or 1

    @property
    def _size(self) -> int:
        if self._loader.split == "predict":
            return NODES
        if self._one_batch or self._loader.batch_size is None:
            return max(1, self._mine.numel())
        return max(1, self._loader.batch_size)

    def __iter__(self) -> Iterator[Data]:
        if self._share() != self._shared:
            self._take_share()
        for seeds in self._mine.split(self._size) or [self._mine]:
            batch = Data(orig_id=self._orig_id, num_nodes=len(self._orig_id), seeds=seeds, batch_size=seeds.numel())
            if self._loader.split != "predict":
                self._fill(batch, seeds)
            yield batch

    def _fill(self, batch: Data, seeds: Tensor) -> None:
        if not self._edges:
            batch.edge_label_index = torch.empty(2, 0, dtype=torch.int64)
            return
        source, target = (self._edges[name][seeds] for name in _ENDS)
        batch.edge_label_index = torch.stack([source, target])
        for name in _OPTIONAL:
            if name in self._edges:
                batch[name.replace("edge_", "edge_label_")] = self._edges[name][seeds]
        if self._filtered:
            if self._known is None:
                self._known = known_edges(self._store, {name: ids[self._mine] for name, ids in self._edges.items()})
            relation = self._edges["edge_type"][seeds] if "edge_type" in self._edges else None
            batch.known_tail_ptr, batch.known_tail = self._known.tails(source, relation)
            batch.known_head_ptr, batch.known_head = self._known.heads(target, relation)


def known_edges(store: Store, edges: Mapping[str, Tensor]) -> KnownEdges:
    """Return all edges of all splits that share the source or the target, and the relation, with one of these edges.

    Edges are compared piece by piece, and only matching ones stay in memory.

    Args:
        store: with buckets.
        edges: ``source``, ``target`` (global ids) and, if edges have relations, ``edge_type``, int64 ``[B]``.
    """
    count = int(store.facts.get("num_relations") or 1)
    typed = "edge_type" in edges
    relation = edges["edge_type"].long() if typed else 0
    keys = [(edges[end].long() * count + relation).unique() for end in _ENDS]
    none = edges["source"][:0].long()
    ends, relations = [none.expand(2, 0)], [none]
    for columns in _all_edges(store):
        relation = columns["edge_type"].long() if typed else 0
        matches = [_among(columns[end] * count + relation, known) for end, known in zip(_ENDS, keys, strict=True)]
        rows = (matches[0] | matches[1]).nonzero().flatten()
        ends.append(torch.stack([columns[end][rows] for end in _ENDS]))
        if typed:
            relations.append(columns["edge_type"][rows].long())
    return KnownEdges(torch.cat(ends, dim=1), torch.cat(relations) if typed else None, count)


def _all_edges(store: Store) -> Iterator[dict[str, Tensor]]:
    """Yield ``source``, ``target`` (global ids, int64) and ``edge_type`` of all edges of all splits, piece by piece."""
    offsets = store.offsets
    for i in range(store.num_parts):
        for j in range(store.num_parts):
            columns = store.bucket(i, j)
            for begin in range(0, len(columns["source"]), EDGES):
                piece = {name: column[begin : begin + EDGES] for name, column in columns.items()}
                ends = {"source": piece["source"].long() + offsets[i], "target": piece["target"].long() + offsets[j]}
                yield piece | ends
    for split in ("val", "test"):
        columns = held_out_edges(store, split)
        if columns:
            yield columns


def _among(values: Tensor, known: Tensor) -> Tensor:
    """Return whether each value is in ``known``, which is sorted; bool ``[n]``. Faster than ``torch.isin`` here."""
    if not len(known):
        return torch.zeros_like(values, dtype=torch.bool)
    return known[torch.searchsorted(known, values).clamp(max=len(known) - 1)] == values
