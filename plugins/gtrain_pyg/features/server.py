"""Serve the rows that this rank hosts to ranks that do not host them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import DataError, StoreError
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import edge_key
from gtrain.wire import Message
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features import kernels
from gtrain_pyg.features.tables import HostedTensors
from gtrain_pyg.ranks.parts import NodeOrEdgeType


class RowServer:
    """Replies to a *request for rows*: a message with

    * ``store``: the checksum of the requester's manifest, ``part``: the part of the rows;
    * ``wants``: a list of ``{"kind", "names", "dtypes", "chunk"}``: the name on the wire of a node type or edge type
      (:func:`wire_name`), the tensors' names, the dtype of each tensor's values on the wire, and the rows of a chunk;
    * for each entry of ``wants`` an int32 or int64 tensor: rows within the part.

    The reply has the tensors of each entry in turn: for each chunk of its rows, in order, and each name the arrays of
    these rows, one for a dense tensor, and three (indptr, indices, values) for a sparse one. Rows travel in chunks
    because the wire allocates fresh pages for each large frame.

    Args:
        hosted: the rows.
        store: the graph.
        pool: memory of the replies.
    """

    def __init__(self, hosted: HostedTensors, store: Store, pool: BufferPool) -> None:
        self._hosted, self._pool = hosted, pool
        self._checksum = fingerprint(store)
        self._types = {wire_name(graph_type): graph_type for graph_type in hosted.types}

    def __call__(self, message: Message) -> Message:
        """Reply to one request.

        Raises:
            StoreError: the requester has another store.
            DataError: this rank does not have the part, the rows or the tensor.
        """
        fields = message.fields
        if fields["store"] != self._checksum:
            raise StoreError(
                f"this rank has the store with checksum {self._checksum}, and the request is for rows of "
                f"{fields['store']}",
                hint="have all ranks open the same store, or copies of it",
            )
        tensors: list[Tensor] = []
        for entry, rows in zip(fields["wants"], message.tensors, strict=True):
            tensors += self._read(entry, int(fields["part"]), rows)
        return Message({}, tensors)

    def _read(self, entry: Mapping[str, Any], part: int, rows: Tensor) -> list[Tensor]:
        graph_type, chunk = self._types.get(entry["kind"], entry["kind"]), entry["chunk"]
        tables = [self._hosted.table(graph_type, name) for name in entry["names"]]
        dtypes = [getattr(torch, name) for name in entry["dtypes"]]
        location = self._locate(graph_type, part, rows)
        return [
            array
            for start in range(0, location.size, chunk)
            for table, dtype in zip(tables, dtypes, strict=True)
            for array in table.gather(location[start : start + chunk], table.bases, self._pool, dtype)
        ]

    def _locate(self, graph_type: NodeOrEdgeType, part: int, rows: Tensor) -> kernels.Array:
        """Return the locations of rows of one part."""
        if part not in self._hosted.hosted:
            raise DataError(
                f"received a request for rows of part {part}; this rank hosts parts {self._hosted.hosted}",
                hint="start all ranks from the same configuration",
            )
        offsets = self._hosted.offsets(graph_type)
        count = int(offsets[part + 1] - offsets[part])
        low, high = (int(bound) for bound in rows.aminmax()) if rows.numel() else (0, -1)
        if low < 0 or high >= count:
            raise DataError(
                f"received a request for rows {low} to {high} of {graph_type} in part {part}, which has {count}",
                hint="have all ranks open the same store, or copies of it",
            )
        return np.bitwise_or(rows.numpy(), np.int64(part << kernels.SHIFT), out=self._pool.take(rows.numel()))


def fingerprint(store: Store) -> int:
    """Return a checksum of a store's contents."""
    return zlib.crc32(repr(sorted(store.manifest.checksums.items())).encode())


def wire_name(graph_type: NodeOrEdgeType) -> str:
    """Return the distinct name of a node type or edge type in requests."""
    return f"node {graph_type}" if isinstance(graph_type, str) else f"edge {edge_key(graph_type)}"
