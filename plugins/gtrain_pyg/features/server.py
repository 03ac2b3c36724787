"""The answering side: rows that this rank hosts, for those who do not."""

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
from gtrain_pyg.ranks.parts import Kind


class RowServer:
    """Answers a *request for rows*: a message with

    * ``store``: the checksum of the asker's manifest, ``part``: whose rows;
    * ``wants``: a list of ``{"kind", "names", "dtypes", "chunk"}``: the name on the wire of a node type or edge type
      (:func:`wire_name`), the tensors' names, the dtype in which each one's values travel, and the rows of a chunk;
    * for each want an int32 or int64 tensor: rows within the part.

    The answer has the tensors of each want in turn: for each chunk of its rows, in order, and each name the pieces of
    these rows, one of a dense tensor, and three (indptr, indices, values) of a sparse one. Rows come in chunks because
    memory for large frames is fresh from the system each time.

    Args:
        hosted: the rows.
        store: the graph.
        pool: memory of the answers.
    """

    def __init__(self, hosted: HostedTensors, store: Store, pool: BufferPool) -> None:
        self._hosted, self._pool = hosted, pool
        self._print = fingerprint(store)
        kinds: tuple[Kind, ...] = (*store.node_types, *store.edge_types)
        self._kinds = {wire_name(kind): kind for kind in kinds}

    def __call__(self, message: Message) -> Message:
        """Answer one request.

        Raises:
            StoreError: the asker has another store.
            DataError: no such part, rows or tensor here.
        """
        fields = message.fields
        if fields["store"] != self._print:
            raise StoreError(
                f"this rank has the store with checksum {self._print}, and was asked for rows of {fields['store']}",
                hint="have all ranks open the same store, or copies of it",
            )
        tensors: list[Tensor] = []
        for want, rows in zip(fields["wants"], message.tensors, strict=True):
            tensors += self._answer(self._kinds.get(want["kind"], want["kind"]), want, int(fields["part"]), rows)
        return Message({}, tensors)

    def _answer(self, kind: Kind, want: Mapping[str, Any], part: int, rows: Tensor) -> list[Tensor]:
        tables = [self._hosted.table(kind, name) for name in want["names"]]
        dtypes = [getattr(torch, name) for name in want["dtypes"]]
        place = self._places(kind, part, rows)
        return [
            piece
            for start in range(0, place.size, want["chunk"])
            for table, dtype in zip(tables, dtypes, strict=True)
            for piece in table.gather(place[start : start + want["chunk"]], table.bases, self._pool, dtype)
        ]

    def _places(self, kind: Kind, part: int, rows: Tensor) -> kernels.Array:
        """The places of rows of one part, all of which are there."""
        if part not in self._hosted.hosted:
            raise DataError(
                f"was asked for rows of part {part}, and hosts {self._hosted.hosted}",
                hint="start all ranks from the same configuration",
            )
        offsets = self._hosted.offsets(kind)
        count = int(offsets[part + 1] - offsets[part])
        low, high = (int(bound) for bound in rows.aminmax()) if rows.numel() else (0, -1)
        if low < 0 or high >= count:
            raise DataError(
                f"was asked for rows {low} to {high} of {kind} in part {part}, which has {count}",
                hint="have all ranks open the same store, or copies of it",
            )
        place = self._pool.take(rows.numel(), np.int64)
        np.bitwise_or(rows.numpy(), np.int64(part << kernels.SHIFT), out=place)
        return place


def fingerprint(store: Store) -> int:
    """A checksum of what a store holds."""
    return zlib.crc32(repr(sorted(store.manifest.checksums.items())).encode())


def wire_name(kind: Kind) -> str:
    """How a node type or edge type is called in requests; no two are called the same."""
    return f"node {kind}" if isinstance(kind, str) else f"edge {edge_key(kind)}"
