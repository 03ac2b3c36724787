"""What sampled neighbourhoods on servers cost: a worker reads the rows of its batch's nodes, but validates on all."""

from __future__ import annotations

from gtrain.plan import batch_layers, layers, wide
from gtrain.plan.batches import MeanBatch
from gtrain.plan.estimate import BANDWIDTH, MEMORY, SERVER_MEMORY, Estimate, PlannedRun
from gtrain.plan.workload import WideTable
from gtrain_ps.costs import Load, Plan
from gtrain_ps.plan_batches import EpochBatches, epoch_batches
from gtrain_ps.plan_products import (
    BUFFERS,
    Wire,
    add_product_bytes,
    add_pulled_bytes,
    add_server_rows,
    add_server_steps,
    chosen_plan,
    graph_load,
    keeps_steps,
    kept_steps,
)

_SERVER_BUFFERS = 2e7  # bytes of a server's compiled kernels, and of the wire's buffers
_KEPT = 2  # memory that the C library keeps, in parts of what a batch allocates: sizes change from batch to batch
_ROWS = 4  # copies of the rows of a table: parts of the servers, all of them, those of the nodes, gradients
_GROWN = 3  # a slot of the replay buffer: that of the first step, and one of twice the size that a larger step takes
_CHOSEN, _SORTED = 28, 5  # bytes to choose an entry from the graph's features, and to sort it by server


def add_sampled(estimate: Estimate, run: PlannedRun, wire: Wire) -> None:
    """Add what a graph with sampled neighbours costs.

    Raises:
        NotEstimated: no formula covers a layer.
    """
    for layer in run.workload.layers:
        layers.check_layer(layer)
    work, batches = run.workload, epoch_batches(run)
    batch, steps = batches.full.graph, batches.steps
    if work.store is None:
        estimate.assumptions.append(f"batches are {batch.origin}")
    estimate.add(SERVER_MEMORY, "kernels and buffers", "buffers", buffers=_SERVER_BUFFERS)
    estimate.add(MEMORY, "imports", "imports", imports=run.machine.imports)
    estimate.add(MEMORY, "edges", "edges * each", edges=work.num_edges, each=layers.EDGE_BYTES)
    estimate.add(MEMORY, "edges of a batch", "edges * each", edges=sum(batch.edges), each=layers.EDGE_BYTES)
    estimate.add(MEMORY, "rows of a batch", "bytes", bytes=batch.row_bytes)
    layers.add_parameters(estimate, run)
    if work.typed:
        batch_layers.add_typed_layers(estimate, run, batch, steps)
    else:
        estimate.add(MEMORY, "kernels and buffers", "buffers", buffers=BUFFERS)
        batch_layers.add_layers(estimate, run, batch, steps, trimmed=_trims(run, batch))
    layers.add_step_time(estimate, run, steps)
    batch_layers.add_sampling(estimate, run, batch, steps)
    for table in work.tables:
        if table.by_node:
            _add_looked_up(estimate, run, table, batches, wire)
    sparse = [table for table in work.tables if not table.by_node]
    if sparse:
        _add_products(estimate, run, sparse[0], batches, wire)


def _trims(run: PlannedRun, batch: MeanBatch) -> bool:
    """Whether a layer computes only the rows that the next one reads."""
    convolutions = run.workload.layers
    counts_degrees = any(layer.name == "GCNConv" for layer in convolutions)
    return not counts_degrees and run.config["model"].get("jk") is None and len(convolutions) <= batch.hops


