"""A worker's training on the edges of a bucket, once both of its partitions are in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import DataError
from gtrain.nn.recipe import ModelRecipe
from gtrain_pbg.edges import EdgeList, RelationGroups
from gtrain_pbg.optimizers import StepRules
from gtrain_pbg.step.layout import EdgeBatch, PartitionRows
from gtrain_pbg.step.relations import RelationWeights
from gtrain_pbg.step.training import TrainingStep
from gtrain_pbg.swaps import ScheduledBucket
from gtrain_pbg.typed import TypedTables

HELD = 500
"""Edges that were held back which are ranked at a time, among each other and twice as many nodes."""


class BucketTraining:
    """Trains on batches, each of one group of relations, and ranks edges that were held back.

    Args:
        module: the model.
        recipe: what it computes.
        rules: of its optimizers.
        shared: relation parameters, and what their optimizer keeps, by name.
        tables: of all entity types.
        matmul: number format of matrix products, one of :data:`~gtrain_pbg.step.arithmetic.FORMATS`.

    Attributes:
        matmul: the same, or float64 where the tables are.
    """

    def __init__(
        self,
        module: Any,
        recipe: ModelRecipe,
        rules: StepRules,
        shared: Mapping[str, Tensor],
        tables: TypedTables,
        matmul: str,
    ) -> None:
        self._module, self._recipe, self._rules, self._tables = module, recipe, rules, tables
        weights = {name: RelationWeights(shared[name], shared[f"{name}.state"]) for name in recipe.parameters}
        self._groups, self._weights = RelationGroups(recipe), weights
        self.use(matmul)
        self._drawn: dict[str, Tensor] = {}
        self._held = torch.zeros(3, dtype=torch.float64)  # reciprocal ranks before, after, and how many

    def use(self, matmul: str) -> None:
        """Compute the following batches with products in this number format; those of float64 stay in float64."""
        double = self._tables.dtype == torch.float64
        self.matmul = "float64" if double else matmul
        self._steps: list[TrainingStep] = []
        for number, group in enumerate(self._recipe.groups):
            own = {name: self._weights[common] for name, common in self._recipe.names_of(number).items()}
            work = self._steps[0].work if self._steps else None
            self._steps.append(TrainingStep(group, own, self._tables.dtype, matmul, work))

    def train(self, batches: list[EdgeList], visit: ScheduledBucket) -> tuple[float, float]:
        """Train on batches of a bucket; return the weighted sum of the losses, and of the weights.

        Raises:
            DataError: a loss is no number.
        """
        table_rule, relation_rule = self._rules.table, self._rules.relations
        total = weight = 0.0
        for edges in batches:
            number = self._groups.of(edges)
            batch, heads, tails = self._batch(number, edges, visit)
            lost, counted = self._steps[number](batch, heads, tails, table_rule, relation_rule)
            if not math.isfinite(lost):
                raise DataError(
                    f"the loss of a batch of bucket {visit.bucket} is {lost}.",
                    hint="lower model.sparse_optimizer.lr or model.init_scale, set model.max_norm, and look for "
                    "weights that are no numbers in the data.",
                )
            total, weight = total + lost, weight + counted
        return total, weight

    def score_before(self, held: EdgeList, visit: ScheduledBucket) -> None:
        """Rank edges that were held back, before their bucket is trained."""
        self._held[0] += self._score(held, visit)

    def score_after(self, held: EdgeList, visit: ScheduledBucket) -> None:
        """Rank them again after it."""
        self._held += torch.tensor([0.0, self._score(held, visit), 2.0 * len(held)])

    def take_held_out(self) -> Tensor:
        """Reciprocal ranks before and after and their number, float64 ``[3]``, summed since this was last asked."""
        ranks = self._held.clone()
        self._held.zero_()
        return ranks

    def _score(self, edges: EdgeList, visit: ScheduledBucket) -> float:
        """Sum of the reciprocal ranks of both ends of edges, among each other and nodes drawn from both partitions."""
        generator, total = torch.Generator().manual_seed(0), 0.0
        for number, every in self._groups.split(edges):
            heads, tails = self._rows(number, visit)
            every = self._localized(number, every, visit)
            for begin in range(0, len(every), HELD):
                some = every.select(slice(begin, begin + HELD))
                drawn = [rows.read(torch.randperm(rows.count, generator=generator)[:HELD]) for rows in (heads, tails)]
                with torch.no_grad():
                    ends = heads.read(some.heads), tails.read(some.tails)
                    ranks = self._module.sampled_ranks(ends, some.relation, (drawn[0], drawn[1]), number)
                total += float(torch.cat(ranks).reciprocal().sum())
        return total

    def _rows(self, number: int, visit: ScheduledBucket) -> tuple[PartitionRows, PartitionRows]:
        """The tables that a group's edges of a bucket refer to."""
        group = self._recipe.groups[number]
        ends = (self._tables.rows(kind, end, visit) for end, kind in enumerate(group.types))
        heads, tails = (replace(rows, bags=bags) for rows, bags in zip(ends, group.bags, strict=True))
        return heads, tails

    def _localized(self, number: int, edges: EdgeList, visit: ScheduledBucket) -> EdgeList:
        """A group's edges by rows of these tables and numbers among its relations."""
        lhs, rhs = self._recipe.groups[number].types
        return self._groups.localized(edges, self._tables.begin(lhs, 0, visit), self._tables.begin(rhs, 1, visit))

    def _batch(
        self, number: int, edges: EdgeList, visit: ScheduledBucket
    ) -> tuple[EdgeBatch, PartitionRows, PartitionRows]:
        heads, tails = self._rows(number, visit)
        count = self._steps[number].draws(len(edges))
        drawn = self._draw("heads", heads.count, count), self._draw("tails", tails.count, count)
        own = self._localized(number, edges, visit)
        return EdgeBatch(own.heads, own.relation, own.tails, own.weight, drawn), heads, tails

    def _draw(self, name: str, nodes: int, count: int) -> Tensor:
        held = self._drawn.get(name)
        if held is None or held.numel() < count:
            held = self._drawn[name] = torch.empty(count, dtype=torch.int64)
        return torch.randint(nodes, (count,), out=held[:count])


def held_out(ranks: Tensor) -> dict[str, float]:
    """Mean reciprocal ranks of all that was held back, by the name under which they are logged."""
    before, after, count = ranks.tolist()
    return {"held_out_mrr_before": before / max(count, 1), "held_out_mrr": after / max(count, 1)}
