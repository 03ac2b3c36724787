"""A worker's training on the edges of a bucket, once both of its partitions are in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import DataError
from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.edges import EdgeList
from gtrain_pbg.optimizers import StepRules
from gtrain_pbg.order import Bucket
from gtrain_pbg.step.relations import Weights
from gtrain_pbg.step.training import EdgeBatch, Rows, TrainingStep

HELD = 500
"""Edges that were held back which are ranked at a time, among each other and twice as many nodes."""


class BucketTraining:
    """Trains on batches, and ranks edges that were held back.

    Args:
        module: the model.
        recipe: what it computes.
        rules: of its optimizers.
        shared: relation parameters, and what their optimizer keeps, by name.
        dtype: of tables and parameters.
        low: whether products of matrices are in bfloat16.
    """

    def __init__(
        self,
        module: Any,
        recipe: EdgeRecipe,
        rules: StepRules,
        shared: Mapping[str, Tensor],
        dtype: torch.dtype,
        low: bool,
    ) -> None:
        self._module, self._rules = module, rules
        weights = {name: Weights(shared[name], shared[f"{name}.state"]) for name in recipe.parameters}
        self._step = TrainingStep(recipe, weights, dtype, low)
        self._drawn: dict[str, Tensor] = {}
        self._held = torch.zeros(3, dtype=torch.float64)  # reciprocal ranks before, after, and how many

    def train(self, bucket: Bucket, batches: list[EdgeList], heads: Rows, tails: Rows) -> tuple[float, float]:
        """Train on batches; return the weighted sum of the losses, and of the weights.

        Raises:
            DataError: a loss is no number.
        """
        table_rule, relation_rule = self._rules.table, self._rules.relations
        total = weight = 0.0
        for edges in batches:
            drawn = self._draw("heads", len(heads.value), edges), self._draw("tails", len(tails.value), edges)
            batch = EdgeBatch(edges.heads, edges.relation, edges.tails, edges.weight, drawn)
            lost, counted = self._step(batch, heads, tails, table_rule, relation_rule)
            if not math.isfinite(lost):
                raise DataError(
                    f"the loss of a batch of bucket {bucket} is {lost}.",
                    hint="lower model.sparse_optimizer.lr or model.init_scale, set model.max_norm, and look for "
                    "weights that are no numbers in the data.",
                )
            total, weight = total + lost, weight + counted
        return total, weight

    def score_before(self, held: EdgeList, heads: Rows, tails: Rows) -> None:
        """Rank edges that were held back, before their bucket is trained."""
        self._held[0] += self._score(held, heads, tails)

    def score_after(self, held: EdgeList, heads: Rows, tails: Rows) -> None:
        """Rank them again after it."""
        self._held += torch.tensor([0.0, self._score(held, heads, tails), 2.0 * len(held)])

    def take_held_out(self) -> Tensor:
        """Reciprocal ranks before and after and their number, float64 ``[3]``, summed since this was last asked."""
        found = self._held.clone()
        self._held.zero_()
        return found

    def _score(self, edges: EdgeList, heads: Rows, tails: Rows) -> float:
        """Sum of the reciprocal ranks of both ends of edges, among each other and nodes drawn from both partitions."""
        generator, found = torch.Generator().manual_seed(0), 0.0
        for begin in range(0, len(edges), HELD):
            some = edges.select(slice(begin, begin + HELD))
            drawn = [rows.value[torch.randperm(len(rows.value), generator=generator)[:HELD]] for rows in (heads, tails)]
            with torch.no_grad():
                ranks = self._module.sampled_ranks(
                    heads.value[some.heads], some.relation, tails.value[some.tails], torch.cat(drawn)
                )
            found += float(torch.cat(ranks).reciprocal().sum())
        return found

    def _draw(self, name: str, nodes: int, edges: EdgeList) -> Tensor:
        count = self._step.draws(len(edges))
        held = self._drawn.get(name)
        if held is None or held.numel() < count:
            held = self._drawn[name] = torch.empty(count, dtype=torch.int64)
        return torch.randint(nodes, (count,), out=held[:count])


def held_out(found: Tensor) -> dict[str, float]:
    """Mean reciprocal ranks of all that was held back, by the name under which they are logged."""
    before, after, count = found.tolist()
    return {"held_out_mrr_before": before / max(count, 1), "held_out_mrr": after / max(count, 1)}
