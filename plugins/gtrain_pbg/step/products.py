"""Products of matrices: which rows of queries and candidates are multiplied, and where the results go.

The products of a large chunk may be of integers: queries, candidates and gradients by scores rounded to 8 bits. CPUs
multiply these two to four times as fast as bfloat16, and their sums are exact. Rows are rounded to the nearest for
scores, each with a scale of its own: without outliers an inner product is as near as one that bfloat16 stores. The
gradient G by the scores is rounded at random, row by row, so that its mean is right::

    G[i, k] ~ s[i] A[i, k]        by queries: G C = s A C        by candidates: G' Q = A' (s Q)

For these two products C and s Q have one scale for all rows. Gradients by the answers' scores are a thousand times as
large as others; they are left out of A, and added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gtrain_pbg.kernels import rounding
from gtrain_pbg.step.layout import Floats, Workspace, bits

_NO_FACTOR = np.ones(1, dtype=np.float32)


@dataclass
class ChunkOperands:
    """What a group of chunks is computed from, and where its gradients go.

    Attributes:
        queries, candidates: ``[G, m, D]`` and ``[G, K, D]``.
        by_queries, by_candidates: of the same shapes, receive the gradients.
    """

    queries: Tensor
    candidates: Tensor
    by_queries: Tensor
    by_candidates: Tensor


class QueryBlock:
    """Some queries of each chunk of a group, whose scores are computed at a time.

    Args:
        part: which queries of each chunk.
        rows: of the group.
        scores: ``[G, m, K]``, of the group; receives the gradient by the scores.
    """

    def __init__(self, part: slice, rows: ChunkOperands, scores: Tensor) -> None:
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


class ChunkGroup:
    """Chunks that are computed together, piece by piece.

    Args:
        begin: the first chunk.
        end: behind the last.
        rows: of the chunks.
        scores: ``[G, m, K]``.
        each: queries of a piece.
    """

    def __init__(self, begin: int, end: int, rows: ChunkOperands, scores: Tensor, each: int) -> None:
        self.begin, self.end, self._rows, self._scores = begin, end, rows, scores
        self.pieces: Sequence[QueryBlock] = [
            QueryBlock(part, rows, scores) for part in slices(rows.queries.size(1), each)
        ]

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


class AnswerPairs(NamedTuple):
    """What is added to the gradients of n rows for the scores of answers; as ``kernels.rounding.gather`` takes it.

    Attributes:
        first: int64 ``[n + 1]``, where the edges of a row begin in
        edge: int64, edges of the chunk.
        other: int64, by edge, the row that its score is a product with.
    """

    first: Floats
    edge: Floats
    other: Floats


def answers_apart(edges: int, columns: int) -> tuple[AnswerPairs, AnswerPairs]:
    """Pairs of queries and of candidates where answers are no columns."""
    none: Floats = np.zeros(0, dtype=np.int64)
    first: Floats = np.zeros(max(edges, columns) + 1, dtype=np.int64)
    return AnswerPairs(first, none, none), AnswerPairs(first, none, none)


def answers_in(column: Tensor, columns: int) -> tuple[AnswerPairs, AnswerPairs]:
    """The same where answers are in these columns.

    Args:
        column: int64 ``[m]``, by edge.
        columns: K.
    """
    each = torch.arange(len(column) + 1)
    first = torch.zeros(columns + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(column, minlength=columns), 0, out=first[1:])
    order = column.argsort(stable=True)
    return AnswerPairs(each.numpy(), each.numpy(), column.numpy()), AnswerPairs(
        first.numpy(), order.numpy(), each.numpy()
    )


@lru_cache(maxsize=8)
def answers_first(edges: int, columns: int) -> tuple[AnswerPairs, AnswerPairs]:
    """The same where the answer of an edge is in the column of its number."""
    return answers_in(torch.arange(edges), columns)


class RoundedRows(NamedTuple):
    """Rows rounded to 8 bits, int8 ``[n, D]``, and their scales, float32 ``[n]``; ``target`` is the memory of rows."""

    rows: Tensor
    target: Floats
    scale: Floats

    @classmethod
    def empty(cls, count: int, width: int, work: Workspace, name: str) -> RoundedRows:
        rows = work.take(f"rounded {name}", count, width, dtype=torch.int8)
        return cls(rows, rows.numpy(), np.empty(count, dtype=np.float32))

    def round(self, rows: Tensor) -> None:
        rounding.round_rows(bits(rows), self.target, self.scale)


class IntegerBuffers:
    """What is computed with for chunks of m queries and K candidates of width D, one after the other.

    Args:
        m, count, width: these numbers.
        each: queries of a piece.
        work: buffers.

    Attributes:
        queries, candidates: rounded.
        even: int8 ``[K, D]``, candidates of one scale.
        gradient: int8 ``[m, K]``, by scores.
        scale: ``[m]``, of its rows.
        by_queries, by_candidates: int32 ``[m, D]`` and ``[K, D]``.
        pieces: of the queries.
    """

    def __init__(self, m: int, count: int, width: int, each: int, work: Workspace) -> None:
        self.queries = RoundedRows.empty(m, width, work, "queries")
        self.candidates = RoundedRows.empty(count, width, work, "candidates")
        self.even = work.take("even candidates", count, width, dtype=torch.int8)
        self.gradient = work.take("rounded gradient", m, count, dtype=torch.int8)
        self.scale: Floats = np.empty(m, dtype=np.float32)
        self.by_queries = work.take("integers by queries", m, width, dtype=torch.int32)
        self.by_candidates = work.take("integers by candidates", count, width, dtype=torch.int32)
        self.scratch: Floats = np.empty(width, dtype=np.float32)
        products = work.take("integers", min(each, m), count, dtype=torch.int32)
        self.pieces = [RoundedQueryBlock(part, products, self) for part in slices(m, each)]


class RoundedQueryBlock(QueryBlock):
    """Some queries of a chunk.

    Args:
        part: which.
        products: int32 ``[n, K]`` or more rows.
        chunk: has the rows.
    """

    def __init__(self, part: slice, products: Tensor, chunk: IntegerBuffers) -> None:
        self.first = part.start
        self._queries, self._turned = chunk.queries.rows[part], chunk.candidates.rows.T
        self._found = products[: part.stop - part.start]
        scores, result = self._found[None].numpy(), chunk.gradient[part][None].numpy()
        factors = chunk.queries.scale[part], chunk.candidates.scale
        self._arguments = scores, *factors, result, chunk.scale[part], dither(chunk.gradient.size(1))

    def products(self) -> tuple[Floats, ...]:
        torch._int_mm(self._queries, self._turned, out=self._found)
        return self._arguments

    def go_back(self) -> None:
        """It is done for all pieces at a time."""


class RoundedChunk(ChunkGroup):
    """One chunk.

    Args:
        begin: which one.
        rows: of it, bfloat16.
        answers: of queries and candidates.
        by_answer: ``[m]``, has gradients by the answers' scores once the pieces have those by others.
        integers: for its numbers of rows.
    """

    def __init__(
        self,
        begin: int,
        rows: ChunkOperands,
        answers: tuple[AnswerPairs, AnswerPairs],
        by_answer: Floats,
        integers: IntegerBuffers,
    ) -> None:
        self.begin, self.end, self._rows, self.pieces = begin, begin + 1, rows, integers.pieces
        self._answers, self._by_answer, self._integers = answers, by_answer, integers

    def prepare(self) -> None:
        self._integers.queries.round(self._rows.queries[0])
        self._integers.candidates.round(self._rows.candidates[0])

    def go_back(self) -> None:
        chunk, rows, (of_queries, of_candidates) = self._integers, self._rows, self._answers
        queries, candidates, fractions = chunk.queries, chunk.candidates, dither(chunk.even.size(1))
        factor = rounding.level(candidates.target, candidates.scale, fractions, chunk.even.numpy())
        torch._int_mm(chunk.gradient, chunk.even, out=chunk.by_queries)
        self._give(chunk.by_queries, chunk.scale * factor, of_queries, rows.candidates, rows.by_queries)
        factor = rounding.level(queries.target, queries.scale * chunk.scale, fractions, queries.target)
        torch._int_mm(chunk.gradient.T, queries.rows, out=chunk.by_candidates)
        scale = np.full(self.columns, factor, dtype=np.float32)
        self._give(chunk.by_candidates, scale, of_candidates, rows.queries, rows.by_candidates)

    def _give(self, found: Tensor, scale: Floats, pairs: AnswerPairs, others: Tensor, result: Tensor) -> None:
        scratch = self._integers.scratch
        rounding.gather(found.numpy(), scale, *pairs, self._by_answer, bits(others[0]), scratch, bits(result[0]))


@lru_cache(maxsize=8)
def dither(columns: int) -> Floats:
    """Fractions as :mod:`gtrain_pbg.kernels.rounding` takes them."""
    drawn = np.random.default_rng(0).random(rounding.SPAN + columns, dtype=np.float32)
    return drawn - np.float32(0.5)
