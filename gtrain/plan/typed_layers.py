"""Formulas of message passing over several types of nodes and edges of one process, which several backends share."""

from __future__ import annotations

from collections.abc import Mapping

from gtrain.plan import layers
from gtrain.plan.estimate import ARITHMETIC, BANDWIDTH, MEMORY, Estimate, NotEstimated, PlannedRun
from gtrain.plan.typed import TypedLayer

KERNELS = 6e7
"""Bytes of compiled kernels and of buffers, beyond the imports: measured in runs on 6,500 nodes."""
KEPT_OF_EDGES, PEAK_OF_EDGES = 3, 2
"""Values of an edge, each as wide as a row, that :class:`HGTConv` keeps for the backward pass (query, key and value),
and that are alive at its peak besides (the gradients of its message and of its value)."""
SOURCE_ROWS = 4
"""Rows for each node and edge type that starts there: keys and values, before and after the matrix of the type."""
EDGE_PASSES = 250
"""Reads and writes of such values, and the faults of their pages, which take most of the time."""


def check(run: PlannedRun) -> None:
    """Refuse a run on a graph with several types that no formula covers.

    Raises:
        NotEstimated: why.
    """
    if not run.workload.typed:
        raise NotEstimated("no formula covers these layers over several types")
    if run.workload.store is None:
        raise NotEstimated("the sizes of the types are known from a store alone")


def add_memory(
    estimate: Estimate,
    run: PlannedRun,
    nodes: Mapping[str, float],
    edges: float,
    *,
    sources: Mapping[str, float] | None = None,
    packed: bool = False,
    recomputed: bool = False,
) -> None:
    """Add the memory of a full batch: what the layers keep for the backward pass, and what is alive at its peak.

    Args:
        estimate: to which terms are added.
        run: the run.
        nodes: nodes of each type that a rank computes.
        edges: edges of all types that point at them.
        sources: nodes of each type at which they start; None: ``nodes``.
        packed: whether the gradients of all sums of a layer are alive at once.
        recomputed: whether a layer that is not a sum keeps its inputs alone, and runs again in the backward pass.
    """
    work = run.workload
    estimate.add(MEMORY, "imports", "imports", imports=run.machine.imports)
    estimate.add(MEMORY, "compiled kernels and buffers", "kernels", kernels=KERNELS)
    estimate.add(MEMORY, "edges", "edges * each", edges=edges, each=layers.EDGE_BYTES)
    add_encoded(estimate, run, nodes)
    for number, layer in enumerate(work.typed, start=1):
        inner = recomputed and number > 1
        add_layer_memory(estimate, run, number, layer, nodes, 0 if inner else edges, {} if inner else sources or nodes)
    add_peak(estimate, run, nodes, edges, packed=packed)
    layers.add_parameters(estimate, run)


def add_encoded(estimate: Estimate, run: PlannedRun, nodes: Mapping[str, float], kept: float = 1) -> None:
    """Add the result of the encoder, and after activation and dropout; arguments as for :func:`add_layer_memory`."""
    work = run.workload
    estimate.add(
        MEMORY, "encoded nodes, and after activation and dropout", "kept * copies * nodes * width * item",
        kept=kept, copies=3 if work.dropout else 2, nodes=sum(nodes.values()), width=work.typed[0].inputs,
        item=work.item,
    )  # fmt: skip


def add_layer_memory(
    estimate: Estimate,
    run: PlannedRun,
    number: int,
    layer: TypedLayer,
    nodes: Mapping[str, float],
    edges: float,
    sources: Mapping[str, float],
    kept: float = 1,
) -> None:
    """Add what a layer keeps for the backward pass.

    Args:
        estimate: to which terms are added.
        run: the run.
        number: of the layer, from 1.
        layer: the layer.
        nodes: nodes of each type that it computes.
        edges: edges of all types of which it keeps values.
        sources: nodes of each type at which they start.
        kept: memory that stays allocated, in parts of what is needed.
    """
    work = run.workload
    estimate.add(
        MEMORY, f"result of layer {number}, and after dropout", "kept * copies * nodes * width * item",
        kept=kept, copies=2 if work.dropout else 1, nodes=layer.results(nodes), width=layer.outputs, item=work.item,
    )  # fmt: skip
    if layer.sums:
        estimate.add(
            MEMORY, f"sums of layer {number}, one for each edge type", "kept * rows * width * item",
            kept=kept, rows=layer.sums_of_types(nodes), width=layer.inputs, item=work.item,
        )  # fmt: skip
    elif edges:
        estimate.add(
            MEMORY, f"keys, queries and values of edges of layer {number}", "kept * copies * edges * width * item",
            kept=kept, copies=KEPT_OF_EDGES, edges=edges, width=layer.outputs, item=work.item,
        )  # fmt: skip
        estimate.add(
            MEMORY, f"keys and values of layer {number}, one for each edge type",
            "kept * copies * rows * width * item",
            kept=kept, copies=SOURCE_ROWS, rows=layer.source_rows(sources), width=layer.outputs, item=work.item,
        )  # fmt: skip


