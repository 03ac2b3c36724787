"""Partitions on disk: rows and optimizer state of each, as ``.npy`` files.

A file is written beside its place, flushed to the disk and renamed, so that it is always whole; and a checkpoint may
keep it by a second name (a hard link) for nothing, for what comes later is another file.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import DataError

ROWS, STATE = "rows", "state"
PIECE = 1 << 18
"""Ids that are worked on at a time."""
_BYTES = 1 << 24  # read and written at a time


def file_name(kind: str, partition: int) -> str:
    """Name of a partition's file."""
    return f"table-{partition}.{kind}.npy"


def write(path: Path, tensor: Tensor) -> None:
    """Write a tensor as a file, durably.

    Raises:
        DataError: it cannot be written, because the disk is full or for another reason.
    """
    temporary = path.with_name(path.name + ".part")
    array = tensor.contiguous().numpy()
    try:
        with open(temporary, "wb") as handle:
            np.lib.format.write_array_header_1_0(
                handle, {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
            )
            view = memoryview(array.reshape(-1).view(np.uint8)) if array.size else memoryview(b"")
            for begin in range(0, len(view), _BYTES):
                handle.write(view[begin : begin + _BYTES])
            handle.flush()
            os.fsync(handle.fileno())
            _forget(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _failed("written", path, error) from error


def read(path: Path, target: Tensor) -> None:
    """Fill a tensor from a file.

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
                    f"{path} holds {dtype} {list(shape)}, and the table's partition is {wanted}.",
                    hint="use a checkpoint of the same data, model and strategy.num_partitions.",
                )
            if array.size:
                view = memoryview(array.reshape(-1).view(np.uint8))
                at = 0
                while at < len(view):
                    count = handle.readinto(view[at : at + _BYTES])  # type: ignore[attr-defined]
                    if not count:
                        raise DataError(f"{path} ends early.", hint="use another checkpoint.")
                    at += count
            _forget(handle.fileno())
    except OSError as error:
        raise _failed("read", path, error) from error


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
