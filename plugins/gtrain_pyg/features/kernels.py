"""Compiled kernels that find where rows are and copy them.

A row's *place* is ``segment << 40 | row``. A segment is a stretch of memory that holds rows of every tensor of a kind
(a node type or an edge type): segment p is part p if this rank hosts it, segment P the cache, and those above are what
other ranks sent. A place below 0 is none yet: the row is to be asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.kernels.memory import copy, count_bits, load32, load64, prefetch
from gtrain.kernels.random import slot_of

Array = NDArray[Any]

SHIFT = 40
"""Bits of a place that are the row."""
_ROW = (1 << SHIFT) - 1
_AHEAD, _AHEAD_NARROW = 8, 64  # rows that memory is asked for ahead, and rows of a cache line or less
_LINE = 64  # bytes


@njit(cache=True, nogil=True)
def find(ids: Array, offsets: Array, hosted: Array, bits: Array, ranks: Array, place: Array) -> tuple[int, int, int]:
    """Find the places of rows.

    Args:
        ids: int64 ``[n]``, what to look for.
        offsets: int64 ``[P + 1]``; part p owns ``offsets[p] .. offsets[p+1]-1``.
        hosted: bool ``[P]``.
        bits, ranks: what is in the cache; see :func:`rank_bits`; empty without a cache.
        place: int64 ``[n]``, the result; ``-1 - owner`` of a row that is to be asked for.

    Returns:
        how many are hosted, and how many are in the cache; and the position of an id that is out of range, or -1.
    """
    parts, part, here, cached = hosted.size, 0, 0, 0
    for i in range(ids.size):
        node = ids[i]
        if node < offsets[part] or node >= offsets[part + 1]:
            if node < 0 or node >= offsets[parts]:
                return here, cached, i
            part = np.searchsorted(offsets, node, side="right") - 1
        if hosted[part]:
            place[i] = part << SHIFT | (node - offsets[part])
            here += 1
        elif bits.size and bits[node >> 6] >> np.uint64(node & 63) & np.uint64(1):
            below = bits[node >> 6] & ((np.uint64(1) << np.uint64(node & 63)) - np.uint64(1))
            place[i] = parts << SHIFT | (np.int64(ranks[node >> 6]) + count_bits(below))
            cached += 1
        else:
            place[i] = -1 - part
    return here, cached, -1


@njit(cache=True, nogil=True)
def rank_bits(ids: Array, bits: Array, ranks: Array) -> None:
    """Mark ascending ids: the one at position i gets the rank i.

    Args:
        ids: int64, ascending and distinct.
        bits: uint64 zeros, one bit for each id there may be.
        ranks: uint32, as many; how many ids are marked before each word.
    """
    for node in ids:
        bits[node >> 6] |= np.uint64(1) << np.uint64(node & 63)
    total = 0
    for word in range(bits.size):
        ranks[word] = total
        total += count_bits(bits[word])


@njit(cache=True, nogil=True)
def _enter(node: int, owner: int, unique: Array, owners: Array, counts: Array, segments: Array) -> int:
    """List a row that is to be asked for, and return its place."""
    index = counts[owner]
    counts[owner] += 1
    unique[counts[-1]] = node
    owners[counts[-1]] = owner
    counts[-1] += 1
    first, each, shift = segments[0], segments[1], segments[2]
    return (first + owner * each + (index >> shift)) << SHIFT | (index & ((1 << shift) - 1))


@njit(cache=True, nogil=True)
def number(
    ids: Array,
    place: Array,
    table: Array,
    turn: int,
    floor: int,
    unique: Array,
    owners: Array,
    counts: Array,
    segments: Array,
) -> int:
    """Give each row that is not here the place that it got in an earlier turn, or else one among those of its owner.

    Args:
        ids: int64 ``[n]``.
        place: int64 ``[n]`` of :func:`find`; where below 0, replaced.
        table: int64 ``[slots, 2]``, a hash map with room for all: ``turn << 40 | id``, and the id's place; 0: empty.
        turn: the batch's number, from 1 on.
        floor: the first turn whose places can still be read.
        unique: int64, the distinct ids that are to be asked for in order of discovery, with room for more.
        owners: int32, the owner of each.
        counts: int64 ``[P + 1]``, how many of each owner, and last of all.
        segments: int64 ``[3]``: the first segment, segments for each owner, and log2 of the rows in each.

    Returns:
        how many empty slots were filled.
    """
    last, filled, address = table.shape[0] - 1, 0, table.ctypes.data
    for i in range(ids.size):
        if i + _AHEAD_NARROW < ids.size and place[i + _AHEAD_NARROW] < 0:
            prefetch(address + slot_of(ids[i + _AHEAD_NARROW], last) * table.itemsize * 2)
        if place[i] >= 0:
            continue
        slot, free = slot_of(ids[i], last), -1
        while table[slot, 0] != 0 and table[slot, 0] & _ROW != ids[i]:
            if free < 0 and table[slot, 0] >> SHIFT < floor:
                free = slot
            slot = (slot + 1) & last
        if table[slot, 0] >> SHIFT < floor:
            if table[slot, 0] == 0:
                if free >= 0:
                    slot = free
                else:
                    filled += 1
            table[slot, 0] = turn << SHIFT | ids[i]
            table[slot, 1] = _enter(ids[i], -1 - place[i], unique, owners, counts, segments)
        place[i] = table[slot, 1]
    return filled


@njit(cache=True, nogil=True)
def enlist(ids: Array, place: Array, unique: Array, owners: Array, counts: Array, segments: Array) -> None:
    """As :func:`number`, of rows that nobody remembers: each is to be asked for, as often as it is named."""
    for i in range(ids.size):
        if place[i] < 0:
            place[i] = _enter(ids[i], -1 - place[i], unique, owners, counts, segments)


@njit(cache=True, nogil=True)
def rehash(table: Array, floor: int, larger: Array) -> int:
    """Enter what a hash map of :func:`number` has from turn ``floor`` on in another, empty one; returns how much."""
    last, count = larger.shape[0] - 1, 0
    for old in range(table.shape[0]):
        if table[old, 0] == 0 or table[old, 0] >> SHIFT < floor:
            continue
        slot = slot_of(table[old, 0] & _ROW, last)
        while larger[slot, 0] != 0:
            slot = (slot + 1) & last
        larger[slot, 0], larger[slot, 1] = table[old, 0], table[old, 1]
        count += 1
    return count


@njit(cache=True, nogil=True)
def deal(unique: Array, owners: Array, offsets: Array, starts: Array, out: Array) -> None:
    """Sort distinct ids by their owners, as rows within the owner's part; ``starts`` ``[P]`` is used up."""
    for i in range(unique.size):
        owner = owners[i]
        out[starts[owner]] = unique[i] - offsets[owner]
        starts[owner] += 1


