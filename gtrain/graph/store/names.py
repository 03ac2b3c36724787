"""String dictionaries on disk: the names of graph nodes or relations, by original id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.store.files import Ledger, names_file
from gtrain.kernels.splitmix import GOLDEN, mix

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

STEP = 1 << 18
"""Names converted at a time."""

JOINT = "\x1f"
"""Between the columns of a key in a name: ASCII's unit separator."""

FIELDS = ("offsets", "bytes", "hashes", "order")
"""The arrays of a dictionary on disk, in the order of the arguments of :class:`Names`."""


class Names:
    """A memory-mapped string dictionary: the names of the ids ``0 .. n-1`` (original ids, or relations).

    Args:
        offsets: int64 ``[n + 1]``; name i is the UTF-8 bytes ``offsets[i] .. offsets[i+1]-1``.
        data: uint8, the bytes of all names.
        hashes: uint64 ``[n]``, hashes of the names, ascending.
        order: integer ``[n]``, the id of each entry of ``hashes``; ids of equal hashes ascend.
    """

    def __init__(self, offsets: Ints, data: Bytes, hashes: NDArray[np.uint64], order: NDArray[Any]) -> None:
        self._offsets, self._data, self._hashes, self._order = offsets, data, hashes, order

    def __len__(self) -> int:
        return len(self._order)

    def decode(self, ids: Tensor | Sequence[int]) -> list[str]:
        """Return the names of ids.

        Args:
            ids: integers in ``0 .. n-1``, ``[k]``; may repeat.

        Raises:
            DataError: an id is out of range.
        """
        rows = torch.as_tensor(ids, dtype=torch.int64).flatten().numpy()
        outside = np.flatnonzero((rows < 0) | (rows >= len(self)))
        if outside.size:
            raise DataError(
                f"no name for id {int(rows[outside[0]])}: the dictionary has {len(self)} names",
                hint=f"pass ids 0..{len(self) - 1} of the source data's numbering (orig_id)",
            )
        starts, stops = self._offsets[rows].tolist(), self._offsets[rows + 1].tolist()
        return [self._data[a:b].tobytes().decode() for a, b in zip(starts, stops, strict=True)]

    def encode(self, strings: Sequence[str]) -> Tensor:
        """Return the id of each string, int64 ``[k]``; -1 for an unknown string, the first id of a repeated name.

        Args:
            strings: a sequence of str, or a pyarrow array of strings.
        """
        ids = [self._encode(offsets, data) for _, offsets, data in _pieces(strings)]
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *ids]))

    def _encode(self, offsets: Ints, data: Bytes) -> Ints:
        result = np.full(len(offsets) - 1, -1, dtype=np.int64)
        hashes = _hashes(offsets, data)
        entry = np.searchsorted(self._hashes, hashes)
        pending = np.flatnonzero(entry < len(self))
        # Further rounds only for different names with the same hash.
        while pending.size:
            # The entries of equal hashes are adjacent; the search ends behind the last of them.
            pending = pending[self._hashes[entry[pending]] == hashes[pending]]
            ids = self._order[entry[pending]].astype(np.int64)
            same = self._equal(ids, offsets, data, pending)
            result[pending[same]] = ids[same]
            pending = pending[~same]
            entry[pending] += 1
            pending = pending[entry[pending] < len(self)]
        return result

    def _equal(self, ids: Ints, offsets: Ints, data: Bytes, rows: Ints) -> NDArray[np.bool_]:
        """Return, for each id, whether its name equals the string in the corresponding row."""
        length = offsets[rows + 1] - offsets[rows]
        same = self._offsets[ids + 1] - self._offsets[ids] == length
        pairs = np.flatnonzero(same)
        length = length[pairs]
        # For each byte to compare: the number of its pair, and its offset within the string.
        pair = np.repeat(np.arange(pairs.size), length)
        inside = np.arange(pair.size) - np.repeat(np.cumsum(length) - length, length)
        differs = self._data[self._offsets[ids[pairs]][pair] + inside] != data[offsets[rows[pairs]][pair] + inside]
        same[pairs[np.unique(pair[differs])]] = False
        return same


def write_names(ledger: Ledger, key: str, names: Any, expected: int | None) -> int:
    """Write a string dictionary, piece by piece.

    Args:
        ledger: the ledger of the store.
        key: a node type, or ``relation``.
        names: a sequence of str, or a pyarrow array of strings, by id.
        expected: the required number of names; None allows any number.

    Returns:
        The number of names.

    Raises:
        DataError: the number of names is wrong, or a name is missing (null).
    """
    count = len(names)
    if expected is not None and count != expected:
        raise DataError(
            f"there are {count} names of {key}, and {expected} ids",
            hint="give one name per id, in the order of the ids",
        )
    offsets = np.zeros(count + 1, dtype=np.int64)
    hashes = np.empty(count, dtype=np.uint64)
    for first, piece_offsets, data in _pieces(names):
        end = first + len(piece_offsets) - 1
        offsets[first + 1 : end + 1] = offsets[first] + piece_offsets[1:]
        hashes[first:end] = _hashes(piece_offsets, data)
    order = np.argsort(hashes, kind="stable").astype(np.int32 if count < 2**31 else np.int64)
    with ledger.open(names_file(key, "bytes"), np.uint8, (int(offsets[-1]),)) as file:
        for _, _, data in _pieces(names):
            file.append(data)
    ledger.write(names_file(key, "offsets"), offsets)
    ledger.write(names_file(key, "hashes"), hashes[order])
    ledger.write(names_file(key, "order"), order)
    return count


def _pieces(names: Any) -> Iterator[tuple[int, Ints, Bytes]]:
    """Yield pieces of the names: id of the first, offsets ``[k + 1]`` from 0, bytes."""
    for first in range(0, len(names), STEP):
        yield first, *_packed(names[first : first + STEP])


def _packed(strings: Any) -> tuple[Ints, Bytes]:
    """Return the offsets ``[k + 1]``, from 0, and the bytes of strings."""
    import pyarrow as pa

    if isinstance(strings, pa.ChunkedArray):
        strings = strings.combine_chunks()
    if isinstance(strings, pa.Array):
        array = strings.cast(pa.large_string())
    else:
        array = pa.array(strings, type=pa.large_string())
    if array.null_count:
        row = array.is_null().to_pylist().index(True)
        raise DataError(f"name {row} of {len(array)} is null", hint="give each id a name")
    _, starts, data = array.buffers()
    offsets = np.frombuffer(starts, dtype=np.int64, count=array.offset + len(array) + 1)[array.offset :]
    content = np.frombuffer(data, dtype=np.uint8) if data is not None else np.empty(0, dtype=np.uint8)
    return offsets - offsets[0], content[offsets[0] : offsets[-1]]


def _hashes(offsets: Ints, data: Bytes) -> NDArray[np.uint64]:
    """Return a hash of each string: a polynomial in GOLDEN over its bytes modulo 2^64, finalised as in SplitMix64.

    Collisions only cost time: :meth:`Names.encode` compares the strings.
    """
    length = np.diff(offsets)
    inside = np.arange(data.size) - np.repeat(offsets[:-1], length)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(int(length.max(initial=0)) + 1, GOLDEN, dtype=np.uint64))
        # Plus 1, so that trailing zero bytes change the hash.
        terms = (data.astype(np.uint64) + np.uint64(1)) * powers[inside]
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])
        mixed: NDArray[np.uint64] = mix(sums[offsets[1:]] - sums[offsets[:-1]])
    return mixed
