"""Mapped arrays whose files are not kept open.

Python's ``mmap``, and so numpy's, keeps a descriptor for each mapping: a store of many parts would exceed the number of
files that a process may open, often 1,024.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def map_array(path: Path) -> NDArray[Any]:
    """Map a ``.npy`` file copy-on-write; an array without elements is not mapped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a complete ``.npy`` file in C order.
    """
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
        if version != (1, 0):
            raise ValueError(f"it is a .npy file of version {version}")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)  # type: ignore[no-untyped-call]
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