def add_peak(
    estimate: Estimate, run: PlannedRun, nodes: Mapping[str, float], edges: float, *, packed: bool, kept: float = 1
) -> None:
    """Add what is alive at the peak of the backward pass, in the widest layer; arguments as for :func:`add_memory`."""
    work = run.workload
    widest = max(work.typed, key=lambda layer: layer.outputs)
    estimate.add(
        MEMORY, "gradients at the peak", "kept * 2 * nodes * width * item",
        kept=kept, nodes=sum(nodes.values()), width=widest.outputs, item=work.item,
    )  # fmt: skip
    if not widest.sums:
        estimate.add(
            MEMORY, "gradients of edges at the peak", "kept * copies * edges * width * item",
            kept=kept, copies=PEAK_OF_EDGES, edges=edges, width=widest.outputs, item=work.item,
        )  # fmt: skip
    elif packed:
        estimate.add(
            MEMORY, "gradients of sums at the peak", "2 * rows * width * item",
            rows=widest.sums_of_types(nodes), width=widest.inputs, item=work.item,
        )  # fmt: skip


def add_time(estimate: Estimate, run: PlannedRun, nodes: Mapping[str, float], edges: float, times: float = 1) -> None:
    """Add the time of the layers' forward and backward pass, and of the optimizer.

    Args:
        estimate: to which terms are added.
        run: the run.
        nodes: nodes of each type that a rank computes.
        edges: edges of all types that point at them.
        times: steps in an epoch.
    """
    work = run.workload
    for number, layer in enumerate(work.typed, start=1):
        add_layer_time(estimate, run, number, layer, nodes, edges, times)
    add_encoder_time(estimate, run, nodes, times)
    layers.add_step_time(estimate, run, times)


def add_encoder_time(estimate: Estimate, run: PlannedRun, nodes: Mapping[str, float], times: float) -> None:
    """Add the time of the layers before and after the convolutions; arguments as for :func:`add_time`."""
    work, count = run.workload, sum(nodes.values())
    estimate.add(
        ARITHMETIC, "encoder and head", "6 * nodes * weights * steps / flops",
        nodes=count / len(nodes), weights=work.dense, steps=times, flops=run.flops,
    )  # fmt: skip
    estimate.add(
        BANDWIDTH, "activation and dropout after the encoder", "passes * nodes * width * item * steps / stream",
        passes=layers.ELEMENT_PASSES, nodes=count, width=work.typed[0].inputs, item=work.item, steps=times,
        stream=run.stream,
    )  # fmt: skip


def add_layer_time(
    estimate: Estimate,
    run: PlannedRun,
    number: int,
    layer: TypedLayer,
    nodes: Mapping[str, float],
    edges: float,
    times: float,
) -> None:
    """Add the time of one layer; arguments as for :func:`add_time`, and its number from 1."""
    work = run.workload
    estimate.add(
        ARITHMETIC, f"products of layer {number}", "6 * numbers * steps / flops",
        numbers=layer.products(nodes), steps=times, flops=run.flops,
    )  # fmt: skip
    if layer.sums:
        estimate.add(
            BANDWIDTH, f"sums of layer {number}", "2 * edges * width * item * steps / gather",
            edges=edges, width=layer.inputs, item=work.item, steps=times, gather=run.gather,
        )  # fmt: skip
    else:
        estimate.add(
            BANDWIDTH, f"values of edges of layer {number}", "passes * edges * width * item * steps / stream",
            passes=EDGE_PASSES, edges=edges, width=layer.outputs, item=work.item, steps=times, stream=run.stream,
        )  # fmt: skip
    estimate.add(
        BANDWIDTH, f"adding the results of layer {number}, activation and dropout",
        "passes * (rows + nodes) * width * item * steps / stream",
        passes=layers.ELEMENT_PASSES, rows=layer.sums_of_types(nodes), nodes=layer.results(nodes),
        width=layer.outputs, item=work.item, steps=times, stream=run.stream,
    )  # fmt: skip
