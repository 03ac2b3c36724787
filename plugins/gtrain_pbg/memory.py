"""What the workers of a machine have in the same memory."""

from __future__ import annotations

from gtrain.nn.recipe import ModelRecipe
from gtrain.strategy.group import Group
from gtrain.wire.addresses import ipc_folder
from gtrain.wire.shared import SharedTensors
from gtrain_pbg.optimizers import StepRules
from gtrain_pbg.step.relations import state_width
from gtrain_pbg.tables import Layout

NAME = "pbg"


def relations_layout(recipe: ModelRecipe, rules: StepRules | None) -> Layout:
    """Relation parameters by name, and, where rules change them, ``<name>.state`` with what those keep."""
    layout: Layout = {}
    for name, parameter in recipe.parameters.items():
        layout[name] = tuple(parameter.shape), parameter.dtype
        if rules is not None:
            columns = state_width(rules.relations.kind, parameter[0].numel())
            layout[f"{name}.state"] = (len(parameter), columns), parameter.dtype
    return layout


def in_memory_of_all(machine: Group, layout: Layout, timeout_seconds: float) -> SharedTensors:
    """Tensors that all workers of a machine have; its first makes them.

    Args:
        machine: the workers.
        layout: shapes and dtypes by name.
        timeout_seconds: how long to wait for them.
    """
    if machine.rank > 0:
        return SharedTensors.attach(machine.broadcast_object(None), NAME, timeout_seconds)
    folder = ipc_folder()
    shared = SharedTensors.create(folder.path, NAME, layout)
    machine.broadcast_object(str(folder.path))
    return shared
