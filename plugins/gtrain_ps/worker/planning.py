"""How tables are cut among the servers, as the first steps suggest, and by which rules the servers change them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from gtrain.data.batches.loader import SeedLoader
from gtrain.errors import ConfigError
from gtrain.nn import Embedding, RowOptimizer, Table, as_csr
from gtrain_ps.config import PsConfig
from gtrain_ps.costs import Load, Plan, choose, plans, shapes, table
from gtrain_ps.placement import Placement, spread
from gtrain_ps.worker.row_table import RowTable, is_rows

Rules = dict[str, tuple[str, dict[str, Any]]]
"""By a table's name: its rule, and the rule's numbers."""
STEPS = 4
"""Steps that are looked at."""


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


def rules_of(tables: Mapping[str, Parameter], optimizers: Iterable[Optimizer]) -> Rules:
    """Each table's rule, and its numbers at this moment.

    Args:
        tables: the parameters of tables, by their names.
        optimizers: of the module.

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


def first_load(loader: SeedLoader, workers: int) -> tuple[Load, bool]:
    """What the first worker asks of a table in the first steps of an epoch.

    Args:
        loader: of the training split.
        workers: K.

    Returns:
        the mean over the steps, and whether an entry has a value other than 1. All workers read the same store, so all
        come to the same.
    """
    store = loader.store
    if not is_rows(store):
        found = [
            as_csr(store.node("x", part, kind))
            for kind in store.node_types
            for part in range(store.num_parts)
            if "x" in store.node_tensors(kind) and store.node("x", part, kind).layout == torch.sparse_csr
        ]
        ids = torch.cat([rows.ids for rows in found]) if found else torch.empty(0)
        rows = sum(piece.num_rows for piece in found)
        weighted = any(piece.values is not None and bool((piece.values != 1).any()) for piece in found)
        return Load(ids.numel(), ids.unique().numel(), rows), weighted
    table = RowTable(store, torch.float32)
    seeds = table.rows_of(loader.split)
    figures, weighted = [], False
    for chunk in islice(loader.step_positions(len(seeds), loader.epoch), STEPS):
        rows = table.batch(seeds[chunk[: -(-chunk.numel() // workers)]]).x
        figures.append((rows.ids.numel(), rows.ids.unique().numel(), rows.num_rows))
        weighted = weighted or bool((rows.values != 1).any())
    means = [sum(column) / max(1, len(figures)) for column in zip(*figures, strict=True)]
    return Load(*means), weighted
