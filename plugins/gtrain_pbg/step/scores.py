"""One direction of a batch: products of queries and candidates, the loss, and the products that give the gradients.

Scores are computed in blocks that stay in the caches from the product to the gradient, in place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.kernels import rows as row_kernels
from gtrain_pbg.kernels import scores as score_kernels
from gtrain_pbg.kernels.scores import BlockQueries, CandidateArrays, LossSettings, QueryArrays
from gtrain_pbg.step.layout import BatchLayout, Operand, Workspace, bits, compact
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
"""Least number of queries at a time: with fewer, a product spends its time on packing the candidates again."""
FEW = 64
"""The same for products of integers."""
ROUNDED = 100_000
"""Least number of scores of a chunk whose rows are quantized: a small chunk spends most of its time elsewhere."""
LOSSES = {"ranking": score_kernels.RANKING, "logistic": score_kernels.LOGISTIC, "softmax": score_kernels.SOFTMAX}
COMPARATOR_CODES = {
    "dot": score_kernels.INNER,
    "cos": score_kernels.INNER,
    "squared_l2": score_kernels.SQUARED,
    "l2": score_kernels.ROOT,
}


class SelfNegatives(NamedTuple):
    """One more negative of each edge (``model.self_negs``): the given endpoint as the other one.

    Attributes:
        scores: ``[B]``; minus infinity where the endpoint is the answer.
        gradient: ``[B]``, receives the gradient by them.
        queries: ``[B, D]``, which the endpoints were compared with.
    """

    scores: Tensor
    gradient: Tensor
    queries: Tensor


class SideScores:
    """Computes the loss of one direction and its gradients by queries and candidates.

    Args:
        recipe: of the group of relations.
        work: buffers.
    """

    def __init__(self, recipe: EdgeRecipe, work: Workspace) -> None:
        self._work = work
        self._comparator = COMPARATOR_CODES[recipe.comparator]
        self._biased, self._distances = recipe.bias, self._comparator != score_kernels.INNER
        self._skip = recipe.all_negs or not recipe.num_batch_negs  # only drawn nodes are candidates
        self._answer = (
            score_kernels.LISTED if recipe.all_negs else score_kernels.APART if self._skip else score_kernels.DIAGONAL
        )
        settings = LOSSES[recipe.loss], recipe.margin, self._comparator, recipe.bias, self._answer
        self._settings = LossSettings(*settings, recipe.self_negs)
        self._integers: dict[tuple[int, int, int], IntegerBuffers] = {}

    def __call__(
        self,
        layout: BatchLayout,
        queries: Operand,
        candidates: Operand,
        answer: Tensor,
        weight: Tensor,
        self_negatives: SelfNegatives | None,
    ) -> float:
        """Return the weighted loss; gradients are written to the operands.

        Args:
            layout: of the candidates' side.
            queries: one for each edge.
            candidates: the rows of the other side.
            answer: ``[B]``, the answers' ids, where all nodes are candidates.
            weight: ``[B]``, of each edge's loss.
            self_negatives: with ``model.self_negs``; else None.
        """
        none = self._work.take("no own", 1)
        more = (none, none) if self_negatives is None else (self_negatives.scores, self_negatives.gradient)
        apart, by_apart = self._apart(layout, queries, candidates)
        tensors = (queries.norm, queries.bias, queries.sums, queries.by_bias, apart, by_apart, *more, answer, weight)
        arrays = QueryArrays(*(tensor.numpy() for tensor in tensors))
        # All views are made before the first product: after one, the caches hold no Python objects any more, and an
        # operation on views takes 20 times as long.
        groups = [self._views(layout, queries, candidates, answer, *span) for span in self._spans(layout)]
        loss = 0.0
        for group in groups:
            columns = self._columns(layout, candidates, group)
            loss += self._gradients(group, layout.chunk_size, columns, arrays)
            group.backward()
            for target, sums, needed in (
                (candidates.sums, columns[2], self._distances),
                (candidates.by_bias, columns[3], self._biased),
            ):
                if needed:
                    self._of_group(layout, target, group).add_(sums)
        if self._answer == score_kernels.LISTED:
            candidates.gradient[: layout.edges].zero_()  # the answers are among all nodes
        if self._answer == score_kernels.APART:
            self._apart_backward(layout, queries, candidates, by_apart)
        return loss

    def _spans(self, layout: BatchLayout) -> list[tuple[int, int]]:
        """Return the chunks that are computed together; a large chunk is alone, and so is an incomplete one."""
        columns = layout.uniform + (0 if self._skip else layout.chunk_size)
        each = max(1, BLOCK // max(1, layout.chunk_size * columns))
        spans = [(begin, min(begin + each, layout.full)) for begin in range(0, layout.full, each)]
        return spans + ([(layout.full, layout.chunks)] if layout.chunks > layout.full else [])

    def _views(
        self, layout: BatchLayout, queries: Operand, candidates: Operand, answer: Tensor, begin: int, end: int
    ) -> ChunkGroup:
        """Return what is computed for a group of chunks; the rows of a large chunk take turns."""
        rows = ChunkOperands(
            layout.of_edges(queries.factor, begin, end, spread=queries.spread),
            layout.of_rows(candidates.factor, begin, end, self._skip),
            layout.of_edges(queries.gradient, begin, end, spread=False),
            layout.of_rows(candidates.gradient, begin, end, self._skip),
        )
        (chunks, chunk_size, width), count = rows.queries.shape, rows.candidates.size(1)
        if not (self._work.rounded and chunks == 1 and chunk_size * count >= ROUNDED):
            each = chunk_size if chunks > 1 else max(ROWS, LARGE // max(1, count))
            return ChunkGroup(begin, end, rows, self._work.product("scores", chunks, chunk_size, count), each)
        if self._answer == score_kernels.LISTED:
            answers = answers_in(answer, count)
        else:
            answers = (answers_first if self._answer == score_kernels.DIAGONAL else answers_apart)(chunk_size, count)
        by_answer = self._work.take("by apart", layout.edges)[begin * layout.chunk_size :].numpy()
        key = chunk_size, count, width
        if key not in self._integers:  # chunks are of few sizes
            self._integers[key] = IntegerBuffers(*key, max(FEW, BLOCK // count), self._work)
        return RoundedChunk(begin, rows, answers, by_answer, self._integers[key])

    def _gradients(self, group: ChunkGroup, chunk_size: int, columns: list[Tensor], queries: QueryArrays) -> float:
        """Turn the scores of a group of chunks into the gradient by them; return the loss."""
        candidates = CandidateArrays(*(column.numpy() for column in columns))
        scratch = [self._work.take(name, group.columns + 1).numpy() for name in ("a row", "another row")]
        loss = 0.0
        group.prepare()
        for block in group.blocks:
            numbers = BlockQueries(group.begin * chunk_size + block.first, chunk_size, block.first)
            arrays = block.products(), numbers, queries, candidates
            loss += score_kernels.loss_and_gradient(*arrays, self._settings, *scratch)
            block.backward()
        return loss

    # ---------------------------------------------------------------------------------- distances, biases, answers

    def _of_group(self, layout: BatchLayout, values: Tensor, group: ChunkGroup) -> Tensor:
        """View ``[Z]`` values of candidates as ``[G, K]``."""
        return layout.of_rows(values.unsqueeze(1), group.begin, group.end, self._skip).squeeze(2)

    def _columns(self, layout: BatchLayout, candidates: Operand, group: ChunkGroup) -> list[Tensor]:
        """Return norms and biases of candidates ``[G, K]``, and buffers for their sums and gradients."""
        take, none = self._work.take, self._work.take("no columns", 1, 1)
        shape = layout.of_rows(candidates.rows, group.begin, group.end, self._skip).shape[:2]
        norm = bias = sums = by_bias = none
        if self._distances:
            norm = take("column norm", *shape).copy_(self._of_group(layout, candidates.norm, group))
            sums = take("column sum", *shape).zero_()
        if self._biased:
            bias = take("column bias", *shape).copy_(self._of_group(layout, candidates.bias, group))
            by_bias = take("column bias gradient", *shape).zero_()
        return [norm, bias, sums, by_bias]

    def _apart(self, layout: BatchLayout, queries: Operand, candidates: Operand) -> tuple[Tensor, Tensor]:
        """Return the scores of answers that are not among the candidates, and a buffer for the gradient by them."""
        apart, by_apart = self._work.take("apart", layout.edges), self._work.take("by apart", layout.edges)
        if self._answer != score_kernels.APART:
            return apart, by_apart
        row_kernels.pairs(compact(self._work, layout, queries).numpy(), candidates.rows.numpy(), layout, apart.numpy())
        if self._distances:
            squared = (queries.norm + candidates.norm[layout.spots]).sub_(apart, alpha=2)
            apart.copy_(
                -squared if self._comparator == score_kernels.SQUARED else -squared.clamp(min=score_kernels.TINY).sqrt()
            )
            self._distance = apart.clone()
        if self._biased:
            apart.add_(queries.bias).add_(candidates.bias[layout.spots])
        return apart, by_apart

    def _apart_backward(self, layout: BatchLayout, queries: Operand, candidates: Operand, by_apart: Tensor) -> None:
        """Propagate the gradients by the scores of :meth:`_apart`."""
        if self._biased:
            candidates.by_bias.index_add_(0, layout.spots, by_apart)
        product = by_apart
        if self._comparator == score_kernels.SQUARED:
            product = 2 * by_apart
        elif self._comparator == score_kernels.ROOT:
            # The same threshold as in _by_product of the kernels, where float32 rounds sqrt(TINY).
            far = self._distance < -math.sqrt(score_kernels.TINY) * 1.0001
            product = torch.where(far, -by_apart / self._distance, 0)
        ends = compact(self._work, layout, queries).numpy(), candidates.rows.numpy()
        gradients = bits(queries.gradient), bits(candidates.gradient)
        row_kernels.pairs_backward(product.numpy(), *ends, layout, *gradients)
        if self._distances:
            queries.sums.add_(product)
            candidates.sums.index_add_(0, layout.spots, product)
