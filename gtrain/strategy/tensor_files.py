"""Tensors in ``.npy`` files that are larger than memory: written in pieces, read into tensors or mapped.

A file is written under a temporary name, flushed to the disk and renamed, so that it is always complete. A checkpoint
shares it by a hard link at no cost: a later version is another file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import DataError
from gtrain.memory.files import map_array, read_header

_BYTES = 1 << 22  # of one read or write
# Of one read-ahead request: Linux truncates larger ones to the disk's read_ahead_kb (128 by default).
_AHEAD = 1 << 17


class Writing:
    """Writes a tensor file in pieces; :meth:`done` gives the complete file its name.

    Args:
        path: the file.
        shape: shape of the tensor.
        dtype: dtype of the tensor.

    Raises:
        DataError: from every method, if the file cannot be written, for example because the disk is full.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._path, self._temporary = path, path.with_name(path.name + ".part")
        header = {"descr": torch.empty(0, dtype=dtype).numpy().dtype.str, "fortran_order": False, "shape": shape}
        with _explaining("written", path, self._temporary):
            self._handle = open(self._temporary, "wb")  # noqa: SIM115 - closed by done()
            # Any program that reads .npy can read the file, even while it is larger than memory.
            np.lib.format.write_array_header_1_0(self._handle, header)

    def add(self, rows: Tensor, written: Callable[[int], None] | None = None) -> None:
        """Write the next rows.

        Args:
            rows: rows of the tensor.
            written: called after each piece, with the number of bytes of ``rows`` that are copied by then.
        """
        view = _bytes(rows.contiguous())
        with _explaining("written", self._path, self._temporary):
            for begin in range(0, len(view), _BYTES):
                self._handle.write(view[begin : begin + _BYTES])
                if written is not None:
                    written(begin + _BYTES)

    def done(self) -> None:
        """Flush the file to the disk and rename it."""
        with _explaining("written", self._path, self._temporary):
            self._handle.flush()
            # The data must be on the disk before the name is: a rename alone survives a crash without them.
            os.fsync(self._handle.fileno())
            _drop_from_page_cache(self._handle.fileno())
            self._handle.close()
            os.replace(self._temporary, self._path)


def write(path: Path, tensor: Tensor) -> None:
    """Write a tensor file and flush it to the disk; see :class:`Writing`."""
    writing = Writing(path, tuple(tensor.shape), tensor.dtype)
    writing.add(tensor)
    writing.done()


def read(path: Path, target: Tensor, free: Callable[[int], None] | None = None) -> None:
    """Read a file into a tensor.

    Args:
        path: the file.
        target: the tensor to overwrite; contiguous, on the CPU.
        free: blocks until the first ``n`` bytes of ``target``, its argument, may be overwritten.

    Raises:
        DataError: the file cannot be read, or has another shape or dtype.
    """
    with _explaining("read", path), open(path, "rb") as handle:
        shape, _, dtype = read_header(handle)
        array = target.numpy()
        if shape != array.shape or dtype != array.dtype:
            raise DataError(
                f"{path} holds {dtype} {list(shape)}; {array.dtype} {list(array.shape)} is expected.",
                hint="use a checkpoint of the same data, model and strategy settings.",
            )
        view, position = _bytes(target), 0
        while position < len(view):
            if free is not None:
                free(min(position + _BYTES, len(view)))
            count = handle.readinto(view[position : position + _BYTES])
            if not count:
                raise DataError(f"{path} is truncated.", hint="use another checkpoint.")
            position += count
        _drop_from_page_cache(handle.fileno())


def announce(path: Path) -> None:
    """Start the kernel's read-ahead of a file that :func:`read` reads soon."""
    with suppress(OSError), open(path, "rb") as handle:  # read() reports the error
        descriptor = handle.fileno()
        for begin in range(0, os.fstat(descriptor).st_size, _AHEAD):
            os.posix_fadvise(descriptor, begin, _AHEAD, os.POSIX_FADV_WILLNEED)


def mapped(path: Path) -> Tensor:
    """Return a file's tensor, mapped from the file; changes of the tensor are not written to the file."""
    return torch.from_numpy(map_array(path))


def keep(source: Path, target: Path) -> None:
    """Create a hard link to a file, or a copy if ``target`` is on another disk.

    Raises:
        DataError: neither can be created.
    """
    with _explaining("written", target):
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, which shares its memory."""
    array = tensor.numpy()
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _drop_from_page_cache(descriptor: int) -> None:
    """Drop the file from the page cache: all other partitions are needed before it is needed again."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _explaining(action: str, path: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a DataError that names the file, and remove the unfinished one."""
    try:
        yield
    except OSError as error:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise DataError(
            f"{path} could not be {action}: {error.strerror or error}.",
            hint="free space on the disk, and resume from the last checkpoint (ckpt_path=last).",
        ) from error
