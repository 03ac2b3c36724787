"""Formulas of models without message passing, which backends share: sparse rows, and embeddings."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from gtrain.model import kinds
from gtrain.plan import layers
from gtrain.plan.estimate import ARITHMETIC, BANDWIDTH, MEMORY, OVERHEAD, Estimate, NotEstimated, PlannedRun
from gtrain.plan.workload import WideTable, Workload

EMBEDDING, SPARSE = kinds.EMBEDDING, kinds.SPARSE
ENTRY_PASSES = 8
"""Reads and writes of an entry's id while rows are chosen, sorted and grouped."""
SORTED_BYTES = 40
"""Bytes of an entry that is sorted by id for the gradient of a table, beside its id and its value: measured."""


_SOFTMAX_PASSES, _TABLE_PASSES = 6, 16  # over scores, and over a table, in a step by query


def steps_of(run: PlannedRun) -> int:
    """Return the steps of an epoch."""
    batch = run.config["data"]["batch_size"]
    return 1 if batch is None else max(ceil(run.workload.num_seeds / batch), 1)


def limited(run: PlannedRun) -> PlannedRun:
    """Return the run with the seeds that ``trainer.limit_train_batches`` leaves of an epoch."""
    limit, batch = run.config["trainer"].get("limit_train_batches", 1.0), run.config["data"]["batch_size"]
    steps = steps_of(run)
    if limit is None or batch is None or not run.workload.num_seeds:
        return run
    left = max(min(limit, steps) if isinstance(limit, int) else int(steps * limit), 1)
    if left == steps:
        return run
    return replace(run, workload=replace(run.workload, num_seeds=left * batch))


def updates_of(run: PlannedRun) -> int:
    """Return the optimizer's updates in an epoch, which ``trainer.accumulate_grad_batches`` makes fewer than steps."""
    return ceil(steps_of(run) / int(run.config["trainer"].get("accumulate_grad_batches") or 1))


def epochs_of(run: PlannedRun) -> float:
    """Return the epochs of the run; 1 if neither their number nor that of its steps is limited."""
    trainer = run.config["trainer"]
    epochs, updates = trainer.get("max_epochs"), trainer.get("max_steps")
    limits = [float(epochs)] if epochs is not None and epochs > 0 else []
    if updates is not None and updates > 0:
        limits.append(max(updates / updates_of(run), 1.0))
    return min(limits, default=1.0)


def largest(work: Workload) -> WideTable:
    """Return the table with most rows; of several entity types, the one with most candidates for an edge."""
    return max(work.tables, key=lambda table: table.rows)


def add_table_memory(estimate: Estimate, run: PlannedRun, quantity: str, table: WideTable, share: float = 1) -> None:
    """Add a share of a table with its optimizer's states."""
    estimate.add(
        quantity, f"table of {table.name}", "share * rows * (dim * (1 + states) + row_states) * item",
        share=share, rows=table.rows, dim=table.dim, states=run.workload.table_states,
        row_states=run.workload.row_states, item=run.workload.item,
    )  # fmt: skip


def add_sparse_rows(estimate: Estimate, run: PlannedRun, table: WideTable, seeds: float, share: float) -> None:
    """Add the time of the products of sparse rows with a table, and of its update.

    Args:
        estimate: to which terms are added.
        run: the run.
        table: the table, or a server's block.
        seeds: rows of an epoch.
        share: of the rows' entries that are in this block.
    """
    work, steps = run.workload, steps_of(run)
    entries = seeds * (work.entries or work.num_features) * share
    estimate.add(
        BANDWIDTH, "products of sparse rows, forward and backward", "2 * entries * dim * item / gather",
        entries=entries, dim=table.dim, item=work.item, gather=run.gather,
    )  # fmt: skip
    estimate.add(
        BANDWIDTH, "update of the rows that a step reads", "2 * updates * dim * (1 + states) * item / gather",
        updates=steps * share * work.columns_read(seeds / steps), dim=table.dim, states=work.table_states,
        item=work.item, gather=run.gather,
    )  # fmt: skip


def add_entries(estimate: Estimate, run: PlannedRun, seeds: float) -> None:
    """Add the time in which rows of sparse features are chosen and grouped."""
    work = run.workload
    estimate.add(
        BANDWIDTH, "choosing and grouping entries", "passes * seeds * entries * (4 + item) / gather",
        passes=ENTRY_PASSES, seeds=seeds, entries=work.entries or work.num_features, item=work.item, gather=run.gather,
    )  # fmt: skip


def add_step_memory(estimate: Estimate, run: PlannedRun, rows: float) -> None:
    """Add the memory of a step over sparse rows: of its layers, or of sorting the entries when these are done."""
    work = run.workload
    estimate.add(
        MEMORY, "chosen entries of a step, layers and gradients, or sorted entries",
        "rows * (entries * (4 + item)"
        " + max((copies * width + peak * widest) * item, entries * sorted + widest * item))",
        rows=rows, entries=work.entries or work.num_features, item=work.item, sorted=SORTED_BYTES,
        **layers.hidden_columns(work),
    )  # fmt: skip


