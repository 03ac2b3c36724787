"""Products of matrices: which rows of queries and candidates are multiplied, and where the results go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gtrain_pbg.kernels import rounding
from gtrain_pbg.step.layout import Floats, Workspace, bits

_NO_FACTOR = np.ones(1, dtype=np.float32)


@dataclass
class Piece:
    """Some queries of each chunk of a group, whose scores are computed at a time.

    Attributes:
        first: number of the first one in its chunk.
        queries: ``[G, n, D]``.
        candidates: ``[G, D, K]``.
        scores: ``[G, n, K]``, receives the gradient by the scores.
        gradient: ``[G, n, D]``, receives that by the queries.
    """

    first: int
    queries: Tensor
    candidates: Tensor
    scores: Tensor
    gradient: Tensor

    @cached_property
    def result(self) -> Floats:
        """``scores`` as kernels take them."""
        return bits(self.scores)

    @property
    def scale(self) -> tuple[Floats, Floats]:
        """What products of queries and of candidates are multiplied by, if they are integers."""
        return _NO_FACTOR, _NO_FACTOR

    def prepare(self) -> None:
        """Do what is done once for the candidates."""

    def products(self) -> Floats:
        """Inner products of queries and candidates, ``[G, n, K]``, in the memory of ``scores``."""
        torch.bmm(self.queries, self.candidates, out=self.scores)
        return self.result


class RoundedPiece(Piece):
    """The same for one chunk, rows being rounded to 8 bits, which CPUs multiply twice as fast as bfloat16.

    The sums are exact, so that for rows without outliers an inner product is as near as one that bfloat16 stores.

    Args:
        piece: what is computed.
        work: buffers; those of the candidates are the same for all pieces of a chunk.
    """

    def __init__(self, piece: Piece, work: Workspace) -> None:
        super().__init__(**vars(piece))
        self._sides = []
        for name, rows in (("queries", piece.queries[0]), ("candidates", piece.candidates[0].T)):
            found = work.take(f"rounded {name}", *rows.shape, dtype=torch.int8)
            scale = work.take(f"scales of {name}", len(rows), dtype=torch.float32)
            self._sides.append((bits(rows), found, found.numpy(), scale.numpy()))
        self._left, self._right = self._sides[0][1], self._sides[1][1].T
        self._found = work.take("integers", len(self._left), self._right.size(1), dtype=torch.int32)
        self._integers: Floats = self._found[None].numpy()

    @property
    def scale(self) -> tuple[Floats, Floats]:
        return self._sides[0][3], self._sides[1][3]

    def prepare(self) -> None:
        self._round(1)

    def products(self) -> Floats:
        self._round(0)
        torch._int_mm(self._left, self._right, out=self._found)
        return self._integers

    def _round(self, side: int) -> None:
        rows, _, found, scale = self._sides[side]
        rounding.round_rows(rows, found, scale)
