"""What a run of ``strategy=ps`` costs: rows and products between workers and servers, and a server's block."""

from __future__ import annotations

from math import ceil

from gtrain.plan import layers, typed_layers, wide
from gtrain.plan.estimate import (
    BANDWIDTH,
    MEMORY,
    NETWORK,
    SENT,
    SERVER_MEMORY,
    Estimate,
    NotEstimated,
    PlannedRun,
    Planner,
)
from gtrain.plan.workload import WideTable
from gtrain_ps.costs import Load, Plan, allowed_plans, cheapest

_HIDDEN = 0.5  # workers send batches ahead while servers compute
_GENERATORS = 1024  # bytes of the states of random numbers in a step
_LOOPS, _CHANGES = 27_000, 3  # bytes of Lightning's state, which changes in so many steps of an epoch
_BUFFERS = 6e7  # bytes of compiled kernels, and of the wire's buffers


class PsPlanner(Planner):
    """The formulas of sparse rows and knowledge graphs on parameter servers."""

    def estimate(self, run: PlannedRun) -> Estimate:
        work = run.workload
        if not work.tables:
            raise NotEstimated("the model's tables are not known before its data are read")
        is_graph = bool(work.layers or work.typed or (work.heterogeneous and work.kind != wide.EMBEDDING))
        if is_graph:
            _check_graph(run)
        estimate, steps, settings = Estimate(hidden=_HIDDEN), wide.steps_of(run), run.settings
        servers, seeds = max(run.servers, 1), work.num_seeds / run.ranks
        number = 2 if settings["wire_dtype"] == "bfloat16" else work.item
        estimate.add(SERVER_MEMORY, "imports", "imports", imports=run.machine.imports)
        for each in work.tables:
            wide.add_table_memory(estimate, run, SERVER_MEMORY, each, 1 / servers)
        if not is_graph:
            estimate.add(MEMORY, "imports", "imports", imports=run.machine.imports)
            estimate.add(MEMORY, "kernels and buffers", "buffers", buffers=_BUFFERS)
            layers.add_parameters(estimate, run)
        if is_graph:
            self._graph(estimate, run, servers, number)
        elif work.kind == wide.SPARSE:
            self._sparse(estimate, run, seeds, servers, number)
        else:
            self._embeddings(estimate, run, seeds, number)
        if settings["rest"] == "server" or run.ranks > 1:
            estimate.add(
                SENT, "gradients of the other layers", "steps * parameters * item",
                steps=steps, parameters=work.parameters, item=work.item,
            )  # fmt: skip
        if settings["rest"] == "server" and settings["max_restarts"] and settings["durability"] != "none":
            # Each server gets a part of what all workers hold, from one of them. The first step has no states yet.
            all_steps = steps * max(run.config["trainer"]["max_epochs"] or 1, 1)
            estimate.add(
                SENT, "progress for a restart",
                "steps * ((1 + states * (1 - 1 / all_steps)) * parameters * item * share + generators)"
                " + min(steps, changes) * loops",
                steps=steps, states=work.states, all_steps=all_steps, parameters=work.parameters, item=work.item,
                share=ceil(servers / run.ranks) / servers, generators=_GENERATORS, loops=_LOOPS, changes=_CHANGES,
            )  # fmt: skip
        sent = estimate.total(SENT)
        estimate.add(NETWORK, "transfers in both directions", "2 * sent / link", sent=sent, link=run.link)
        estimate.add(
            NETWORK, "waiting for replies", "2 * steps * messages * latency",
            steps=steps, messages=2 * servers, latency=run.latency,
        )  # fmt: skip
        estimate.add(BANDWIDTH, "packing and reading messages", "4 * sent / stream", sent=sent, stream=run.stream)
        return estimate

    def _graph(self, estimate: Estimate, run: PlannedRun, servers: int, number: int) -> None:
        """Add what a graph costs: each worker computes all of it in every step, and reads all rows of the tables."""
        work, steps = run.workload, wide.steps_of(run)
        estimate.add(SERVER_MEMORY, "kernels and buffers", "buffers", buffers=_BUFFERS)
        if work.typed:
            nodes = {node_type: sum(parts.nodes) for node_type, parts in work.parts_by_type(1).items()}
            typed_layers.add_memory(estimate, run, nodes, work.num_edges)
            typed_layers.add_time(estimate, run, nodes, work.num_edges, steps)
        else:
            layers.add_memory(estimate, run, work.num_nodes, work.num_edges)
            estimate.add(MEMORY, "kernels and buffers", "buffers", buffers=_BUFFERS)
            layers.add_time(estimate, run, work.num_nodes, work.num_edges, work.num_seeds / run.ranks / steps, steps)
        if work.task == "link":
            layers.add_scored_edges(estimate, run, work.num_seeds / run.ranks / steps, 1, steps)
        for table in work.tables:
            if table.by_node:
                estimate.add(
                    SENT, f"ids and gradients of rows of {table.name}", "steps * rows * (4 + number * dim)",
                    steps=steps, rows=table.rows, number=number, dim=table.dim,
                )  # fmt: skip
        sparse = [table for table in work.tables if not table.by_node]
        if sparse:
            self._products(estimate, run, _sparse_load(run), sparse[0], servers, number)

    def _products(
        self, estimate: Estimate, run: PlannedRun, load: Load, table: WideTable, servers: int, number: int
    ) -> None:
        """Add the products of the sparse features of all nodes, in every step."""
        work, steps = run.workload, wide.steps_of(run)
        values = 0 if work.unit_entries else work.item
        plans = allowed_plans(run.settings["protocol"], run.settings["split"], servers, table.dim)
        plan = cheapest(plans, load, table.dim, values, number)
        self._add_product_bytes(estimate, plan, load, steps, values, number, table.dim)
        estimate.add(MEMORY, "entries by server", "entries * (12 + values)", entries=load.entries, values=values)
        # The replay buffer has those of the last two steps.
        estimate.add(
            SERVER_MEMORY, "entries and products of steps",
            "2 * workers * (entries / blocks * (4 + values) + 2 * rows * dim * number)",
            workers=run.ranks, entries=load.entries, blocks=plan.row_blocks, values=values, rows=load.rows,
            dim=table.dim, number=number,
        )  # fmt: skip
        share = run.servers_per_machine / servers * run.ranks / run.ranks_per_machine
        wide.add_sparse_rows(estimate, run, table, load.rows * steps, share)

    def _add_product_bytes(
        self, estimate: Estimate, plan: Plan, load: Load, steps: int, values: int, number: int, dim: int
    ) -> None:
        """Add what a worker sends for the products of a step's rows."""
        if plan.protocol == "ship":
            estimate.add(
                SENT, "rows", "steps * (columns * entries * (4 + values) + 2 * blocks * columns * rows)",
                steps=steps, columns=plan.column_blocks, entries=load.entries, values=values, blocks=plan.row_blocks,
                rows=load.rows,
            )  # fmt: skip
            estimate.add(
                SENT, "gradients of products", "steps * number * blocks * rows * dim",
                steps=steps, number=number, blocks=plan.row_blocks, rows=load.rows, dim=dim,
            )  # fmt: skip
            return
        estimate.add(
            SENT, "ids and gradients of rows", "steps * distinct * (4 * columns + number * dim)",
            steps=steps, distinct=load.unique, columns=plan.column_blocks, number=number, dim=dim,
        )  # fmt: skip

    def _sparse(self, estimate: Estimate, run: PlannedRun, seeds: float, servers: int, number: int) -> None:
        """Add what rows of sparse features cost."""
        work, steps, table = run.workload, wide.steps_of(run), run.workload.tables[0]
        entries = seeds * (work.entries or work.num_features)
        load = Load(entries / steps, wide.distinct(entries / steps, table.rows), seeds / steps)
        values = 0 if work.unit_entries else work.item
        plans = allowed_plans(run.settings["protocol"], run.settings["split"], servers, table.dim)
        plan = cheapest(plans, load, table.dim, values, number)
        self._add_product_bytes(estimate, plan, load, steps, values, number, table.dim)
        wide.add_entries(estimate, run, seeds)
        # Servers compute for all workers, on the cores that these leave idle.
        share = run.servers_per_machine / servers * run.ranks / run.ranks_per_machine
        wide.add_sparse_rows(estimate, run, table, seeds, share)
        layers.add_time(estimate, run, 0, 0, seeds / steps, steps)

    def _embeddings(self, estimate: Estimate, run: PlannedRun, edges: float, number: int) -> None:
        """Add what edges of a knowledge graph cost, whose rows are pulled and whose gradients are pushed."""
        steps, table = wide.steps_of(run), run.workload.tables[0]
        _, drawn = wide.negatives(dict(run.config), table.rows)
        sides = int(run.config["model"]["head_negs"]) + int(run.config["model"]["tail_negs"])
        reads = (2 + sides * drawn) * edges / steps
        rows = table.rows if run.config["model"]["all_negs"] else wide.distinct(reads, table.rows)
        estimate.add(
            SENT, "ids and gradients of rows", "steps * distinct * (8 + number * dim)",
            steps=steps, distinct=rows, number=number, dim=table.dim,
        )  # fmt: skip
        wide.add_edge_scores(estimate, run, edges, flops=run.flops, fused=False)
        wide.add_batch_scores(estimate, run, edges / steps)
        wide.add_starts(estimate, run, steps)


def _check_graph(run: PlannedRun) -> None:
    work = run.workload
    if run.config["data"]["num_neighbors"] is not None:
        raise NotEstimated("no formula covers sampled neighbours on parameter servers")
    if work.heterogeneous:
        typed_layers.check(run)


def _sparse_load(run: PlannedRun) -> Load:
    """Return the sparse features of all nodes that have some: every step multiplies all of them."""
    work = run.workload
    if work.store is None:
        entries = work.num_nodes * (work.entries or work.num_features)
        return Load(entries, wide.distinct(entries, work.num_features), work.num_nodes)
    specs = [spec.tensors["x"] for spec in work.store.manifest.node_types.values() if "x" in spec.tensors]
    sparse = [spec for spec in specs if spec.nnz is not None]
    entries = float(sum(spec.nnz or 0 for spec in sparse))
    columns = sum(spec.shape[1] for spec in sparse)
    return Load(entries, wide.distinct(entries, columns), float(sum(spec.shape[0] for spec in sparse)))
