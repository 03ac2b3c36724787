"""One side of a batch: products of queries and candidates, the loss, and the products that give the gradients.

Scores are computed in blocks that stay in the second cache from the product to the gradient, in place.
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
from gtrain_pbg.step.layout import Floats, Layout, Operand, Workspace, bits

BLOCK = 1 << 18
"""Scores computed at a time, about: 512 KiB in bfloat16."""
ROWS = 256
"""Queries at a time, at least: with fewer, a product spends its time on arranging the candidates anew."""
LOSSES = {"ranking": losses.RANKING, "logistic": losses.LOGISTIC, "softmax": losses.SOFTMAX}
KINDS = {"dot": losses.INNER, "cos": losses.INNER, "squared_l2": losses.SQUARED, "l2": losses.ROOT}


class Own(NamedTuple):
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
        self._loss, self._kind, self._margin = LOSSES[recipe.loss], KINDS[recipe.comparator], recipe.margin
        self._biased, self._distances = recipe.bias, self._kind != losses.INNER
        self._skip = recipe.all_negs or not recipe.num_batch_negs  # answers are no columns beside the drawn nodes
        self._answer = losses.LISTED if recipe.all_negs else losses.APART if self._skip else losses.DIAGONAL
        self._first, self._has_own = np.zeros(1, dtype=np.int64), False

    def __call__(
        self, layout: Layout, queries: Operand, candidates: Operand, answer: Tensor, weight: Tensor, own: Own | None
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
        lost = 0.0
        for begin, end in self._groups(layout):
            q = layout.of_edges(queries.factor, begin, end, spread=queries.spread)
            c = layout.of_rows(candidates.factor, begin, end, self._skip)
            place = begin * layout.places
            columns = self._columns(layout, candidates, begin, end)
            scores = self._work.product("scores", q.size(0), q.size(1), c.size(1))
            by_q = layout.of_edges(queries.gradient, begin, end, spread=False)
            lost += self._block(layout, scores, q, c, by_q, place, columns, given)
            torch.bmm(scores.transpose(1, 2), q, out=layout.of_rows(candidates.gradient, begin, end, self._skip))
            self._give_columns(layout, candidates, begin, end, columns)
        if self._answer == losses.LISTED:
            candidates.gradient[: layout.edges].zero_()  # the answers are among all nodes
        if self._answer == losses.APART:
            self._give_apart(layout, queries, candidates, by_apart)
        return lost

    def _groups(self, layout: Layout) -> list[tuple[int, int]]:
        """Chunks that are computed together; a large one is alone, and so is an incomplete one."""
        columns = layout.uniform + (0 if self._skip else layout.places)
        each = max(1, BLOCK // max(1, layout.places * columns))
        groups = [(begin, min(begin + each, layout.full)) for begin in range(0, layout.full, each)]
        return groups + ([(layout.full, layout.chunks)] if layout.chunks > layout.full else [])

    def _block(
        self,
        layout: Layout,
        scores: Tensor,
        q: Tensor,
        c: Tensor,
        by_q: Tensor,
        place: int,
        columns: tuple[Tensor, ...],
        given: tuple[Floats, ...],
    ) -> float:
        """Scores of a group of chunks to their gradient, and the gradient by queries; rows of a large chunk in turn."""
        rows = q.size(1) if q.size(0) > 1 else max(ROWS, BLOCK // max(1, c.size(1)))
        lost, turned, count = 0.0, c.transpose(1, 2), c.size(1)
        by_column = tuple(column.numpy() for column in columns)
        scratch = self._work.take("a row", count + 1).numpy(), self._work.take("another row", count + 1).numpy()
        values = bits(scores)
        for first in range(0, q.size(1), rows):
            some = slice(first, min(first + rows, q.size(1)))
            piece = scores[:, some]
            torch.bmm(q[:, some], turned, out=piece)
            lost += self._gradient(values[:, some], place + first, first, layout.places, by_column, given, scratch)
            torch.bmm(piece, c, out=by_q[:, some])
        return lost

    def _gradient(
        self,
        scores: Floats,
        query: int,
        first: int,
        step: int,
        columns: tuple[Floats, ...],
        given: tuple[Floats, ...],
        scratch: tuple[Floats, Floats],
    ) -> float:
        """Scores to their gradient, in place."""
        norm, bias, row_sum, by_bias, apart, by_apart, own, by_own, answer, weight = given
        column_norm, column_bias, column_sum, by_column_bias = columns
        self._first[0] = first
        listed = self._first if self._answer == losses.DIAGONAL else answer
        arguments: list[Any] = [scores, query, step, self._answer, listed, apart, by_apart]
        arguments += [own, by_own, self._has_own, weight, self._loss, self._margin, self._kind, self._biased]
        arguments += [norm, column_norm, bias, column_bias, row_sum, column_sum, by_bias, by_column_bias, *scratch]
        found: float = losses.loss_and_gradient(*arguments)
        return found

    # ---------------------------------------------------------------------------------- what not every model needs

    def _columns(self, layout: Layout, candidates: Operand, begin: int, end: int) -> tuple[Tensor, ...]:
        """Norms and biases of candidates ``[G, K]``, and room for the sums of columns."""
        none = self._work.take("no columns", 1, 1)
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
        self, layout: Layout, candidates: Operand, begin: int, end: int, columns: tuple[Tensor, ...]
    ) -> None:
        for target, found, needed in (
            (candidates.sums, columns[2], self._distances),
            (candidates.by_bias, columns[3], self._biased),
        ):
            if needed:
                layout.of_rows(target.unsqueeze(1), begin, end, self._skip).squeeze(2).add_(found)

    def _apart(self, layout: Layout, queries: Operand, candidates: Operand) -> tuple[Tensor, Tensor]:
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

    def _give_apart(self, layout: Layout, queries: Operand, candidates: Operand, by_apart: Tensor) -> None:
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


def compact(work: Workspace, layout: Layout, operand: Operand, name: str = "compact") -> Tensor:
    """Rows of an operand by edge, ``[B, D]``."""
    if not operand.spread:
        return operand.rows
    found = work.take(name, layout.edges, operand.rows.size(1))
    return torch.index_select(operand.rows, 0, layout.spots, out=found)
