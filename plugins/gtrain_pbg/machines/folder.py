"""Partitions in a folder, each version a pair of files: rows and optimizer state.

A version has the number of the lease under which it was written. The state's file is renamed into place first and the
rows' file last, so a version exists if its rows do, and partial files are never read. A version older than the newest
one comes from a machine that has lost its lease, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gtrain.errors import DataError, PeerLostError
from gtrain.strategy import tensor_files
from gtrain_pbg.partition_store import ROWS, STATE, FileStore, ReuseWaits

WRITE_ORDER = (STATE, ROWS)


class PartitionFolder(FileStore):
    """Versions of partitions, in a folder that machines share or in the folder of a partition server."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._granted: dict[str, int] = {}

    def path(self, key: str, array: str) -> Path:
        version = self.version(key)
        if version is None:
            raise DataError(f"{self.folder} has no partition {key}.", hint="resume from the last checkpoint.")
        return self._file(key, version, array)

    def version(self, key: str) -> int | None:
        """Return the newest version of a partition; None: it has none."""
        names = (path.name for path in self.folder.glob(f"{key}.v*.{ROWS}.npy"))
        return max((int(name[len(key) + 2 :].split(".")[0]) for name in names), default=None)

    def begin(
        self, key: str, version: int, array: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tensor_files.Writing:
        """Start to write a file of a version; it exists when its ``done()`` returns.

        Raises:
            PeerLostError: a newer version exists.
            DataError: the file cannot be written.
        """
        self.check(key, version)
        self.folder.mkdir(parents=True, exist_ok=True)
        return tensor_files.Writing(self._file(key, version, array), shape, dtype)

    def check(self, key: str, version: int) -> None:
        """Check that a version is not older than the newest one.

        Raises:
            PeerLostError: it is older.
        """
        newest = max(self.version(key) or 0, self._granted.get(key, 0))
        if version < newest:
            raise PeerLostError(
                f"partition {key} was to be written under lease {version}, and it was granted again under {newest}.",
                hint="the machine had lost its lease: raise strategy.lease_seconds if it was only slow.",
            )

    def grant(self, key: str, lease: int) -> None:
        """Refuse versions of older leases from now on: the holder of this lease reads the partition."""
        self._granted[key] = max(lease, self._granted.get(key, 0))

    def forget_older(self, key: str, version: int) -> None:
        """Delete the versions that this one replaces; a checkpoint has links to the files that it needs."""
        for path in self.folder.glob(f"{key}.v*"):
            match = re.match(rf"{re.escape(key)}\.v(\d+)\.", path.name)
            if match and int(match[1]) < version:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        for path in self.folder.glob("*.v*.npy*"):
            path.unlink(missing_ok=True)

    def save(self, key: str, version: int, tensors: Mapping[str, Tensor]) -> ReuseWaits:
        for array in WRITE_ORDER:
            writing = self.begin(key, version, array, tuple(tensors[array].shape), tensors[array].dtype)
            writing.add(tensors[array])
            self.check(key, version)
            writing.done()
        self.forget_older(key, version)
        return {}

    def adopt(self, key: str, version: int, sources: Mapping[str, Path]) -> None:
        self.check(key, version)
        self.folder.mkdir(parents=True, exist_ok=True)
        for array in WRITE_ORDER:
            target = self._file(key, version, array)
            # A link cannot replace a file.
            target.unlink(missing_ok=True)
            tensor_files.keep(sources[array], target)
        self.forget_older(key, version)

    def _file(self, key: str, version: int, array: str) -> Path:
        return self.folder / f"{key}.v{version}.{array}.npy"
