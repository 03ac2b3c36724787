"""Products of matrices: which rows of queries and candidates are multiplied, and where the results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gtrain_pbg.step.layout import Floats, bits

_NO_FACTOR = np.ones(1, dtype=np.float32)


@dataclass
class Operands:
    """What a group of chunks is computed from, and where its gradients go.

    Attributes:
        queries, candidates: ``[G, m, D]`` and ``[G, K, D]``.
        by_queries, by_candidates: of the same shapes, receive the gradients.
    """

    queries: Tensor
    candidates: Tensor
    by_queries: Tensor
    by_candidates: Tensor


class Piece:
    """Some queries of each chunk of a group, whose scores are computed at a time.

    Args:
        part: which queries of each chunk.
        rows: of the group.
        scores: ``[G, m, K]``, of the group; receives the gradient by the scores.
    """

    def __init__(self, part: slice, rows: Operands, scores: Tensor) -> None:
        self.first: int = part.start
        self._queries, self._by_queries = rows.queries[:, part], rows.by_queries[:, part]
        self._candidates, self._turned = rows.candidates, rows.candidates.transpose(1, 2)
        self._scores = scores[:, part]
        self._scale: Floats = np.empty(self._scores.size(1), dtype=np.float32)

    @cached_property
    def _result(self) -> Floats:
        return bits(self._scores)

    def products(self) -> tuple[Floats, ...]:
        """Multiply queries and candidates.

        Returns:
            Inner products ``[G, n, K]``, what they are to be multiplied by for queries and for candidates, the array
            for the gradient by them, that for its scale, and dither; as ``kernels.scores.loss_and_gradient`` takes it.
        """
        torch.bmm(self._queries, self._turned, out=self._scores)
        return self._result, _NO_FACTOR, _NO_FACTOR, self._result, self._scale, _NO_FACTOR

    def go_back(self) -> None:
        """Compute the gradient by queries from that by products, while this is near."""
        torch.bmm(self._scores, self._candidates, out=self._by_queries)


class Group:
    """Chunks that are computed together, piece by piece.

    Args:
        begin: the first chunk.
        end: behind the last.
        rows: of the chunks.
        scores: ``[G, m, K]``.
        each: queries of a piece.
    """

    def __init__(self, begin: int, end: int, rows: Operands, scores: Tensor, each: int) -> None:
        self.begin, self.end, self._rows, self._scores = begin, end, rows, scores
        self.pieces: Sequence[Piece] = [Piece(part, rows, scores) for part in slices(rows.queries.size(1), each)]

    @property
    def columns(self) -> int:
        """K."""
        return self._rows.candidates.size(1)

    def prepare(self) -> None:
        """Do what is done once, in front of all pieces."""

    def go_back(self) -> None:
        """Compute the gradients that all pieces are needed for."""
        torch.bmm(self._scores.transpose(1, 2), self._rows.queries, out=self._rows.by_candidates)


def slices(count: int, each: int) -> list[slice]:
    """Pieces of that many."""
    return [slice(first, min(first + each, count)) for first in range(0, count, each)]
