"""The rules by which the module's optimizers change the table and the relations, read anew in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from gtrain.errors import ConfigError
from gtrain.nn import JointOptimizer, RowOptimizer
from gtrain.nn.recipe import ModelRecipe
from gtrain_pbg.step.relations import KERNEL_RULES, UpdateRule


class StepRules:
    """What the optimizers say: learning rates change from epoch to epoch, so groups are asked each time.

    Args:
        optimizers: the module's.
        recipe: the module's.

    Raises:
        ConfigError: an optimizer is of a kind that the training step does not know.
    """

    def __init__(self, optimizers: Sequence[Optimizer], recipe: ModelRecipe) -> None:
        self._table = _find(optimizers, [table.weight for table in recipe.tables.values()], "model.sparse_optimizer")
        parameters = list(recipe.parameters.values())
        self._relations = _find(optimizers, parameters, "model.optimizer") if parameters else self._table

    @property
    def table(self) -> UpdateRule:
        """The table's rule, as it is now."""
        return _rule(*self._table)

    @property
    def relations(self) -> UpdateRule:
        """The relation parameters' rule, as it is now."""
        return _rule(*self._relations)

    @property
    def starts(self) -> tuple[float, float]:
        """What the state of the table and of the relations begins with."""
        table, relations = (group.get("initial_accumulator", 0.0) for _, group in (self._table, self._relations))
        return table, relations


def _rule(kind: str, group: dict[str, Any]) -> UpdateRule:
    return UpdateRule(kind, group["lr"], group.get("eps", 0.0), group["weight_decay"])


def _find(optimizers: Sequence[Optimizer], parameters: list[Any], key: str) -> tuple[str, dict[str, Any]]:
    """The rule and the group of the optimizer that has these parameters."""
    parts = [
        part
        for optimizer in optimizers
        for part in (optimizer.parts if isinstance(optimizer, JointOptimizer) else [optimizer])
    ]
    wanted = {id(parameter) for parameter in parameters}
    for part in parts:
        for group in part.param_groups:
            if wanted <= {id(parameter) for parameter in group["params"]}:
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
