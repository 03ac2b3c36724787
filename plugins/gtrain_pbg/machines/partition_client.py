"""Partitions on partition servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gtrain.errors import PeerLostError
from gtrain.wire import Client, Message, PeerRestartedError, RemoteError
from gtrain_pbg import files
from gtrain_pbg.machines.folder import KINDS
from gtrain_pbg.partition_store import Free, PartitionStore

PIECE_BYTES = 64 << 20
"""Bytes of a partition that are sent at a time."""
SILENT_SECONDS = 600.0
"""A partition server that does not answer for so long is gone with its machine; a slow disk may take a while."""


class PartitionClient(PartitionStore):
    """A :class:`PartitionStore` on servers; partition p is at server p modulo their number.

    A server begins by deleting what an earlier job has left; one that is restarted has what is on its disk. Requests
    are then repeated: reading changes nothing, and a version is written from its beginning.

    Args:
        clients: one for each server, in rank order.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = list(clients)

    def load(self, key: str, tensors: Mapping[str, Tensor], lease: int = 0, free: Free | None = None) -> None:
        for kind, tensor in tensors.items():
            for begin, end in _pieces(tensor):
                fields = {"key": key, "kind": kind, "begin": begin, "end": end, "lease": lease}
                tensor[begin:end] = self._ask(key, "read", fields).tensors[0]

    def save(self, key: str, version: int, tensors: Mapping[str, Tensor]) -> Free:
        client = self._client(key)
        while True:
            try:
                for kind in KINDS:
                    for begin, end in _pieces(tensors[kind]):
                        fields = {"key": key, "version": version, "kind": kind, "begin": begin}
                        fields["rows"] = len(tensors[kind])
                        client.request("write", fields, [tensors[kind][begin:end]], SILENT_SECONDS)
            except PeerRestartedError:
                continue
            except RemoteError as error:
                if error.kind == PeerLostError.__name__:
                    raise PeerLostError(error.remote_message, hint=error.hint) from error
                raise
            return {}

    def select(self, key: str, rows: Tensor, target: Tensor) -> None:
        wanted, back = rows.unique(return_inverse=True)
        target.copy_(self._ask(key, "select", {"key": key}, [wanted]).tensors[0][back])

    def keep(self, key: str, targets: Mapping[str, Path], like: Mapping[str, Tensor]) -> None:
        fields = {"key": key, "targets": {kind: str(path) for kind, path in targets.items()}}
        if not self._ask(key, "keep", fields).fields["here"]:  # its machine does not have the checkpoint's disk
            self.load(key, like)
            for kind, path in targets.items():
                files.write(path, like[kind])

    def adopt(self, key: str, version: int, sources: Mapping[str, Path]) -> None:
        fields = {"key": key, "version": version, "sources": {kind: str(path) for kind, path in sources.items()}}
        if not self._ask(key, "adopt", fields).fields["here"]:
            self.save(key, version, {kind: files.mapped(path) for kind, path in sources.items()})

    def _ask(self, key: str, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Message:
        while True:
            try:
                return self._client(key).request(method, fields, tensors, SILENT_SECONDS)
            except PeerRestartedError:
                continue

    def _client(self, key: str) -> Client:
        return self._clients[int(key.rpartition("-")[2]) % len(self._clients)]


def _pieces(tensor: Tensor) -> list[tuple[int, int]]:
    """Ranges of rows that are sent at a time; at least one, so that what has no rows is sent as well."""
    rows = max(1, PIECE_BYTES // max(1, tensor[:1].nbytes))
    return [(begin, min(begin + rows, len(tensor))) for begin in range(0, max(1, len(tensor)), rows)]
