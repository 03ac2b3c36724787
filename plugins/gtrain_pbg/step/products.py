"""Products of matrices: which rows of queries and candidates are multiplied, and where the results go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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


class _Side(NamedTuple):
    """Rows of a product, bfloat16 bits ``[n, D]``, and room for what they are rounded to, int8 ``[n, D]``.

    ``target`` is the memory of ``rounded`` as kernels take it; ``scale`` is ``[n]``.
    """

    rows: Floats
    rounded: Tensor
    target: Floats
    scale: Floats

    def round(self) -> None:
        rounding.round_rows(self.rows, self.target, self.scale)


class RoundedPiece(Piece):
    """The same for one chunk, rows being rounded to 8 bits, which CPUs multiply twice as fast as bfloat16.

    The sums are exact, so that for rows without outliers an inner product is as near as one that bfloat16 stores.

    Args:
        piece: what is computed.
        work: buffers; those of the candidates are the same for all pieces of a chunk.
    """

    def __init__(self, piece: Piece, work: Workspace) -> None:
        super().__init__(**vars(piece))
        self._left = _side(work, "queries", piece.queries[0])
        self._right = _side(work, "candidates", piece.candidates[0].T)
        self._found = work.take("integers", len(self._left.rounded), len(self._right.rounded), dtype=torch.int32)
        self._turned = self._right.rounded.T
        self._integers: Floats = self._found[None].numpy()

    @property
    def scale(self) -> tuple[Floats, Floats]:
        return self._left.scale, self._right.scale

    def prepare(self) -> None:
        self._right.round()

    def products(self) -> Floats:
        self._left.round()
        torch._int_mm(self._left.rounded, self._turned, out=self._found)
        return self._integers


def _side(work: Workspace, name: str, rows: Tensor) -> _Side:
    rounded = work.take(f"rounded {name}", *rows.shape, dtype=torch.int8)
    scale = work.take(f"scales of {name}", len(rows), dtype=torch.float32)
    return _Side(bits(rows), rounded, rounded.numpy(), scale.numpy())
