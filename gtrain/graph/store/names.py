"""String dictionaries on disk: the name of each graph node or relation, by orig id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
"""Names that are converted at a time."""

FIELDS = ("offsets", "bytes", "hashes", "order")


class Names:
    """A string dictionary, memory-mapped: ids ``0 .. n-1`` (orig ids, or relations) and their names.

    Args:
        offsets: int64 ``[n + 1]``; name i is the bytes ``offsets[i] .. offsets[i+1]-1``, UTF-8.
        data: uint8, the bytes of all names.
        hashes: uint64 ``[n]``, hash of each name, ascending.
        order: integer ``[n]``, the id that each of ``hashes`` belongs to; equal hashes by ascending id.
    """

    def __init__(self, offsets: Ints, data: Bytes, hashes: NDArray[np.uint64], order: NDArray[Any]) -> None:
        self._offsets, self._data, self._hashes, self._order = offsets, data, hashes, order

    def __len__(self) -> int:
        return len(self._order)

    def decode(self, ids: Tensor | Sequence[int]) -> list[str]:
        """Return the names of ids.

        Args:
            ids: integers ``0 .. n-1``, in any order, repeated or not; ``[k]``.

        Raises:
            DataError: an id is outside.
        """
        wanted = torch.as_tensor(ids, dtype=torch.int64).flatten().numpy()
        outside = np.flatnonzero((wanted < 0) | (wanted >= len(self)))
        if outside.size:
            raise DataError(
                f"there is no name for id {int(wanted[outside[0]])}: the dictionary has {len(self)} names",
                hint=f"ask for ids 0..{len(self) - 1} of the source data's numbering (orig_id)",
            )
        starts, stops = self._offsets[wanted].tolist(), self._offsets[wanted + 1].tolist()
        return [self._data[a:b].tobytes().decode() for a, b in zip(starts, stops, strict=True)]

    def encode(self, strings: Sequence[str]) -> Tensor:
        """Return the id of each string, int64 ``[k]``; -1 for a string that is no name, the first of equal names.

        Args:
            strings: str, a sequence or a pyarrow array.
        """
        found = [self._encode(offsets, data) for _, offsets, data in _pieces(strings)]
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *found]))

    def _encode(self, offsets: Ints, data: Bytes) -> Ints:
        result = np.full(len(offsets) - 1, -1, dtype=np.int64)
        hashes = _hashes(offsets, data)
        at = np.searchsorted(self._hashes, hashes)
        open_ = np.flatnonzero(at < len(self))
        while open_.size:  # one round, but for hashes that different names share
            open_ = open_[self._hashes[at[open_]] == hashes[open_]]
            ids = self._order[at[open_]].astype(np.int64)
            same = self._same(ids, offsets, data, open_)
            result[open_[same]] = ids[same]
            open_ = open_[~same]
            at[open_] += 1
            open_ = open_[at[open_] < len(self)]
        return result

    def _same(self, ids: Ints, offsets: Ints, data: Bytes, rows: Ints) -> NDArray[np.bool_]:
        """Say for which pairs the name of the id and the string of the row are equal."""
        length = offsets[rows + 1] - offsets[rows]
        same = self._offsets[ids + 1] - self._offsets[ids] == length
        pairs = np.flatnonzero(same)
        length = length[pairs]
        # One number for each byte that is compared: which pair it is of, and which byte of that.
        pair = np.repeat(np.arange(pairs.size), length)
        inside = np.arange(pair.size) - np.repeat(np.cumsum(length) - length, length)
        ours = self._data[self._offsets[ids[pairs]][pair] + inside]
        theirs = data[offsets[rows[pairs]][pair] + inside]
        same[pairs[np.unique(pair[ours != theirs])]] = False
        return same


def write_names(ledger: Ledger, kind: str, names: Any, expected: int | None) -> int:
    """Write a string dictionary, a piece at a time.

    Args:
        ledger: of the store that is being written.
        kind: a node type, or ``relation``.
        names: a sequence of str, or a pyarrow array of strings; position = id.
        expected: how many there have to be; None means any number.

    Returns:
        The number of names.

    Raises:
        DataError: there are more or fewer names than ids, or one is missing (null).
    """
    count = len(names)
    if expected is not None and count != expected:
        raise DataError(
            f"there are {count} names of {kind}, and {expected} ids",
            hint="give one name for each id, in the order of the ids",
        )
    offsets = np.zeros(count + 1, dtype=np.int64)
    hashes = np.empty(count, dtype=np.uint64)
    for first, piece, data in _pieces(names):
        offsets[first + 1 : first + len(piece)] = offsets[first] + piece[1:]
        hashes[first : first + len(piece) - 1] = _hashes(piece, data)
    order = np.argsort(hashes, kind="stable").astype(np.int32 if count < 2**31 else np.int64)
    with ledger.files() as files:
        stored = files.add("bytes", names_file(kind, "bytes"), np.uint8, (int(offsets[-1]),))
        for _, _, data in _pieces(names):
            stored.append(data)
    ledger.write(names_file(kind, "offsets"), offsets)
    ledger.write(names_file(kind, "hashes"), hashes[order])
    ledger.write(names_file(kind, "order"), order)
    return count


def open_names(load: Callable[[str], NDArray[Any]]) -> Names:
    """Return the dictionary whose pieces ``load`` maps, by the names in :data:`FIELDS`."""
    offsets, data, hashes, order = (load(name) for name in FIELDS)
    return Names(offsets, data, hashes, order)


def _pieces(names: Any) -> Iterator[tuple[int, Ints, Bytes]]:
    """Yield the names in pieces: id of the first, offsets and bytes."""
    for first in range(0, len(names), STEP):
        yield first, *_packed(names[first : first + STEP])


def _packed(strings: Any) -> tuple[Ints, Bytes]:
    """Return strings as offsets ``[k + 1]`` from 0 and bytes."""
    import pyarrow as pa

    if isinstance(strings, pa.ChunkedArray):
        strings = strings.combine_chunks()
    if isinstance(strings, pa.Array):
        array = strings.cast(pa.large_string())
    else:
        array = pa.array(strings, type=pa.large_string())
    if array.null_count:
        row = array.is_null().to_pylist().index(True)
        raise DataError(f"name {row} of {len(array)} is missing", hint="give each id a name")
    _, starts, data = array.buffers()
    offsets = np.frombuffer(starts, dtype=np.int64, count=array.offset + len(array) + 1)[array.offset :]
    content = np.frombuffer(data, dtype=np.uint8) if data is not None else np.empty(0, dtype=np.uint8)
    return offsets - offsets[0], content[offsets[0] : offsets[-1]]


def _hashes(offsets: Ints, data: Bytes) -> NDArray[np.uint64]:
    """Return a hash of each string: a polynomial in an odd number modulo 2^64, mixed as splitmix64 does its state.

    Equal hashes of different strings cost time and nothing else: :meth:`Names.encode` compares the strings.
    """
    length = np.diff(offsets)
    inside = np.arange(data.size) - np.repeat(offsets[:-1], length)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(int(length.max(initial=0)) + 1, GOLDEN, dtype=np.uint64))
        terms = (data.astype(np.uint64) + np.uint64(1)) * powers[inside]
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)])
        mixed: NDArray[np.uint64] = mix(sums[offsets[1:]] - sums[offsets[:-1]])
    return mixed
