"""Kernels of the dictionary: hashes of names, and a hash table with open addressing over an arena of names."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.kernels.memory import load_word, prefetch_entry
from gtrain.kernels.splitmix import GOLDEN

Bytes = NDArray[np.uint8]

PAD = 8
"""Bytes that every buffer of keys has behind its contents, since keys are read eight bytes at a time."""
ID_BITS = np.uint64(40)
ID_MASK = np.uint64((1 << 40) - 1)
AHEAD = 16
"""Keys between the steps of a look-up: slot fetched, name fetched, compared. Each step would miss the caches alone."""


_MIX = np.uint64(0xD6E8FEB86659FD93)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@njit(cache=True, nogil=True)
def hash_keys(data: Bytes, starts: NDArray[np.int32], lengths: NDArray[np.int32], out: NDArray[np.uint64]) -> None:
    """Hash byte strings to 64 bits each.

    Multiply and shift over words of eight bytes, in the manner of MurmurHash2 (Appleby 2008).

    Shapes:
        data padded by ``PAD`` bytes; starts, lengths and out ``[n]``.
    """
    for i in range(starts.size):
        here, left = np.intp(starts[i]), np.intp(lengths[i])
        value = GOLDEN ^ np.uint64(left)
        while left > 0:
            word = load_word(data, here)
            if left < 8:
                word &= _ALL >> np.uint64(64 - 8 * left)
            value = (value ^ word) * _MIX
            value ^= value >> np.uint64(32)
            here += 8
            left -= 8
        value *= _MIX
        out[i] = value ^ (value >> np.uint64(32))


@njit(cache=True, nogil=True)
def _equal(one: Bytes, here: np.intp, other: Bytes, there: np.intp, length: np.intp) -> bool:
    while length >= 8:
        if load_word(one, here) != load_word(other, there):
            return False
        here += 8
        there += 8
        length -= 8
    shift = np.uint64(64 - 8 * length)
    return length == 0 or (load_word(one, here) << shift) == (load_word(other, there) << shift)


@njit(cache=True, nogil=True)
def encode(
    table: NDArray[np.uint64],
    arena: Bytes,
    offsets: NDArray[np.int64],
    known: int,
    data: Bytes,
    starts: NDArray[np.int32],
    lengths: NDArray[np.int32],
    hashes: NDArray[np.uint64],
    out: NDArray[np.int64],
) -> int:
    """Look byte strings up, adding those that are new; returns how many names there are then.

    A slot of the table is two words: a tag of 24 bits of the hash above 40 bits of id + 1, 0 while it is free; and
    24 bits of length above 40 bits of the name's place in the arena. A tag and a length that match are verified
    against the name's bytes, so the result is exact whatever the hashes are.

    Args:
        table: slots, with room for all keys that may be new.
        arena: the names one behind the other, with room and ``PAD`` bytes behind that.
        offsets: where each name begins, and the end of the last.
        known: number of names.
        data, starts, lengths: the keys; none is empty.
        hashes: 64 bits for each key.
        out: the id of each key.

    Shapes:
        table ``[2 * power of two]``, offsets ``[more than known + n]``; starts, lengths, hashes and out ``[n]``.
    """
    mask = np.uint64(table.size // 2 - 1)
    for i in range(starts.size):
        if i + 2 * AHEAD < starts.size:
            prefetch_entry(table, np.intp(2 * (hashes[i + 2 * AHEAD] & mask)))
        if i + AHEAD < starts.size:
            prefetch_entry(arena, np.intp(table[np.intp(2 * (hashes[i + AHEAD] & mask)) + 1] & ID_MASK))
        start, length = np.intp(starts[i]), np.intp(lengths[i])
        tag = (hashes[i] >> ID_BITS) << ID_BITS
        slot = hashes[i] & mask
        while True:
            place = np.intp(2 * slot)
            first, second = table[place], table[place + 1]
            if first == np.uint64(0):
                end = offsets[known]
                table[place] = tag | np.uint64(known + 1)
                table[place + 1] = (np.uint64(length) << ID_BITS) | np.uint64(end)
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
    """Put names ``first .. first + n - 1``, which are distinct, into a larger table.

    Shapes:
        table ``[2 * power of two]``, hashes ``[n]``.
    """
    mask = np.uint64(table.size // 2 - 1)
    for i in range(hashes.size):
        if i + AHEAD < hashes.size:
            prefetch_entry(table, np.intp(2 * (hashes[i + AHEAD] & mask)))
        slot = hashes[i] & mask
        while table[np.intp(2 * slot)] != np.uint64(0):
            slot = (slot + np.uint64(1)) & mask
        place, name = np.intp(2 * slot), first + i
        length = offsets[name + 1] - offsets[name]
        table[place] = ((hashes[i] >> ID_BITS) << ID_BITS) | np.uint64(name + 1)
        table[place + 1] = (np.uint64(length) << ID_BITS) | np.uint64(offsets[name])
