"""Sparse rows: read from a CSR matrix, sorted by the blocks of a table, and grouped by id."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.kernels.memory import prefetch_entry

Array = NDArray[Any]
_PREFETCH_ROWS = 3
_PREFETCH_ENTRIES = 64


class PartRows(NamedTuple):
    """The sparse rows of one part of a store, which may be memory-mapped.

    Attributes:
        low, high: the global id of the part's first row, and that of its last row plus 1.
        starts: int64 ``[high - low + 1]``, CSR offsets.
        ids: int64 ``[K]``, the column of each entry.
        values: float ``[K]``.
    """

    low: int
    high: int
    starts: Array
    ids: Array
    values: Array


class GroupedEntries(NamedTuple):
    """Entries of sparse rows, grouped by id: :func:`group` writes the arrays, an update walks over the chains.

    Attributes:
        num_ids: number of distinct ids.
        unique: int32 ``[>= num_ids]``, the distinct ids.
        first: int32 ``[>= num_ids]``, the first entry of each id's chain.
        following: int32 ``[Z]``, the next entry of the same id; -1 at the end of a chain.
        row_of: int32 ``[Z]``, the sparse row of each entry.
        values: ``[Z]``, of the block's dtype, if ``weighted``.
        weighted: whether entries have values; else every value is 1.
    """

    num_ids: int
    unique: Array
    first: Array
    following: Array
    row_of: Array
    values: Array
    weighted: bool


@njit(cache=True, nogil=True)
def locate_ids(ids: Any, multiplier: int, modulus: int, height: int, block: Any, position: Any) -> int:
    """Locate ids in the row blocks of a table.

    An id has the number ``id * multiplier mod modulus``; each block has ``height`` consecutive numbers. Multiplying by
    a reciprocal replaces the integer divisions; it may miss the quotient by one, which the branches correct.

    Args:
        ids: ``[Z]``.
        multiplier, modulus, height: see :class:`gtrain_ps.placement.Placement`.
        block: uint8 ``[Z]``, receives the block of each id.
        position: int32 ``[Z]``, receives its row in the block.

    Returns:
        -1, or the first entry whose id is out of range.
    """
    # Quotients are below 2**31 and their relative errors near 2**-52, so each is wrong by at most one.
    inverse, per = 1.0 / modulus, 1.0 / height
    for entry in range(len(ids)):
        number = np.int64(ids[entry])
        if number < 0 or number >= modulus:
            return entry
        if multiplier != 1:
            product = number * multiplier
            number = product - np.int64(product * inverse) * modulus
            if number < 0:
                number += modulus
            elif number >= modulus:
                number -= modulus
        owner = np.int64(number * per)
        rest = number - owner * height
        if rest < 0:
            owner -= 1
            rest += height
        elif rest >= height:
            owner += 1
            rest -= height
        # Blocks fit into uint8 and positions into int32: the columns that the next passes read are narrow.
        block[entry] = owner
        position[entry] = rest
    return -1


@njit(cache=True, nogil=True)
def count_blocks(block: Any, offsets: Any, lengths: Any, totals: Any) -> None:
    """Count the entries of each block: ``lengths`` ``[P, m]`` by row, ``totals`` int64 ``[P]``; both start as zeros."""
    for row in range(len(offsets) - 1):
        for entry in range(offsets[row], offsets[row + 1]):
            owner = block[entry]
            lengths[owner, row] += 1
            totals[owner] += 1


@njit(cache=True, nogil=True)
def all_ones(values: Any) -> bool:
    """Whether every value is 1."""
    entry = 0
    while entry < len(values) and values[entry] == 1:
        entry += 1
    return entry == len(values)


@njit(cache=True, nogil=True)
def sort_by_block(
    block: Any, position: Any, values: Any, weighted: bool, begin: Any, ids_out: Any, values_out: Any
) -> None:
    """Sort entries by block; a counting sort, stable within a block.

    Args:
        block, position: of :func:`locate_ids`.
        values: ``[Z]``; read only if ``weighted``.
        begin: int64 ``[P]``, the start of each block in the results; advanced to its end.
        ids_out: int32 ``[Z]``.
        values_out: ``[Z]``.
    """
    for entry in range(len(block)):
        owner = block[entry]
        to = begin[owner]
        begin[owner] = to + 1
        ids_out[to] = position[entry]
        if weighted:
            values_out[to] = values[entry]


@njit(cache=True, nogil=True)
def group(ids: Any, offsets: Any, latest: Any, unique: Any, first: Any, following: Any, row_of: Any) -> int:
    """Group entries by id: those of one id become a chain, from the last entry to the first, in O(Z).

    Args:
        ids: int32 ``[Z]``, rows of the block.
        offsets: int64 ``[m + 1]``.
        latest: int32, one per row of the block, all 0 before and after: 1 + the last entry seen of each id.
        unique: int32 ``[Z + 1]``, receives the distinct ids in order of their first occurrence.
        first: int32 ``[Z + 1]``, receives the first entry of each chain.
        following: int32 ``[Z]``, receives the next entry of the same id; -1 at the end of a chain.
        row_of: int32 ``[Z]``, receives the sparse row of each entry.

    Returns:
        the number of distinct ids.
    """
    count, last = 0, len(ids) - 1
    for row in range(len(offsets) - 1):
        for entry in range(offsets[row], offsets[row + 1]):
            prefetch_entry(latest, ids[min(entry + _PREFETCH_ENTRIES, last)])
            number = ids[entry]
            # ``latest`` is the head of the id's chain, 1-based, so that the array needs no initialisation but zeros.
            before = latest[number]
            latest[number] = entry + 1
            following[entry] = before - 1
            row_of[entry] = row
            # Overwritten unless it is new; a branch would be mispredicted too often.
            unique[count] = number
            count += before == 0
    for index in range(count):
        # Reset only the entries that were set: the block may have a thousand times as many rows.
        prefetch_entry(latest, unique[min(index + _PREFETCH_ENTRIES, count - 1)])
        first[index] = latest[unique[index]] - 1
        latest[unique[index]] = 0
    return count


@njit(cache=True, nogil=True)
def first_outside(ids: Any, height: int) -> int:
    """Return the first entry whose id is not a row of the block; -1 without one."""
    for entry in range(len(ids)):
        if ids[entry] < 0 or ids[entry] >= height:
            return entry
    return -1


@njit(cache=True, nogil=True)
def measure_rows(chosen: Any, part: PartRows, lengths: Any) -> None:
    """Write the lengths of the chosen rows that are in one part.

    Args:
        chosen: int64 ``[m]``, global ids.
        part: the rows.
        lengths: int64 ``[m]``, receives the number of entries of each of these rows.
    """
    low, high, starts = part.low, part.high, part.starts
    for index in range(len(chosen)):
        if low <= chosen[index] < high:
            row = chosen[index] - low
            lengths[index] = starts[row + 1] - starts[row]


@njit(cache=True, nogil=True)
def copy_rows(chosen: Any, part: PartRows, begin: Any, ids_out: Any, values_out: Any) -> None:
    """Copy the chosen rows that are in one part.

    Args:
        chosen: int64 ``[m]``, global ids.
        part: the rows.
        begin: int64 ``[m + 1]``, the offset of each chosen row in the results.
        ids_out, values_out: the results, ``[begin[m]]``.
    """
    low, high, starts, ids, values = part
    for index in range(len(chosen)):
        ahead = chosen[min(index + _PREFETCH_ROWS, len(chosen) - 1)] - low
        if 0 <= ahead < high - low:
            # An entry has at most eight bytes, so a cache line has at least eight entries.
            for entry in range(starts[ahead], starts[ahead + 1], 8):
                prefetch_entry(ids, entry)
                prefetch_entry(values, entry)
        if low <= chosen[index] < high:
            row, to = chosen[index] - low, begin[index]
            first, count = starts[row], starts[row + 1] - starts[row]
            for entry in range(count):
                ids_out[to + entry] = ids[first + entry]
            for entry in range(count):
                values_out[to + entry] = values[first + entry]
