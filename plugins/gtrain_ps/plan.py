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
from gtrain_ps.costs import Load, Plan
from gtrain_ps.plan_products import (
    BUFFERS,
    Wire,
    add_product_bytes,
    add_pulled_bytes,
    add_server_rows,
    add_server_steps,
    chosen_plan,
    graph_load,
    replayed_steps,
    wire_of,
)
from gtrain_ps.plan_sampled import add_sampled

_HIDDEN = 0.5  # workers send batches ahead while servers compute
_IN_FLIGHT = 56  # bytes of an entry beside its id and value: sorted by server, sent, and kept for a repeat; measured
_ROWS = 8  # copies of pulled rows: parts of the servers, all of them, gradients, and what the C library keeps; measured
_GENERATORS = 1024  # bytes of the states of random numbers in a step
_LOOPS, _CHANGES = 27_000, 3  # bytes of Lightning's state, which changes in so many steps of an epoch


class PsPlanner(Planner):
    """The formulas of sparse rows and knowledge graphs on parameter servers."""

    def estimate(self, run: PlannedRun) -> Estimate:
        layers.check_engine(run)
        run = wide.limited(run)
        work = run.workload
        if not work.tables:
            raise NotEstimated("the model's tables are not known before its data are read")
        is_graph = bool(work.layers or work.typed or (work.heterogeneous and work.kind != wide.EMBEDDING))
        if is_graph and work.heterogeneous:
            typed_layers.check(run)
        estimate, steps, settings, wire = Estimate(hidden=_HIDDEN), wide.steps_of(run), run.settings, wire_of(run)
        servers, seeds = wire.servers, work.num_seeds / run.ranks
        estimate.add(SERVER_MEMORY, "imports", "imports", imports=run.machine.imports)
        for each in work.tables:
            wide.add_table_memory(estimate, run, SERVER_MEMORY, each, 1 / servers)
        if not is_graph:
            estimate.add(MEMORY, "imports", "imports", imports=run.machine.imports)
            estimate.add(MEMORY, "kernels and buffers", "buffers", buffers=BUFFERS)
            layers.add_parameters(estimate, run)
        if is_graph and run.config["data"]["num_neighbors"] is not None:
            add_sampled(estimate, run, wire)
        elif is_graph:
            self._graph(estimate, run, wire)
        elif work.kind == wide.SPARSE:
            self._sparse(estimate, run, seeds, wire)
        else:
            self._embeddings(estimate, run, seeds, wire.number)
        if settings["rest"] == "server" or run.ranks > 1:
            estimate.add(
                SENT, "gradients of the other layers", "steps * parameters * item",
                steps=steps, parameters=work.parameters, item=work.item,
            )  # fmt: skip
        if settings["rest"] == "server" and settings["max_restarts"] and settings["durability"] != "none":
            # Each server gets a part of what all workers hold, from one of them. The first step has no states yet.
            all_steps = steps * wide.epochs_of(run)
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

    def _graph(self, estimate: Estimate, run: PlannedRun, wire: Wire) -> None:
        """Add what a graph costs: each worker computes all of it in every step, and reads all rows of the tables."""
        work, steps = run.workload, wide.steps_of(run)
        estimate.add(SERVER_MEMORY, "kernels and buffers", "buffers", buffers=BUFFERS)
        if work.typed:
            nodes = {node_type: sum(parts.nodes) for node_type, parts in work.parts_by_type(1).items()}
            typed_layers.add_memory(estimate, run, nodes, work.num_edges)
            typed_layers.add_time(estimate, run, nodes, work.num_edges, steps)
        else:
            layers.add_memory(estimate, run, work.num_nodes, work.num_edges)
            estimate.add(MEMORY, "kernels and buffers", "buffers", buffers=BUFFERS)
            layers.add_time(estimate, run, work.num_nodes, work.num_edges, work.num_seeds / run.ranks / steps, steps)
        if work.task == "link":
            layers.add_scored_edges(estimate, run, work.num_seeds / run.ranks / steps, 1, steps)
        for table in work.tables:
            if table.by_node:
                add_pulled_bytes(estimate, table, table.rows, steps, wire)
                estimate.add(
                    MEMORY, f"rows of {table.name}, and their gradients", "copies * rows * dim * item",
                    copies=_ROWS, rows=table.rows, dim=table.dim, item=work.item,
                )  # fmt: skip
                add_server_rows(estimate, run, Plan("pull", wire.servers, 1), table.rows, wire, table.dim)
        sparse = [table for table in work.tables if not table.by_node]
        if sparse:
            self._products(estimate, run, sparse[0], wire)

    def _products(self, estimate: Estimate, run: PlannedRun, table: WideTable, wire: Wire) -> None:
        """Add the products of the sparse features of all nodes, in every step."""
        steps, load = wide.steps_of(run), graph_load(run)
        plan = chosen_plan(run, table, load, wire)
        add_product_bytes(estimate, plan, load, steps, wire, table.dim)
        estimate.add(MEMORY, "entries by server", "entries * (12 + values)", entries=load.entries, values=wire.value)
        add_server_steps(estimate, run, plan, load, wire, table.dim, replayed_steps(run))
        share = run.servers_per_machine / wire.servers * run.ranks / run.ranks_per_machine
        wide.add_sparse_rows(estimate, run, table, load.rows * steps, share)

    def _sparse(self, estimate: Estimate, run: PlannedRun, seeds: float, wire: Wire) -> None:
        """Add what rows of sparse features cost."""
        work, steps, table = run.workload, wide.steps_of(run), run.workload.tables[0]
        entries = seeds * (work.entries or work.num_features)
        load = Load(entries / steps, work.columns_read(seeds / steps), seeds / steps)
        plan = chosen_plan(run, table, load, wire)
        add_product_bytes(estimate, plan, load, steps, wire, table.dim)
        estimate.add(
            MEMORY, "entries of steps in flight", "steps * entries * (4 + item + each)",
            steps=min(1 + run.settings["prefetch"], steps), entries=load.entries, item=work.item, each=_IN_FLIGHT,
        )  # fmt: skip
        layers.add_hidden_memory(estimate, run, load.rows)
        estimate.add(SERVER_MEMORY, "kernels and buffers", "buffers", buffers=BUFFERS)
        add_server_steps(estimate, run, plan, load, wire, table.dim)
        if plan.protocol == "ship":
            estimate.add(
                SERVER_MEMORY, "sorted entries of a step", "entries / blocks * each",
                entries=load.entries, blocks=plan.row_blocks, each=wide.SORTED_BYTES,
            )  # fmt: skip
        else:
            estimate.add(
                MEMORY, "rows of a step, and their gradients", "2 * distinct * dim * item",
                distinct=load.unique, dim=table.dim, item=work.item,
            )  # fmt: skip
        wide.add_entries(estimate, run, seeds)
        # Servers compute for all workers, on the cores that these leave idle.
        share = run.servers_per_machine / wire.servers * run.ranks / run.ranks_per_machine
        wide.add_sparse_rows(estimate, run, table, seeds, share)
        layers.add_time(estimate, run, 0, 0, seeds / steps, steps)

    def _embeddings(self, estimate: Estimate, run: PlannedRun, edges: float, number: int) -> None:
        """Add what edges of a knowledge graph cost, whose rows are pulled and whose gradients are pushed."""
        work, steps = run.workload, wide.steps_of(run)
        if work.kind != wide.EMBEDDING:
            raise NotEstimated("no formula covers this model")
        _, drawn = wide.negatives(dict(run.config), wide.largest(work).rows)
        sides = int(run.config["model"]["head_negs"]) + int(run.config["model"]["tail_negs"])
        for table in work.tables:
            rows = work.nodes_read(table, edges / steps, sides * drawn * edges / steps)
            estimate.add(
                SENT, f"ids and gradients of rows of {table.name}", "steps * distinct * (8 + number * dim)",
                steps=steps, distinct=table.rows if run.config["model"]["all_negs"] else rows, number=number,
                dim=table.dim,
            )  # fmt: skip
        wide.add_edge_scores(estimate, run, edges, flops=run.flops, fused=False)
        wide.add_batch_scores(estimate, run, edges / steps)
        wide.add_starts(estimate, run, steps)
