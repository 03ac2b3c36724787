"""Matrix products of a chunk: which rows of queries and candidates are multiplied, and where the results go.

The products of a large chunk may be of integers: queries, candidates and gradients by scores quantized to 8 bits. CPUs
multiply these two to four times as fast as bfloat16, and their sums are exact. For scores, rows are rounded to nearest,
each with its scale: without outliers an inner product is as exact as one stored in bfloat16. The gradient G by the
scores is rounded stochastically, row by row, so that its mean is right::

    G[i, k] ~ s[i] A[i, k]        by queries: G C = s A C        by candidates: G' Q = A' (s Q)

In these two products C and s Q have one scale for all rows. Gradients by the answers' scores are a thousand times as
large as the others; A omits them, and they are added afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gtrain_pbg.kernels import rounding
from gtrain_pbg.kernels.scores import ScoreBlock
from gtrain_pbg.step.layout import Array, Workspace, bits

_NO_FACTOR = np.ones(1, dtype=np.float32)


@dataclass
class ChunkOperands:
    """Inputs of a group of chunks, and where its gradients go.

    Attributes:
        queries, candidates: ``[G, m, D]`` and ``[G, K, D]``.
        by_queries, by_candidates: of the same shapes, receive the gradients.
    """

    queries: Tensor
    candidates: Tensor
    by_queries: Tensor
    by_candidates: Tensor


class QueryBlock:
    """Queries of each chunk of a group whose scores are computed at a time.

    Args:
        part: which queries of each chunk.
        rows: of the group.
        scores: ``[G, m, K]``, of the group; receives the gradient by the scores.
    """

    def __init__(self, part: slice, rows: ChunkOperands, scores: Tensor) -> None:
        self.first: int = part.start
        self._queries, self._by_queries = rows.queries[:, part], rows.by_queries[:, part]
        self._candidates, self._transposed = rows.candidates, rows.candidates.transpose(1, 2)
        self._scores = scores[:, part]
        scale, memory = np.empty(self._scores.size(1), dtype=np.float32), bits(self._scores)
        self._block = ScoreBlock(memory, _NO_FACTOR, _NO_FACTOR, memory, scale, _NO_FACTOR)

    def products(self) -> ScoreBlock:
        """Multiply queries and candidates; return the products for the loss kernel."""
        torch.bmm(self._queries, self._transposed, out=self._scores)
        return self._block

    def backward(self) -> None:
        """Compute the gradient by queries from that by scores, while the caches hold it."""
        torch.bmm(self._scores, self._candidates, out=self._by_queries)


class ChunkGroup:
    """Chunks that are computed together, block by block.

    Args:
        begin: the first chunk.
        end: the chunk behind the last.
        rows: of the chunks.
        scores: ``[G, m, K]``.
        each: queries of a block.
    """

    def __init__(self, begin: int, end: int, rows: ChunkOperands, scores: Tensor, each: int) -> None:
        self.begin, self.end, self._rows, self._scores = begin, end, rows, scores
        self.blocks: Sequence[QueryBlock] = [QueryBlock(part, rows, scores) for part in slices(scores.size(1), each)]

    @property
    def columns(self) -> int:
        """K."""
        return self._rows.candidates.size(1)

    def prepare(self) -> None:
        """Do what is done once, before the first block."""

    def backward(self) -> None:
        """Compute the gradients that depend on all blocks."""
        torch.bmm(self._scores.transpose(1, 2), self._rows.queries, out=self._rows.by_candidates)


def slices(count: int, each: int) -> list[slice]:
    """Cut a range into pieces of this size."""
    return [slice(first, min(first + each, count)) for first in range(0, count, each)]


class AnswerPairs(NamedTuple):
    """The edges of n rows whose gradients by the answers' scores are added apart; see ``kernels.rounding.gather``.

    Attributes:
        first: int64 ``[n + 1]``, where the edges of a row start in ``edge``.
        edge: int64, edges of the chunk.
        other: int64, by edge, the row that its score is a product with.
    """

    first: Array
    edge: Array
    other: Array


def answers_apart(edges: int, columns: int) -> tuple[AnswerPairs, AnswerPairs]:
    """Return the pairs of queries and of candidates where answers are not among the columns: none."""
    none, first = np.zeros(0, dtype=np.int64), np.zeros(max(edges, columns) + 1, dtype=np.int64)
    return AnswerPairs(first, none, none), AnswerPairs(first, none, none)


def answers_in(column: Tensor, columns: int) -> tuple[AnswerPairs, AnswerPairs]:
    """Return the pairs of queries and of candidates where the answers are in these columns.

    Args:
        column: int64 ``[m]``, by edge.
        columns: K.
    """
    each = torch.arange(len(column) + 1).numpy()
    first = torch.zeros(columns + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(column, minlength=columns), 0, out=first[1:])
    order = column.argsort(stable=True)
    return AnswerPairs(each, each, column.numpy()), AnswerPairs(first.numpy(), order.numpy(), each)


@lru_cache(maxsize=8)
def answers_first(edges: int, columns: int) -> tuple[AnswerPairs, AnswerPairs]:
    """Return the pairs where the answer of an edge is in the column of its number."""
    return answers_in(torch.arange(edges), columns)


class RoundedRows(NamedTuple):
    """Rows in 8 bits: int8 ``[n, D]`` as tensor and as array, and their scales, float32 ``[n]``."""

    rows: Tensor
    target: Array
    scale: Array

    @classmethod
    def empty(cls, count: int, width: int, work: Workspace, name: str) -> RoundedRows:
        """Allocate rows."""
        rows = work.take(f"rounded {name}", count, width, dtype=torch.int8)
        return cls(rows, rows.numpy(), np.empty(count, dtype=np.float32))


class IntegerBuffers:
    """Buffers for chunks of m queries and K candidates of width D, one chunk after the other.

    Args:
        m, count, width: m, K and D.
        each: queries of a block.
        work: buffers.

    Attributes:
        queries, candidates: rounded.
        even: int8 ``[K, D]``, candidates of one scale.
        gradient: int8 ``[m, K]``, by scores.
        scale: ``[m]``, of its rows.
        by_queries, by_candidates: int32 ``[m, D]`` and ``[K, D]``.
        blocks: of the queries.
    """

    def __init__(self, m: int, count: int, width: int, each: int, work: Workspace) -> None:
        self.queries = RoundedRows.empty(m, width, work, "queries")
        self.candidates = RoundedRows.empty(count, width, work, "candidates")
        self.even = work.take("even candidates", count, width, dtype=torch.int8)
        self.gradient = work.take("rounded gradient", m, count, dtype=torch.int8)
        self.scale: Array = np.empty(m, dtype=np.float32)
        self.by_queries = work.take("integers by queries", m, width, dtype=torch.int32)
        self.by_candidates = work.take("integers by candidates", count, width, dtype=torch.int32)
        self.scratch: Array = np.empty(width, dtype=np.float32)
        products = work.take("integers", min(each, m), count, dtype=torch.int32)
        self.blocks = [RoundedQueryBlock(part, products, self) for part in slices(m, each)]


class RoundedQueryBlock(QueryBlock):
    """Queries of a chunk whose products are of integers.

    Args:
        part: which queries.
        products: int32 ``[n, K]`` or more rows.
        chunk: has the rows.
    """

    def __init__(self, part: slice, products: Tensor, chunk: IntegerBuffers) -> None:
        self.first = part.start
        self._queries, self._transposed = chunk.queries.rows[part], chunk.candidates.rows.T
        self._scores = products[: part.stop - part.start]
        memory, gradient = self._scores[None].numpy(), chunk.gradient[part][None].numpy()
        factors = chunk.queries.scale[part], chunk.candidates.scale
        self._block = ScoreBlock(memory, *factors, gradient, chunk.scale[part], dither(chunk.gradient.size(1)))

    def products(self) -> ScoreBlock:
        # int8 times int8, summed in int32: exact, since 127 * 127 * D stays below 2**31 for any D in use.
        torch._int_mm(self._queries, self._transposed, out=self._scores)
        return self._block

    def backward(self) -> None:
        """Nothing: :class:`RoundedChunk` does this for all blocks at once."""


class RoundedChunk(ChunkGroup):
    """One chunk whose products are of integers.

    Args:
        begin: its number.
        rows: of the chunk, bfloat16.
        answers: of queries and candidates.
        by_answer: ``[m]``, gradients by the answers' scores, complete once all blocks are computed.
        integers: buffers for its numbers of rows.
    """

    def __init__(
        self,
        begin: int,
        rows: ChunkOperands,
        answers: tuple[AnswerPairs, AnswerPairs],
        by_answer: Array,
        integers: IntegerBuffers,
    ) -> None:
        self.begin, self.end, self._rows, self.blocks = begin, begin + 1, rows, integers.blocks
        self._answers, self._by_answer, self._integers = answers, by_answer, integers

    def prepare(self) -> None:
        for rows, rounded in (
            (self._rows.queries, self._integers.queries),
            (self._rows.candidates, self._integers.candidates),
        ):
            rounding.round_rows(bits(rows[0]), rounded.target, rounded.scale)

    def backward(self) -> None:
        chunk, rows, (of_queries, of_candidates) = self._integers, self._rows, self._answers
        queries, candidates, fractions = chunk.queries, chunk.candidates, dither(chunk.even.size(1))
        # One scale for all candidates: it must be a factor of the whole sum over k, which an integer product cannot
        # weigh.
        factor = rounding.equalize_scales(candidates.target, candidates.scale, fractions, chunk.even.numpy())
        torch._int_mm(chunk.gradient, chunk.even, out=chunk.by_queries)
        self._gather(chunk.by_queries, chunk.scale * factor, of_queries, rows.candidates, rows.by_queries)
        # The rows s[i] Q[i] with one scale: the sum over i cannot weigh them either. In place, since Q is not read
        # again.
        factor = rounding.equalize_scales(queries.target, queries.scale * chunk.scale, fractions, queries.target)
        torch._int_mm(chunk.gradient.T, queries.rows, out=chunk.by_candidates)
        scale = np.full(self.columns, factor, dtype=np.float32)
        self._gather(chunk.by_candidates, scale, of_candidates, rows.queries, rows.by_candidates)

    def _gather(self, products: Tensor, scale: Array, answers: AnswerPairs, others: Tensor, result: Tensor) -> None:
        arrays = self._by_answer, bits(others[0]), self._integers.scratch, bits(result[0])
        rounding.gather(products.numpy(), scale, answers, *arrays)


@lru_cache(maxsize=8)
def dither(columns: int) -> Array:
    """Return the random fractions of :mod:`gtrain_pbg.kernels.rounding`."""
    # A fixed seed: a repeated run rounds alike.
    return np.random.default_rng(0).random(rounding.SPAN + columns, dtype=np.float32) - np.float32(0.5)
