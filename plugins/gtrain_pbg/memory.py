"""What the workers of a machine have in the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gtrain.nn.recipe import ModelRecipe
from gtrain.strategy.group import Group
from gtrain.wire.shared import SharedDirectory, SharedTensors
from gtrain_pbg.optimizers import StepRules
from gtrain_pbg.step.relations import state_width
from gtrain_pbg.tables import TensorShapes

NAME = "pbg"
RELATIONS = "relations.pt"


def relations_layout(recipe: ModelRecipe, rules: StepRules | None) -> TensorShapes:
    """Relation parameters by name, and, where rules change them, ``<name>.state`` with what those keep."""
    layout: TensorShapes = {}
    for name, parameter in recipe.parameters.items():
        layout[name] = tuple(parameter.shape), parameter.dtype
        if rules is not None:
            columns = state_width(rules.relations.name, parameter[0].numel())
            layout[f"{name}.state"] = (len(parameter), columns), parameter.dtype
    return layout


def share_memory(machine: Group, layout: TensorShapes, timeout_seconds: float) -> SharedTensors:
    """Tensors that all workers of a machine have; its first makes them.

    Args:
        machine: the workers.
        layout: shapes and dtypes by name.
        timeout_seconds: how long to wait for them.
    """
    if machine.rank > 0:
        return SharedTensors.attach(machine.broadcast_object(None), NAME, timeout_seconds)
    directory = SharedDirectory()
    shared = SharedTensors.create(directory.name, NAME, layout)
    machine.broadcast_object(directory.name)
    return shared


def fill_relations(shared: Mapping[str, Tensor], recipe: ModelRecipe, start: float) -> None:
    """Give relation parameters the model's values, and what optimizers keep of them its first value."""
    for name, parameter in recipe.parameters.items():
        shared[name].copy_(parameter.detach())
        if f"{name}.state" in shared:
            shared[f"{name}.state"].fill_(start)


def save_states(folder: Path, shared: Mapping[str, Tensor], recipe: ModelRecipe) -> None:
    """Write what optimizers keep of relation parameters into a checkpoint."""
    states = {f"{name}.state" for name in recipe.parameters} & set(shared)
    torch.save({name: shared[name].clone() for name in sorted(states)}, folder / RELATIONS)


def load_states(folder: Path, shared: Mapping[str, Tensor]) -> None:
    """Take back what :func:`save_states` wrote, if the checkpoint has it."""
    path = folder / RELATIONS
    for name, state in (torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}).items():
        if name in shared:
            shared[name].copy_(state)
