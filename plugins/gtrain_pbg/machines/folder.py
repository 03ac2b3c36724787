"""Partitioning in a folder, each version a pair of files: rows and optimizer state.

A version is the number of the lease under which it was written. The state's file gets its name first and that of the
rows last, so that a version is there if its rows are, and what was written in part is never read. A version older than
what is there comes from a machine that has lost its lease, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gtrain.errors import DataError, PeerLostError
from gtrain_pbg import files
from gtrain_pbg.partition_store import PartitionStore, ReuseWaits

KINDS = (files.STATE, files.ROWS)
"""In the order in which they are written."""


class PartitionFolder(PartitionStore):
    """Versions of partitions, in a folder that machines share or of a partition server.

    Args:
        folder: where they are; made when the first is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._granted: dict[str, int] = {}

    def path(self, key: str, kind: str) -> Path:
        """The newest version's file.

        Raises:
            DataError: there is none.
        """
        version = self.version(key)
        if version is None:
            raise DataError(f"{self.folder} has no partition {key}.", hint="go on from the last checkpoint.")
        return self._file(key, version, kind)

    def version(self, key: str) -> int | None:
        """The newest version of a partition; None: there is none."""
        return max(self._versions(key), default=None)

    def begin(self, key: str, version: int, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> files.Writing:
        """Begin to write a file of a version; it is there when it is done.

        Raises:
            PeerLostError: there is a newer version.
            DataError: the file cannot be written.
        """
        self.check(key, version)
        self.folder.mkdir(parents=True, exist_ok=True)
        return files.Writing(self._file(key, version, kind), shape, dtype)

    def check(self, key: str, version: int) -> None:
        """Refuse a version older than what is there.

        Raises:
            PeerLostError: it is.
        """
        newest = max(self.version(key) or 0, self._granted.get(key, 0))
        if version < newest:
            raise PeerLostError(
                f"partition {key} was to be written under lease {version}, and it was granted again under {newest}.",
                hint="the machine had lost its lease: raise strategy.lease_seconds if it was only slow.",
            )

    def grant(self, key: str, lease: int) -> None:
        """Refuse older versions from now on: who holds this lease begins to read."""
        self._granted[key] = max(lease, self._granted.get(key, 0))

    def forget_older(self, key: str, version: int) -> None:
        """Delete what a version has replaced; a checkpoint that has it keeps it by another name."""
        for path in self.folder.glob(f"{key}.v*"):
            match = re.match(rf"{re.escape(key)}\.v(\d+)\.", path.name)
            if match and int(match[1]) < version:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        for path in self.folder.glob("*.v*.npy*"):
            path.unlink(missing_ok=True)

    def load(self, key: str, tensors: Mapping[str, Tensor], lease: int = 0, free: ReuseWaits | None = None) -> None:
        for kind, tensor in tensors.items():
            files.read(self.path(key, kind), tensor)

    def save(self, key: str, version: int, tensors: Mapping[str, Tensor]) -> ReuseWaits:
        for kind in KINDS:
            writing = self.begin(key, version, kind, tuple(tensors[kind].shape), tensors[kind].dtype)
            writing.add(tensors[kind])
            self.check(key, version)
            writing.done()
        self.forget_older(key, version)
        return {}

    def select(self, key: str, rows: Tensor, target: Tensor) -> None:
        torch.index_select(files.mapped(self.path(key, files.ROWS)), 0, rows, out=target)

    def keep(self, key: str, targets: Mapping[str, Path], like: Mapping[str, Tensor]) -> None:
        for kind, target in targets.items():
            files.keep(self.path(key, kind), target)

    def adopt(self, key: str, version: int, sources: Mapping[str, Path]) -> None:
        self.check(key, version)
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind in KINDS:
            target = self._file(key, version, kind)
            target.unlink(missing_ok=True)
            files.keep(sources[kind], target)
        self.forget_older(key, version)

    def _versions(self, key: str) -> list[int]:
        names = (path.name for path in self.folder.glob(f"{key}.v*.{files.ROWS}.npy"))
        return [int(name[len(key) + 2 :].split(".")[0]) for name in names]

    def _file(self, key: str, version: int, kind: str) -> Path:
        return self.folder / f"{key}.v{version}.{kind}.npy"
