"""Rows of sparse features, read on demand from the memory-mapped parts of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.batches.loader import target_type
from gtrain.errors import DataError
from gtrain.graph.store import Store
from gtrain.nn import Csr
from gtrain_ps.kernels import rows as kernels


@dataclass(frozen=True)
class _Part:
    """Memory maps of one part: its rows, labels, and ids in the source data."""

    rows: kernels.PartRows
    y: Tensor | None
    orig_id: Tensor


class RowTable:
    """The rows of a store without edges; only the rows of a batch are read.

    Args:
        store: the store; ``x`` of its one node type is sparse.
        dtype: of the values.
    """

    def __init__(self, store: Store, dtype: torch.dtype) -> None:
        self._store, self._dtype = store, torch.empty(0, dtype=dtype).numpy().dtype
        self._parts = [_open(store, part) for part in range(store.num_parts)]
        self._offsets = store.offsets

    def rows_of(self, split: str) -> Tensor:
        """Return the global ids of a split's rows, int64, in the order of the source data.

        Raises:
            DataError: the store lacks the split.
        """
        node_type, ids, orig_ids = target_type(self._store), [], []
        for number, part in enumerate(self._parts):
            if split == "predict":
                rows = torch.arange(len(part.orig_id))
            elif f"{split}_mask" not in self._store.node_tensors(node_type):
                raise DataError(f"the store has no {split} split.", hint="label the rows.")
            else:
                rows = self._store.node(f"{split}_mask", number).nonzero().flatten()
            ids.append(rows + self._offsets[number])
            orig_ids.append(part.orig_id[rows])
        joined = torch.cat(ids)
        return joined if len(ids) == 1 and split != "predict" else joined[torch.argsort(torch.cat(orig_ids))]

    def batch(self, rows: Tensor, names: Sequence[str] = ("y",)) -> Data:
        """Return rows as a batch.

        Args:
            rows: int64 ``[m]``, global ids.
            names: tensors of the batch besides ``x``: ``y``, ``orig_id``; those that the store lacks are left out.

        Returns:
            a ``Data`` of m nodes, all of them seeds, with ``x`` as a :class:`~gtrain.nn.Csr`, ``n_id`` and ``names``.
        """
        count, chosen = rows.numel(), rows.numpy()
        lengths = np.empty(count, np.int64)
        # Lengths first: then the rows of all parts are copied straight to their positions in the batch.
        for part in self._parts:
            kernels.measure_rows(chosen, part.rows, lengths)
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        ids, values = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], self._dtype)
        for part in self._parts:
            kernels.copy_rows(chosen, part.rows, offsets, ids, values)
        batch = Data(num_nodes=count, seeds=torch.arange(count), batch_size=count, n_id=rows)
        batch.x = Csr(torch.from_numpy(ids), torch.from_numpy(values), torch.from_numpy(offsets))
        for name in names:
            gathered = self._gather(name, rows)
            if gathered is not None:
                batch[name] = gathered
        return batch

    def _gather(self, name: str, rows: Tensor) -> Tensor | None:
        first = getattr(self._parts[0], name)
        if first is None:
            return None
        out = first.new_empty((len(rows), *first.shape[1:]))
        for part in self._parts:
            low, high = part.rows.low, part.rows.high
            mine = (rows >= low) & (rows < high)
            out[mine] = getattr(part, name)[rows[mine] - low]
        return out


def is_rows(store: Store) -> bool:
    """Whether a store holds rows of sparse features and no edges."""
    return not store.is_hetero and store.num_edges == 0 and bool(store.facts.get("sparse_features"))


def _open(store: Store, part: int) -> _Part:
    store.verify(part)
    x = store.node("x", part)
    labels = store.node("y", part) if "y" in store.node_tensors() else None
    low, high = store.offsets[part : part + 2].tolist()
    rows = kernels.PartRows(low, high, x.crow_indices().numpy(), x.col_indices().numpy(), x.values().numpy())
    return _Part(rows, labels, store.node("orig_id", part))