def negatives(config: dict[str, Any], entities: float) -> tuple[float, float]:
    """Return the candidates that each end of an edge is compared with, and the rows that an edge's chunk draws."""
    model = config["model"]
    if model["all_negs"]:
        return entities, 0.0
    batch, uniform = model["num_batch_negs"], model["num_uniform_negs"]
    return batch + uniform, uniform / max(batch or uniform, 1)


def add_edge_scores(estimate: Estimate, run: PlannedRun, edges: float, *, flops: float, fused: bool) -> None:
    """Add the time of scores of edges and their negatives, and of the updates of the rows that they read.

    Args:
        estimate: to which terms are added.
        run: the run.
        edges: edges of an epoch that a process trains.
        flops: operations per second of its products.
        fused: whether a compiled step computes them; otherwise operations of torch, with more passes over scores.
    """
    work = run.workload
    if work.kind != EMBEDDING or not work.tables:
        raise NotEstimated("no formula covers this model")
    table, model = largest(work), run.config["model"]
    candidates, drawn = negatives(dict(run.config), table.rows)
    sides = int(model["head_negs"]) + int(model["tail_negs"])
    estimate.add(
        ARITHMETIC, "scores of negatives and their gradients", "6 * edges * sides * candidates * dim / flops",
        edges=edges, sides=sides, candidates=candidates, dim=table.dim, flops=flops,
    )  # fmt: skip
    estimate.add(
        BANDWIDTH, "losses of the scores", "passes * edges * sides * candidates * item / stream",
        passes=8 if fused else 24, edges=edges, sides=sides, candidates=candidates, item=work.item, stream=run.stream,
    )  # fmt: skip
    estimate.add(
        BANDWIDTH, "rows of ends and negatives, with updates",
        "passes * edges * (2 + sides * drawn) * dim * item / gather",
        passes=8 if fused else 24, edges=edges, sides=sides, drawn=drawn, dim=table.dim, item=work.item,
        gather=run.gather,
    )  # fmt: skip


def score_flops(run: PlannedRun) -> float:
    """Return the operations per second of scores by layers of torch: not in bfloat16 on a CPU that lacks it."""
    low = str(run.config["trainer"]["precision"]).startswith("bf16")
    return max(run.flops, run.cores * run.machine.flops) if low else run.flops


def add_query_scores(estimate: Estimate, run: PlannedRun) -> None:
    """Add the cost of ``model.by_query``: one row of scores for each query, and steps that read and change all rows."""
    work = run.workload
    if work.kind != EMBEDDING or not work.tables:
        raise NotEstimated("no formula covers this model")
    table, steps = largest(work), 2 * steps_of(run)
    numbers = sum(each.rows * each.dim for each in work.tables)
    queries = 2 * work.num_seeds if work.num_queries is None else work.num_queries
    estimate.add(
        ARITHMETIC, "scores of queries and their gradients", "6 * queries * rows * dim / flops",
        queries=queries, rows=table.rows, dim=table.dim, flops=score_flops(run),
    )  # fmt: skip
    estimate.add(
        BANDWIDTH, "softmax of the scores", "passes * queries * rows * item / stream",
        passes=_SOFTMAX_PASSES, queries=queries, rows=table.rows, item=work.item, stream=run.stream,
    )  # fmt: skip
    estimate.add(
        BANDWIDTH, "tables, their gradients and updates", "passes * steps * numbers * item / stream",
        passes=_TABLE_PASSES, steps=steps, numbers=numbers, item=work.item, stream=run.stream,
    )  # fmt: skip
    estimate.add(
        BANDWIDTH, "rows of ends", "passes * edges * dim * item / gather",
        passes=24, edges=2 * work.num_seeds, dim=table.dim, item=work.item, gather=run.gather,
    )  # fmt: skip
    estimate.add(
        MEMORY, "scores, rows and gradients of a step", "(4 * queries / steps * rows + 5 * numbers) * item",
        queries=queries, steps=steps, rows=table.rows, numbers=numbers, item=work.item,
    )  # fmt: skip
    add_starts(estimate, run, steps)


def add_batch_scores(estimate: Estimate, run: PlannedRun, edges: float) -> None:
    """Add the memory of a batch of edges: scores, their gradients, and rows."""
    work, model = run.workload, run.config["model"]
    table = largest(work)
    candidates, _ = negatives(dict(run.config), table.rows)
    sides = int(model["head_negs"]) + int(model["tail_negs"])
    estimate.add(
        MEMORY, "scores and rows of a batch", "4 * edges * (sides * candidates + 4 * dim) * item",
        edges=edges, sides=sides, candidates=candidates, dim=table.dim, item=work.item,
    )  # fmt: skip


def add_starts(estimate: Estimate, run: PlannedRun, steps: int) -> None:
    """Add the time of starting the operations of each step, which are about as many as those of two layers."""
    estimate.add(
        OVERHEAD, "starting operations", "steps * (step + 2 * layer)",
        steps=steps, step=run.machine.step, layer=run.machine.layer,
    )  # fmt: skip
