"""The sizes of a model's tables, which a run logs before it takes their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gtrain.errors import GtrainError
from gtrain.graph.store import Store
from gtrain.nn import deferred, tables
from gtrain.plan.workload import number_bytes, row_states, table_states
from gtrain.run import build
from gtrain.run.sketch import has_plain_constructor
from gtrain.units import size

_NAMED = 3
"""Tables that the line names; the others are counted."""


def table_sizes(config: Mapping[str, Any], store: Store) -> str | None:
    """Return a line with rows and columns of the tables of a job's model, and their bytes; None without tables.

    The model is built without the rows of its tables. Models of users, whose constructors may do anything, have no
    line.

    Args:
        config: the configuration.
        store: the graph.
    """
    settings = dict(config["model"])
    if not has_plain_constructor(build.find_target(settings.get("_target_"), "model")):
        return None
    try:
        # The model that trains is built next, and draws the same random numbers.
        with deferred(), torch.random.fork_rng(devices=[]):
            specs = [layer.table for _, layer in tables(build.make_model(settings, store))]
    except GtrainError:
        return None  # raised again when the model is built
    if not specs:
        return None
    largest = sorted(specs, key=lambda spec: -spec.rows * spec.dim)
    names = [f"{spec.name} {spec.rows:,} x {spec.dim}" for spec in largest[:_NAMED]]
    if len(specs) > _NAMED:
        names.append(f"{len(specs) - _NAMED} more")
    item = number_bytes(str(config["trainer"]["precision"]))
    rows = sum(spec.rows * spec.dim for spec in specs) * item
    text = f"{'table' if len(specs) == 1 else 'tables'} {', '.join(names)}: {size(rows)}"
    if config["verb"] != "train":
        return f"{text} over all ranks"
    whole = rows * (1 + table_states(config)) + row_states(config) * sum(spec.rows for spec in specs) * item
    return (
        f"{text}, with the optimizer's state {size(whole)} over all ranks; a checkpoint takes at most the same on disk"
    )
