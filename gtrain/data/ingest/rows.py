"""What every reader hands on: the edges of one piece of a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.data.ingest.scan import Bytes, Ints


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
