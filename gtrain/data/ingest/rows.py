"""What every reader hands on: the edges of one piece of a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gtrain.data.ingest.probe import PAD, Bytes, hash_keys

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Keys:
    """Byte strings in one buffer, hashed.

    Attributes:
        data: the buffer, with ``PAD`` bytes behind the last key.
        starts: where each key begins, ``[n]``.
        lengths: bytes of each key, ``[n]``; none is 0.
        hashes: 64 bits for each key, ``[n]``.
    """

    data: Bytes
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    hashes: NDArray[np.uint64]

    @classmethod
    def interleaved(cls, *columns: pa.Array) -> Keys:
        """Return the strings of some columns as keys, row by row."""
        buffers, starts, lengths, base = [], [], [], 0
        for column in columns:
            strings = column.cast(pa.large_string())
            offsets = np.frombuffer(strings.buffers()[1], dtype=np.int64)[strings.offset :][: len(strings) + 1]
            data = np.frombuffer(strings.buffers()[2] or b"", dtype=np.uint8)
            buffers.append(data[offsets[0] : offsets[-1]])
            starts.append(offsets[:-1] - offsets[0] + base)
            lengths.append(np.diff(offsets))
            base += int(offsets[-1] - offsets[0])
        packed = np.concatenate([*buffers, np.zeros(PAD, dtype=np.uint8)])
        begins, sizes = (np.stack(values, axis=1).reshape(-1).astype(np.int32) for values in (starts, lengths))
        hashes = np.empty(begins.size, dtype=np.uint64)
        hash_keys(packed, begins, sizes, hashes)
        return cls(packed, begins, sizes, hashes)


@dataclass(frozen=True)
class Rows:
    """Edges in the order of the file.

    Attributes:
        ids: source and target of each edge by turns, ``[2 * n]``: integers, or strings that are UTF-8.
        relation: relation of each edge, ``[n]``; None without.
        weight: finite weight of each edge, ``[n]`` float32; None without.
        time: time of each edge, ``[n]`` int64; None without.
        read: bytes of the file that were read so far.
        place: takes a row from 0 and returns the file and the line, for messages.
    """

    ids: Keys | Ints
    relation: Keys | Ints | None
    weight: NDArray[np.float32] | None
    time: Ints | None
    read: int
    place: Callable[[int], str]

    def __len__(self) -> int:
        return (self.ids.starts.size if isinstance(self.ids, Keys) else self.ids.size) // 2


def first_true(wrong: NDArray[Any]) -> int | None:
    """Return the first position that is true; None where none is."""
    return int(wrong.argmax()) if wrong.any() else None
