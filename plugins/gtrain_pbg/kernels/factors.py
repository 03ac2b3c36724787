"""Factors of the products of :mod:`gtrain_pbg.kernels.tiles`, from rows of numbers.

Each function has the array for its result as the last argument. If its items are words, that is where two bfloat16 go
that follow one another in the sum of the product; else the numbers stay what they are, and mostly where they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from gtrain.kernels.options import STRICT, bare
from gtrain_pbg.kernels.numbers import store, stored

_NONE = np.uint16(0)
_HIGH = np.uint32(16)


def steps_of(count: int, like: Any) -> int:
    """Steps of a sum over so many."""
    raise NotImplementedError("compiled only")


def along(rows: Any, count: int, columns: int, result: Any) -> Any:
    """The first rows as ``a`` of a product whose sum goes over columns: words are pairs of columns."""
    raise NotImplementedError("compiled only")


def down(rows: Any, count: int, columns: int, result: Any) -> Any:
    """The first rows as ``b``, or turned as ``a``, of a product whose sum goes over rows: words are pairs of rows."""
    raise NotImplementedError("compiled only")


def _half(count: int, like: Any) -> int:
    return (count + 1) // 2


def _same(count: int, like: Any) -> int:
    return count


def _as_they_are(rows: Any, count: int, columns: int, result: Any) -> Any:
    return rows


def _pairs_of_columns(rows: Any, count: int, columns: int, result: Any) -> Any:
    low = result.view(np.uint16)
    for i in range(count):
        store(rows[i], low[i], columns)
        if columns % 2:
            low[i, columns] = _NONE
    return result


def _pairs_of_rows(rows: Any, count: int, columns: int, result: Any) -> Any:
    for i in range(0, count - 1, 2):
        _join(rows[i], rows[i + 1], columns, result[i // 2])
    if count % 2:
        for d in range(columns):
            result[count // 2, d] = stored(rows[count - 1, d], _NONE)
    return result


@bare(fastmath=STRICT)
def _join(first: Any, second: Any, columns: int, result: Any) -> None:
    for d in range(columns):
        result[d] = np.uint32(stored(first[d], _NONE)) | (np.uint32(stored(second[d], _NONE)) << _HIGH)


@bare
def turn(rows: Any, count: int, columns: int, result: Any) -> None:
    """Columns of the first rows, which may be words, as rows."""
    for d in range(columns):
        for i in range(count):
            result[d, i] = rows[i, d]


@overload(steps_of, inline="always")
def _typed_steps(count: int, like: Any) -> Any:
    return _half if like.dtype is types.uint32 else _same


@overload(along, jit_options={"forceinline": True})
def _typed_along(rows: Any, count: int, columns: int, result: Any) -> Any:
    return _pairs_of_columns if result.dtype is types.uint32 else _as_they_are


@overload(down, jit_options={"forceinline": True})
def _typed_down(rows: Any, count: int, columns: int, result: Any) -> Any:
    return _pairs_of_rows if result.dtype is types.uint32 else _as_they_are