def _add_looked_up(estimate: Estimate, run: PlannedRun, table: WideTable, batches: EpochBatches, wire: Wire) -> None:
    """Add the rows of a table that the nodes of a batch have."""
    work, steps, rows = run.workload, batches.steps, batches.full.rows(table.name)
    plan = Plan("pull", wire.servers, 1)
    add_pulled_bytes(estimate, table, batches.rows(table.name), steps, wire)
    _add_rows(estimate, run, table.name, table.dim, rows, table.rows)
    _add_replayed(estimate, run, table.name, rows / wire.servers, table.dim, wire)
    # Validation reads all rows, and sends no gradients.
    larger = max(rows, table.rows / 2) if layers.ranks_held_out(run) else rows
    add_server_rows(estimate, run, plan, larger, wire, table.dim)
    estimate.add(
        BANDWIDTH, f"rows of {table.name}, and their gradients", "2 * copies * rows * dim * item * steps / gather",
        copies=_ROWS, rows=rows, dim=table.dim, item=work.item, steps=steps, gather=run.gather,
    )  # fmt: skip
    estimate.add(
        BANDWIDTH, f"update of rows of {table.name}", "2 * share * rows * dim * (1 + states) * item * steps / gather",
        share=_share(run, wire), rows=rows, dim=table.dim, states=work.table_states, item=work.item, steps=steps,
        gather=run.gather,
    )  # fmt: skip


def _add_products(estimate: Estimate, run: PlannedRun, table: WideTable, batches: EpochBatches, wire: Wire) -> None:
    """Add the products of the sparse features of a batch's nodes."""
    work, steps, load, whole = run.workload, batches.steps, batches.full.load, graph_load(run)
    plan = chosen_plan(run, table, load, wire)
    ships = plan.protocol == "ship"
    add_product_bytes(estimate, plan, batches.load, steps, wire, table.dim)
    _add_rows(estimate, run, "products", table.dim, load.rows, whole.rows)
    estimate.add(
        MEMORY, "entries of a batch, chosen and by server",
        "kept * entries * (chosen + item + ships * (sorted + 3 * (4 + item)))",
        kept=_KEPT, entries=load.entries, chosen=_CHOSEN, item=work.item, ships=int(ships), sorted=_SORTED,
    )  # fmt: skip
    if layers.ranks_held_out(run) and ships:
        estimate.add(
            MEMORY, "entries of the other nodes in validation", "entries * (sorted + 4 + item)",
            entries=max(whole.entries - load.entries, 0), sorted=_SORTED, item=work.item,
        )  # fmt: skip
    columns, requested = table.dim / plan.column_blocks, load.rows if ships else load.unique / plan.row_blocks
    _add_replayed(estimate, run, "products", requested, columns, wire)
    add_server_steps(estimate, run, plan, _larger(run, load, whole), wire, table.dim)
    wide.add_entries(estimate, run, load.rows * steps)
    wide.add_sparse_rows(estimate, run, table, load.rows * steps, _share(run, wire))


def _larger(run: PlannedRun, load: Load, whole: Load) -> Load:
    """Return the load of a batch, or of validation if that is more: of all nodes, without gradients."""
    if not layers.ranks_held_out(run):
        return load
    return Load(max(load.entries, whole.entries), max(load.unique, whole.unique), max(load.rows, whole.rows / 2))


def _add_rows(estimate: Estimate, run: PlannedRun, name: str, dim: int, rows: float, most: float) -> None:
    """Add the memory of a batch's rows of a table, or products with it, and of those of all nodes in validation."""
    estimate.add(
        MEMORY, f"rows of {name} in a batch, and their gradients", "kept * copies * rows * dim * item",
        kept=_KEPT, copies=_ROWS, rows=rows, dim=dim, item=run.workload.item,
    )  # fmt: skip
    if layers.ranks_held_out(run):
        estimate.add(
            MEMORY, f"rows of {name} of the other nodes in validation", "copies * rows * dim * item",
            copies=_ROWS, rows=max(most - rows, 0), dim=dim, item=run.workload.item,
        )  # fmt: skip


def _add_replayed(estimate: Estimate, run: PlannedRun, name: str, rows: float, dim: float, wire: Wire) -> None:
    """Add the replay buffer of a server: products of the last steps, whose sizes vary."""
    if keeps_steps(run):
        estimate.add(
            SERVER_MEMORY, f"replay buffer of rows of {name}", "grown * steps * workers * rows * dim * number",
            grown=_GROWN, steps=kept_steps(run), workers=run.ranks, rows=rows, dim=dim, number=wire.number,
        )  # fmt: skip


def _share(run: PlannedRun, wire: Wire) -> float:
    """Return the part of all rows that servers on a worker's cores compute."""
    return run.servers_per_machine / wire.servers * run.ranks / run.ranks_per_machine
