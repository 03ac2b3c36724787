"""One side of a batch: products of queries and candidates, the loss, and the products that give the gradients.

Scores are computed in blocks that stay in the caches from the product to the gradient, in place.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.kernels import rows as kernels
from gtrain_pbg.kernels import scores as losses
from gtrain_pbg.step.layout import BatchLayout, Floats, Operand, Workspace, bits
from gtrain_pbg.step.products import (
    ChunkGroup,
    ChunkOperands,
    IntegerBuffers,
    RoundedChunk,
    answers_apart,
    answers_first,
    answers_in,
)

BLOCK = 1 << 18
"""Scores of small chunks computed at a time, about: 512 KiB in bfloat16."""
LARGE = 1 << 21
"""Scores of a large chunk computed at a time, about: 4 MiB in bfloat16."""
ROWS = 256
"""Queries at a time, at least: with fewer, a product spends its time on arranging the candidates anew."""
FEW = 64
"""The same for products of integers."""
ROUNDED = 100_000
"""Least number of scores of a chunk whose rows are rounded: of a small one, most of the time is spent elsewhere."""
LOSSES = {"ranking": losses.RANKING, "logistic": losses.LOGISTIC, "softmax": losses.SOFTMAX}
COMPARATOR_CODES = {"dot": losses.INNER, "cos": losses.INNER, "squared_l2": losses.SQUARED, "l2": losses.ROOT}


class SelfNegatives(NamedTuple):
    """One more false answer of each edge, the end that is given.

    Attributes:
        scores: ``[B]``; minus infinity where the end is the answer.
        gradient: ``[B]``, receives the gradient by them.
        queries: ``[B, D]``, what the ends were compared with.
    """

    scores: Tensor
    gradient: Tensor
    queries: Tensor


class SideScores:
    """Computes the loss of one side and its gradients by queries and candidates.

    Args:
        recipe: the model.
        work: buffers.
    """

    def __init__(self, recipe: EdgeRecipe, work: Workspace) -> None:
        self._work = work
        self._loss, self._kind, self._margin = LOSSES[recipe.loss], COMPARATOR_CODES[recipe.comparator], recipe.margin
        self._biased, self._distances = recipe.bias, self._kind != losses.INNER
        self._skip = recipe.all_negs or not recipe.num_batch_negs  # answers are no columns beside the drawn nodes
        self._answer = losses.LISTED if recipe.all_negs else losses.APART if self._skip else losses.DIAGONAL
        self._first, self._has_own = np.zeros(1, dtype=np.int64), False
        self._integers: dict[tuple[int, int, int], IntegerBuffers] = {}

    def __call__(
        self,
        layout: BatchLayout,
        queries: Operand,
        candidates: Operand,
        answer: Tensor,
        weight: Tensor,
        own: SelfNegatives | None,
    ) -> float:
        """Return the weighted loss; gradients are in the operands.

        Args:
            layout: of the batch.
            queries: one for each edge.
            candidates: the rows of the other side.
            answer: ``[B]``, the answers' ids, where all nodes are candidates.
            weight: ``[B]``, of each edge's loss.
            own: false answers of each edge's own; None: there are none.
        """
        self._has_own, none = own is not None, self._work.take("no own", 1)
        more = (none, none) if own is None else (own.scores, own.gradient)
        apart, by_apart = self._apart(layout, queries, candidates)
        arrays = (queries.norm, queries.bias, queries.sums, queries.by_bias, apart, by_apart, *more, answer, weight)
        given = tuple(array.numpy() for array in arrays)
        # views first: between products, caches hold nothing of Python, and an operation takes 20 times as long
        groups = [self._views(layout, queries, candidates, answer, *group) for group in self._groups(layout)]
        lost = 0.0
        for group in groups:
            columns = self._columns(layout, candidates, group.begin, group.end)
            lost += self._gradients(group, layout.places, columns, given)
            group.go_back()
            self._give_columns(layout, candidates, group.begin, group.end, columns)
        if self._answer == losses.LISTED:
            candidates.gradient[: layout.edges].zero_()  # the answers are among all nodes
        if self._answer == losses.APART:
            self._give_apart(layout, queries, candidates, by_apart)
        return lost

    def _groups(self, layout: BatchLayout) -> list[tuple[int, int]]:
        """Chunks that are computed together; a large one is alone, and so is an incomplete one."""
        columns = layout.uniform + (0 if self._skip else layout.places)
        each = max(1, BLOCK // max(1, layout.places * columns))
        groups = [(begin, min(begin + each, layout.full)) for begin in range(0, layout.full, each)]
        return groups + ([(layout.full, layout.chunks)] if layout.chunks > layout.full else [])

    def _views(
        self, layout: BatchLayout, queries: Operand, candidates: Operand, answer: Tensor, begin: int, end: int
    ) -> ChunkGroup:
        """What is computed for a group of chunks; the rows of a large chunk are in turn."""
        rows = ChunkOperands(
            layout.of_edges(queries.factor, begin, end, spread=queries.spread),
            layout.of_rows(candidates.factor, begin, end, self._skip),
            layout.of_edges(queries.gradient, begin, end, spread=False),
            layout.of_rows(candidates.gradient, begin, end, self._skip),
        )
        (chunks, places, _), count = rows.queries.shape, rows.candidates.size(1)
        if self._work.rounded and chunks == 1 and places * count >= ROUNDED:
            return self._rounded(layout, rows, answer, begin)
        each = places if chunks > 1 else max(ROWS, LARGE // max(1, count))
        return ChunkGroup(begin, end, rows, self._work.product("scores", chunks, places, count), each)

    def _rounded(self, layout: BatchLayout, rows: ChunkOperands, answer: Tensor, begin: int) -> ChunkGroup:
        """A chunk whose products are of integers."""
        edges, columns = rows.queries.size(1), rows.candidates.size(1)
        if self._answer == losses.LISTED:
            answers = answers_in(answer, columns)
        else:
            answers = (answers_first if self._answer == losses.DIAGONAL else answers_apart)(edges, columns)
        by_answer = self._work.take("by apart", layout.edges)[begin * layout.places :].numpy()
        key = edges, columns, rows.queries.size(2)
        if key not in self._integers:  # chunks are of few sizes
            self._integers[key] = IntegerBuffers(*key, max(FEW, BLOCK // columns), self._work)
        return RoundedChunk(begin, rows, answers, by_answer, self._integers[key])

    def _gradients(
        self, group: ChunkGroup, places: int, columns: tuple[Tensor, ...], given: tuple[Floats, ...]
    ) -> float:
        """Scores of a group of chunks to their gradient."""
        by_column = tuple(column.numpy() for column in columns)
        count = group.columns + 1
        scratch = self._work.take("a row", count).numpy(), self._work.take("another row", count).numpy()
        lost = 0.0
        group.prepare()
        for piece in group.pieces:
            query = group.begin * places + piece.first
            lost += self._gradient(piece.products(), query, piece.first, places, by_column, given, scratch)
            piece.go_back()
        return lost

    def _gradient(
        self,
        products: tuple[Floats, ...],
        query: int,
        first: int,
        step: int,
        columns: tuple[Floats, ...],
        given: tuple[Floats, ...],
        scratch: tuple[Floats, Floats],
    ) -> float:
        """From products of matrices, and by what they are multiplied, to the gradient by them."""
        norm, bias, row_sum, by_bias, apart, by_apart, own, by_own, answer, weight = given
        column_norm, column_bias, column_sum, by_column_bias = columns
        self._first[0] = first
        listed = self._first if self._answer == losses.DIAGONAL else answer
        arguments: list[Any] = [*products, query, step, self._answer, listed, apart, by_apart]
        arguments += [own, by_own, self._has_own, weight, self._loss, self._margin, self._kind, self._biased]
        arguments += [norm, column_norm, bias, column_bias, row_sum, column_sum, by_bias, by_column_bias, *scratch]
        found: float = losses.loss_and_gradient(*arguments)
        return found

    # ---------------------------------------------------------------------------------- what not every model needs

    def _columns(self, layout: BatchLayout, candidates: Operand, begin: int, end: int) -> tuple[Tensor, ...]:
        """Norms and biases of candidates ``[G, K]``, and room for the sums of columns."""
        none = self._work.take("no columns", 1, 1)
        if not self._distances and not self._biased:
            return none, none, none, none
        found = []
        for name, values, needed in (
            ("column norm", candidates.norm, self._distances),
            ("column bias", candidates.bias, self._biased),
        ):
            if needed:
                view = layout.of_rows(values.unsqueeze(1), begin, end, self._skip).squeeze(2)
                found.append(self._work.take(name, *view.shape).copy_(view))
            else:
                found.append(none)
        groups = layout.of_rows(candidates.rows, begin, end, self._skip).shape[:2]
        for name, needed in (("column sum", self._distances), ("column bias gradient", self._biased)):
            found.append(self._work.take(name, *groups).zero_() if needed else none)
        return tuple(found)

    def _give_columns(
        self, layout: BatchLayout, candidates: Operand, begin: int, end: int, columns: tuple[Tensor, ...]
    ) -> None:
        for target, found, needed in (
            (candidates.sums, columns[2], self._distances),
            (candidates.by_bias, columns[3], self._biased),
        ):
            if needed:
                layout.of_rows(target.unsqueeze(1), begin, end, self._skip).squeeze(2).add_(found)

    def _apart(self, layout: BatchLayout, queries: Operand, candidates: Operand) -> tuple[Tensor, Tensor]:
        """Scores of the answers where they are no columns, and room for the gradient by them."""
        apart, by_apart = self._work.take("apart", layout.edges), self._work.take("by apart", layout.edges)
        if self._answer != losses.APART:
            return apart, by_apart
        rows = compact(self._work, layout, queries).numpy()
        kernels.pairs(rows, candidates.rows.numpy(), layout.places, layout.uniform, apart.numpy())
        if self._distances:
            squared = (queries.norm + candidates.norm[layout.spots]).sub_(apart, alpha=2)
            apart.copy_(-squared if self._kind == losses.SQUARED else -squared.clamp(min=losses.TINY).sqrt())
            self._distance = apart.clone()
        if self._biased:
            apart.add_(queries.bias).add_(candidates.bias[layout.spots])
        return apart, by_apart

    def _give_apart(self, layout: BatchLayout, queries: Operand, candidates: Operand, by_apart: Tensor) -> None:
        """Hand on the gradients by the answers' scores."""
        if self._biased:
            candidates.by_bias.index_add_(0, layout.spots, by_apart)
        product = by_apart
        if self._kind == losses.SQUARED:
            product = 2 * by_apart
        elif self._kind == losses.ROOT:
            far = self._distance < -math.sqrt(losses.TINY) * 1.0001
            product = torch.where(far, -by_apart / self._distance, 0)
        rows, by_query, by_row = candidates.rows.numpy(), bits(queries.gradient), bits(candidates.gradient)
        given = compact(self._work, layout, queries).numpy()
        kernels.pair_gradients(product.numpy(), given, rows, layout.places, layout.uniform, by_query, by_row)
        if self._distances:
            queries.sums.add_(product)
            candidates.sums.index_add_(0, layout.spots, product)


def compact(work: Workspace, layout: BatchLayout, operand: Operand, name: str = "compact") -> Tensor:
    """Rows of an operand by edge, ``[B, D]``."""
    if not operand.spread:
        return operand.rows
    found = work.take(name, layout.edges, operand.rows.size(1))
    return torch.index_select(operand.rows, 0, layout.spots, out=found)
