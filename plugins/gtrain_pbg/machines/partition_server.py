"""A partition server, which keeps partitions on its disk between their trainings, and the store on all servers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gtrain.errors import DataError, PeerLostError
from gtrain.strategy.server import ServerContext
from gtrain.wire import Caller, Client, Message, PeerRestartedError, RemoteError
from gtrain_pbg import files
from gtrain_pbg.machines.folder import KINDS, PartitionFolder
from gtrain_pbg.machines.heartbeat import start_heartbeat
from gtrain_pbg.partition_store import PartitionStore, ReuseWaits

PIECE_BYTES = 8 << 20
"""Bytes of a partition that are sent at a time, which both sides hold besides."""
SILENT_SECONDS = 600.0
"""A partition server that does not answer for so long is gone with its machine; a slow disk may take a while."""


def main(context: ServerContext) -> None:
    """Serve until asked to end; what an earlier life has written is still there."""
    folder = PartitionFolder(context.run_dir.absolute() / f"partition-server-{context.slot.rank}")
    if not context.restarts:
        folder.clear()
    print(f"process {os.getpid()} serves {folder.folder}", flush=True)
    start_heartbeat(context)
    context.serve(PartitionHandlers(folder).methods())


class PartitionHandlers:
    """The methods of a partition server.

    Args:
        folder: where the partitions are.
    """

    def __init__(self, folder: PartitionFolder) -> None:
        self._folder = folder
        self._writing: dict[tuple[str, str], tuple[int, int, files.Writing]] = {}  # version, rows so far

    def methods(self) -> dict[str, Any]:
        """The handlers by the names of their methods."""
        return {name: getattr(self, name) for name in ("write", "read", "select", "keep", "adopt")}

    def write(self, message: Message, caller: Caller) -> None:
        """Take rows of a file. Fields: ``key``, ``version``, ``kind``, ``begin``, ``rows`` of the whole; 1 tensor.

        A version is there when both files have all their rows, first the state's and then those of the rows; it is
        acknowledged when the disk has it.
        """
        fields, piece = message.fields, message.tensors[0]
        key, version, kind, begin, rows = (fields[name] for name in ("key", "version", "kind", "begin", "rows"))
        if begin == 0:
            shape = (rows, *piece.shape[1:])
            self._writing[key, kind] = version, 0, self._folder.begin(key, version, kind, shape, piece.dtype)
        found = self._writing.get((key, kind))
        if found is None or found[:2] != (version, begin):
            raise DataError(f"rows of partition {key} came out of their order.", hint="this is an error of gtrain.")
        found[2].add(piece)
        if begin + len(piece) < rows:
            self._writing[key, kind] = version, begin + len(piece), found[2]
            return
        del self._writing[key, kind]
        self._folder.check(key, version)
        found[2].done()
        if kind == files.ROWS:
            self._folder.forget_older(key, version)

    def read(self, message: Message, caller: Caller) -> Message:
        """Rows of a file. Fields: ``key``, ``kind``, ``begin``, ``end``, and the reader's ``lease``; 0: it has none."""
        fields = message.fields
        self._folder.grant(fields["key"], fields["lease"])
        found = files.mapped(self._folder.path(fields["key"], fields["kind"]))
        return Message({}, [found[fields["begin"] : fields["end"]].clone()])

    def select(self, message: Message, caller: Caller) -> Message:
        """Some rows of the rows' file, by number. Fields: ``key``; 1 tensor."""
        found = files.mapped(self._folder.path(message.fields["key"], files.ROWS))
        return Message({}, [found[message.tensors[0]]])

    def keep(self, message: Message, caller: Caller) -> Message:
        """Give a checkpoint a partition, if its folder can be reached from here. Fields: ``key``, ``targets``."""
        targets = {kind: Path(path) for kind, path in message.fields["targets"].items()}
        here = all(path.parent.is_dir() for path in targets.values())
        if here:
            self._folder.keep(message.fields["key"], targets, {})
        return Message({"here": here})

    def adopt(self, message: Message, caller: Caller) -> Message:
        """Take a checkpoint's partition, if it can be reached from here. Fields: ``key``, ``version``, ``sources``."""
        fields = message.fields
        sources = {kind: Path(path) for kind, path in fields["sources"].items()}
        here = all(path.is_file() for path in sources.values())
        if here:
            self._folder.adopt(fields["key"], fields["version"], sources)
        return Message({"here": here})


class PartitionClient(PartitionStore):
    """A :class:`PartitionStore` on servers; partition p is at server p modulo their number.

    A server begins by deleting what an earlier job has left; one that is restarted has what is on its disk. Requests
    are then repeated: reading changes nothing, and a version is written from its beginning.

    Args:
        clients: one for each server, in rank order.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = list(clients)

    def load(self, key: str, tensors: Mapping[str, Tensor], lease: int = 0, free: ReuseWaits | None = None) -> None:
        for kind, tensor in tensors.items():
            for begin, end in _pieces(tensor):
                fields = {"key": key, "kind": kind, "begin": begin, "end": end, "lease": lease}
                tensor[begin:end] = self._ask(key, "read", fields).tensors[0]

    def save(self, key: str, version: int, tensors: Mapping[str, Tensor]) -> ReuseWaits:
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
