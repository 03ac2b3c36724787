"""Hashing strings into buckets: the same in every process, on every machine, in every release."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gtrain.graph.mixing import mix

_OFFSET, _PRIME = 0xCBF29CE484222325, 0x100000001B3  # of FNV-1a in 64 bits
_MASK = 2**64 - 1


def hash_strings(strings: Any, salt: str) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each string.

    FNV-1a (Fowler, Noll and Vo) over the UTF-8 bytes of ``salt``, a zero byte and the string, then the finaliser of
    SplitMix64 (Steele et al. 2014), which spreads similar strings over all bits.

    Args:
        strings: a pyarrow array of strings without nulls, ``[N]``.
        salt: what keeps equal strings of different columns apart, such as the column's name.

    Returns:
        uint64 ``[N]``.
    """
    strings = pc.cast(strings, pa.large_binary())
    lengths = pc.binary_length(strings).to_numpy(zero_copy_only=False).astype(np.int64)
    order = np.argsort(-lengths, kind="stable")  # the strings that still have a byte come first
    starts = np.frombuffer(strings.buffers()[1], np.int64, len(strings), 8 * strings.offset)[order]
    text = np.frombuffer(strings.buffers()[2] or b"\0", np.uint8)
    found = np.full(len(strings), _fnv1a(salt.encode() + b"\0"), np.uint64)
    counts = len(strings) - np.cumsum(np.bincount(lengths, minlength=1))  # strings longer than each length
    for position, count in enumerate(counts):
        found[:count] = (found[:count] ^ text[starts[:count] + position]) * np.uint64(_PRIME)
    hashes = np.empty_like(found)
    hashes[order] = mix(found)
    return hashes


def _fnv1a(text: bytes) -> int:
    value = _OFFSET
    for byte in text:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value
