"""Kernels over raw bytes: where the fields of each line are, what integers they spell, and their hashes."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.data.ingest.load8 import load8

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

PAD = 8
"""Bytes that every buffer of keys has behind its contents, since keys are read eight bytes at a time."""

SPACE, TAB, NEWLINE, RETURN, QUOTE = 32, 9, 10, 13, 34

_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HIGH = np.uint64(0x8080808080808080)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_TOP = np.int64(922337203685477580)  # 2^63 // 10


@njit(cache=True, nogil=True)
def _blank(byte: int, separator: int) -> bool:
    return byte == SPACE or (byte == TAB and separator != TAB)


@njit(cache=True, nogil=True)
def _ends_line(byte: int) -> bool:
    return byte == NEWLINE or byte == RETURN  # noqa: SIM109 - a tuple would be slower here


@njit(cache=True, nogil=True)
def _end_of_line(data: Bytes, here: int) -> int:
    while not _ends_line(data[here]):
        here += 1
    return here


@njit(cache=True, nogil=True)
def _split_words(
    data: Bytes, here: int, slots: Ints, row: int, starts: NDArray[np.int32], lengths: NDArray[np.int32]
) -> tuple[int, int]:
    """Take a line of fields between blanks apart; returns how many there are, and where the line ends."""
    column = 0
    while not _ends_line(data[here]):
        start = here
        while data[here] > SPACE or not (data[here] == SPACE or data[here] == TAB or _ends_line(data[here])):
            here += 1
        if column < slots.size and slots[column] >= 0:
            starts[row, slots[column]] = start
            lengths[row, slots[column]] = here - start
        column += 1
        while data[here] == SPACE or data[here] == TAB:
            here += 1
    return column, here


@njit(cache=True, nogil=True)
def _cell(data: Bytes, here: int, separator: int) -> tuple[int, int, int]:
    """Return where a field begins and ends without blanks and quotes, and what follows it; -1 after a wrong quote."""
    while _blank(data[here], separator):
        here += 1
    quoted = data[here] == QUOTE and separator != TAB
    if quoted:
        here += 1
        start = here
        while data[here] != QUOTE and not _ends_line(data[here]):
            here += 1
        end = here
        here += data[here] == QUOTE
        while _blank(data[here], separator):
            here += 1
        if data[end] == QUOTE and (data[here] == separator or _ends_line(data[here])):
            return start, end, here
        return start, end, -1
    start = here
    while data[here] != separator and not _ends_line(data[here]):
        here += 1
    end = here
    while end > start and (data[end - 1] == SPACE or data[end - 1] == TAB):
        end -= 1
    return start, end, here


@njit(cache=True, nogil=True)
def _split_cells(
    data: Bytes, here: int, separator: int, slots: Ints, row: int, starts: NDArray[np.int32], lengths: NDArray[np.int32]
) -> tuple[int, int]:
    """Take a line of separated fields apart; returns how many there are (-1: a wrong quote), and where it ends."""
    column = 0
    while True:
        start, end, here = _cell(data, here, separator)
        if here < 0:
            return -1, _end_of_line(data, end)
        if column < slots.size and slots[column] >= 0:
            starts[row, slots[column]] = start
            lengths[row, slots[column]] = end - start
        column += 1
        if data[here] != separator:
            return column, here
        here += 1


@njit(cache=True, nogil=True)
def split(
    data: Bytes,
    size: int,
    separator: int,
    comments: Bytes,
    slots: Ints,
    starts: NDArray[np.int32],
    lengths: NDArray[np.int32],
) -> tuple[int, int, int]:
    """Find the wanted fields of each line that is neither blank nor a comment.

    Args:
        data: text that ends in a line end at ``size - 1``; LF, CR LF or CR.
        size: bytes of text.
        separator: the byte between fields; a space stands for any run of spaces and tabs. Between other separators
            than tabs a field may be in quotes, and then hold the separator, but no quotes.
        comments: the bytes that begin a comment line.
        slots: for each column of a line, which column of the result takes it; -1 where none does.
        starts: where each field begins.
        lengths: bytes of each field, without blanks and quotes around it.

    Shapes:
        data ``[size + PAD]``, slots ``[columns of a line]``, starts and lengths ``[most rows, columns of the result]``.

    Returns:
        Rows found, how many of the lines before the end were comments, and -1; or, where a line is malformed, the same
        before it, and where it begins.
    """
    row, skipped, here = 0, 0, 0
    while here < size:
        begin = here
        while _blank(data[here], separator):
            here += 1
        comment = False
        for mark in comments:
            comment |= data[here] == mark
        if comment or _ends_line(data[here]):
            skipped += comment
            here = _end_of_line(data, here)
        else:
            if separator == SPACE:
                columns, here = _split_words(data, here, slots, row, starts, lengths)
            else:
                columns, here = _split_cells(data, here, separator, slots, row, starts, lengths)
            if columns != slots.size:
                return row, skipped, begin
            row += 1
        here += 2 if data[here] == RETURN and here + 1 < size and data[here + 1] == NEWLINE else 1
    return row, skipped, -1


@njit(cache=True, nogil=True)
def parse_integers(data: Bytes, starts: NDArray[np.int32], lengths: NDArray[np.int32], out: NDArray[np.int64]) -> int:
    """Parse decimal integers; returns the first position that holds none that fits int64, or -1.

    Shapes:
        starts, lengths and out ``[n]``.
    """
    for i in range(starts.size):
        here, end = np.intp(starts[i]), np.intp(starts[i]) + lengths[i]
        negative = here < end and data[here] == 45
        if here < end and (negative or data[here] == 43):
            here += 1
        if here == end:
            return i
        value = np.int64(0)
        while here < end:
            digit = np.int64(data[here]) - 48
            if digit < 0 or digit > 9 or value > _TOP or (value == _TOP and digit > 7 + negative):
                return i
            value = value * 10 + digit
            here += 1
        out[i] = -value if negative else value
    return -1


@njit(cache=True, nogil=True)
def hash_keys(data: Bytes, starts: NDArray[np.int32], lengths: NDArray[np.int32], out: NDArray[np.uint64]) -> bool:
    """Hash byte strings to 64 bits each; returns whether any holds a byte above 127.

    Multiply and shift over words of eight bytes, in the manner of MurmurHash2 (Appleby 2008).

    Shapes:
        data padded by ``PAD`` bytes; starts, lengths and out ``[n]``.
    """
    seen = np.uint64(0)
    for i in range(starts.size):
        here, left = np.intp(starts[i]), np.intp(lengths[i])
        value = _SEED ^ np.uint64(left)
        while left > 0:
            word = load8(data, here)
            if left < 8:
                word &= _ALL >> np.uint64(64 - 8 * left)
            seen |= word
            value = (value ^ word) * _MIX
            value ^= value >> np.uint64(32)
            here += 8
            left -= 8
        value *= _MIX
        out[i] = value ^ (value >> np.uint64(32))
    return (seen & _HIGH) != np.uint64(0)


@njit(cache=True, nogil=True)
def gather(data: Bytes, starts: NDArray[np.int32], offsets: NDArray[np.int32], out: Bytes) -> None:
    """Copy byte strings one behind the other.

    Shapes:
        starts ``[n]``, offsets ``[n + 1]`` with the ends in the result, out ``[offsets[n]]``.
    """
    for i in range(starts.size):
        start = np.intp(starts[i])
        for j in range(offsets[i + 1] - offsets[i]):
            out[offsets[i] + j] = data[start + j]
