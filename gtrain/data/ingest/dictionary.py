"""Edges as the readers yield them, and a dictionary that numbers their names in order of first appearance.

The dictionary is an open-addressing hash table over an arena of names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from gtrain.kernels.memory import load_word, prefetch_entry
from gtrain.kernels.splitmix import GOLDEN

T = TypeVar("T", bound=np.generic)
Bytes = NDArray[np.uint8]
Hash = Callable[[Bytes, NDArray[np.int32], NDArray[np.int32], NDArray[np.uint64]], None]

FIRST_SLOTS = 1 << 16
FULL = 0.7
"""Load factor at which the table doubles."""
STRIDE = 1 << 16
"""Keys per look-up call; the table first grows enough to add all of them."""
PAD = 8
"""Bytes of padding behind the contents of every buffer of keys, since kernels read eight bytes at a time."""
ID_BITS = np.uint64(40)
ID_MASK = np.uint64((1 << 40) - 1)
AHEAD = 16
"""Prefetch distance in keys: the slot is prefetched two distances ahead, the name in the arena one."""

_MIX = np.uint64(0xD6E8FEB86659FD93)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


class Keys(NamedTuple):
    """Byte strings in one buffer, with their hashes.

    Attributes:
        data: the buffer, with ``PAD`` bytes behind the last key.
        starts: offset of each key in ``data``, ``[n]``.
        lengths: length of each key in bytes, ``[n]``; at least 1.
        hashes: 64-bit hash of each key, ``[n]``.
    """

    data: Bytes
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    hashes: NDArray[np.uint64]

    @classmethod
    def interleaved(cls, *columns: pa.Array) -> Keys:
        """Return the strings of columns of equal length as keys, row by row."""
        buffers, starts, lengths, base = [], [], [], 0
        for column in columns:
            strings = column.cast(pa.large_string())
            offsets = np.frombuffer(strings.buffers()[1], dtype=np.int64)[strings.offset :][: len(strings) + 1]
            data = np.frombuffer(strings.buffers()[2] or b"", dtype=np.uint8)
            buffers.append(data[offsets[0] : offsets[-1]])
            starts.append(offsets[:-1] - offsets[0] + base)
            lengths.append(np.diff(offsets))
            base += int(offsets[-1] - offsets[0])
        packed = np.concatenate([*buffers, np.zeros(PAD, dtype=np.uint8)])
        all_starts, sizes = (np.stack(values, axis=1).reshape(-1).astype(np.int32) for values in (starts, lengths))
        hashes = np.empty(all_starts.size, dtype=np.uint64)
        hash_keys(packed, all_starts, sizes, hashes)
        return cls(packed, all_starts, sizes, hashes)

    def part(self, chosen: slice) -> Keys:
        """Return some of the keys."""
        return Keys(self.data, self.starts[chosen], self.lengths[chosen], self.hashes[chosen])


class NameTable(NamedTuple):
    """A hash table of names, with free slots.

    A slot is two words. Word 0: 24 bits of the hash (the tag) above 40 bits of id + 1; 0 if the slot is free. Word 1:
    24 bits of length above 40 bits of the name's offset in the arena.

    Attributes:
        slots: ``[2 * power of two]``.
        arena: the names back to back, and at least ``PAD`` bytes.
        offsets: start of each name in the arena, and the end of the last; longer than the number of names.
    """

    slots: NDArray[np.uint64]
    arena: Bytes
    offsets: NDArray[np.int64]


@njit(cache=True, nogil=True)
def hash_keys(data: Bytes, starts: NDArray[np.int32], lengths: NDArray[np.int32], out: NDArray[np.uint64]) -> None:
    """Hash byte strings to 64 bits each.

    Multiply and shift over words of eight bytes, in the manner of MurmurHash2 (Appleby 2008).

    Shapes:
        data padded by ``PAD`` bytes; starts, lengths and out ``[n]``.
    """
    for i in range(starts.size):
        offset, remaining = np.intp(starts[i]), np.intp(lengths[i])
        value = GOLDEN ^ np.uint64(remaining)
        while remaining > 0:
            word = load_word(data, offset)
            if remaining < 8:  # zero the bytes behind the key
                word &= _ALL >> np.uint64(64 - 8 * remaining)
            value = (value ^ word) * _MIX
            value ^= value >> np.uint64(32)
            offset += 8
            remaining -= 8
        value *= _MIX
        out[i] = value ^ (value >> np.uint64(32))


@njit(cache=True, nogil=True)
def _equal(a: Bytes, a_offset: np.intp, b: Bytes, b_offset: np.intp, length: np.intp) -> bool:
    while length >= 8:
        if load_word(a, a_offset) != load_word(b, b_offset):
            return False
        a_offset += 8
        b_offset += 8
        length -= 8
    # The shift drops the bytes behind the keys; words are little-endian. A shift by 64 is undefined: length 0 is apart.
    shift = np.uint64(64 - 8 * length)
    return length == 0 or (load_word(a, a_offset) << shift) == (load_word(b, b_offset) << shift)


@njit(cache=True, nogil=True)
def encode(names: NameTable, known: int, keys: Keys, out: NDArray[np.int64]) -> int:
    """Look up byte strings and add the new ones; return the number of names after that.

    Where tag and length match, the bytes are compared, so collisions cost time but never give a wrong id.

    Args:
        names: the table, with capacity for ``n`` new names and their bytes.
        known: number of names in the table.
        keys: ``n`` keys.
        out: output, the id of each key, ``[n]``.
    """
    table, arena, offsets = names
    data, starts, lengths, hashes = keys
    mask = np.uint64(table.size // 2 - 1)
    for i in range(starts.size):
        # Two misses per key, one after the other: the slot, and the name that the slot points at.
        if i + 2 * AHEAD < starts.size:
            prefetch_entry(table, np.intp(2 * (hashes[i + 2 * AHEAD] & mask)))
        if i + AHEAD < starts.size:
            prefetch_entry(arena, np.intp(table[np.intp(2 * (hashes[i + AHEAD] & mask)) + 1] & ID_MASK))
        start, length = np.intp(starts[i]), np.intp(lengths[i])
        tag = (hashes[i] >> ID_BITS) << ID_BITS
        slot = hashes[i] & mask
        while True:
            entry = np.intp(2 * slot)
            first, second = table[entry], table[entry + 1]
            # A free slot: the name is new.
            if first == np.uint64(0):
                end = offsets[known]
                table[entry] = tag | np.uint64(known + 1)
                table[entry + 1] = (np.uint64(length) << ID_BITS) | np.uint64(end)
                for j in range(length):
                    arena[end + j] = data[start + j]
                out[i] = known
                known += 1
                offsets[known] = end + length
                break
            if (
                (first & ~ID_MASK) == tag
                and np.intp(second >> ID_BITS) == length
                and _equal(arena, np.intp(second & ID_MASK), data, start, length)
            ):
                out[i] = np.int64(first & ID_MASK) - 1
                break
            slot = (slot + np.uint64(1)) & mask
    return known


@njit(cache=True, nogil=True)
def fill(table: NDArray[np.uint64], offsets: NDArray[np.int64], first: int, hashes: NDArray[np.uint64]) -> None:
    """Insert the distinct names ``first .. first + n - 1`` into an enlarged table.

    Shapes:
        table ``[2 * power of two]``, hashes ``[n]``.
    """
    mask = np.uint64(table.size // 2 - 1)
    for i in range(hashes.size):
        if i + AHEAD < hashes.size:
            prefetch_entry(table, np.intp(2 * (hashes[i + AHEAD] & mask)))
        slot = hashes[i] & mask
        # All names are distinct, so no bytes need to be compared.
        while table[np.intp(2 * slot)] != np.uint64(0):
            slot = (slot + np.uint64(1)) & mask
        entry, name = np.intp(2 * slot), first + i
        length = offsets[name + 1] - offsets[name]
        table[entry] = ((hashes[i] >> ID_BITS) << ID_BITS) | np.uint64(name + 1)
        table[entry + 1] = (np.uint64(length) << ID_BITS) | np.uint64(offsets[name])


class Dictionary:
    """Assigns the ids 0, 1, 2, ... to byte strings in order of first appearance; hash collisions do not matter.

    Memory per name of b bytes: b + 8 + 23..46 bytes.

    Args:
        hash_names: hashes the names again when the table grows; must be the function that hashed the keys.
        first_slots: initial slots, a power of two.
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
        """Return the id of each key, ``[n]`` int64; a new key gets the next id."""
        out = np.empty(keys.starts.size, dtype=np.int64)
        for first in range(0, out.size, STRIDE):
            part = slice(first, first + STRIDE)
            some = keys.part(part)
            self._longest = max(self._longest, int(some.lengths.max()))
            self._make_room(some.starts.size, int(some.lengths.sum(dtype=np.int64)))
            names = NameTable(self._table, self._arena, self._offsets)
            self._size = encode(names, self._size, some, out[part])
        return out

    def freeze(self) -> pa.LargeStringArray:
        """Return the names by id and free the table; :meth:`encode` fails afterwards. Names must be UTF-8."""
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
            # Free the old table first: the new one is filled from the names.
            self._table = np.zeros(0, dtype=np.uint64)
            self._table = np.zeros(2 * slots, dtype=np.uint64)
            self._fill()

    def _fill(self) -> None:
        # Offsets within a stride must fit int32.
        stride = min(STRIDE, 2**30 // self._longest)
        for first in range(0, self._size, stride):
            offsets = self._offsets[first : min(first + stride, self._size) + 1]
            base, hashes = int(offsets[0]), np.empty(offsets.size - 1, dtype=np.uint64)
            starts, lengths = (offsets[:-1] - base).astype(np.int32), np.diff(offsets).astype(np.int32)
            self._hash_names(self._arena[base:], starts, lengths, hashes)
            fill(self._table, self._offsets, first, hashes)


def _grown(array: NDArray[T], used: int, capacity: int) -> NDArray[T]:
    """Return ``array``, or a copy of its first ``used`` items with at least ``capacity`` items."""
    if capacity <= array.size:
        return array
    larger = np.empty(max(capacity, array.size + array.size // 2), dtype=array.dtype)
    larger[:used] = array[:used]
    return larger


Ints = NDArray[np.int64]


@dataclass(frozen=True)
class EdgeRows:
    """Edges in the order of the file.

    Attributes:
        ids: source and target of each edge, interleaved, ``[2 * n]``: int64, or UTF-8 strings.
        relation: relation of each edge, ``[n]``; None if the file has no relations.
        weight: finite weight of each edge, ``[n]`` float32; None if the file has no weights.
        time: time of each edge, ``[n]`` int64; None if the file has no times.
        read: bytes of the file read so far.
        location: returns the file and line of a row (from 0), for messages.
    """

    ids: Keys | Ints
    relation: Keys | Ints | None
    weight: NDArray[np.float32] | None
    time: Ints | None
    read: int
    location: Callable[[int], str]

    def __len__(self) -> int:
        return (self.ids.starts.size if isinstance(self.ids, Keys) else self.ids.size) // 2


def first_true(wrong: NDArray[Any]) -> int | None:
    """Return the first true position of a mask; None if all are false."""
    return int(wrong.argmax()) if wrong.any() else None
