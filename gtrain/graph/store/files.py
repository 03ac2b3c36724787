"""The files of a store: their paths, and arrays written piece by piece with checksums."""

from __future__ import annotations

import io
import math
import mmap
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gtrain.graph.store.manifest import EDGE_TYPE, NODE_TYPE, EdgeType, edge_key, safe_name

Array = NDArray[Any]

CHUNK_ROWS = 1 << 20
"""Rows per chunk of a pass over a column of the graph."""

CHUNK_BYTES = 1 << 25
"""Bytes per chunk of a pass over a tensor of the graph."""


def node_file(part: int, name: str, node_type: str = NODE_TYPE) -> str:
    """Return the path of a node tensor relative to the store."""
    return f"part-{part}/nodes/{safe_name(node_type)}/{safe_name(name)}.npy"


def edge_file(part: int, name: str, edge_type: EdgeType = EDGE_TYPE) -> str:
    """Return the path of an edge tensor relative to the store."""
    return f"part-{part}/edges/{edge_key(edge_type)}/{safe_name(name)}.npy"


def held_out_file(part: int, name: str, split: str, edge_type: EdgeType = EDGE_TYPE) -> str:
    """Return the path of a tensor of held-out edges relative to the store."""
    return f"part-{part}/edges/{edge_key(edge_type)}/{split}/{safe_name(name)}.npy"


def bucket_file(part: int, name: str, edge_type: EdgeType = EDGE_TYPE) -> str:
    """Return the path, relative to the store, of a tensor of all buckets whose targets are in ``part``."""
    return f"part-{part}/buckets/{edge_key(edge_type)}/{safe_name(name)}.npy"


def names_file(key: str, name: str) -> str:
    """Return the path of an array of a string dictionary relative to the store."""
    return f"names/{safe_name(key)}/{name}.npy"


def file_crc(path: Path, chunk: int = 1 << 22) -> int:
    """Return the crc32 of a file, read in chunks of ``chunk`` bytes."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(min(chunk, os.fstat(file.fileno()).st_size))
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
    return crc


def chunks(start: int, stop: int, row_bytes: int = 0) -> Iterator[slice]:
    """Yield slices that cover a range of rows, each of at most CHUNK_ROWS rows and about CHUNK_BYTES bytes."""
    step = CHUNK_ROWS if row_bytes == 0 else max(1, min(CHUNK_ROWS, CHUNK_BYTES // row_bytes))
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def row_bytes(array: Array) -> int:
    """Return the bytes of one row, at least 1."""
    return max(1, array.itemsize * math.prod(array.shape[1:]))


def release(array: Array) -> None:
    """Release the resident pages of a memory-mapped array; the next access reads them again.

    Otherwise a pass over a file leaves the whole file in this process's resident memory. A private mapping (numpy's
    mode ``c``) is skipped: its pages may hold writes that exist nowhere else.
    """
    owner: object = array
    while isinstance(owner, np.ndarray):
        if isinstance(owner, np.memmap) and owner.mode == "c":
            return
        owner = owner.base
    if isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)


class ArrayFile:
    """A ``.npy`` file of known shape, written from front to back.

    Attributes:
        crc: crc32 of all bytes written so far.
        size: number of bytes written so far.
    """

    def __init__(self, path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.crc = self.size = 0
        self._missing = math.prod(shape)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._write(memoryview(npy_header(self.dtype, shape)))

    def append(self, rows: Array) -> None:
        """Write the next rows, converted to the file's dtype."""
        array = np.ascontiguousarray(rows, dtype=self.dtype)
        self._missing -= array.size
        if array.size:
            self._write(array.reshape(-1).view(np.uint8).data)

    def close(self, *, complete: bool = True) -> None:
        """Close the file; raise ValueError if rows are missing from a file that should be ``complete``."""
        self._file.close()
        if complete and self._missing:
            raise ValueError(f"{self.path}: {self._missing} elements of the array were not written")

    def _write(self, data: memoryview) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self.size += data.nbytes
        while data.nbytes:
            data = data[self._file.write(data) :]


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header that ``numpy.save`` writes before an array's elements."""
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()


class Ledger:
    """The record of the files written below a folder: checksums and sizes, for the manifest.

    Attributes:
        folder: the store that is being written.
        checksums: crc32 of each file, by its path relative to the folder.
        sizes: bytes of each file, likewise.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checksums: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    @contextmanager
    def open(self, path: str, dtype: DTypeLike, shape: tuple[int, ...]) -> Iterator[ArrayFile]:
        """Open the file of one tensor, at ``path`` relative to the folder; on exit close it and enter it."""
        file, complete = ArrayFile(self.folder / path, dtype, shape), False
        try:
            yield file
            complete = True
        finally:
            file.close(complete=complete)
        self.checksums[path], self.sizes[path] = file.crc, file.size

    def write(self, path: str, array: Array) -> None:
        """Write an array from memory."""
        with self.open(path, array.dtype, array.shape) as file:
            file.append(array)

    def enter(self, path: str) -> None:
        """Enter a file that was written out of order; reads it again for its checksum."""
        file = self.folder / path
        self.checksums[path], self.sizes[path] = file_crc(file), file.stat().st_size

    def nbytes(self, part: int) -> int:
        """Return the bytes of one part."""
        return sum(size for path, size in self.sizes.items() if path.startswith(f"part-{part}/"))
