"""The kernel that parses libsvm text: one pass over bytes, no object for each token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

OK, BAD_NUMBER, NOT_FINITE, NO_COLON, BAD_ID, NEGATIVE_ID, QUERY_ID, LARGE_ID = range(8)
LARGEST_ID = (1 << 31) - 1
_SPACE, _TAB, _CR, _NEWLINE, _HASH, _COMMA, _COLON = 32, 9, 13, 10, 35, 44, 58
_MINUS, _PLUS, _DOT, _ZERO, _NINE, _Q = 45, 43, 46, 48, 57, 113
_TENS = 10.0 ** np.arange(23)  # powers of ten that a double holds exactly
_MANTISSA = 10**17
_LARGEST = float(np.finfo(np.float32).max)


@njit(cache=True, nogil=True)
def _number(text: NDArray[np.uint8], at: int, end: int) -> tuple[float, int, int]:
    """Return the number that begins at a byte, the byte after it, and a code."""
    sign, mantissa, scale, digits = 1.0, 0, 0, 0
    if at < end and (text[at] == _MINUS or text[at] == _PLUS):
        sign = -1.0 if text[at] == _MINUS else 1.0
        at += 1
    if at < end and (text[at] | 32 == 110 or text[at] | 32 == 105):  # nan, inf
        return 0.0, at, NOT_FINITE
    fraction = False
    while at < end:
        c = text[at]
        if _ZERO <= c <= _NINE:
            digits += 1
            if mantissa < _MANTISSA:
                mantissa = mantissa * 10 + (c - _ZERO)
                scale -= fraction
            else:
                scale += not fraction  # digits beyond what a double holds
        elif c == _DOT and not fraction:
            fraction = True
        else:
            break
        at += 1
    if digits == 0:
        return 0.0, at, BAD_NUMBER
    if at < end and text[at] | 32 == 101:
        at += 1
        negative = at < end and text[at] == _MINUS
        if at < end and (text[at] == _MINUS or text[at] == _PLUS):
            at += 1
        exponent, digits = 0, 0
        while at < end and _ZERO <= text[at] <= _NINE:
            exponent = min(exponent * 10 + (text[at] - _ZERO), 9999)
            digits += 1
            at += 1
        if digits == 0:
            return 0.0, at, BAD_NUMBER
        scale += -exponent if negative else exponent
    value = sign * mantissa
    while scale < 0 and value != 0.0:
        step = min(-scale, 22)
        value /= _TENS[step]
        scale += step
    while scale > 0 and value != 0.0:
        step = min(scale, 22)
        value *= _TENS[step]
        scale -= step
        if np.isinf(value):
            return 0.0, at, NOT_FINITE
    return value, at, OK


@njit(cache=True, nogil=True)
def _blanks(text: NDArray[np.uint8], at: int, end: int) -> int:
    while at < end and (text[at] == _SPACE or text[at] == _TAB or text[at] == _CR):
        at += 1
    return at


@njit(cache=True, nogil=True)
def _labels(text: NDArray[np.uint8], at: int, end: int, labels: NDArray[Any], count: int) -> tuple[int, int, int]:
    """Parse ``1,3,5``; return the number of labels so far, the byte after them, and a code."""
    while True:
        value, at, code = _number(text, at, end)
        if code != OK:
            return count, at, code
        labels[count] = value
        count += 1
        if at == end or text[at] != _COMMA:
            return count, at, OK
        at += 1


@njit(cache=True, nogil=True)
def _feature_id(text: NDArray[np.uint8], at: int, end: int) -> tuple[int, int, int]:
    negative = at < end and text[at] == _MINUS
    start = at + negative
    at, value = start, 0
    while at < end and _ZERO <= text[at] <= _NINE:
        value = min(value * 10 + (text[at] - _ZERO), LARGEST_ID + 1)  # however many digits follow
        at += 1
    if at == start:
        return 0, at, QUERY_ID if at + 3 < end and text[at] == _Q and text[at + 3] == _COLON else BAD_ID
    if at == end or text[at] != _COLON:
        return 0, at, NO_COLON if at == end or text[at] <= _SPACE else BAD_ID
    if negative:
        return value, at, NEGATIVE_ID
    return value, at + 1 if value <= LARGEST_ID else at, OK if value <= LARGEST_ID else LARGE_ID


@njit(cache=True, nogil=True)
def _begins_feature(text: NDArray[np.uint8], at: int, end: int) -> bool:
    """Return whether the token at a byte has a colon, so that the row has no label."""
    while at < end and text[at] != _SPACE and text[at] != _TAB and text[at] != _NEWLINE:
        if text[at] == _COLON:
            return True
        at += 1
    return False


@njit(cache=True, nogil=True)
def parse(
    text: NDArray[np.uint8],
    labels: NDArray[np.float64],
    label_ptr: NDArray[np.int64],
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
    row_ptr: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Parse whole lines of libsvm text into arrays that are large enough.

    Args:
        text: the bytes of some lines.
        labels: filled with the labels of all rows.
        label_ptr: filled with the first label of each row, and their number.
        ids: filled with feature ids, as written.
        values: filled with their values.
        row_ptr: filled with the first feature of each row, and their number.

    Returns:
        Number of rows; what is wrong (``OK`` or another code of this module); the byte where it was found.
    """
    end, at, rows, num_labels, num_features = len(text), 0, 0, 0, 0
    label_ptr[0] = row_ptr[0] = 0
    while at < end:
        at = _blanks(text, at, end)
        if at < end and text[at] != _NEWLINE and text[at] != _HASH:
            if not _begins_feature(text, at, end):
                num_labels, at, code = _labels(text, at, end, labels, num_labels)
                if code != OK or (at < end and not (text[at] <= _SPACE or text[at] == _HASH)):
                    return rows, code if code != OK else BAD_NUMBER, at
                at = _blanks(text, at, end)
            while at < end and text[at] != _NEWLINE and text[at] != _HASH:
                ids[num_features], at, code = _feature_id(text, at, end)
                if code != OK:
                    return rows, code, at
                value, at, code = _number(text, at, end)
                if code != OK or (at < end and not (text[at] <= _SPACE or text[at] == _HASH)):
                    return rows, code if code != OK else BAD_NUMBER, at
                if abs(value) > _LARGEST:
                    return rows, NOT_FINITE, at
                values[num_features] = value
                num_features += 1
                at = _blanks(text, at, end)
            rows += 1
            label_ptr[rows] = num_labels
            row_ptr[rows] = num_features
        while at < end and text[at] != _NEWLINE:  # a comment
            at += 1
        at += 1
    return rows, OK, end
