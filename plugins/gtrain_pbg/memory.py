"""Memory that the workers of a machine share: relation parameters and their optimizer state."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gtrain.nn.recipe import ModelRecipe
from gtrain.strategy.group import Group
from gtrain.wire.shared import SharedDirectory, SharedTensors
from gtrain_pbg.step.relations import state_width
from gtrain_pbg.tables import TensorShapes
from gtrain_pbg.training import StepRules

NAME = "pbg"


def relation_shapes(recipe: ModelRecipe, rules: StepRules | None) -> TensorShapes:
    """Return the shapes of relation parameters by name and, with rules, of their optimizer state, ``<name>.state``."""
    shapes: TensorShapes = {}
    for name, parameter in recipe.parameters.items():
        shapes[name] = tuple(parameter.shape), parameter.dtype
        if rules is not None:
            columns = state_width(rules.relations.name, parameter[0].numel())
            shapes[f"{name}.state"] = (len(parameter), columns), parameter.dtype
    return shapes


def share_memory(machine: Group, shapes: TensorShapes, timeout_seconds: float) -> SharedTensors:
    """Allocate tensors that all workers of a machine share; rank 0 of the machine makes them.

    Args:
        machine: the workers.
        shapes: shapes and dtypes by name.
        timeout_seconds: how long to wait for them.
    """
    if machine.rank > 0:
        return SharedTensors.attach(machine.broadcast_object(None), NAME, timeout_seconds)
    directory = SharedDirectory()
    shared = SharedTensors.create(directory.name, NAME, shapes)
    machine.broadcast_object(directory.name)
    return shared


def fill_relations(shared: Mapping[str, Tensor], recipe: ModelRecipe, start: float) -> None:
    """Set relation parameters to the model's values, and their optimizer state to its initial value."""
    for name, parameter in recipe.parameters.items():
        shared[name].copy_(parameter.detach())
        if f"{name}.state" in shared:
            shared[f"{name}.state"].fill_(start)
