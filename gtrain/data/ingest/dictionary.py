"""Numbers for byte strings in order of first appearance."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gtrain.data.ingest.probe import PAD, Bytes, encode, fill, hash_keys
from gtrain.data.ingest.rows import Keys

T = TypeVar("T", bound=np.generic)
Hash = Callable[[Bytes, NDArray[np.int32], NDArray[np.int32], NDArray[np.uint64]], None]

FIRST_SLOTS = 1 << 16
FULL = 0.7
"""Share of the slots in use at which the table doubles."""
STRIDE = 1 << 16
"""Keys looked up at once; room is made for all of them to be new."""


class Dictionary:
    """Ids 0, 1, 2, ... for byte strings, in the order in which they first appear; exact, whatever the hashes are.

    Memory for n names of b bytes on the average: b + 8 + 23..46 bytes each.

    Args:
        hash_names: hashes names again when the table grows; it must be the function that hashed the keys.
    """

    def __init__(self, hash_names: Hash = hash_keys, first_slots: int = FIRST_SLOTS) -> None:
        self._hash_names = hash_names
        self._table = np.zeros(2 * first_slots, dtype=np.uint64)
        self._arena = np.empty(1 << 16, dtype=np.uint8)
        self._offsets = np.zeros(1 << 12, dtype=np.int64)
        self._size = 0
        self._longest = 1

    def __len__(self) -> int:
        return self._size

    def encode(self, keys: Keys) -> NDArray[np.int64]:
        """Return the id of each key, numbering those that are new, ``[n]``."""
        out = np.empty(keys.starts.size, dtype=np.int64)
        for first in range(0, out.size, STRIDE):
            part = slice(first, first + STRIDE)
            starts, lengths, hashes = keys.starts[part], keys.lengths[part], keys.hashes[part]
            self._longest = max(self._longest, int(lengths.max()))
            self._make_room(starts.size, int(lengths.sum(dtype=np.int64)))
            self._size = encode(
                self._table, self._arena, self._offsets, self._size, keys.data, starts, lengths, hashes, out[part]
            )
        return out

    def freeze(self) -> pa.LargeStringArray:
        """Return the names by id and free the table; nothing can be encoded afterwards. Names must be UTF-8."""
        self._table = np.zeros(0, dtype=np.uint64)
        offsets = pa.py_buffer(self._offsets[: self._size + 1])
        return pa.LargeStringArray.from_buffers(self._size, offsets, pa.py_buffer(self._arena[: self._used]))

    @property
    def _used(self) -> int:
        return int(self._offsets[self._size])

    def _make_room(self, names: int, size: int) -> None:
        self._offsets = _grown(self._offsets, self._size + 1, self._size + 1 + names)
        self._arena = _grown(self._arena, self._used, self._used + size + PAD)
        slots = self._table.size // 2
        while self._size + names > FULL * slots:
            slots *= 2
        if slots > self._table.size // 2:
            self._table = np.zeros(0, dtype=np.uint64)  # freed before its successor is made, which needs only the names
            self._table = np.zeros(2 * slots, dtype=np.uint64)
            self._fill()

    def _fill(self) -> None:
        stride = min(STRIDE, 2**30 // self._longest)  # places within a stride are int32
        for first in range(0, self._size, stride):
            offsets = self._offsets[first : min(first + stride, self._size) + 1]
            base, hashes = int(offsets[0]), np.empty(offsets.size - 1, dtype=np.uint64)
            starts, lengths = (offsets[:-1] - base).astype(np.int32), np.diff(offsets).astype(np.int32)
            self._hash_names(self._arena[base:], starts, lengths, hashes)
            fill(self._table, self._offsets, first, hashes)


def _grown(array: NDArray[T], used: int, wanted: int) -> NDArray[T]:
    """Return the array, or one of at least ``wanted`` items that begins with its first ``used`` ones."""
    if wanted <= array.size:
        return array
    larger = np.empty(max(wanted, array.size + array.size // 2), dtype=array.dtype)
    larger[:used] = array[:used]
    return larger
