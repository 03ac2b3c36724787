"""Formulas of message passing over a batch of sampled neighbourhoods, which several backends share.

A layer computes the rows that the next one reads: the last layer the seeds, the one before also their neighbours.
"""

from __future__ import annotations

from gtrain.engine.fused_layers import costs_less_first
from gtrain.plan import layers, typed_layers
from gtrain.plan.batches import MeanBatch
from gtrain.plan.estimate import BANDWIDTH, MEMORY, Estimate, PlannedRun
from gtrain.plan.workload import ATTENTION, Layer

KEPT = 1.5
"""Memory that the C library keeps for the next batch, in parts of what a batch allocates."""
KEPT_TYPED, KEPT_OF_EDGES = 2.5, 4
"""The same with many tensors whose sizes change from batch to batch, and with values of edges."""


def add_sampling(estimate: Estimate, run: PlannedRun, batch: MeanBatch, steps: int) -> None:
    """Add the time in which batches are drawn and their rows are gathered."""
    estimate.add(
        BANDWIDTH, "sampling", "edges * steps / (cores * sampling)",
        edges=sum(batch.edges), steps=steps, cores=run.cores, sampling=run.machine.sampling,
    )  # fmt: skip
    estimate.add(
        BANDWIDTH, "rows of batches", "2 * bytes * steps / gather",
        bytes=batch.row_bytes, steps=steps, gather=run.gather,
    )  # fmt: skip


def add_layers(estimate: Estimate, run: PlannedRun, batch: MeanBatch, steps: int, *, trimmed: bool = True) -> None:
    """Add the memory and the time of layers over one type.

    Args:
        estimate: to which terms are added.
        run: the run.
        batch: the mean batch.
        steps: of an epoch.
        trimmed: whether a layer computes only the rows that the next one reads; otherwise those of all nodes.
    """
    work, hops, (nodes,) = run.workload, batch.hops, batch.nodes.values()
    widest = 0.0
    for number, layer in enumerate(work.layers, start=1):
        # The last layer computes the seeds; each earlier one the rows that the next one reads.
        hop = max(hops - number, 0) if trimmed else hops
        sources, targets, edges = nodes[min(hop + 1, hops)], nodes[hop], sum(batch.edges[: hop + 1])
        first = _transforms_first(layer, sources, targets, edges)
        rows = (sources + targets) / 2 if first and layer.name in ("SAGEConv", "GraphConv") else targets
        rows = sources if first and layer.name not in ("SAGEConv", "GraphConv") else rows
        layers.add_layer_time(estimate, run, number, layer, rows, edges, edges, steps)
        widest = max(widest, targets * max(layer.outputs, layer.width))
        estimate.add(
            MEMORY, f"layer {number}", "kept * nodes * (inputs + copies * outputs) * item",
            kept=KEPT, nodes=targets,
            inputs=0 if layer.kind == ATTENTION or layer.entries is not None else layer.inputs,
            copies=3 if work.dropout and number < len(work.layers) else 2, outputs=layer.outputs, item=work.item,
        )  # fmt: skip
    joined = run.config["model"].get("jk") is not None or not trimmed
    layers.add_norms_and_jumps(estimate, run, nodes[hops if joined else max(hops - 1, 0)], KEPT)
    layers.add_converted(estimate, run, nodes[hops])
    estimate.add(MEMORY, "gradients at the peak", "2 * numbers * item", numbers=widest, item=work.item)
    if work.dense:
        # As many rows as the first layer computes: other layers stand beside the convolutions, or behind them.
        layers.add_dense_time(estimate, run, nodes[max(hops - 1, 0) if trimmed else hops], steps)


def add_typed_layers(estimate: Estimate, run: PlannedRun, batch: MeanBatch, steps: int) -> None:
    """Add the memory and the time of layers over several types, and of the encoder before them."""
    work, hops = run.workload, batch.hops
    kept = KEPT_TYPED if all(layer.sums for layer in work.typed) else KEPT_OF_EDGES
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
