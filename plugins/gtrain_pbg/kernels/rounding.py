"""Quantization to 8 bits, for matrix products of integers.

Rows are quantized to the nearest integer for scores. Gradients are computed from rows that are rounded stochastically
(Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"): up or down with probabilities that make the mean
right. Of a thousand softmax probabilities, most are less than half of the smallest number that 8 bits distinguish from
0, and all of them count. The random fractions come from a table, ``dither`` float32 ``[SPAN + columns]``, uniform over
-0.5 to 0.5; row z reads it from ``z * STRIDE % SPAN`` on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from gtrain.kernels.exponential import ROUND, ROUND_BITS
from gtrain.kernels.options import STRICT, by_type, inlined
from gtrain_pbg.kernels.numbers import add_scaled, number, store

SPAN, STRIDE = 4096, 1021  # coprime: rows that read the same fractions are 4096 apart

_MAX = np.float32(127)
_SIGNLESS, _INFINITE = np.uint16(0x7FFF), np.uint16(0x7F80)
# A fraction of up to 0.5 is added before rounding: the result is at most 127.
_DITHERED_MAX = np.float32(126)
_POSITIVE, _INFINITE_SINGLE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@inlined
def _max_bits(row: Any) -> Any:
    """Return the bfloat16 bits of the largest absolute value: without the sign, bits are ordered as the numbers."""
    best = np.uint16(0)
    for d in range(row.size):
        bits = np.uint16(row[d] & _SIGNLESS)
        best = bits if bits > best else best
    return best


@inlined(fastmath=STRICT)
def _round(row: Any, factor: Any, target: Any) -> None:
    # adding ROUND leaves the integer nearest to the sum in the low bits of the float's mantissa
    for d in range(row.size):
        near = np.float32(number(row[d]) * factor + ROUND)
        target[d] = np.int8(near.view(np.int32) - ROUND_BITS)


@inlined(fastmath=STRICT)
def round_rows(rows: Any, result: Any, scale: Any) -> None:
    """Quantize each row: ``rows[z] ~ scale[z] * result[z]`` with ``scale[z] = max |rows[z]| / 127``.

    Args:
        rows: ``[n, D]`` bfloat16 bits.
        result: int8 ``[n, D]``.
        scale: float32 ``[n]``; NaN where a row has NaN or infinity.
    """
    for z in range(rows.shape[0]):
        bits = _max_bits(rows[z])
        biggest = number(bits)
        if bits >= _INFINITE:
            scale[z] = np.float32(np.nan)
            result[z, :] = 1
        elif biggest < np.float32(1e-36):  # its inverse would be infinite
            scale[z] = np.float32(0)
            result[z, :] = 0
        else:
            scale[z] = biggest / _MAX
            _round(rows[z], _MAX / biggest, result[z])


@inlined(fastmath=STRICT)
def _round_dithered(row: Any, factor: Any, dither: Any, z: int, target: Any) -> None:
    first = z * STRIDE % SPAN
    # A slice: numba would check the sign of each index that is a sum.
    fraction = dither[first : first + target.size]
    for k in range(target.size):
        near = np.float32(np.float32(np.float32(row[k]) * factor + fraction[k]) + ROUND)
        target[k] = np.int8(near.view(np.int32) - ROUND_BITS)


@inlined(fastmath=STRICT)
def equalize_scales(rows: Any, scale: Any, dither: Any, result: Any) -> Any:
    """Requantize rows to one scale: ``rows[z] * scale[z] ~ factor * result[z]``, rounded stochastically.

    Args:
        rows: int8 ``[n, D]``.
        scale: float32 ``[n]``, not negative.
        dither: see the module.
        result: int8 ``[n, D]``; may be ``rows``.

    Returns:
        The factor; NaN or infinity if a scale is.
    """
    biggest = np.float32(0)
    for z in range(scale.size):
        # Not >: a NaN is taken as the largest, and returned.
        if not scale[z] <= biggest:
            biggest = scale[z]
    # Zero, infinity or NaN: there is nothing to quantize, and the factor tells the caller.
    if not (np.float32(1e-36) < biggest < np.float32(np.inf)):
        result[:, :] = 0
        return biggest
    for z in range(scale.size):
        # 127 at the largest scale becomes 126, which leaves room for the random fraction.
        _round_dithered(rows[z], scale[z] / biggest * (_DITHERED_MAX / _MAX), dither, z, result[z])
    return biggest * (_MAX / _DITHERED_MAX)


@by_type(
    lambda work, columns, dither, i, row: (
        write_row_quantized.py_func if row.dtype is types.int8 else _write_row_unscaled
    ),
    jit_options={"forceinline": True},
)
def write_row(work: Any, columns: int, dither: Any, i: int, row: Any) -> Any:
    """Write the first numbers of ``work`` to row i of an array, quantized if its items are int8; return their scale."""


@inlined(fastmath=STRICT)
def write_row_quantized(work: Any, columns: int, dither: Any, i: int, row: Any) -> Any:
    """:func:`write_row` in 8 bits; the scale is 0 if all numbers are, NaN if one is NaN or infinite."""
    bits = np.int32(0)
    for k in range(columns):
        # Bit patterns of floats without sign are ordered as the floats, and the maximum of integers vectorises.
        magnitude = np.int32(np.float32(work[k]).view(np.int32) & _POSITIVE)
        bits = magnitude if magnitude > bits else bits
    biggest = np.int32(bits).view(np.float32)
    if bits >= _INFINITE_SINGLE or biggest < np.float32(1e-36):
        row[:] = 0
        return np.float32(np.nan) if bits >= _INFINITE_SINGLE else np.float32(0)
    _round_dithered(work, _DITHERED_MAX / biggest, dither, i, row)
    return biggest / _DITHERED_MAX


def _write_row_unscaled(work: Any, columns: int, dither: Any, i: int, row: Any) -> Any:
    store(work, row, columns)
    return np.float32(1)


@inlined(fastmath=STRICT)
def gather(products: Any, scale: Any, answers: Any, by_answer: Any, rows: Any, scratch: Any, result: Any) -> None:
    """Assemble gradients: dequantize integer products and add the gradients by the answers' scores.

    ``result[z] = scale[z] * products[z] + sum over e in edges(z) of by_answer[e] * rows[other[e]]``

    Args:
        products: int32 ``[n, D]``.
        scale: float32 ``[n]``.
        answers: :class:`~gtrain_pbg.step.products.AnswerPairs`: which edges belong to a row, and with which of ``rows``
            an edge's score is a product.
        by_answer: ``[B]``, the gradient by the score of each edge's answer.
        rows: ``[k, D]`` bfloat16 bits.
        scratch: float32 ``[D]``.
        result: ``[n, D]`` bfloat16 bits.
    """
    for z in range(products.shape[0]):
        row, factor = products[z], scale[z]
        for d in range(scratch.size):
            scratch[d] = np.float32(row[d]) * factor
        for position in range(answers.first[z], answers.first[z + 1]):
            e = answers.edge[position]
            add_scaled(rows[answers.other[e]], by_answer[e], scratch, scratch.size)
        store(scratch, result[z], scratch.size)
