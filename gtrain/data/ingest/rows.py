"""The output of every edge reader: the edges of one piece of a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.data.ingest.dictionary import Keys

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class EdgeRows:
    """Edges in the order of the file.

    Attributes:
        ids: source and target of each edge, interleaved, ``[2 * n]``: int64, or UTF-8 strings.
        relation: relation of each edge, ``[n]``; None if the file has no relations.
        weight: finite weight of each edge, ``[n]`` float32; None if the file has no weights.
        time: time of each edge, ``[n]`` int64; None if the file has no times.
        read: bytes of the file read so far.
        location: returns the file and line of a row (from 0), for messages.
    """

    ids: Keys | Ints
    relation: Keys | Ints | None
    weight: NDArray[np.float32] | None
    time: Ints | None
    read: int
    location: Callable[[int], str]

    def __len__(self) -> int:
        return (self.ids.starts.size if isinstance(self.ids, Keys) else self.ids.size) // 2


def first_true(wrong: NDArray[Any]) -> int | None:
    """Return the first true position of a mask; None if all are false."""
    return int(wrong.argmax()) if wrong.any() else None
