"""Batches trained chunk by chunk: from rows to their gradients, all is computed while it is in the caches.

Chunks that are too large for them are left to torch's products (:mod:`gtrain_pbg.step.scores`), and so are models that
need more than rows, operators of columns, and inner products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.kernels import chunks as kernels
from gtrain_pbg.kernels.tiles import has_words, padded
from gtrain_pbg.step.batch import EdgeBatch, PartitionRows
from gtrain_pbg.step.layout import Floats, Workspace
from gtrain_pbg.step.relations import OPERATOR_CODES, RelationOperator, UpdateRule
from gtrain_pbg.step.scores import LOSSES

MOST = 1 << 27
"""Multiplications for a chunk's scores, at most: where there are more, torch is as fast, or faster (int8, AMX)."""


def fits(recipe: EdgeRecipe, work: Workspace) -> bool:
    """Whether :class:`ChunkTraining` trains this model, and is the faster way."""
    small = recipe.places * (recipe.places + recipe.num_uniform_negs) * recipe.dimension <= MOST
    own_rows = recipe.bags == (None, None) and recipe.shifts is None and recipe.max_norm is None and not recipe.bias
    by_column = recipe.operator in OPERATOR_CODES and (recipe.reciprocal or not recipe.forwards)
    inner = recipe.comparator == "dot" and not recipe.n3
    answers = recipe.num_batch_negs > 0 and not recipe.all_negs and not recipe.self_negs
    return small and own_rows and by_column and inner and answers and (has_words() or not work.low)


class ChunkTraining:
    """Computes a batch's loss, changes its rows, and adds up gradients by the parameters of operators.

    Args:
        recipe: one that fits.
        operators: of heads that are given, and of tails; None: there is none.
        work: buffers.
    """

    def __init__(
        self, recipe: EdgeRecipe, operators: tuple[RelationOperator | None, RelationOperator | None], work: Workspace
    ) -> None:
        self._recipe, self._work = recipe, work
        self._none: Floats = np.empty((1, 1), dtype=torch.empty(0, dtype=work.dtype).numpy().dtype)
        self._operators = tuple(self._operator(operator) for operator in operators)
        m, count = recipe.places, recipe.places + recipe.num_uniform_negs
        self._width = self._padded(recipe.dimension)
        self._ends = [(self._array(count), self._array(count), self._array(m)) for _ in (0, 1)]
        self._scratch = self._make_scratch(m, count)
        self._count: Floats = np.zeros((2, 1), dtype=np.int64)

    def __call__(
        self, batch: EdgeBatch, tables: tuple[PartitionRows, PartitionRows], weight: Tensor, rule: UpdateRule
    ) -> float:
        """Train on a batch.

        Args:
            batch: the edges.
            tables: rows of heads and of tails.
            weight: ``[B]``, of each edge's loss.
            rule: the tables' optimizer.

        Returns:
            The weighted loss.
        """
        recipe = self._recipe
        sums = self._sums(batch, tables)
        ends: list[Any] = []
        given = zip(tables, (batch.heads, batch.tails), batch.drawn, sums, self._ends, strict=True)
        for (table, ids, drawn, own, room), replaced in zip(given, (recipe.head_negs, recipe.tail_negs), strict=True):
            ends.append(kernels.Endpoint(table.value.numpy(), ids.numpy(), drawn.numpy(), own, replaced, *room))
        loss = kernels.LossSettings(LOSSES[recipe.loss], recipe.margin, weight.numpy())
        arguments: list[Any] = [tuple(ends), self._operators, batch.relation.numpy(), recipe.places]
        lost: float = kernels.train_chunks(*arguments, recipe.num_uniform_negs, loss, self._scratch)
        for table, own in zip(tables, sums, strict=True):
            kernels.apply_sums(own, table.value.numpy(), table.state.numpy(), *rule.numbers)
        return lost

    def _sums(self, batch: EdgeBatch, tables: tuple[PartitionRows, PartitionRows]) -> list[kernels.GradientSums]:
        """Room for gradients: the same for both ends where their table is."""
        same = tables[0].value.data_ptr() == tables[1].value.data_ptr()
        found: list[kernels.GradientSums] = []
        for end, table in enumerate(tables):
            if end and same:
                return found * 2
            most = min(len(table.value), (len(batch) + batch.drawn[end].numel()) * (1 + same))
            rows = self._work.take(f"summed {end}", most, dtype=torch.int64)
            gradient = self._work.take(f"sums {end}", most, self._width)
            found.append(kernels.GradientSums(table.head.numpy(), rows.numpy(), self._count[end], gradient.numpy()))
        return found

    def _operator(self, operator: RelationOperator | None) -> kernels.OperatorArrays:
        if operator is None or not operator.weights:
            return kernels.OperatorArrays(OPERATOR_CODES["none"], *[self._none] * 4)
        first, *rest = operator.weights.values()
        second = rest[0] if rest else first
        pair = (first, second)
        arrays = [weights.value.numpy() for weights in pair] + [weights.gradient.numpy() for weights in pair]
        return kernels.OperatorArrays(OPERATOR_CODES[operator.name], *arrays)

    def _make_scratch(self, m: int, count: int) -> kernels.Scratch:
        """Room for what is computed of m edges and ``count`` candidates."""
        columns, wide, none = self._recipe.dimension, self._padded(count), self._none
        score, query, by_query = np.zeros((m, wide), dtype=none.dtype), self._array(m), self._array(m)
        if not self._work.low:
            turned = np.zeros((columns, wide), dtype=none.dtype)
            return kernels.Scratch(query, score, by_query, none, none, none, turned, none, none, none)
        pairs = -(-columns // 2)
        shapes = [(m, pairs), (-(-m // 2), self._width), (count, pairs), (pairs, wide)]
        shapes += [(-(-count // 2), self._width), (m, -(-count // 2)), (-(-m // 2), wide)]
        return kernels.Scratch(query, score, by_query, *(np.zeros(shape, dtype=np.uint32) for shape in shapes))

    def _padded(self, columns: int) -> int:
        return padded(columns, self._none.itemsize)

    def _array(self, rows: int) -> Floats:
        return np.zeros((rows, self._width), dtype=self._none.dtype)
