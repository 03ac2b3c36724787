"""Batches trained chunk by chunk in fused kernels, from rows to their gradients, while the caches hold a chunk.

Chunks too large for the caches use torch's products (:mod:`gtrain_pbg.step.scores`), and so do models that need more
than rows, operators that act on columns, and inner products.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.kernels import chunks as kernels
from gtrain_pbg.kernels.tiles import has_words, padded
from gtrain_pbg.kernels.updates import GradientSums, apply_sums
from gtrain_pbg.step.layout import Array, BatchLayout, EdgeBatch, PartitionRows, Workspace
from gtrain_pbg.step.relations import OPERATOR_CODES, RelationOperator, UpdateRule
from gtrain_pbg.step.scores import LOSSES

MOST = 1 << 27
"""Most multiplications for a chunk's scores: beyond it torch is as fast, or faster (int8, AMX)."""


def fits(recipe: EdgeRecipe, work: Workspace) -> bool:
    """Return whether :class:`ChunkTraining` can train this model, and is the faster way."""
    small = recipe.chunk_size * (recipe.chunk_size + recipe.num_uniform_negs) * recipe.dimension <= MOST
    plain_rows = recipe.bags == (None, None) and recipe.shifts is None and recipe.max_norm is None and not recipe.bias
    by_column = recipe.operator in OPERATOR_CODES and (recipe.reciprocal or not recipe.forwards)
    inner = recipe.comparator == "dot" and not recipe.has_edge_losses
    answers = recipe.num_batch_negs > 0 and not recipe.all_negs and not recipe.self_negs
    return small and plain_rows and by_column and inner and answers and (has_words() or not work.low)


class ChunkTraining:
    """Computes a batch's loss, updates its rows, and adds the gradients by the operators' parameters.

    Args:
        recipe: one that :func:`fits`.
        operators: of queries that are heads, and of queries that are tails.
        work: buffers.
    """

    def __init__(
        self, recipe: EdgeRecipe, operators: tuple[RelationOperator, RelationOperator], work: Workspace
    ) -> None:
        self._recipe, self._work = recipe, work
        self._operators = tuple(operator.arrays for operator in operators)
        m, count = recipe.chunk_size, recipe.chunk_size + recipe.num_uniform_negs
        self._width = self._padded(recipe.dimension)
        self._ends = [[self._zeros(rows, self._width) for rows in (count, count, m)] for _ in (0, 1)]
        self._scratch = self._make_scratch(m, count)
        self._count: Array = np.zeros((2, 1), dtype=np.int64)

    def __call__(
        self, batch: EdgeBatch, tables: tuple[PartitionRows, PartitionRows], weight: Tensor, rule: UpdateRule
    ) -> float:
        """Train on a batch.

        Args:
            batch: the edges.
            tables: rows of heads and of tails.
            weight: ``[B]``, of each edge's loss.
            rule: of the tables' optimizer.

        Returns:
            The weighted loss.
        """
        recipe, sums = self._recipe, self._sums(batch, tables)
        ends = tuple(
            kernels.Endpoint(table.value.numpy(), ids.numpy(), drawn.numpy(), end_sums, replaced, *buffers)
            for table, ids, drawn, end_sums, replaced, buffers in zip(
                tables,
                (batch.heads, batch.tails),
                batch.drawn,
                sums,
                (recipe.head_negs, recipe.tail_negs),
                self._ends,
                strict=True,
            )
        )
        loss = kernels.ChunkLoss(LOSSES[recipe.loss], recipe.margin, weight.numpy())
        layout = BatchLayout(recipe.chunk_size, recipe.num_uniform_negs, len(batch))
        lost: float = kernels.train_chunks(ends, self._operators, batch.relation.numpy(), layout, loss, self._scratch)
        for table, end_sums in zip(tables, sums, strict=True):
            apply_sums(end_sums, table.value.numpy(), table.state.numpy(), rule.numbers)
        return lost

    def _sums(self, batch: EdgeBatch, tables: tuple[PartitionRows, PartitionRows]) -> list[GradientSums]:
        """Return buffers for gradients: the same for both ends if their table is the same."""
        same = tables[0].value.data_ptr() == tables[1].value.data_ptr()
        sums: list[GradientSums] = []
        for end, table in enumerate(tables[:1] if same else tables):
            # At most one slot per row of the table, and per position of the batch.
            most = min(len(table.value), (len(batch) + batch.drawn[end].numel()) * (1 + same))
            rows = self._work.take(f"summed {end}", most, dtype=torch.int64)
            gradient = self._work.take(f"sums {end}", most, self._width)
            sums.append(GradientSums(table.head.numpy(), rows.numpy(), self._count[end], gradient.numpy()))
        return sums * 2 if same else sums

    def _make_scratch(self, m: int, count: int) -> kernels.Scratch:
        """Allocate buffers for m edges and ``count`` candidates."""
        columns, wide, none = self._recipe.dimension, self._padded(count), self._zeros(1, 1)
        query, score, by_query = self._zeros(m, self._width), self._zeros(m, wide), self._zeros(m, self._width)
        if not self._work.low:
            return kernels.Scratch(
                query, score, by_query, none, none, none, self._zeros(columns, wide), none, none, none
            )
        # Two bfloat16 per word, the last of an odd number padded.
        pairs = -(-columns // 2)
        shapes = [(m, pairs), (-(-m // 2), self._width), (count, pairs), (pairs, wide)]
        shapes += [(-(-count // 2), self._width), (m, -(-count // 2)), (-(-m // 2), wide)]
        return kernels.Scratch(query, score, by_query, *(np.zeros(shape, dtype=np.uint32) for shape in shapes))

    def _padded(self, columns: int) -> int:
        return padded(columns, self._work.dtype.itemsize)

    def _zeros(self, *shape: int) -> Array:
        return torch.zeros(shape, dtype=self._work.dtype).numpy()
