"""The tensors that this rank hosts: those of the store, by memory map, and those that were computed besides."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import TensorSpec, edge_key
from gtrain_pyg.ranks.parts import Kind, PartBook
from gtrain_pyg.rows.tables import CsrTable, DenseTable, Table, pieces_of

Array = NDArray[Any]
Extra = Mapping[Kind, Mapping[str, Mapping[int, Any]]]


class Shelf:
    """Opens a tensor when it is first asked for.

    Args:
        store: the graph.
        book: who owns what.
        hosted: the parts whose files this rank reads.
        extra: by kind, name and hosted part, tensors ``[n_p, ...]`` that the store does not have.
    """

    def __init__(self, store: Store, book: PartBook, hosted: Sequence[int], extra: Extra) -> None:
        self._store, self._extra = store, extra
        self.parts, self.hosted = book.num_parts, sorted(hosted)
        self.is_hosted: Array = np.isin(np.arange(book.num_parts), self.hosted)
        self.segments = book.num_parts + 1  # one more for the cache
        self._offsets: dict[Kind, Array] = {}
        for offsets in (book.offsets, book.edge_offsets):
            self._offsets.update((kind, starts) for kind, starts in offsets.items())
        self._tables: dict[tuple[Kind, str], Table] = {}
        self._lock = threading.Lock()

    def offsets(self, kind: Kind) -> Array:
        """Int64 ``[P + 1]``; part p has the rows ``offsets[p] .. offsets[p+1]-1`` of the kind.

        Raises:
            DataError: there is no such node type or edge type.
        """
        if kind not in self._offsets:
            raise DataError(
                f"the store {self._store.path} has no node type or edge type {kind!r}",
                hint=f"choose one of {', '.join(str(known) for known in self._offsets)}",
            )
        return self._offsets[kind]

    def table(self, kind: Kind, name: str) -> Table:
        """A tensor's rows.

        Raises:
            StoreError: the store has no such tensor.
            DataError: it has no rows for nodes or edges, or an extra one has too few or too many.
        """
        with self._lock:
            if (kind, name) not in self._tables:
                self._tables[kind, name] = self._open(kind, name)
            return self._tables[kind, name]

    def _open(self, kind: Kind, name: str) -> Table:
        offsets = self.offsets(kind)
        parts = {part: self._tensor(kind, name, part) for part in self.hosted}
        example = parts[self.hosted[0]]
        table: Table
        if example.layout == torch.sparse_csr:
            table = CsrTable(example, self.segments, self._row_entries(kind, name))
        else:
            table = DenseTable(example, self.segments)
        for part, tensor in parts.items():
            rows = int(offsets[part + 1] - offsets[part])
            if tensor.size(0) != rows:
                raise DataError(
                    f"{name} of {kind} has {tensor.size(0)} rows in part {part}, which has {rows}",
                    hint="give it one row for each node or edge of the part",
                )
            table.hold(part, pieces_of(tensor))
        return table

    def _tensor(self, kind: Kind, name: str, part: int) -> Tensor:
        given = self._extra.get(kind, {}).get(name)
        if given is not None:
            return torch.as_tensor(given[part])
        if isinstance(kind, str):
            return self._store.node(name, part, kind)
        if name == "indptr":
            raise DataError(f"indptr of {kind} has no rows for edges", hint="choose another edge tensor")
        return self._store.edge(name, part, kind)

    def _row_entries(self, kind: Kind, name: str) -> float:
        manifest = self._store.manifest
        types: Mapping[str, Any] = manifest.node_types if isinstance(kind, str) else manifest.edge_types
        spec: TensorSpec = types[kind if isinstance(kind, str) else edge_key(kind)].tensors[name]
        return (spec.nnz or 0) / max(1, spec.shape[0])
