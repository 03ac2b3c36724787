"""Sparse rows: chosen from a CSR matrix and cut by the blocks of a table, stacked, grouped by id."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.kernels.memory import prefetch_entry

Array = NDArray[Any]
_ROWS_AHEAD = 3
_ENTRIES_AHEAD = 64


class Grouped(NamedTuple):
    """Sparse rows, stacked and grouped by id, as :func:`group` writes them: what an update walks over.

    Attributes:
        found: distinct ids.
        unique: int32 ``[>= found]``, these ids.
        first: int32 ``[>= found]``, where the chain of each begins.
        following: int32 ``[Z]``, the next entry of the same id; -1: there is none.
        row_of: int32 ``[Z]``, the sparse row of each entry.
        values: ``[Z]``, of the block's dtype, if ``weighted``.
        weighted: whether entries have values; else every one is 1.
    """

    found: int
    unique: Array
    first: Array
    following: Array
    row_of: Array
    values: Array
    weighted: bool


@njit(cache=True, nogil=True)
def place_ids(ids: Any, multiplier: int, modulus: int, height: int, block: Any, place: Any) -> int:
    """Find where the rows of ids are.

    An id is permuted to ``id * multiplier mod modulus``; blocks are ``height`` of the permuted numbers each.

    Args:
        ids: ``[Z]``.
        multiplier, modulus, height: see :class:`gtrain_ps.placement.Placement`.
        block: uint8 ``[Z]``, gets the block of each id.
        place: int32 ``[Z]``, gets its row in the block.

    Returns:
        -1, or the first id that is out of range.
    """
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
        block[entry] = owner
        place[entry] = rest
    return -1


@njit(cache=True, nogil=True)
def count_blocks(block: Any, offsets: Any, lengths: Any, totals: Any) -> None:
    """Count entries in each block: of each row ``lengths`` ``[P, m]``, of all ``totals`` int64 ``[P]``; zero before."""
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
def most_entries(offsets: Any) -> int:
    """Entries of the longest row; offsets ``[m + 1]``."""
    most = 0
    for row in range(len(offsets) - 1):
        most = max(most, offsets[row + 1] - offsets[row])
    return most


@njit(cache=True, nogil=True)
def deal(block: Any, place: Any, values: Any, weighted: bool, begin: Any, ids_out: Any, values_out: Any) -> None:
    """Order entries by block, keeping their order within one.

    Args:
        block, place: of :func:`place_ids`.
        values: ``[Z]``; read only if ``weighted``.
        begin: int64 ``[P]``, where each block begins in the results; is advanced.
        ids_out: int32 ``[Z]``.
        values_out: ``[Z]``.
    """
    for entry in range(len(block)):
        owner = block[entry]
        to = begin[owner]
        begin[owner] = to + 1
        ids_out[to] = place[entry]
        if weighted:
            values_out[to] = values[entry]


@njit(cache=True, nogil=True)
def group(ids: Any, offsets: Any, latest: Any, unique: Any, first: Any, following: Any, row_of: Any) -> int:
    """Group entries by id: those of one id become a chain, from the last entry to the first, in O(Z).

    Args:
        ids: int32 ``[Z]``, rows of the block.
        offsets: int64 ``[m + 1]``.
        latest: int32, one for each row of the block, all 0; is 0 again afterwards.
        unique: int32 ``[Z + 1]``, gets the distinct ids in the order in which they first occur.
        first: int32 ``[Z + 1]``, gets where the chain of each begins in the next two.
        following: int32 ``[Z]``, gets the next entry of the same id; -1: there is none.
        row_of: int32 ``[Z]``, gets the row of each entry.

    Returns:
        number of distinct ids.
    """
    found, last = 0, len(ids) - 1
    for row in range(len(offsets) - 1):
        for entry in range(offsets[row], offsets[row + 1]):
            prefetch_entry(latest, ids[min(entry + _ENTRIES_AHEAD, last)])
            number = ids[entry]
            before = latest[number]
            latest[number] = entry + 1
            following[entry] = before - 1
            row_of[entry] = row
            unique[found] = number  # stays there if it is new: a branch would be guessed wrong too often
            found += before == 0
    for index in range(found):
        prefetch_entry(latest, unique[min(index + _ENTRIES_AHEAD, found - 1)])
        first[index] = latest[unique[index]] - 1
        latest[unique[index]] = 0
    return found


@njit(cache=True, nogil=True)
def first_outside(ids: Any, height: int) -> int:
    """The first entry whose id is not a row of the block; -1 where there is none."""
    for entry in range(len(ids)):
        if ids[entry] < 0 or ids[entry] >= height:
            return entry
    return -1


@njit(cache=True, nogil=True)
def measure_rows(chosen: Any, low: int, high: int, starts: Any, lengths: Any) -> None:
    """Write the entries of those of the chosen rows that are in one part.

    Args:
        chosen: int64 ``[m]``, global ids.
        low, high: the first id of the part, and the first behind it.
        starts: ``[high - low + 1]``, where each of its rows begins.
        lengths: int64 ``[m]``.
    """
    for index in range(len(chosen)):
        if low <= chosen[index] < high:
            row = chosen[index] - low
            lengths[index] = starts[row + 1] - starts[row]


@njit(cache=True, nogil=True)
def copy_labels(chosen: Any, low: int, high: int, labels: Any, out: Any) -> None:
    """Copy the labels ``[high - low, ...]`` of the chosen rows that are in one part; ``out`` is ``[m, ...]``."""
    for index in range(len(chosen)):
        if low <= chosen[index] < high:
            out[index] = labels[chosen[index] - low]


@njit(cache=True, nogil=True)
def copy_rows(
    chosen: Any, low: int, high: int, starts: Any, ids: Any, values: Any, begin: Any, ids_out: Any, values_out: Any
) -> None:
    """Copy those of the chosen rows that are in one part, which may be memory-mapped.

    Args:
        chosen, low, high, starts: as in :func:`measure_rows`.
        ids, values: the part's entries.
        begin: int64, where each chosen row goes to in the results.
        ids_out, values_out: the results.
    """
    for index in range(len(chosen)):
        ahead = chosen[min(index + _ROWS_AHEAD, len(chosen) - 1)] - low
        if 0 <= ahead < high - low:
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
