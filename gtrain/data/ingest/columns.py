"""Columns of edges that may be larger than memory."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gtrain.errors import DataError

IN_MEMORY = 1 << 25
"""Bytes above which a column spills to a file."""
CHUNK = 1 << 22
"""Items per read from a column."""


class Column:
    """An append-only array that spills to a temporary file when it exceeds :data:`IN_MEMORY`.

    The file is unlinked, so the operating system frees it with the last array that maps it, also after a kill.

    Args:
        folder: folder of the temporary file; created if it is missing.
        dtype: dtype of the items; ``int32`` widens to ``int64`` when an item does not fit.
    """

    def __init__(self, folder: Path, dtype: DTypeLike) -> None:
        self._folder = folder
        self._dtype = np.dtype(dtype)
        self._pieces: list[NDArray[Any]] = []
        self._file: IO[bytes] | None = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, values: NDArray[Any]) -> None:
        """Append items ``[n]``; an item that does not fit ``int32`` widens the whole column.

        Raises:
            DataError: the disk is full.
        """
        if self._dtype == np.int32 and values.size and (values.max() >= 2**31 or values.min() < -(2**31)):
            self._widen()
        self._store(np.ascontiguousarray(values, dtype=self._dtype))

    def array(self) -> NDArray[Any]:
        """Return the items, ``[n]``: an array, or a read-only memory map of the file."""
        if self._file is None:
            self._pieces = [np.concatenate([np.empty(0, self._dtype), *self._pieces])]
            return self._pieces[0]
        return np.memmap(self._file, dtype=self._dtype, mode="r", shape=(self._size,))  # type: ignore[call-overload,no-any-return]

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield copies of the current items, ``CHUNK`` at a time; the caller may append during the iteration."""
        # The size at the start: items that the caller appends meanwhile are not yielded.
        size, file = self._size, self._file
        whole = self.array() if file is None else None
        for first in range(0, size, CHUNK):
            last = min(first + CHUNK, size)
            yield whole[first:last] if whole is not None else self._load(first, last)

    def _store(self, values: NDArray[Any]) -> None:
        self._size += values.size
        if self._file is None:
            self._pieces.append(values)
            if self._size * self._dtype.itemsize > IN_MEMORY:
                self._spill()
        else:
            self._write(values)

    def _spill(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - lives as long as the arrays
        for piece in self._pieces:
            self._write(piece)
        self._pieces = []

    def _write(self, values: NDArray[Any]) -> None:
        assert self._file is not None
        unwritten = memoryview(values.view(np.uint8).data)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as err:
            if err.errno != errno.ENOSPC:
                raise
            raise DataError(
                f"the disk is full: {self._folder} has no room for temporary columns of {self._size} edges",
                hint="free some space, or set data.store to a folder on a larger disk",
            ) from err

    def _load(self, first: int, last: int) -> NDArray[Any]:
        assert self._file is not None
        self._file.seek(first * self._dtype.itemsize)
        items = np.fromfile(self._file, dtype=self._dtype, count=last - first)
        # Back to the end, where the next append writes.
        self._file.seek(0, os.SEEK_END)
        return items

    def _widen(self) -> None:
        wide = Column(self._folder, np.int64)
        for piece in self.chunks():
            wide._store(piece.astype(np.int64))
        self._dtype, self._pieces, self._file = wide._dtype, wide._pieces, wide._file
