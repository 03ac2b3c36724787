"""A partition server, which stores partitions that no machine trains on its disk; and the store on all servers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gtrain.errors import DataError, PeerLostError
from gtrain.memory.heap import give_back_freed
from gtrain.strategy import tensor_files
from gtrain.strategy.server import ServerContext
from gtrain.wire import Caller, Client, Message, PeerRestartedError, RemoteError
from gtrain_pbg.machines.folder import WRITE_ORDER, PartitionFolder
from gtrain_pbg.machines.heartbeat import start_heartbeat
from gtrain_pbg.partition_store import ROWS, PartitionStore, ReuseWaits

PIECE_BYTES = 2 << 20
"""Bytes of a partition per message, which both sides hold besides the partition."""
SILENT_SECONDS = 600.0
"""Time-out of a request: a slow disk may take a while."""


def main(context: ServerContext) -> None:
    """Serve until asked to end; a restarted server has the partitions that it had written.

    The agent bound the socket before the fork; :class:`gtrain.wire.Server` adopts it, and closes it at the end.
    """
    # Requests of several workers overlap at random: a heap that retains their pieces grows by each new overlap.
    give_back_freed()
    folder = PartitionFolder(context.run_dir.absolute() / f"partition-server-{context.slot.rank}")
    if not context.restarts:
        folder.clear()
    print(f"process {os.getpid()} serves {folder.folder}", flush=True)
    start_heartbeat(context)
    context.serve(PartitionHandlers(folder).methods())


class PartitionHandlers:
    """The methods of a partition server.

    Args:
        folder: of the partitions.
    """

    def __init__(self, folder: PartitionFolder) -> None:
        self._folder = folder
        self._writing: dict[tuple[str, str], tuple[int, int, tensor_files.Writing]] = {}  # version, rows so far, file

    def methods(self) -> dict[str, Any]:
        """Return the handlers by the names of their methods."""
        return {name: getattr(self, name) for name in ("write", "read", "select", "keep", "adopt")}

    def write(self, message: Message, caller: Caller) -> None:
        """Write rows of a file. Fields: ``key``, ``version``, ``kind``, ``begin``, ``rows`` of the whole; 1 tensor.

        A version exists when both files have all their rows, first the state and then the rows; the last request is
        acknowledged when they are on the disk.
        """
        piece = message.tensors[0]
        key, version, array, begin, rows = (message.fields[n] for n in ("key", "version", "kind", "begin", "rows"))
        # The first piece: discard what an earlier attempt wrote of this version.
        if begin == 0:
            shape = (rows, *piece.shape[1:])
            self._writing[key, array] = version, 0, self._folder.begin(key, version, array, shape, piece.dtype)
        *position, writing = self._writing.get((key, array), (None, None, None))
        if writing is None or position != [version, begin]:
            raise DataError(f"rows of partition {key} came out of order.", hint="this is an error of gtrain.")
        writing.add(piece)
        if begin + len(piece) < rows:
            self._writing[key, array] = version, begin + len(piece), writing
            return
        del self._writing[key, array]
        # Checked again: the lease may have ended while the pieces arrived.
        self._folder.check(key, version)
        writing.done()
        if array == ROWS:
            self._folder.forget_older(key, version)

    def read(self, message: Message, caller: Caller) -> Message:
        """Return rows of a file. Fields: ``key``, ``kind``, ``begin``, ``end``, the reader's ``lease`` (0: none)."""
        fields = message.fields
        self._folder.grant(fields["key"], fields["lease"])
        rows = tensor_files.mapped(self._folder.path(fields["key"], fields["kind"]))
        return Message({}, [rows[fields["begin"] : fields["end"]].clone()])

    def select(self, message: Message, caller: Caller) -> Message:
        """Return some rows by number. Fields: ``key``; 1 tensor."""
        rows = tensor_files.mapped(self._folder.path(message.fields["key"], ROWS))
        return Message({}, [rows[message.tensors[0]]])

    def keep(self, message: Message, caller: Caller) -> Message:
        """Write a partition into a checkpoint, if this machine reaches its folder. Fields: ``key``, ``targets``."""
        targets = {array: Path(path) for array, path in message.fields["targets"].items()}
        reachable = all(path.parent.is_dir() for path in targets.values())
        if reachable:
            self._folder.keep(message.fields["key"], targets, {})
        return Message({"here": reachable})

    def adopt(self, message: Message, caller: Caller) -> Message:
        """Take a checkpoint's partition, if this machine reaches it. Fields: ``key``, ``version``, ``sources``."""
        fields = message.fields
        sources = {array: Path(path) for array, path in fields["sources"].items()}
        reachable = all(path.is_file() for path in sources.values())
        if reachable:
            self._folder.adopt(fields["key"], fields["version"], sources)
        return Message({"here": reachable})


