"""The files of a store: where each lies, and arrays written piece by piece with their checksums."""

from __future__ import annotations

import io
import math
import mmap
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gtrain.graph.store.manifest import EDGE_TYPE, NODE_TYPE, EdgeType, edge_key, safe_name

Array = NDArray[Any]

CHUNK_ROWS = 1 << 20
"""Rows that a pass over a column of the graph handles at a time."""

CHUNK_BYTES = 1 << 25
"""Bytes that a pass over a tensor of the graph holds at a time."""


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


def names_file(kind: str, name: str) -> str:
    """Return the path of a piece of a string dictionary relative to the store."""
    return f"names/{safe_name(kind)}/{name}.npy"


def file_crc(path: Path, chunk: int = 1 << 22) -> int:
    """Return the crc32 of a file, holding ``chunk`` bytes of it in memory at a time."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(min(chunk, os.fstat(file.fileno()).st_size))
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
    return crc


def chunks(start: int, stop: int, row_bytes: int = 0) -> Iterator[slice]:
    """Cut a range of rows into slices of at most CHUNK_ROWS rows and about CHUNK_BYTES bytes."""
    step = CHUNK_ROWS if row_bytes == 0 else max(1, min(CHUNK_ROWS, CHUNK_BYTES // row_bytes))
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def row_bytes(array: Array) -> int:
    """Return the bytes of one row."""
    return max(1, array.itemsize * math.prod(array.shape[1:]))


def release(array: Array) -> None:
    """Give the memory of a mapped file's pages back; they are read again when they are touched.

    Without it, one pass over a file counts the whole file as memory of this process. A private mapping (numpy's mode
    ``c``) is left alone: its pages may have been written to, and exist nowhere else.
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

    def close(self) -> None:
        """Finish the file, all of whose rows must have been written."""
        self._file.close()
        if self._missing:
            raise ValueError(f"{self.path}: {self._missing} elements of the array were not written")

    def abandon(self) -> None:
        """Close the file as it is, after an error."""
        self._file.close()

    def _write(self, data: memoryview) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self.size += data.nbytes
        while data.nbytes:
            data = data[self._file.write(data) :]


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return what ``numpy.save`` writes in front of an array's elements."""
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()


class FileSet:
    """The files of one part's tensors of one kind, written together; closes them, or abandons them on an error."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._files: dict[str, ArrayFile] = {}
        self._paths: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, file in self._files.items():
            if kind is None:
                self._ledger.close(self._paths[name], file)
            else:
                file.abandon()

    def add(self, name: str, path: str, dtype: DTypeLike, shape: tuple[int, ...]) -> ArrayFile:
        """Open the file of one tensor, at ``path`` relative to the store."""
        self._paths[name] = path
        self._files[name] = ArrayFile(self._ledger.folder / path, dtype, shape)
        return self._files[name]

    def append(self, name: str, rows: Array) -> None:
        """Write the next rows of one tensor."""
        self._files[name].append(rows)


class Ledger:
    """The files that were written below a folder, with their checksums and sizes.

    Attributes:
        folder: the store that is being written.
        checksums: crc32 of each file, by its path relative to the folder.
        sizes: bytes of each file, likewise.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checksums: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def files(self) -> FileSet:
        """Return an empty set of files that enter the ledger when they are closed."""
        return FileSet(self)

    def write(self, path: str, array: Array) -> None:
        """Write an array that is in memory."""
        with self.files() as files:
            files.add(path, path, array.dtype, array.shape).append(array)

    def close(self, path: str, file: ArrayFile) -> None:
        """Close a file and enter it."""
        file.close()
        self.checksums[path], self.sizes[path] = file.crc, file.size

    def enter(self, path: str) -> None:
        """Enter a file that was written out of order, by reading it once more."""
        file = self.folder / path
        self.checksums[path], self.sizes[path] = file_crc(file), file.stat().st_size

    def nbytes(self, part: int) -> int:
        """Return the bytes of one part."""
        return sum(size for path, size in self.sizes.items() if path.startswith(f"part-{part}/"))
