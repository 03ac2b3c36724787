"""From the source data's numbering of nodes to the store's, without a table of all nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from gtrain.graph.store.store import Store


class GlobalIds:
    """Finds nodes of one type by their orig id, by a binary search in each part.

    Args:
        store: the graph; ``orig_id`` stays memory-mapped. Where it does not ascend, since the part's nodes are in
            groups, 8 bytes a node are needed besides.
        node_type: the type; None means the only one.

    Attributes:
        orig_ids: of each part, int64 ``[n_p]``.
    """

    def __init__(self, store: Store, node_type: str | None = None) -> None:
        self._first = store.offsets_of(node_type)[:-1].tolist()
        self.orig_ids = [store.node("orig_id", part, node_type) for part in range(store.num_parts)]
        self._sorters = [None if bool((ids[1:] > ids[:-1]).all()) else ids.argsort() for ids in self.orig_ids]

    def __call__(self, orig_id: Tensor) -> Tensor:
        """Return the global ids of orig ids of any shape, all of which must be in the graph."""
        orig_id = orig_id.contiguous()  # a column of a table is not, and torch warns of each copy that it makes
        found = torch.empty_like(orig_id)
        for first, ids, sorter in zip(self._first, self.orig_ids, self._sorters, strict=True):
            if ids.numel():
                place = torch.searchsorted(ids, orig_id, sorter=sorter).clamp_(max=ids.numel() - 1)
                if sorter is not None:
                    place = sorter[place]
                torch.where(ids[place] == orig_id, place + first, found, out=found)
        return found
