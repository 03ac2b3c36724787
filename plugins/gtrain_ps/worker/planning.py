"""How tables are cut among the servers, and by which rules these change them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from gtrain.errors import ConfigError
from gtrain.nn import Embedding, RowOptimizer, Table
from gtrain_ps.config import PsConfig
from gtrain_ps.costs import Load, Plan, choose, plans, shapes, table
from gtrain_ps.placement import Placement, spread
from gtrain_ps.worker.home import ServedHome

Rules = dict[str, tuple[str, dict[str, Any]]]
"""By a table's name: its rule, and the rule's numbers."""


def plan_of(
    name: str,
    layer: Table,
    settings: PsConfig,
    servers: int,
    wire: torch.dtype,
    look: Callable[[], tuple[Load, bool]],
    tell: bool,
) -> Plan:
    """How a table is cut, and what travels: as the settings say, or what moves fewest bytes in the first steps.

    Args:
        name: of the table.
        layer: that has it.
        settings: of the strategy.
        servers: P.
        wire: type in which products and gradients travel.
        look: what a worker asks of the table in the first steps, and whether entries have values other than 1.
        tell: whether to print what there is to choose from.
    """
    width = layer.table.dim
    if isinstance(layer, Embedding):  # looked up, row by row: ids would go to every block of columns
        return Plan("pull", *shapes("row", servers, width)[0])
    allowed = plans(settings.protocol, settings.split, servers, width)
    if len(allowed) == 1:
        return allowed[0]
    load, weighted = look()
    figures = load, width, layer.weight.dtype.itemsize if weighted else 0, wire.itemsize
    if tell:
        print(table(name, allowed, *figures), flush=True)
    return choose(allowed, *figures)


def placement_of(layer: Table, plan: Plan, settings: PsConfig) -> Placement:
    """Which server has what of a table that is cut so."""
    spec = layer.table
    multiplier = spread(spec.rows) if settings.blocks == "hash" else 1
    return Placement(spec.rows, spec.dim, plan.row_blocks, plan.column_blocks, multiplier)


def rules_of(homes: Mapping[str, ServedHome], optimizers: Iterable[Optimizer]) -> Rules:
    """Each table's rule, and its numbers at this moment.

    Raises:
        ConfigError: a table has no optimizer of ``gtrain.nn``.
    """
    return rules_of_tables({name: home.anchor for name, home in homes.items()}, optimizers)


def rules_of_tables(tables: Mapping[str, Parameter], optimizers: Iterable[Optimizer]) -> Rules:
    """The same for the parameters of tables, by their names.

    Raises:
        ConfigError: a table has no optimizer of ``gtrain.nn``.
    """
    names = {id(parameter): name for name, parameter in tables.items()}
    found = {}
    for optimizer in optimizers:
        for part in getattr(optimizer, "parts", [optimizer]):
            for group in part.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in names and isinstance(part, RowOptimizer):
                        numbers = {key: _plain(value) for key, value in group.items() if key != "params"}
                        found[names[id(parameter)]] = part.rule.name, numbers
    missing = [name for name, parameter in tables.items() if name not in found and parameter.requires_grad]
    if missing:
        raise ConfigError(
            f"the table {missing[0]} is on servers, and its optimizer is none of gtrain.nn's.",
            hint="set 'model.sparse_optimizer={_target_:gtrain.nn.RowwiseAdagrad,lr:0.1}' (or Adagrad, SGD, LazyAdam).",
        )
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
