"""Compiled loops of :mod:`gtrain.nn.dropout`; import this module inside the functions that need it.

Both a mask's word and an edge's id are SplitMix64 of a counter. A word serves two columns, 32 bits each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gtrain.kernels.random import GOLDEN, mix

_SHIFT_32, _SHIFT_33 = np.uint64(32), np.uint64(33)
_SHIFT_16, _HALF, _ONE = np.uint32(16), np.uint32(0x7FFF), np.uint32(1)
_SIGN, _INFINITY, _QUIET = np.uint32(1 << 31), np.uint32(0x7F800000), np.uint32(0x40)


@njit(cache=True, nogil=True)
def fill_words(bits: Any, row: int, words: int, stream: Any) -> None:
    """Set ``bits`` uint32 ``[2 * words]`` to the random numbers of one row, one for each column."""
    first = stream + np.uint64(row) * np.uint64(words) * GOLDEN
    for w in range(words):
        word = mix(first + np.uint64(w) * GOLDEN)
        bits[2 * w] = np.uint32(word)
        bits[2 * w + 1] = np.uint32(word >> _SHIFT_32)


@njit(cache=True, nogil=True)
def drop(x: Any, out: Any, ids: Any, stream: Any, threshold: Any, scale: Any) -> None:
    """Set ``out`` to ``x`` times its mask.

    Args:
        x, out: ``(n, columns)``, contiguous; they may be the same.
        ids: int64 ``(n,)``, the id of each row.
        stream: uint64, start of the stream of random numbers.
        threshold: uint32; columns with a smaller random number are dropped.
        scale: of the dtype of ``x``, the factor of the others.
    """
    columns = x.shape[1]
    words = (columns + 1) // 2
    bits, nothing = np.empty(2 * words, np.uint32), scale - scale
    for i in range(ids.size):
        # two loops: the compiler vectorises the second, which has no branches
        fill_words(bits, ids[i], words, stream)
        for c in range(columns):
            out[i, c] = x[i, c] * (scale if bits[c] >= threshold else nothing)


@njit(cache=True, nogil=True)
def drop_rounded(x: Any, out: Any, ids: Any, stream: Any, threshold: Any, scale: Any) -> None:
    """As :func:`drop`, for bfloat16: ``x`` and ``out`` have its bits, as uint16; ``scale`` is float32.

    A product is rounded to the nearest, ties to even; a NaN remains one.
    """
    columns = x.shape[1]
    words = (columns + 1) // 2
    bits, nothing = np.empty(2 * words, np.uint32), scale - scale
    wide = np.empty(columns, np.uint32)
    numbers = wide.view(np.float32)
    for i in range(ids.size):
        fill_words(bits, ids[i], words, stream)
        for c in range(columns):
            wide[c] = np.uint32(x[i, c]) << _SHIFT_16
        for c in range(columns):
            numbers[c] *= scale if bits[c] >= threshold else nothing
        for c in range(columns):
            word = wide[c]
            upper = word >> _SHIFT_16
            rounded = np.uint32(word + np.uint32(_HALF + (upper & _ONE))) >> _SHIFT_16
            out[i, c] = (upper | _QUIET) if (word & ~_SIGN) > _INFINITY else rounded


@njit(cache=True, nogil=True)
def drop_entries(
    values: Any, out: Any, offsets: Any, columns: Any, ids: Any, words: int, stream: Any, threshold: Any, scale: Any
) -> None:
    """Set ``out`` to the entries of sparse rows times their mask; :func:`drop` of the dense rows has the same mask.

    Args:
        values, out: ``(Z,)``.
        offsets: int64 ``(n + 1,)``, the entries of each row.
        columns: int32 or int64 ``(Z,)``, the column of each entry.
        ids: int64 ``(n,)``, the id of each row.
        words: random numbers of a row, half as many as columns, rounded up.
        stream, threshold, scale: as for :func:`drop`.
    """
    nothing = scale - scale
    for i in range(ids.size):
        first = stream + np.uint64(ids[i]) * np.uint64(words) * GOLDEN
        for e in range(offsets[i], offsets[i + 1]):
            word = mix(first + np.uint64(columns[e] // 2) * GOLDEN)
            bits = np.uint32(word) if columns[e] % 2 == 0 else np.uint32(word >> _SHIFT_32)
            out[e] = values[e] * (scale if bits >= threshold else nothing)


@njit(cache=True, nogil=True)
def edge_ids(sources: Any, targets: Any, source_ids: Any, target_ids: Any, out: Any) -> None:
    """Set ``out`` to a 31-bit hash of the ids of each edge's ends; arguments as :func:`gtrain.nn.dropout.edge_ids`."""
    for e in range(out.size):
        source, target = np.uint64(source_ids[sources[e]]), np.uint64(target_ids[targets[e]])
        out[e] = np.int64(mix(mix(source + GOLDEN) + target * GOLDEN) >> _SHIFT_33)