@njit(cache=True, nogil=True)
def gather(place: Array, bases: Array, nbytes: int, out: int, low: int, high: int) -> None:
    """Copy rows of so many bytes to ``out``, an address; those of segments outside of ``low .. high-1`` are left out.

    ``bases`` int64 has the address of each segment's first row.
    """
    count, distance = place.size, _AHEAD if nbytes > _LINE else _AHEAD_NARROW
    for i in range(count):
        if i + distance < count:
            ahead = place[i + distance]
            segment = ahead >> SHIFT
            if low <= segment < high:
                start = bases[segment] + (ahead & _ROW) * nbytes
                for c in range(0, nbytes, _LINE):
                    prefetch(start + c)
        segment = place[i] >> SHIFT
        if low <= segment < high:
            source = bases[segment] + (place[i] & _ROW) * nbytes
            if nbytes == 8:
                copy(out + i * 8, source, 8)
            elif nbytes == 4:
                copy(out + i * 4, source, 4)
            elif nbytes == 1:
                copy(out + i, source, 1)
            else:
                copy(out + i * nbytes, source, nbytes)


@njit(cache=True, nogil=True)
def _start(base: int, row: int, width: int) -> int:
    """The entry of an indptr of 4 or 8 bytes a number."""
    if width == 4:
        return int(load32(base + row * 4))
    return int(load64(base + row * 8))


@njit(cache=True, nogil=True)
def measure(place: Array, indptr: Array, width: int, out: Array) -> None:
    """Add up the lengths of sparse rows: ``out`` int ``[n + 1]`` becomes the indptr of these rows.

    ``indptr`` int64 has the address of each segment's own, whose numbers have ``width`` bytes.
    """
    total = 0
    out[0] = 0
    for i in range(place.size):
        if i + _AHEAD < place.size:
            ahead = place[i + _AHEAD]
            prefetch(indptr[ahead >> SHIFT] + (ahead & _ROW) * width)
        base, row = indptr[place[i] >> SHIFT], place[i] & _ROW
        total += _start(base, row + 1, width) - _start(base, row, width)
        out[i + 1] = total


@njit(cache=True, nogil=True)
def gather_entries(place: Array, indptr: Array, width: int, bases: Array, nbytes: int, starts: Array, out: int) -> None:
    """Copy the entries of sparse rows, ``nbytes`` each, to ``out``, an address; ``starts`` is of :func:`measure`."""
    for i in range(place.size):
        if i + _AHEAD < place.size:
            ahead = place[i + _AHEAD]
            begin = _start(indptr[ahead >> SHIFT], ahead & _ROW, width)
            prefetch(bases[ahead >> SHIFT] + begin * nbytes)
        segment, row = place[i] >> SHIFT, place[i] & _ROW
        begin = _start(indptr[segment], row, width)
        length = starts[i + 1] - starts[i]
        if length:
            copy(out + starts[i] * nbytes, bases[segment] + begin * nbytes, length * nbytes)
