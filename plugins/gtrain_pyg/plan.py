"""What a run of ``strategy=pyg`` costs: sampled neighbourhoods, of which some rows belong to other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gtrain.plan import batch_layers, layers, typed_layers, wide
from gtrain.plan.batches import fan_out_of
from gtrain.plan.estimate import MEMORY, NETWORK, SENT, Estimate, NotEstimated, PlannedRun, Planner
from gtrain_pyg.plan_batches import RankBatch, hosted_parts, mean_batch, requests_rows, store_parts

_HIDDEN = 0.8  # of the transfers, which are a batch ahead
_EDGE_BYTES = 40  # of a sampled edge: ends and position, and their order by target and by source
_EDGE_ID_BYTES = 12  # of an edge's number in the source data, which its owner sends, and of the position that names it


class PygPlanner(Planner):
    """The formulas of mini-batches of sampled neighbourhoods."""

    exact_validation: ClassVar[Mapping[str, Any]] = {"evaluation": "exact"}

    def estimate(self, run: PlannedRun) -> Estimate:
        layers.check_engine(run)
        run = wide.limited(run)
        work, data = run.workload, run.config["data"]
        _check_layers(run)
        seeds = min(data["batch_size"] or work.num_seeds, work.num_seeds)
        steps = wide.steps_of(run)
        batch = mean_batch(run, seeds / run.ranks, fan_out_of(run), steps)
        estimate = Estimate(hidden=_HIDDEN)
        if work.store is None:
            estimate.assumptions.append(f"batches are {batch.origin}")
        elif run.ranks not in (1, store_parts(run)):
            estimate.assumptions.append(f"the parts of {run.ranks} ranks are equal ranges of the store's nodes")
        if data["temporal_strategy"] is not None:
            estimate.assumptions.append("seeds see all neighbours, also later ones")
        self._add_memory(estimate, run, batch)
        if work.typed:
            batch_layers.add_typed_layers(estimate, run, batch, steps)
        else:
            batch_layers.add_layers(estimate, run, batch, steps)
        layers.add_parameters(estimate, run)
        for table in work.tables:
            # Twice: a checkpoint, and the sum over the ranks, copy the rows.
            wide.add_table_memory(estimate, run, MEMORY, table, 2)
        layers.add_step_time(estimate, run, steps)
        if work.task == "link":
            layers.add_scored_edges(estimate, run, seeds / run.ranks, run.ranks, steps)
            estimate.assumptions.append("the batches in which validation encodes all nodes take no more memory")
        batch_layers.add_sampling(estimate, run, batch, steps)
        if run.ranks > 1:
            self._add_bytes(estimate, run, batch, steps)
        return estimate

    def _add_memory(self, estimate: Estimate, run: PlannedRun, batch: RankBatch) -> None:
        """Add the memory of batches; that of layers comes with their time."""
        ahead = int(run.settings["prefetch"])
        estimate.add(MEMORY, "imports", "imports", imports=run.machine.imports)
        estimate.add(
            MEMORY, "edges of batches", "(1 + ahead) * edges * each",
            ahead=ahead, edges=sum(batch.edges), each=_EDGE_BYTES,
        )  # fmt: skip
        estimate.add(
            MEMORY, "rows of a batch", "copies * bytes", copies=1 if run.ranks == 1 else 2, bytes=batch.row_bytes
        )
        for name, held in (("cached rows", batch.cached_bytes), ("copied edges", batch.copied_bytes)):
            if held:
                estimate.add(
                    MEMORY, f"{name} of others, once on a machine", "bytes / ranks",
                    bytes=held, ranks=hosted_parts(run),
                )  # fmt: skip

    def _add_bytes(self, estimate: Estimate, run: PlannedRun, batch: RankBatch, steps: int) -> None:
        work, updates = run.workload, wide.updates_of(run)
        layers.add_gradient_sum(estimate, run)
        tables = sum(table.rows * table.dim for table in work.tables)
        estimate.add(
            SENT, "sums of gradients", "updates * (parameters + tables) * item",
            updates=updates, parameters=work.parameters, tables=tables, item=work.item,
        )  # fmt: skip
        layers.add_reduce_time(estimate, run, work.parameters + tables, updates)
        if requests_rows(run):
            if run.settings["halo_hops"] != "all":
                # A rank asks as many others as ask it.
                estimate.add(
                    SENT, "nodes whose neighbours are requested", "steps * expanded * 4",
                    steps=steps, expanded=batch.expanded,
                )  # fmt: skip
                estimate.add(
                    SENT, "neighbours in replies", "steps * (edges * 8 + counts * 4)",
                    steps=steps, edges=batch.replied_edges, counts=batch.counts,
                )  # fmt: skip
            estimate.add(
                SENT, "rows in replies, and their ids", "steps * (bytes + remote * 4)",
                steps=steps, bytes=batch.reply_bytes, remote=sum(batch.requested.values()),
            )  # fmt: skip
            estimate.add(
                SENT, "numbers of edges in replies, and their positions", "steps * remote_edges * each",
                steps=steps, remote_edges=batch.remote_edges, each=_EDGE_ID_BYTES,
            )  # fmt: skip
            estimate.add(
                NETWORK, "waiting for replies", "steps * (hops + 1) * latency",
                steps=steps, hops=batch.hops, latency=run.latency,
            )  # fmt: skip
        estimate.add(NETWORK, "transfer", "sent / link", sent=estimate.total(SENT), link=run.link)


def _check_layers(run: PlannedRun) -> None:
    work = run.workload
    if work.heterogeneous:
        typed_layers.check(run)
    elif not work.layers:
        raise NotEstimated("no formula covers models without message passing")
    for layer in work.layers:
        layers.check_layer(layer)
