"""Compiled kernels that locate rows and copy them.

The *location* of a row is ``segment << 40 | row``. A segment is a range of memory with rows of every tensor of a node
type or edge type: segment p is part p if this rank hosts it, segment P is the cache, and those above hold rows that
other ranks sent. A negative location, ``-1 - owner``, is a row that has to be requested from its owner.

Letters of shapes: n rows of a batch, P parts, S segments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from gtrain.kernels.memory import copy, count_bits, load32, load64, prefetch
from gtrain.kernels.random import slot_of
from gtrain_pyg.peers import Array

SHIFT = 40
"""Bits of a location that are the row."""
_ROW = (1 << SHIFT) - 1
_AHEAD, _AHEAD_NARROW = 8, 64  # rows whose memory is prefetched ahead: wide ones, and those of a cache line or less
_LINE = 64  # bytes


class RequestList(NamedTuple):
    """Rows to request, in order of discovery; the arrays have room for more than ``counts[-1]`` rows.

    Attributes:
        ids: int64.
        owners: int32, the owner of each.
        counts: int64 ``[P + 1]``, rows of each owner, and the total.
    """

    ids: Array
    owners: Array
    counts: Array


class SegmentRange(NamedTuple):
    """The segments for the rows of one batch's requests.

    Attributes:
        first: the first segment of owner 0.
        per_owner: segments of each owner.
        shift: log2 of the rows in a segment.
    """

    first: int
    per_owner: int
    shift: int


@njit(cache=True, nogil=True)
def locate(
    ids: Array, offsets: Array, hosted: Array, bits: Array, ranks: Array, location: Array
) -> tuple[int, int, int]:
    """Locate rows in the hosted parts and in the cache.

    Args:
        ids: int64 ``[n]``.
        offsets: int64 ``[P + 1]``; part p owns ``offsets[p] .. offsets[p+1]-1``.
        hosted: bool ``[P]``.
        bits, ranks: the ids in the cache, see :func:`rank_bits`; empty without a cache.
        location: int64 ``[n]``, written.

    Returns:
        the number of hosted rows, the number of cached rows, and the index of an id that is out of range, or -1.
    """
    parts, part, num_hosted, num_cached = hosted.size, 0, 0, 0
    for i in range(ids.size):
        node = ids[i]
        if node < offsets[part] or node >= offsets[part + 1]:
            # Successive ids are mostly of the same part.
            if node < 0 or node >= offsets[parts]:
                return num_hosted, num_cached, i
            part = np.searchsorted(offsets, node, side="right") - 1
        if hosted[part]:
            location[i] = part << SHIFT | (node - offsets[part])
            num_hosted += 1
        elif bits.size and bits[node >> 6] >> np.uint64(node & 63) & np.uint64(1):
            below = bits[node >> 6] & ((np.uint64(1) << np.uint64(node & 63)) - np.uint64(1))
            location[i] = parts << SHIFT | (np.int64(ranks[node >> 6]) + count_bits(below))
            num_cached += 1
        else:
            location[i] = -1 - part
    return num_hosted, num_cached, -1


@njit(cache=True, nogil=True)
def rank_bits(ids: Array, bits: Array, ranks: Array) -> None:
    """Write a bitmap with ranks: the row of an id is ``ranks[word]`` + the ids in lower bits of its word.

    Args:
        ids: int64, ascending and distinct.
        bits: uint64 zeros ``[words]``, one bit per possible id.
        ranks: uint32 ``[words]``, written: ids in earlier words.
    """
    for node in ids:
        bits[node >> 6] |= np.uint64(1) << np.uint64(node & 63)
    total = 0
    for word in range(bits.size):
        ranks[word] = total
        total += count_bits(bits[word])


@njit(cache=True, nogil=True)
def split_cached(ids: Array, bits: Array, ranks: Array, slots: Array, missing: Array, positions: Array) -> int:
    """Divide rows into those of a cache and those that are missing there.

    Args:
        ids: int64 ``[n]``; those out of range are missing.
        bits, ranks: the ids in the cache, see :func:`rank_bits`.
        slots: int32 ``[n]``, written: rows of the cache; 0 for a missing row.
        missing: int64 ``[n]``, written: the missing ids, in order.
        positions: int64 ``[n]``, written: their indices in ``ids``.

    Returns:
        the number of missing rows.
    """
    count, last = 0, bits.size << 6
    for i in range(ids.size):
        node = ids[i]
        if 0 <= node < last and bits[node >> 6] >> np.uint64(node & 63) & np.uint64(1):
            below = bits[node >> 6] & ((np.uint64(1) << np.uint64(node & 63)) - np.uint64(1))
            slots[i] = np.int64(ranks[node >> 6]) + count_bits(below)
        else:
            slots[i] = 0
            missing[count], positions[count] = node, i
            count += 1
    return count


@njit(cache=True, nogil=True)
def _append(node: int, owner: int, requests: RequestList, segments: SegmentRange) -> int:
    """Append a row to the list, and return its location."""
    counts = requests.counts
    index = counts[owner]
    counts[owner] += 1
    requests.ids[counts[-1]] = node
    requests.owners[counts[-1]] = owner
    counts[-1] += 1
    segment = segments.first + owner * segments.per_owner + (index >> segments.shift)
    return segment << SHIFT | (index & ((1 << segments.shift) - 1))


@njit(cache=True, nogil=True)
def request_new(
    ids: Array,
    location: Array,
    table: Array,
    sequence: int,
    oldest: int,
    requests: RequestList,
    segments: SegmentRange,
) -> int:
    """Locate each missing row where an earlier batch requested it, or else append it to the requests.

    The hash map is open-addressed with linear probing. Nothing is deleted: entries of batches before ``oldest`` are
    stale, and a new entry overwrites the first stale one on its probe path.

    Args:
        ids: int64 ``[n]``.
        location: int64 ``[n]`` of :func:`locate`; negative ones are replaced.
        table: int64 ``[slots, 2]``, the hash map, with room for all: ``sequence << 40 | id``, and the location; 0 is
            an empty slot.
        sequence: the batch's number, from 1.
        oldest: the earliest batch whose rows can still be read.
        requests: the rows to request, appended to.
        segments: where they go.

    Returns:
        the number of empty slots that were filled.
    """
    last, filled, address = table.shape[0] - 1, 0, table.ctypes.data
    for i in range(ids.size):
        if i + _AHEAD_NARROW < ids.size and location[i + _AHEAD_NARROW] < 0:
            prefetch(address + slot_of(ids[i + _AHEAD_NARROW], last) * table.itemsize * 2)
        if location[i] >= 0:
            continue
        slot, stale = slot_of(ids[i], last), -1
        while table[slot, 0] != 0 and table[slot, 0] & _ROW != ids[i]:
            if stale < 0 and table[slot, 0] >> SHIFT < oldest:
                stale = slot
            slot = (slot + 1) & last
        if table[slot, 0] >> SHIFT < oldest:  # not requested yet, or its rows are gone
            if table[slot, 0] == 0:
                if stale >= 0:
                    slot = stale
                else:
                    filled += 1
            table[slot, 0] = sequence << SHIFT | ids[i]
            table[slot, 1] = _append(ids[i], -1 - location[i], requests, segments)
        location[i] = table[slot, 1]
    return filled


@njit(cache=True, nogil=True)
def request_all(ids: Array, location: Array, requests: RequestList, segments: SegmentRange) -> None:
    """As :func:`request_new` without a map: every missing row is requested, duplicates too."""
    for i in range(ids.size):
        if location[i] < 0:
            location[i] = _append(ids[i], -1 - location[i], requests, segments)


@njit(cache=True, nogil=True)
def rehash(table: Array, oldest: int, larger: Array) -> int:
    """Copy the entries of a hash map from batch ``oldest`` on to another, empty one, and return their number."""
    last, count = larger.shape[0] - 1, 0
    for old in range(table.shape[0]):
        if table[old, 0] == 0 or table[old, 0] >> SHIFT < oldest:
            continue
        slot = slot_of(table[old, 0] & _ROW, last)
        while larger[slot, 0] != 0:
            slot = (slot + 1) & last
        larger[slot, 0], larger[slot, 1] = table[old, 0], table[old, 1]
        count += 1
    return count


@njit(cache=True, nogil=True)
def sort_by_owner(ids: Array, owners: Array, offsets: Array, starts: Array, rows: Array) -> None:
    """Write ids as rows within their owners' parts, grouped by owner (counting sort).

    Args:
        ids: int64 ``[r]``.
        owners: int32 ``[r]``.
        offsets: int64 ``[P + 1]``.
        starts: int64 ``[P]``, the first index of each owner in ``rows``; advanced.
        rows: int32 or int64 ``[r]``, written.
    """
    for i in range(ids.size):
        owner = owners[i]
        rows[starts[owner]] = ids[i] - offsets[owner]
        starts[owner] += 1


@njit(cache=True, nogil=True)
def gather(location: Array, bases: Array, nbytes: int, out: int, low: int, high: int) -> None:
    """Copy dense rows.

    Rows of a few bytes are copied with constant lengths, which LLVM compiles to a load and a store.

    Args:
        location: int64 ``[n]``.
        bases: int64 ``[S]``, the address of each segment's first row.
        nbytes: of a row.
        out: address of the result, ``[n, nbytes]``.
        low, high: rows of segments outside ``low .. high-1`` are skipped, and their bytes stay.
    """
    count, distance = location.size, _AHEAD if nbytes > _LINE else _AHEAD_NARROW
    for i in range(count):
        if i + distance < count:
            ahead = location[i + distance]
            segment = ahead >> SHIFT
            if low <= segment < high:
                start = bases[segment] + (ahead & _ROW) * nbytes
                for c in range(0, nbytes, _LINE):
                    prefetch(start + c)
        segment = location[i] >> SHIFT
        if low <= segment < high:
            source = bases[segment] + (location[i] & _ROW) * nbytes
            if nbytes == 8:
                copy(out + i * 8, source, 8)
            elif nbytes == 4:
                copy(out + i * 4, source, 4)
            elif nbytes == 1:
                copy(out + i, source, 1)
            else:
                copy(out + i * nbytes, source, nbytes)


@njit(cache=True, nogil=True)
def gather_bfloat16(location: Array, bases: Array, out: Array) -> None:
    """Copy dense rows of float32 and round them to bfloat16, to the nearest and then to the even one, as torch does.

    Args:
        location: int64 ``[n]``.
        bases: int64 ``[S]``, the address of each segment's first row.
        out: uint16 ``[n, columns]``, written: the bits of the numbers.
    """
    count, columns = out.shape
    nbytes = columns * 4
    distance = _AHEAD if nbytes > _LINE else _AHEAD_NARROW
    row = np.empty(columns, np.uint32)  # the loop over an array is compiled to vector instructions
    for i in range(count):
        if i + distance < count:
            ahead = location[i + distance]
            start = bases[ahead >> SHIFT] + (ahead & _ROW) * nbytes
            for c in range(0, nbytes, _LINE):
                prefetch(start + c)
        copy(row.ctypes.data, bases[location[i] >> SHIFT] + (location[i] & _ROW) * nbytes, nbytes)
        _round(row, out[i])


@njit(cache=True, nogil=True)
def _round(bits: Array, out: Array) -> None:
    for c in range(out.size):
        rounded = (bits[c] + np.uint32(0x7FFF) + ((bits[c] >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        # The increment could turn a NaN into an infinity or 0.
        is_nan = (bits[c] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[c] = np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


@njit(cache=True, nogil=True)
def _start(base: int, row: int, width: int) -> int:
    """Return an entry of an indptr at an address, of 4 or 8 bytes per number."""
    if width == 4:
        return int(load32(base + row * 4))
    return int(load64(base + row * 8))


@njit(cache=True, nogil=True)
def build_indptr(location: Array, indptr: Array, width: int, out: Array) -> None:
    """Write the indptr of some sparse rows.

    Args:
        location: int64 ``[n]``.
        indptr: int64 ``[S]``, the address of each segment's indptr.
        width: bytes of its numbers.
        out: int ``[n + 1]``, written.
    """
    total = 0
    out[0] = 0
    for i in range(location.size):
        if i + _AHEAD < location.size:
            ahead = location[i + _AHEAD]
            prefetch(indptr[ahead >> SHIFT] + (ahead & _ROW) * width)
        base, row = indptr[location[i] >> SHIFT], location[i] & _ROW
        total += _start(base, row + 1, width) - _start(base, row, width)
        out[i + 1] = total


@njit(cache=True, nogil=True)
def gather_entries(
    location: Array, indptr: Array, width: int, bases: Array, nbytes: int, starts: Array, out: int
) -> None:
    """Copy the entries of sparse rows, their column indices or their values.

    Args:
        location: int64 ``[n]``.
        indptr: int64 ``[S]``, the address of each segment's indptr.
        width: bytes of its numbers.
        bases: int64 ``[S]``, the address of each segment's entries.
        nbytes: of an entry.
        starts: int ``[n + 1]`` of :func:`build_indptr`.
        out: address of the result.
    """
    for i in range(location.size):
        if i + _AHEAD < location.size:
            ahead = location[i + _AHEAD]
            first = _start(indptr[ahead >> SHIFT], ahead & _ROW, width)
            prefetch(bases[ahead >> SHIFT] + first * nbytes)
        segment, row = location[i] >> SHIFT, location[i] & _ROW
        first = _start(indptr[segment], row, width)
        length = starts[i + 1] - starts[i]
        if length:
            copy(out + starts[i] * nbytes, bases[segment] + first * nbytes, length * nbytes)
