"""Mapped arrays whose files are not kept open.

Python's ``mmap``, and so numpy's, keeps a descriptor for each mapping: a store of many parts would exceed the number of
files that a process may open, often 1,024.
"""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

# numpy reads a header by ast.literal_eval. Two threads at once may end in a SystemError there: "AST constructor
# recursion depth mismatch" (seen with CPython 3.11.7).
_reading_a_header = threading.Lock()


def read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a ``.npy`` file; safe in several threads at once.

    Args:
        file: at its start; it is left at the array's first byte.

    Returns:
        the array's shape, whether it is in Fortran order, and its dtype.

    Raises:
        ValueError: it is not a ``.npy`` file of version 1.0.
    """
    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
    if version != (1, 0):
        raise ValueError(f"it is a .npy file of version {version}")
    with _reading_a_header:
        header: tuple[tuple[int, ...], bool, np.dtype[Any]] = np.lib.format.read_array_header_1_0(file)  # type: ignore[no-untyped-call]
    return header


def map_array(path: Path) -> NDArray[Any]:
    """Map a ``.npy`` file copy-on-write; an array without elements is not mapped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a complete ``.npy`` file in C order.
    """
    with path.open("rb") as file:
        shape, fortran, dtype = read_header(file)
        start, size = file.tell(), os.fstat(file.fileno()).st_size
    end = start + dtype.itemsize * math.prod(shape)
    if fortran or dtype.hasobject or end > size:
        raise ValueError(
            f"it has {size} bytes of {end}" if end > size else "its array is not in C order, or of objects"
        )
    if end == start:
        return np.empty(shape, dtype)
    # Not shared: the file is opened to be read, and closed after mmap.
    whole = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
    array: NDArray[Any] = whole.numpy()[start:].view(dtype).reshape(shape)
    return array
