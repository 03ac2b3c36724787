"""What a run of ``strategy=single`` costs: the whole graph in one process."""

from __future__ import annotations

from gtrain.plan import layers, typed_layers, wide
from gtrain.plan.estimate import MEMORY, Estimate, PlannedRun, Planner


class SinglePlanner(Planner):
    """The formulas of one process on all data."""

    def estimate(self, run: PlannedRun) -> Estimate:
        layers.check_engine(run)
        run = wide.limited(run)
        work, steps = run.workload, wide.steps_of(run)
        estimate = Estimate()
        if work.heterogeneous and work.kind != wide.EMBEDDING:
            self._typed(estimate, run, steps)
            return estimate
        layers.add_memory(estimate, run, work.num_nodes, work.num_edges)
        for table in work.tables:
            # Twice: a checkpoint copies the rows and their optimizer's states.
            wide.add_table_memory(estimate, run, MEMORY, table, 2)
        if work.kind == wide.EMBEDDING and run.config["model"].get("by_query"):
            wide.add_query_scores(estimate, run)
            return estimate
        if work.kind == wide.EMBEDDING:
            wide.add_edge_scores(estimate, run, work.num_seeds, flops=wide.score_flops(run), fused=False)
            wide.add_batch_scores(estimate, run, work.num_seeds / steps)
            wide.add_starts(estimate, run, steps)
            return estimate
        if work.kind == wide.SPARSE:
            wide.add_step_memory(estimate, run, work.num_seeds / steps)
            wide.add_entries(estimate, run, work.num_seeds)
            wide.add_sparse_rows(estimate, run, work.tables[0], work.num_seeds, 1.0)
        elif not work.layers:
            layers.add_hidden_memory(estimate, run, work.num_nodes)
        layers.add_time(estimate, run, work.num_nodes, work.num_edges, work.num_seeds / steps, steps)
        if work.task == "link" and work.layers:
            layers.add_scored_edges(estimate, run, work.num_seeds / steps, 1, steps)
        return estimate

    def _typed(self, estimate: Estimate, run: PlannedRun, steps: int) -> None:
        """Add what a network over several types costs."""
        typed_layers.check(run)
        work = run.workload
        nodes = {node_type: sum(parts.nodes) for node_type, parts in work.parts_by_type(1).items()}
        typed_layers.add_memory(estimate, run, nodes, work.num_edges)
        for table in work.tables:
            wide.add_table_memory(estimate, run, MEMORY, table, 2)
        typed_layers.add_time(estimate, run, nodes, work.num_edges, steps)
        if work.task == "link":
            layers.add_scored_edges(estimate, run, work.num_seeds / steps, 1, steps)
