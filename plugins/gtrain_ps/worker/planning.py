"""Chooses protocol and placement of each table, and maps optimizers to the rules of the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from gtrain.data.batches.loader import SeedLoader
from gtrain.errors import ConfigError
from gtrain.nn import Csr, Embedding, RowOptimizer, Table, as_csr
from gtrain_ps.config import PsConfig
from gtrain_ps.costs import Load, Plan, allowed_plans, cheapest, cost_table, grid_shapes
from gtrain_ps.worker.batches import BatchSource
from gtrain_ps.worker.row_table import RowTable, is_rows

SAMPLED_STEPS = 4
"""Steps from which the load is estimated."""


def plan_of(
    name: str,
    layer: Table,
    settings: PsConfig,
    servers: int,
    wire: torch.dtype,
    estimate_load: Callable[[], tuple[Load, bool]],
    verbose: bool,
) -> Plan:
    """Return a table's plan: that of the settings, or the one that sends the fewest bytes in the first steps.

    Args:
        name: the table's name.
        layer: the table's layer.
        settings: of the strategy.
        servers: P.
        wire: dtype of products and gradients on the wire.
        estimate_load: returns the load of the first steps, and whether entries have values other than 1.
        verbose: whether to print the costs of the plans.
    """
    width = layer.table.dim
    if isinstance(layer, Embedding):
        # A lookup would send its ids to every column block.
        return Plan("pull", *grid_shapes("row", servers, width)[0])
    plans = allowed_plans(settings.protocol, settings.split, servers, width)
    if len(plans) == 1:
        return plans[0]
    load, weighted = estimate_load()
    figures = load, width, layer.weight.dtype.itemsize if weighted else 0, wire.itemsize
    if verbose:
        print(cost_table(name, plans, *figures), flush=True)
    return cheapest(plans, *figures)


def rules_of(tables: Mapping[str, Parameter], optimizers: Iterable[Optimizer]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return each table's rule and its current numbers, by the table's name.

    Args:
        tables: the parameters of tables, by their names.
        optimizers: the module's optimizers.

    Raises:
        ConfigError: the optimizer of a table is not one of ``gtrain.nn``.
    """
    names = {id(parameter): name for name, parameter in tables.items()}
    rules = {}
    for optimizer in optimizers:
        for part in getattr(optimizer, "parts", [optimizer]):
            for group in part.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in names and isinstance(part, RowOptimizer):
                        numbers = {key: value for key, value in group.items() if key != "params"}
                        rules[names[id(parameter)]] = part.rule.name, numbers
    missing = [name for name, parameter in tables.items() if name not in rules and parameter.requires_grad]
    if missing:
        raise ConfigError(
            f"the table {missing[0]} is on servers; its optimizer is not one of gtrain.nn.",
            hint="set 'model.sparse_optimizer={_target_:gtrain.nn.RowwiseAdagrad,lr:0.1}' (or Adagrad, SGD, LazyAdam).",
        )
    return rules


def estimate_load(loader: SeedLoader, workers: int) -> tuple[Load, bool]:
    """Estimate the load of a table from the first worker's first steps of an epoch.

    Args:
        loader: of the training split.
        workers: K.

    Returns:
        the mean over the steps, and whether an entry has a value other than 1. All workers read the same store and
        return the same estimate.
    """
    store = loader.store
    if not is_rows(store):
        features = [
            as_csr(store.node("x", part, node_type))
            for node_type in store.node_types
            for part in range(store.num_parts)
            if "x" in store.node_tensors(node_type) and store.node("x", part, node_type).layout == torch.sparse_csr
        ]
        ids = torch.cat([rows.ids for rows in features]) if features else torch.empty(0)
        count = sum(rows.num_rows for rows in features)
        weighted = any(rows.values is not None and bool((rows.values != 1).any()) for rows in features)
        return Load(ids.numel(), ids.unique().numel(), count), weighted
    table = RowTable(store, torch.float32)
    seeds = table.rows_of(loader.split)
    figures, weighted = [], False
    for chunk in islice(loader.step_positions(len(seeds), loader.epoch), SAMPLED_STEPS):
        rows = table.batch(seeds[chunk[: -(-chunk.numel() // workers)]]).x
        figures.append((rows.ids.numel(), rows.ids.unique().numel(), rows.num_rows))
        weighted = weighted or bool((rows.values != 1).any())
    return _mean(figures), weighted


def estimate_sampled_load(loader: SeedLoader, source: BatchSource, workers: int) -> tuple[Load, bool]:
    """Estimate the load of the first worker's first steps of an epoch of sampled neighbourhoods.

    Args:
        loader: of the training split.
        source: of its batches.
        workers: K.

    Returns:
        as :func:`estimate_load`.
    """
    seeds, epoch = source.seeds(loader), loader.epoch
    figures, weighted = [], False
    for step, chunk in enumerate(islice(loader.step_positions(len(seeds), epoch), SAMPLED_STEPS)):
        batch = source.batch(seeds, chunk[: -(-chunk.numel() // workers)], epoch, step)
        features = [stored["x"] for stored in batch.node_stores if isinstance(stored.get("x"), Csr)]
        ids = torch.cat([rows.ids for rows in features]) if features else torch.empty(0)
        figures.append((ids.numel(), ids.unique().numel(), sum(rows.num_rows for rows in features)))
        weighted = weighted or any(rows.values is not None and bool((rows.values != 1).any()) for rows in features)
    return _mean(figures), weighted


def _mean(figures: list[tuple[int, int, int]]) -> Load:
    """Return the mean of entries, distinct ids and rows of some steps."""
    return Load(*(sum(column) / max(1, len(figures)) for column in zip(*figures, strict=True)))
