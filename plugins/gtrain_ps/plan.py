"""What a run of ``strategy=ps`` costs: rows and products between workers and servers, and a server's block."""

from __future__ import annotations

from gtrain.plan import layers, wide
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
from gtrain_ps.costs import Load, allowed_plans, cheapest

_HIDDEN = 0.5  # workers send batches ahead while servers compute
_GENERATORS, _LOOPS = 1024, 82_000  # bytes of the states of random numbers in a step, and of Lightning's in an epoch
_BUFFERS = 6e7  # bytes of compiled kernels, and of the wire's buffers


class PsPlanner(Planner):
    """The formulas of sparse rows and knowledge graphs on parameter servers."""

    def estimate(self, run: PlannedRun) -> Estimate:
        work = run.workload
        if work.layers:
            raise NotEstimated("no formula covers graph models on parameter servers")
        if not work.tables:
            raise NotEstimated("the model's tables are not known before its data are read")
        estimate, steps, settings = Estimate(hidden=_HIDDEN), wide.steps_of(run), run.settings
        table, servers, seeds = work.tables[0], max(run.servers, 1), work.num_seeds / run.ranks
        number = 2 if settings["wire_dtype"] == "bfloat16" else work.item
        estimate.add(MEMORY, "imports", "imports", imports=run.machine.imports)
        estimate.add(MEMORY, "kernels and buffers", "buffers", buffers=_BUFFERS)
        layers.add_parameters(estimate, run)
        estimate.add(SERVER_MEMORY, "imports", "imports", imports=run.machine.imports)
        wide.add_table_memory(estimate, run, SERVER_MEMORY, table, 1 / servers)
        if work.kind == wide.SPARSE:
            self._sparse(estimate, run, seeds, servers, number)
        else:
            self._embeddings(estimate, run, seeds, number)
        if settings["rest"] == "server" or run.ranks > 1:
            estimate.add(
                SENT, "gradients of the other layers", "steps * parameters * item",
                steps=steps, parameters=work.parameters, item=work.item,
            )  # fmt: skip
        if settings["rest"] == "server" and settings["max_restarts"] and settings["durability"] != "none":
            estimate.add(
                SENT, "progress for a restart", "steps * ((1 + states) * parameters * item + generators) + loops",
                steps=steps, states=work.states, parameters=work.parameters, item=work.item, generators=_GENERATORS,
                loops=_LOOPS,
            )  # fmt: skip
        sent = estimate.total(SENT)
        estimate.add(NETWORK, "transfers in both directions", "2 * sent / link", sent=sent, link=run.link)
        estimate.add(
            NETWORK, "waiting for replies", "2 * steps * messages * latency",
            steps=steps, messages=2 * servers, latency=run.latency,
        )  # fmt: skip
        estimate.add(BANDWIDTH, "packing and reading messages", "4 * sent / stream", sent=sent, stream=run.stream)
        return estimate

    def _sparse(self, estimate: Estimate, run: PlannedRun, seeds: float, servers: int, number: int) -> None:
        """Add what rows of sparse features cost."""
        work, steps, table = run.workload, wide.steps_of(run), run.workload.tables[0]
        entries = seeds * (work.entries or work.num_features)
        load = Load(entries / steps, wide.distinct(entries / steps, table.rows), seeds / steps)
        values = 0 if work.unit_entries else work.item
        plans = allowed_plans(run.settings["protocol"], run.settings["split"], servers, table.dim)
        plan = cheapest(plans, load, table.dim, values, number)
        if plan.protocol == "ship":
            estimate.add(
                SENT, "rows", "columns * entries * (4 + values) + 2 * blocks * columns * seeds",
                columns=plan.column_blocks, entries=entries, values=values, blocks=plan.row_blocks, seeds=seeds,
            )  # fmt: skip
            estimate.add(
                SENT, "gradients of products", "number * blocks * seeds * dim",
                number=number, blocks=plan.row_blocks, seeds=seeds, dim=table.dim,
            )  # fmt: skip
        else:
            estimate.add(
                SENT, "ids and gradients of rows", "steps * distinct * (4 * columns + number * dim)",
                steps=steps, distinct=load.unique, columns=plan.column_blocks, number=number, dim=table.dim,
            )  # fmt: skip
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
        wide.add_starts(estimate, run, 4 * layers.OPERATIONS)
