"""What a run of ``strategy=pyg`` costs: sampled neighbourhoods, of which some rows belong to other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, ClassVar

from gtrain.engine.fused_layers import costs_less_first
from gtrain.plan import layers, typed_layers, wide
from gtrain.plan.estimate import BANDWIDTH, MEMORY, NETWORK, SENT, Estimate, NotEstimated, PlannedRun, Planner
from gtrain.plan.workload import ATTENTION, Layer
from gtrain_pyg.plan_batches import MeanBatch, mean_batch

_HIDDEN = 0.8  # of the transfers, which are a batch ahead
_EDGE_BYTES = 40  # of a sampled edge: ends and position, and their order by target and by source
_EDGE_ID_BYTES = 12  # of an edge's number in the source data, which its owner sends, and of the position that names it
_KEPT = 1.5  # memory that the C library keeps for the next batch, in parts of what a batch allocates
_KEPT_TYPED, _KEPT_OF_EDGES = 2.5, 4  # the same with many tensors whose sizes change from batch to batch


class PygPlanner(Planner):
    """The formulas of mini-batches of sampled neighbourhoods."""

    exact_validation: ClassVar[Mapping[str, Any]] = {"evaluation": "exact"}

    def estimate(self, run: PlannedRun) -> Estimate:
        work, data = run.workload, run.config["data"]
        _check_layers(run)
        seeds = min(data["batch_size"] or work.num_seeds, work.num_seeds)
        steps = ceil(work.num_seeds / seeds)
        batch = mean_batch(run, seeds / run.ranks, _fan_out(run), steps)
        estimate = Estimate(hidden=_HIDDEN)
        if work.store is None:
            estimate.assumptions.append(f"batches are {batch.origin}")
        if data["temporal_strategy"] is not None:
            estimate.assumptions.append("seeds see all neighbours, also later ones")
        self._add_memory(estimate, run, batch)
        if work.typed:
            _add_typed_layers(estimate, run, batch, steps)
        else:
            _add_layers(estimate, run, batch, steps)
        layers.add_parameters(estimate, run)
        for table in work.tables:
            # Twice: a checkpoint, and the sum over the ranks, copy the rows.
            wide.add_table_memory(estimate, run, MEMORY, table, 2)
        layers.add_step_time(estimate, run, steps)
        if work.task == "link":
            layers.add_scored_edges(estimate, run, seeds / run.ranks, run.ranks, steps)
            estimate.assumptions.append("the batches in which validation encodes all nodes take no more memory")
        estimate.add(
            BANDWIDTH, "sampling", "edges * steps / (cores * sampling)",
            edges=sum(batch.edges), steps=steps, cores=run.cores, sampling=run.machine.sampling,
        )  # fmt: skip
        estimate.add(
            BANDWIDTH, "rows of batches", "2 * bytes * steps / gather",
            bytes=batch.row_bytes, steps=steps, gather=run.gather,
        )  # fmt: skip
        if run.ranks > 1:
            self._add_bytes(estimate, run, batch, steps)
        return estimate

    def _add_memory(self, estimate: Estimate, run: PlannedRun, batch: MeanBatch) -> None:
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

    def _add_bytes(self, estimate: Estimate, run: PlannedRun, batch: MeanBatch, steps: int) -> None:
        work = run.workload
        layers.add_gradient_sum(estimate, run)
        estimate.add(
            SENT, "sums of gradients", "steps * (parameters + tables) * item",
            steps=steps, parameters=work.parameters, tables=sum(table.rows * table.dim for table in work.tables),
            item=work.item,
        )  # fmt: skip
        if run.num_machines > 1 or run.settings["transport"] == "tcp":
            if run.settings["halo_hops"] != "all":
                # A rank asks as many others as ask it.
                estimate.add(
                    SENT, "nodes whose neighbours are requested", "steps * expanded * 4",
                    steps=steps, expanded=batch.expanded,
                )  # fmt: skip
                estimate.add(
                    SENT, "neighbours in replies", "steps * (remote_edges * 8 + counts * 4)",
                    steps=steps, remote_edges=batch.remote_edges, counts=batch.counts,
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


def _fan_out(run: PlannedRun) -> Any:
    """Return the neighbours of each hop: a list, or one for each edge type."""
    fan_out, work = run.config["data"]["num_neighbors"], run.workload
    if fan_out is None:
        return [-1] * (len(work.typed) or len(work.layers))
    if isinstance(fan_out, list):
        return [int(count) for count in fan_out]
    if not work.typed:
        raise NotEstimated("no formula covers fan-outs by edge type")
    return fan_out


def _add_layers(estimate: Estimate, run: PlannedRun, batch: MeanBatch, steps: int) -> None:
    """Add the memory and the time of layers over one type."""
    work, hops, (nodes,) = run.workload, batch.hops, batch.nodes.values()
    widest = 0.0
    for number, layer in enumerate(work.layers, start=1):
        # The last layer computes the seeds; each earlier one the rows that the next one reads.
        hop = max(hops - number, 0)
        sources, targets, edges = nodes[min(hop + 1, hops)], nodes[hop], sum(batch.edges[: hop + 1])
        first = _transforms_first(layer, sources, targets, edges)
        rows = (sources + targets) / 2 if first and layer.name in ("SAGEConv", "GraphConv") else targets
        rows = sources if first and layer.name not in ("SAGEConv", "GraphConv") else rows
        layers.add_layer_time(estimate, run, number, layer, rows, edges, edges, steps)
        widest = max(widest, targets * max(layer.outputs, layer.width))
        estimate.add(
            MEMORY, f"layer {number}", "kept * nodes * (inputs + copies * outputs) * item",
            kept=_KEPT, nodes=targets,
            inputs=0 if layer.kind == ATTENTION or layer.entries is not None else layer.inputs,
            copies=3 if work.dropout and number < len(work.layers) else 2, outputs=layer.outputs, item=work.item,
        )  # fmt: skip
    estimate.add(MEMORY, "gradients at the peak", "2 * numbers * item", numbers=widest, item=work.item)


def _add_typed_layers(estimate: Estimate, run: PlannedRun, batch: MeanBatch, steps: int) -> None:
    """Add the memory and the time of layers over several types, and of the encoder before them."""
    work, hops = run.workload, batch.hops
    kept = _KEPT_TYPED if all(layer.sums for layer in work.typed) else _KEPT_OF_EDGES
    estimate.add(MEMORY, "compiled kernels and buffers", "kernels", kernels=typed_layers.KERNELS)
    typed_layers.add_encoded(estimate, run, batch.after(hops), kept)
    typed_layers.add_encoder_time(estimate, run, batch.after(hops), steps)
    for number, layer in enumerate(work.typed, start=1):
        hop = max(hops - number, 0)
        edges, sources = sum(batch.edges[: hop + 1]), batch.after(min(hop + 1, hops))
        typed_layers.add_layer_memory(estimate, run, number, layer, batch.after(hop), edges, sources, kept)
        typed_layers.add_layer_time(estimate, run, number, layer, batch.after(hop), edges, steps)
    # Of the first layer, which has the most rows.
    typed_layers.add_peak(estimate, run, batch.after(hops), sum(batch.edges), packed=False, kept=kept)


def _transforms_first(layer: Layer, sources: float, targets: float, edges: float) -> bool:
    """Whether rows are multiplied before they are summed, as the layer engine decides in a batch."""
    if not layer.transforms_first and layer.kind != "linear":
        return False
    if layer.entries is not None or layer.name not in ("SAGEConv", "GraphConv"):
        return layer.transforms_first
    return costs_less_first(sources, targets, edges, layer.inputs, layer.outputs)
