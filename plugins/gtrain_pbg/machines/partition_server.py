"""A partition server: keeps partitions on its disk between their trainings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from gtrain.errors import DataError
from gtrain.strategy.server import ServerContext
from gtrain.wire import Caller, Message
from gtrain_pbg import files
from gtrain_pbg.machines.folder import PartitionFolder
from gtrain_pbg.machines.heartbeat import start_heartbeat

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def main(context: ServerContext) -> None:
    """Serve until asked to end; what an earlier life has written is still there."""
    folder = PartitionFolder(context.run_dir.absolute() / f"partition-server-{context.slot.rank}")
    if not context.restarts:
        folder.clear()
    print(f"process {os.getpid()} serves {folder.folder}", flush=True)
    start_heartbeat(context)
    context.serve(Handlers(folder).methods())


class Handlers:
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
