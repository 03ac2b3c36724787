"""Rows of sparse features, read from the parts of a store as they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.batches.loader import target_type
from gtrain.errors import DataError
from gtrain.graph.store import Store
from gtrain.nn import Csr
from gtrain_ps.kernels import rows as kernels


@dataclass(frozen=True)
class _Part:
    """Memory maps of one part: its rows' entries, and labels."""

    starts: NDArray[np.int64]
    ids: NDArray[np.int64]
    values: NDArray[np.float32]
    y: Tensor | None
    orig_id: Tensor


class RowTable:
    """All rows of a store without edges; only those that are asked for are read.

    Args:
        store: the store; ``x`` of its one node type is sparse.
        dtype: of the values.
    """

    def __init__(self, store: Store, dtype: torch.dtype) -> None:
        self._store, self._kind = store, torch.empty(0, dtype=dtype).numpy().dtype
        self._parts = [_open(store, part) for part in range(store.num_parts)]
        self._offsets = store.offsets
        ends = self._offsets.tolist()
        self._spans = list(zip(ends[:-1], ends[1:], self._parts, strict=True))

    def rows_of(self, split: str) -> Tensor:
        """Global ids of a split's rows, in the order of the source data, int64.

        Raises:
            DataError: the store has no such split.
        """
        kind, found, places = target_type(self._store), [], []
        for part, opened in enumerate(self._parts):
            if split == "predict":
                mine = torch.arange(len(opened.orig_id))
            elif f"{split}_mask" not in self._store.node_tensors(kind):
                raise DataError(f"the store has no {split} split.", hint="give the rows labels.")
            else:
                mine = self._store.node(f"{split}_mask", part).nonzero().flatten()
            found.append(mine + self._offsets[part])
            places.append(opened.orig_id[mine])
        rows = torch.cat(found)
        return rows if len(found) == 1 and split != "predict" else rows[torch.argsort(torch.cat(places))]

    def batch(self, rows: Tensor, names: Sequence[str] = ("y",)) -> Data:
        """Some rows as a batch.

        Args:
            rows: int64 ``[m]``, global ids.
            names: which of ``y`` and ``orig_id`` it is to have, where the store has them.

        Returns:
            A ``Data`` of m nodes, all of them seeds, with ``x`` as a :class:`~gtrain.nn.Csr`, ``n_id`` and ``names``.
        """
        count, chosen = rows.numel(), rows.numpy()
        lengths = np.empty(count, np.int64)
        for low, high, part in self._spans:
            kernels.measure_rows(chosen, low, high, part.starts, lengths)
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        ids, values = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], self._kind)
        for low, high, part in self._spans:
            kernels.copy_rows(chosen, low, high, part.starts, part.ids, part.values, offsets, ids, values)
        made = Data(num_nodes=count, seeds=torch.arange(count), batch_size=count, n_id=rows)
        made.x = Csr(torch.from_numpy(ids), torch.from_numpy(values), torch.from_numpy(offsets))
        for name in names:
            gathered = self._gather(name, rows)
            if gathered is not None:
                made[name] = gathered
        return made

    def _gather(self, name: str, rows: Tensor) -> Tensor | None:
        first = getattr(self._parts[0], name)
        if first is None:
            return None
        out = first.new_empty((len(rows), *first.shape[1:]))
        for low, high, part in self._spans:
            kernels.copy_labels(rows.numpy(), low, high, getattr(part, name).numpy(), out.numpy())
        return out


def is_rows(store: Store) -> bool:
    """Whether a store holds rows of sparse features and no edges."""
    return not store.is_hetero and store.num_edges == 0 and bool(store.facts.get("sparse_features"))


def _open(store: Store, part: int) -> _Part:
    store.verify(part)
    x = store.node("x", part)
    labels = store.node("y", part) if "y" in store.node_tensors() else None
    arrays = x.crow_indices().numpy(), x.col_indices().numpy(), x.values().numpy()
    return _Part(*arrays, labels, store.node("orig_id", part))
