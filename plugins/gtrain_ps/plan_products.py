"""Formulas of a step's products and rows on servers, for graphs, sampled neighbourhoods and sparse rows."""

from __future__ import annotations

from dataclasses import dataclass

from gtrain.plan import wide
from gtrain.plan.estimate import SENT, SERVER_MEMORY, Estimate, PlannedRun
from gtrain.plan.workload import WideTable
from gtrain_ps.costs import Load, Plan, allowed_plans, cheapest

BUFFERS = 6e7
"""Bytes of compiled kernels, and of the wire's buffers."""


@dataclass(frozen=True)
class Wire:
    """The servers, and the bytes of numbers on the way to them.

    Attributes:
        servers: P.
        number: bytes of a number of a product or a gradient.
        value: bytes of the value of an entry; 0: all are 1 and not sent.
    """

    servers: int
    number: int
    value: int


def wire_of(run: PlannedRun) -> Wire:
    """Return the wire of a run."""
    work = run.workload
    number = 2 if run.settings["wire_dtype"] == "bfloat16" else work.item
    return Wire(max(run.servers, 1), number, 0 if work.unit_entries else work.item)


def chosen_plan(run: PlannedRun, table: WideTable, load: Load, wire: Wire) -> Plan:
    """Return the protocol and the placement of a table that a run with this load of its first steps chooses."""
    plans = allowed_plans(run.settings["protocol"], run.settings["split"], wire.servers, table.dim)
    return cheapest(plans, load, table.dim, wire.value, wire.number)


def graph_load(run: PlannedRun) -> Load:
    """Return the sparse features of all nodes that have some."""
    work = run.workload
    if work.store is None:
        entries = work.num_nodes * (work.entries or work.num_features)
        return Load(entries, work.columns_read(work.num_nodes), work.num_nodes)
    specs = [spec.tensors["x"] for spec in work.store.manifest.node_types.values() if "x" in spec.tensors]
    sparse = [spec for spec in specs if spec.nnz is not None]
    entries = float(sum(spec.nnz or 0 for spec in sparse))
    return Load(entries, work.columns_read(work.num_nodes), float(sum(spec.shape[0] for spec in sparse)))


def add_product_bytes(estimate: Estimate, plan: Plan, load: Load, steps: int, wire: Wire, dim: int) -> None:
    """Add what a worker sends for the products of a step's rows."""
    if plan.protocol == "ship":
        estimate.add(
            SENT, "rows", "steps * (columns * entries * (4 + values) + 2 * blocks * columns * rows)",
            steps=steps, columns=plan.column_blocks, entries=load.entries, values=wire.value, blocks=plan.row_blocks,
            rows=load.rows,
        )  # fmt: skip
        estimate.add(
            SENT, "gradients of products", "steps * number * blocks * rows * dim",
            steps=steps, number=wire.number, blocks=plan.row_blocks, rows=load.rows, dim=dim,
        )  # fmt: skip
        return
    estimate.add(
        SENT, "ids and gradients of rows", "steps * distinct * (4 * columns + number * dim)",
        steps=steps, distinct=load.unique, columns=plan.column_blocks, number=wire.number, dim=dim,
    )  # fmt: skip


def add_pulled_bytes(estimate: Estimate, table: WideTable, rows: float, steps: int, wire: Wire) -> None:
    """Add what a worker sends to read ``rows`` of a table in each step, and to change them."""
    estimate.add(
        SENT, f"ids and gradients of rows of {table.name}", "steps * rows * (4 + number * dim)",
        steps=steps, rows=rows, number=wire.number, dim=table.dim,
    )  # fmt: skip


def keeps_steps(run: PlannedRun) -> bool:
    """Whether servers keep the products of the last steps, to send them again to a worker that restarts."""
    settings = run.settings
    durable = settings["durability"] == "disk" or (settings["max_restarts"] and settings["durability"] != "none")
    return bool(settings["rest"] == "server" and durable)


def kept_steps(run: PlannedRun) -> float:
    """Return the steps in the replay buffer of a server that has one."""
    lag = run.settings["staleness"] if run.settings["consistency"] == "async" else 0
    return min(lag + 4, wide.steps_of(run) * wide.epochs_of(run))


def replayed_steps(run: PlannedRun) -> float:
    """Return the steps of a whole graph whose products a server has: two in full batch, which is one step an epoch."""
    if run.config["data"]["batch_size"] is None or not keeps_steps(run):
        return 2
    return max(kept_steps(run), 2)


def add_server_steps(
    estimate: Estimate, run: PlannedRun, plan: Plan, load: Load, wire: Wire, dim: int, steps: float = 2
) -> None:
    """Add the memory of a server for all workers' products: requests, products and gradients of some steps."""
    if plan.protocol == "ship":
        estimate.add(
            SERVER_MEMORY, "entries and products of steps",
            "steps * workers * (entries / blocks * (4 + values) + 2 * rows * dim / columns * number)",
            steps=steps, workers=run.ranks, entries=load.entries, blocks=plan.row_blocks, values=wire.value,
            rows=load.rows, dim=dim, columns=plan.column_blocks, number=wire.number,
        )  # fmt: skip
    else:
        add_server_rows(estimate, run, plan, load.unique, wire, dim)


def add_server_rows(estimate: Estimate, run: PlannedRun, plan: Plan, rows: float, wire: Wire, dim: int) -> None:
    """Add the memory of a server for rows that all workers read: ids, rows and gradients of two steps."""
    estimate.add(
        SERVER_MEMORY, "ids and rows of steps", "2 * workers * rows / blocks * (4 + 2 * dim / columns * number)",
        workers=run.ranks, rows=rows, blocks=plan.row_blocks, dim=dim, columns=plan.column_blocks, number=wire.number,
    )  # fmt: skip
