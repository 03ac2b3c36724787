"""Tensors in ``.npy`` files that are too large to be held: written piece by piece, read in place or mapped.

A file is written beside its final name, flushed to the disk and renamed, so that it is always complete; and a
checkpoint may keep it under a second name (a hard link) at no cost, because a later version is another file.
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

_BYTES = 1 << 22  # read and written at a time
_AHEAD = 1 << 17  # announced at a time: of more, Linux reads what the disk takes at once (read_ahead_kb), and no more


class Writing:
    """A file that is written piece by piece and has its name when it is whole.

    Args:
        path: the file.
        shape: of the tensor.
        dtype: of its numbers.

    Raises:
        DataError: of every method, where the disk is full or the file cannot be written for another reason.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._path, self._temporary = path, path.with_name(path.name + ".part")
        descr = torch.empty(0, dtype=dtype).numpy().dtype.str
        with self._said():
            self._handle = open(self._temporary, "wb")  # noqa: SIM115 - closed by done()
            header = {"descr": descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(self._handle, header)

    def add(self, rows: Tensor, written: Callable[[int], None] | None = None) -> None:
        """Write the next rows.

        Args:
            rows: what to write.
            written: is told how many bytes of them have been copied, piece by piece.
        """
        array = rows.contiguous().numpy()
        view = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
        with self._said():
            for begin in range(0, len(view), _BYTES):
                self._handle.write(view[begin : begin + _BYTES])
                if written is not None:
                    written(begin + _BYTES)

    def done(self) -> None:
        """Give the file its name, once the disk has it."""
        with self._said():
            self._handle.flush()
            os.fsync(self._handle.fileno())
            _forget(self._handle.fileno())
            self._handle.close()
            os.replace(self._temporary, self._path)

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._temporary.unlink(missing_ok=True)
            raise _failed("written", self._path, error) from error


def write(path: Path, tensor: Tensor) -> None:
    """Write a tensor as a file, durably; see :class:`Writing`."""
    writing = Writing(path, tuple(tensor.shape), tensor.dtype)
    writing.add(tensor)
    writing.done()


def read(path: Path, target: Tensor, free: Callable[[int], None] | None = None) -> None:
    """Fill a tensor from a file.

    Args:
        path: the file.
        target: the tensor.
        free: returns as soon as so many bytes of the tensor may be overwritten.

    Raises:
        DataError: it cannot be read, or is of another size.
    """
    try:
        with open(path, "rb") as handle:
            shape, _, dtype = _header(handle)
            array = target.numpy()
            if shape != array.shape or dtype != array.dtype:
                wanted = f"{array.dtype} {list(array.shape)}"
                raise DataError(
                    f"{path} holds {dtype} {list(shape)}, and {wanted} is expected.",
                    hint="use a checkpoint of the same data, model and strategy settings.",
                )
            if array.size:
                view = array.reshape(-1).view(np.uint8).data
                at = 0
                while at < len(view):
                    if free is not None:
                        free(min(at + _BYTES, len(view)))
                    count = handle.readinto(view[at : at + _BYTES])  # type: ignore[attr-defined]
                    if not count:
                        raise DataError(f"{path} ends early.", hint="use another checkpoint.")
                    at += count
            _forget(handle.fileno())
    except OSError as error:
        raise _failed("read", path, error) from error


def announce(path: Path) -> None:
    """Let the kernel read a file, which :func:`read` will ask for soon."""
    with suppress(OSError), open(path, "rb") as handle:  # which reading it will tell
        descriptor = handle.fileno()
        for begin in range(0, os.fstat(descriptor).st_size, _AHEAD):
            os.posix_fadvise(descriptor, begin, _AHEAD, os.POSIX_FADV_WILLNEED)


def mapped(path: Path) -> Tensor:
    """A file's tensor without reading it; writing to it does not reach the disk."""
    with open(path, "rb") as handle:
        empty = 0 in _header(handle)[0]  # which cannot be mapped
    return torch.from_numpy(np.load(path, mmap_mode=None if empty else "c"))


def keep(source: Path, target: Path) -> None:
    """Let a file have a second name, or a copy where the other place is on another disk.

    Raises:
        DataError: neither can be made.
    """
    try:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
    except OSError as error:
        raise _failed("written", target, error) from error


def _header(handle: object) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = np.lib.format.read_magic(handle)  # type: ignore[arg-type]
    assert version == (1, 0)
    return np.lib.format.read_array_header_1_0(handle)  # type: ignore[arg-type, return-value]


def _forget(descriptor: int) -> None:
    """Leave the file out of the page cache: it is not needed before the others were."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _failed(done: str, path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} could not be {done}: {error.strerror or error}.",
        hint="free space on the disk, and go on from the last checkpoint (ckpt_path=last).",
    )
