"""Global ids: a numbering of the nodes of one type in which each part's nodes are contiguous."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.graph.store.store import Store

Ints = NDArray[np.int64]


@dataclass
class Numbering:
    """The global ids of one node type.

    Attributes:
        offsets: first global id of each part, and N, ``[P + 1]`` int64.
        orig_id: original id of each global id, ``[N]`` int64; None if they are equal.
        global_id: global id of each original id, ``[N]`` int32 or int64; None if they are equal.
    """

    offsets: Ints
    orig_id: Ints | None
    global_id: NDArray[Any] | None

    @classmethod
    def of(cls, assignment: NDArray[Any], num_parts: int, groups: NDArray[Any] | None = None) -> Numbering:
        """Number the nodes by part, within a part by group, and within a group in the order of the source data.

        Args:
            assignment: the part of each node, ``[N]`` integer.
            num_parts: P; a part may be empty.
            groups: the group of each node within its part, ``[N]`` integer; None means one group per part.
        """
        offsets = np.zeros(num_parts + 1, dtype=np.int64)
        np.cumsum(np.bincount(assignment, minlength=num_parts), out=offsets[1:])
        if num_parts == 1:
            return cls(offsets, None, None)
        # numpy sorts 16-bit integers by radix sort, in linear time.
        narrow = assignment.astype(np.uint16) if num_parts <= 2**16 else assignment
        orig_id = np.argsort(narrow, kind="stable") if groups is None else np.lexsort((groups, narrow))
        global_id = np.empty(orig_id.size, dtype=index_dtype(orig_id.size))
        global_id[orig_id] = np.arange(orig_id.size, dtype=global_id.dtype)
        return cls(offsets, orig_id, global_id)

    @property
    def num_parts(self) -> int:
        return self.offsets.size - 1

    @property
    def num_nodes(self) -> int:
        return int(self.offsets[-1])

    def range(self, part: int) -> tuple[int, int]:
        """Return the first global id of a part, and the last plus 1."""
        return int(self.offsets[part]), int(self.offsets[part + 1])

    def originals(self, start: int, stop: int) -> Ints:
        """Return the original ids of the global ids ``start .. stop-1``."""
        return np.arange(start, stop) if self.orig_id is None else self.orig_id[start:stop]

    def owners(self) -> NDArray[Any]:
        """Return the part of each node by original id, ``[N]`` uint16 or int64."""
        parts = np.arange(self.num_parts, dtype=np.uint16 if self.num_parts <= 2**16 else np.int64)
        return self._by_orig_id(np.repeat(parts, np.diff(self.offsets)))

    def within(self) -> NDArray[Any]:
        """Return the offset of each node within its part by original id, ``[N]`` int32 or int64."""
        numbers = np.arange(self.num_nodes, dtype=index_dtype(self.num_nodes))
        return self._by_orig_id(numbers - np.repeat(self.offsets[:-1].astype(numbers.dtype), np.diff(self.offsets)))

    def globals(self, ids: NDArray[Any]) -> Ints:
        """Return the global ids of original ids."""
        return np.asarray(ids if self.global_id is None else self.global_id[ids], dtype=np.int64)

    def _by_orig_id(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self.global_id is None else values[self.global_id]


def index_dtype(count: int) -> np.dtype[Any]:
    """Return the narrowest of int32 and int64 that holds the numbers below ``count``."""
    return np.dtype(np.int32 if count < 2**31 else np.int64)


class GlobalIds:
    """Maps original ids of one node type to global ids, by binary search in each part.

    Args:
        store: the graph; ``orig_id`` stays memory-mapped. A part whose ``orig_id`` does not ascend (its nodes are in
            locality groups) needs 8 bytes per node for a permutation.
        node_type: the type; None means the only one.

    Attributes:
        orig_ids: of each part, int64 ``[n_p]``.
    """

    def __init__(self, store: Store, node_type: str | None = None) -> None:
        self._first = store.offsets_of(node_type)[:-1].tolist()
        self.orig_ids = [store.node("orig_id", part, node_type) for part in range(store.num_parts)]
        self._sorters = [None if bool((ids[1:] > ids[:-1]).all()) else ids.argsort() for ids in self.orig_ids]

    def __call__(self, orig_id: Tensor) -> Tensor:
        """Return the global ids, int64, of original ids of any shape, all of which must be in the graph."""
        # torch.searchsorted copies a strided column and warns, at each call.
        orig_id = orig_id.contiguous()
        global_id = torch.empty_like(orig_id)
        for first, ids, sorter in zip(self._first, self.orig_ids, self._sorters, strict=True):
            if ids.numel():
                # An id of another part gets a position too, which the comparison below discards.
                row = torch.searchsorted(ids, orig_id, sorter=sorter).clamp_(max=ids.numel() - 1)
                if sorter is not None:
                    row = sorter[row]
                torch.where(ids[row] == orig_id, row + first, global_id, out=global_id)
        return global_id
