"""Batches of edges that are ranked, and of nodes that are written out: each worker has its share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.edge_seeds import KnownEdges
from gtrain.data.loader import SeedLoader
from gtrain.graph.store import Store
from gtrain.graph.whole import held_out_edges
from gtrain_pbg.tables import Partitions

NODES = 1 << 16
"""Nodes of a batch that are written out."""
_OPTIONAL = ("edge_type", "edge_weight")


class EvaluationBatches:
    """A worker's share of a split's edges; of all nodes for ``predict``.

    Args:
        loader: what to evaluate.
        partitions: how the table is cut.
        filtered: whether the model leaves out what is known.
        worker: number of this worker; workers: how many there are.
        one_batch: whether all edges come at once, because going through the table is dear.
    """

    def __init__(
        self, loader: SeedLoader, partitions: Partitions, filtered: bool, worker: int, workers: int, one_batch: bool
    ) -> None:
        self._loader, self._store, self._filtered, self._one_batch = loader, loader.store, filtered, one_batch
        self._orig_id = torch.cat(partitions.orig_id)
        self._edges = {} if loader.split == "predict" else held_out_edges(loader.store, loader.split)
        total = len(self._orig_id) if loader.split == "predict" else len(self._edges.get("source", ()))
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
        for seeds in self._mine.split(self._size) or [self._mine]:
            batch = Data(orig_id=self._orig_id, num_nodes=len(self._orig_id))
            if self._loader.split == "predict":
                batch.seeds, batch.batch_size = seeds, seeds.numel()
            else:
                self._fill(batch, seeds)
            yield batch

    def _fill(self, batch: Data, seeds: Tensor) -> None:
        batch.seeds, batch.batch_size = seeds, seeds.numel()
        if not self._edges:
            batch.edge_label_index = torch.empty(2, 0, dtype=torch.int64)
            return
        source, target = (self._edges[name][seeds] for name in ("source", "target"))
        batch.edge_label_index = torch.stack([source, target])
        for name in _OPTIONAL:
            if name in self._edges:
                batch[name.replace("edge_", "edge_label_")] = self._edges[name][seeds]
        if self._filtered:
            if self._known is None:
                self._known = known_edges(self._store)
            relation = self._edges["edge_type"][seeds] if "edge_type" in self._edges else None
            batch.known_tail_ptr, batch.known_tail = self._known.tails(source, relation)
            batch.known_head_ptr, batch.known_head = self._known.heads(target, relation)


def known_edges(store: Store) -> KnownEdges:
    """All edges of the data, of all splits, by global ids."""
    offsets = store.offsets
    ends, relations = [], []
    for i in range(store.num_parts):
        for j in range(store.num_parts):
            columns = store.bucket(i, j)
            pair = columns["source"].long() + offsets[i], columns["target"].long() + offsets[j]
            ends.append(torch.stack(pair))
            if "edge_type" in columns:
                relations.append(columns["edge_type"].long())
    for split in ("val", "test"):
        found = held_out_edges(store, split)
        if found:
            ends.append(torch.stack([found["source"], found["target"]]))
            if "edge_type" in found:
                relations.append(found["edge_type"].long())
    count = int(store.facts.get("num_relations") or 1)
    return KnownEdges(torch.cat(ends, dim=1), torch.cat(relations) if relations else None, count)
