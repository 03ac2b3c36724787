"""A worker's training on the edges of a bucket, the update rules of its optimizers, and the memory of relations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gtrain.errors import ConfigError, DataError
from gtrain.nn import JointOptimizer, RowOptimizer
from gtrain.nn.recipe import ModelRecipe
from gtrain_pbg.buckets import Bucket, ScheduledBucket
from gtrain_pbg.edges import EdgeList, RelationGroups
from gtrain_pbg.step.layout import EdgeBatch, PartitionRows
from gtrain_pbg.step.relations import KERNEL_RULES, RelationWeights, UpdateRule, state_width
from gtrain_pbg.step.training import TrainingStep
from gtrain_pbg.tables import TensorShapes
from gtrain_pbg.typed import TypedTables

HELD = 500
"""Held-out edges that are ranked at a time, among each other and twice as many nodes."""


class StepRules:
    """The update rules of the module's optimizers, read in every step: schedulers change learning rates.

    Args:
        optimizers: of the module.
        recipe: of the module.

    Raises:
        ConfigError: the training step does not know the rule of an optimizer.
    """

    def __init__(self, optimizers: Sequence[Optimizer], recipe: ModelRecipe) -> None:
        self._table = _find(optimizers, [table.weight for table in recipe.tables.values()], "model.sparse_optimizer")
        parameters = list(recipe.parameters.values())
        self._relations = _find(optimizers, parameters, "model.optimizer") if parameters else self._table

    @property
    def table(self) -> UpdateRule:
        """The table's current rule."""
        return _rule(*self._table)

    @property
    def relations(self) -> UpdateRule:
        """The relation parameters' current rule."""
        return _rule(*self._relations)

    @property
    def initial_states(self) -> tuple[float, float]:
        """The initial value of the optimizer state of the table, and of the relations."""
        table, relations = (group.get("initial_accumulator", 0.0) for _, group in (self._table, self._relations))
        return table, relations


def _rule(name: str, group: dict[str, Any]) -> UpdateRule:
    return UpdateRule(name, group["lr"], group.get("eps", 0.0), group["weight_decay"])


def _find(optimizers: Sequence[Optimizer], parameters: list[Any], key: str) -> tuple[str, dict[str, Any]]:
    """Return the rule and the parameter group of the optimizer that has these parameters."""
    parts = [
        part
        for optimizer in optimizers
        for part in (optimizer.parts if isinstance(optimizer, JointOptimizer) else [optimizer])
    ]
    ids = {id(parameter) for parameter in parameters}
    for part in parts:
        for group in part.param_groups:
            if ids <= {id(parameter) for parameter in group["params"]}:
                if isinstance(part, RowOptimizer) and part.rule.name in KERNEL_RULES:
                    return part.rule.name, group
                raise ConfigError(
                    f"{key} made a {type(part).__name__}; strategy=pbg trains with gtrain.nn.RowwiseAdagrad, Adagrad "
                    "and SGD.",
                    hint=f"set {key}._target_=gtrain.nn.Adagrad, or strategy=single.",
                )
    raise ConfigError(
        f"no group of the module's optimizers has all parameters that {key} is for.",
        hint="give one optimizer the table, and one all other parameters.",
    )


def relation_shapes(recipe: ModelRecipe, rules: StepRules | None) -> TensorShapes:
    """Return the shapes of relation parameters by name and, with rules, of their optimizer state, ``<name>.state``."""
    shapes: TensorShapes = {}
    for name, parameter in recipe.parameters.items():
        shapes[name] = tuple(parameter.shape), parameter.dtype
        if rules is not None:
            columns = state_width(rules.relations.name, parameter[0].numel())
            shapes[f"{name}.state"] = (len(parameter), columns), parameter.dtype
    return shapes


def fill_relations(shared: Mapping[str, Tensor], recipe: ModelRecipe, start: float) -> None:
    """Set relation parameters to the model's values, and their optimizer state to its initial value."""
    for name, parameter in recipe.parameters.items():
        shared[name].copy_(parameter.detach())
        if f"{name}.state" in shared:
            shared[f"{name}.state"].fill_(start)