class PartitionClient(PartitionStore):
    """A :class:`PartitionStore` on servers; partition p is on server p modulo their number.

    A server that starts deletes the partitions of an earlier job; a restarted one has those on its disk. Requests are
    then repeated: reading changes nothing, and a version is written from its start again.

    Args:
        clients: one per server, in rank order.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = list(clients)

    def load(self, key: str, tensors: Mapping[str, Tensor], lease: int = 0, waits: ReuseWaits | None = None) -> None:
        for array, tensor in tensors.items():
            for begin, end in _pieces(tensor):
                fields = {"key": key, "kind": array, "begin": begin, "end": end, "lease": lease}
                tensor[begin:end] = self._request(key, "read", fields).tensors[0]

    def save(self, key: str, version: int, tensors: Mapping[str, Tensor]) -> ReuseWaits:
        while True:
            try:
                for array in WRITE_ORDER:
                    for begin, end in _pieces(tensors[array]):
                        fields = {"key": key, "version": version, "kind": array, "begin": begin}
                        fields["rows"] = len(tensors[array])
                        self._client(key).request("write", fields, [tensors[array][begin:end]], SILENT_SECONDS)
            except PeerRestartedError:
                continue
            except RemoteError as error:
                if error.kind == PeerLostError.__name__:
                    raise PeerLostError(error.remote_message, hint=error.hint) from error
                raise
            return {}

    def select(self, key: str, rows: Tensor, target: Tensor) -> None:
        # Each row is sent once.
        distinct, inverse = rows.unique(return_inverse=True)
        target.copy_(self._request(key, "select", {"key": key}, [distinct]).tensors[0][inverse])

    def keep(self, key: str, targets: Mapping[str, Path], like: Mapping[str, Tensor]) -> None:
        fields = {"key": key, "targets": {array: str(path) for array, path in targets.items()}}
        if not self._request(key, "keep", fields).fields["here"]:
            # The server does not reach the checkpoint's disk.
            self.load(key, like)
            for array, path in targets.items():
                tensor_files.write(path, like[array])

    def adopt(self, key: str, version: int, sources: Mapping[str, Path]) -> None:
        fields = {"key": key, "version": version, "sources": {array: str(path) for array, path in sources.items()}}
        if not self._request(key, "adopt", fields).fields["here"]:
            self.save(key, version, {array: tensor_files.mapped(path) for array, path in sources.items()})

    def _request(self, key: str, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Message:
        while True:
            try:
                return self._client(key).request(method, fields, tensors, SILENT_SECONDS)
            except PeerRestartedError:
                continue

    def _client(self, key: str) -> Client:
        return self._clients[int(key.rpartition("-")[2]) % len(self._clients)]


def _pieces(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the ranges of rows per message; at least one, so that an empty tensor is sent too."""
    rows = max(1, PIECE_BYTES // max(1, tensor[:1].nbytes))
    return [(begin, min(begin + rows, len(tensor))) for begin in range(0, max(1, len(tensor)), rows)]