class BucketTraining:
    """Trains on batches, each of one group of relations, and ranks held-out edges.

    Args:
        module: the model.
        recipe: of the model.
        rules: of its optimizers.
        shared: relation parameters and their optimizer state, by name.
        tables: of all entity types.
        matmul: number format of matrix products, one of :data:`~gtrain_pbg.step.matmul_format.FORMATS`.

    Attributes:
        matmul: the same, or float64 if the tables are.
        is_fast: whether training takes no longer than reading the edges, which are then read ahead.
    """

    is_fast = False

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
        self._weights = {name: RelationWeights(shared[name], shared[f"{name}.state"]) for name in recipe.parameters}
        self._groups = RelationGroups(recipe)
        self.use(matmul)
        self._buffers: dict[str, Tensor] = {}
        self._held = torch.zeros(3, dtype=torch.float64)  # reciprocal ranks before, after, and their number

    def use(self, matmul: str) -> None:
        """Compute the products of later batches in this number format; those of float64 stay in float64."""
        dtype = self._tables.dtype
        self.matmul = "float64" if dtype == torch.float64 else matmul
        self._steps: list[TrainingStep] = []
        for number, group in enumerate(self._recipe.groups):
            weights = {name: self._weights[common] for name, common in self._recipe.names_of(number).items()}
            self._steps.append(
                TrainingStep(group, weights, dtype, matmul, self._steps[0].work if self._steps else None)
            )

    def train(
        self, batches: list[EdgeList], scheduled: ScheduledBucket, following: list[EdgeList] | None = None
    ) -> tuple[float, float]:
        """Train on batches of a bucket; return the weighted sum of the losses, and the sum of the weights.

        Args:
            batches: each of one group of relations.
            scheduled: the bucket.
            following: batches of the next call, if it is of the same bucket; a device prepares them ahead.

        Raises:
            DataError: a loss is NaN or infinite.
        """
        rules = self._rules.table, self._rules.relations
        total = weight = 0.0
        for edges in batches:
            number = self._groups.of(edges)
            ends = heads, tails = self._rows(number, scheduled)
            count = self._steps[number].draws(len(edges))
            drawn = self._draw("heads", heads.count, count), self._draw("tails", tails.count, count)
            local = self._localized(number, edges, scheduled)
            batch = EdgeBatch(local.heads, local.relation, local.tails, local.weight, drawn)
            lost, counted = self._steps[number](batch, *ends, *rules)
            if not math.isfinite(lost):
                raise diverged(scheduled.bucket, lost)
            total, weight = total + lost, weight + counted
        return total, weight

    def drain(self) -> tuple[float, float]:
        """Return the sums of losses and weights that :meth:`train` has not returned yet; a CPU leaves none."""
        return 0.0, 0.0

    def score_before(self, held: EdgeList, scheduled: ScheduledBucket) -> None:
        """Rank held-out edges before their bucket is trained."""
        self._held[0] += self._score(held, scheduled)

    def score_after(self, held: EdgeList, scheduled: ScheduledBucket) -> None:
        """Rank them again after it."""
        self._held += torch.tensor([0.0, self._score(held, scheduled), 2.0 * len(held)])

    def take_held_out(self) -> Tensor:
        """Return the sums of reciprocal ranks before and after, and their number, float64 ``[3]``; reset them."""
        ranks = self._held.clone()
        self._held.zero_()
        return ranks

    def _score(self, held: EdgeList, scheduled: ScheduledBucket) -> float:
        """Sum the reciprocal ranks of both ends of edges, among each other and nodes drawn from both partitions."""
        # A fixed seed: the same nodes before and after training, so that the two ranks can be compared.
        generator, total = torch.Generator().manual_seed(0), 0.0
        for number, members in self._groups.split(held):
            heads, tails = self._rows(number, scheduled)
            members = self._localized(number, members, scheduled)
            for begin in range(0, len(members), HELD):
                edges = self._to_device(members.select(slice(begin, begin + HELD)))
                drawn = [
                    rows.read(torch.randperm(rows.count, generator=generator)[:HELD].to(edges.heads.device))
                    for rows in (heads, tails)
                ]
                with torch.no_grad():
                    ends = heads.read(edges.heads), tails.read(edges.tails)
                    ranks = self._module.sampled_ranks(ends, edges.relation, (drawn[0], drawn[1]), number)
                total += float(torch.cat(ranks).reciprocal().sum())
        return total

    def _to_device(self, edges: EdgeList) -> EdgeList:
        """Return edges where the tables are."""
        return edges

    def _rows(self, number: int, scheduled: ScheduledBucket) -> tuple[PartitionRows, PartitionRows]:
        """Return the rows that a group's edges of a bucket refer to."""
        group = self._recipe.groups[number]
        heads, tails = (
            replace(self._tables.rows(entity_type, end, scheduled), bags=bags)
            for end, (entity_type, bags) in enumerate(zip(group.types, group.bags, strict=True))
        )
        return heads, tails

    def _localized(self, number: int, edges: EdgeList, scheduled: ScheduledBucket) -> EdgeList:
        """Number a group's edges by rows of these tables and by relations of the group."""
        lhs, rhs = self._recipe.groups[number].types
        begin = self._tables.begin
        return self._groups.localized(edges, begin(lhs, 0, scheduled), begin(rhs, 1, scheduled))

    def _draw(self, name: str, nodes: int, count: int) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[name] = torch.empty(count, dtype=torch.int64)
        # Drawn into a buffer that every batch reuses.
        return torch.randint(nodes, (count,), out=buffer[:count])


def diverged(bucket: Bucket, loss: float) -> DataError:
    """Return the error of a loss that is NaN or infinite."""
    return DataError(
        f"the loss of a batch of bucket {bucket} is {loss}: training diverged, or the data contains NaN or inf.",
        hint="lower model.sparse_optimizer.lr or model.init_scale, set model.max_norm, and check the weights in the "
        "data.",
    )


def held_out(ranks: Tensor) -> dict[str, float]:
    """Return the mean reciprocal ranks of held-out edges as metrics."""
    before, after, count = ranks.tolist()
    return {"held_out_mrr_before": before / max(count, 1), "held_out_mrr": after / max(count, 1)}
