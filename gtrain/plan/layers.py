"""Formulas of message passing over the nodes and edges of one process, which several backends share.

The numbers of passes over a layer's matrices are those of the layer engine: what it keeps for the backward pass, and
what is alive at its peak.
"""

from __future__ import annotations

from gtrain.model.candidate_ranks import TILE
from gtrain.model.kinds import SPARSE
from gtrain.plan.estimate import ARITHMETIC, BANDWIDTH, MEMORY, NETWORK, OVERHEAD, Estimate, NotEstimated, PlannedRun
from gtrain.plan.workload import ATTENTION, IDS, OTHER, RELATIONAL, Layer, Workload

ELEMENT_PASSES = 30
"""Reads and writes of a hidden layer's result by activation, dropout, bias and their backward passes."""
BACKWARD_ATTENTION = 1.5
"""Time of attention's backward pass in forward passes; see docs/benchmarks.md."""
EDGE_BYTES = 40
"""Bytes of an edge in memory: its ends as int64, and its int32 numbers by target and by source."""
STORED_ITEM = 4
"""Bytes of a number of stored features."""
SMALL_SUM = 32 << 10
"""Bytes of a tensor up to which each rank sends all of it to all others to sum it."""
RELATION_BYTES = 56
"""Bytes of an edge of R-GCN beside :data:`EDGE_BYTES`: its number among pairs of relation and node, and their ends."""
NEW_RESULTS = 8
"""Results and gradients of a layer that each step of a full batch allocates; see :mod:`gtrain.memory.heap`."""
SCORED_PASSES = 6
"""Reads and writes of the rows of scored edges, forward and backward."""


def add_time(estimate: Estimate, run: PlannedRun, nodes: float, edges: float, seeds: float, times: float = 1) -> None:
    """Add the time of the layers' forward and backward pass, and of the optimizer.

    Args:
        estimate: to which terms are added.
        run: the run.
        nodes: nodes that a rank computes.
        edges: edges that point at them.
        seeds: nodes of the loss.
        times: steps in an epoch.
    """
    work = run.workload
    if not work.layers and not work.dense and not work.tables:
        raise NotEstimated("the model's layers are not known before its data are read")
    for number, layer in enumerate(work.layers, start=1):
        add_layer_time(estimate, run, number, layer, nodes, edges, edges, times)
        estimate.add(
            BANDWIDTH, f"new memory of layer {number}", "results * nodes * width * item * steps / fresh",
            results=NEW_RESULTS, nodes=nodes, width=layer.outputs, item=work.item, steps=times, fresh=run.fresh,
        )  # fmt: skip
    if work.dense:
        # Sparse rows are chosen before they are multiplied; other models compute all nodes.
        add_dense_time(estimate, run, seeds if work.kind == SPARSE else nodes, times)
    add_step_time(estimate, run, times)


def add_dense_time(estimate: Estimate, run: PlannedRun, rows: float, times: float) -> None:
    """Add the time of the other matrices than those of convolutions, for a number of rows in each step."""
    estimate.add(
        ARITHMETIC, "other matrices", "6 * rows * weights * steps / flops",
        rows=rows, weights=run.workload.dense, steps=times, flops=run.flops,
    )  # fmt: skip


def add_layer_time(
    estimate: Estimate,
    run: PlannedRun,
    number: int,
    layer: Layer,
    nodes: float,
    edges: float,
    summed: float,
    times: float = 1,
) -> None:
    """Add the time of one layer.

    Args:
        estimate: to which terms are added.
        run: the run.
        number: of the layer, from 1.
        layer: the layer.
        nodes: rows that are multiplied.
        edges: edges whose source rows are read.
        summed: edges that the backward pass reads.
        times: steps in an epoch.
    """
    passes = 6 if layer.trained_input else 4
    estimate.add(
        ARITHMETIC, f"products of layer {number}", "passes * nodes * weights * steps / flops",
        passes=passes, nodes=nodes, weights=layer.weights, steps=times, flops=run.flops,
    )  # fmt: skip
    if layer.entries is not None:
        estimate.add(
            BANDWIDTH, f"products of sparse rows of layer {number}, forward and backward",
            "2 * nodes * entries * columns * item * steps / gather",
            nodes=nodes, entries=layer.entries, columns=layer.sparse_columns, item=run.workload.item, steps=times,
            gather=run.gather,
        )  # fmt: skip
    if layer.pair_weights:
        # At most one pair of relation and target for each edge.
        estimate.add(
            ARITHMETIC, f"products of relations of layer {number}", "passes * edges * weights * steps / flops",
            passes=passes, edges=edges, weights=layer.pair_weights, steps=times, flops=run.flops,
        )  # fmt: skip
    if layer.kind == ATTENTION:
        estimate.add(
            BANDWIDTH, f"attention of layer {number}",
            "edges * (width * item / attention + heads * logit) * (1 + backward) * steps / cores",
            edges=edges, width=layer.width, heads=layer.heads, logit=run.machine.logit,
            item=run.workload.item, backward=BACKWARD_ATTENTION, steps=times, cores=run.cores,
            attention=run.machine.attention,
        )  # fmt: skip
    elif layer.sums_forward or layer.sums_backward:
        estimate.add(
            BANDWIDTH, f"sums of layer {number}",
            "(forward * edges + backward * summed) * width * item * steps / gather",
            forward=int(layer.sums_forward), backward=int(layer.sums_backward), edges=edges, summed=summed,
            width=layer.width, item=run.workload.item, steps=times, gather=run.gather,
        )  # fmt: skip
    if number < len(run.workload.layers):
        estimate.add(
            BANDWIDTH, f"activation and dropout after layer {number}", "passes * nodes * width * item * steps / stream",
            passes=ELEMENT_PASSES if run.workload.dropout else ELEMENT_PASSES / 2, nodes=nodes, width=layer.outputs,
            item=run.workload.item, steps=times, stream=run.stream,
        )  # fmt: skip


def add_scored_edges(estimate: Estimate, run: PlannedRun, edges: float, ranks: int, steps: float) -> None:
    """Add what a link task costs beside the layers: rows of the edges' ends, and ranking held-out edges.

    Args:
        estimate: to which terms are added.
        run: the run.
        edges: true edges that a rank scores in a step.
        ranks: among which the candidates are distributed.
        steps: in an epoch.
    """
    work = run.workload
    rows, dim = 2 + negatives_of(run), work.embedding_width
    estimate.add(
        MEMORY, "rows of scored edges, and their gradients", "2 * edges * rows * dim * item",
        edges=edges, rows=rows, dim=dim, item=work.item,
    )  # fmt: skip
    add_ranking(estimate, run, max(work.ends(ranks).targets.nodes))
    estimate.add(
        BANDWIDTH, "rows of scored edges", "passes * edges * rows * dim * item * steps / gather",
        passes=SCORED_PASSES, edges=edges, rows=rows, dim=dim, item=work.item, steps=steps, gather=run.gather,
    )  # fmt: skip


def add_reduce_time(estimate: Estimate, run: PlannedRun, numbers: float, times: float = 1) -> None:
    """Add the transfers of a sum over the ranks beyond the tensor itself, which the counters of sent bytes count.

    Args:
        estimate: to which a term is added.
        run: the run.
        numbers: of the tensor.
        times: sums in an epoch.
    """
    ranks, size = run.ranks, numbers * run.workload.item
    estimate.add(
        NETWORK, "sums over the ranks, beyond one tensor", "times * (transferred - 1) * bytes / link",
        times=times, transferred=ranks - 1 if size <= SMALL_SUM else 2 * (ranks - 1) / ranks, bytes=size, link=run.link,
    )  # fmt: skip


def ranks_held_out(run: PlannedRun) -> bool:
    """Whether the run validates or tests."""
    trainer = run.config["trainer"]
    return any(trainer.get(f"limit_{stage}_batches", 1.0) != 0 for stage in ("val", "test"))


def add_ranking(estimate: Estimate, run: PlannedRun, candidates: float) -> None:
    """Add the memory of ranking held-out edges among all candidates: scores of a tile of both."""
    if not ranks_held_out(run):
        return
    estimate.add(
        MEMORY, "a tile of scores of held-out edges", "min(held_out, tile) * min(candidates, tile) * item",
        held_out=run.workload.num_held_out, candidates=candidates, tile=TILE, item=run.workload.item,
    )  # fmt: skip


def negatives_of(run: PlannedRun) -> int:
    """Return the negative targets of an edge in training."""
    if run.config["data"].get("neg_sampling") is not None:
        raise NotEstimated("no formula covers data.neg_sampling")
    negatives = run.config["model"].get("num_negatives")
    if negatives is None:
        raise NotEstimated("it is not known how many negative edges the model draws")
    return int(negatives)


def add_step_time(estimate: Estimate, run: PlannedRun, times: float) -> None:
    """Add the optimizer's time, and that of starting operations."""
    work, accumulated = run.workload, int(run.config["trainer"].get("accumulate_grad_batches") or 1)
    estimate.add(
        BANDWIDTH, "optimizer", "(4 + 3 * states) * parameters * item * ceil(steps / accumulated) / stream",
        states=work.states, parameters=work.parameters, item=work.item, steps=times, accumulated=accumulated,
        stream=run.stream,
    )  # fmt: skip
    # HeteroConv calls a convolution for each edge type.
    convolutions = len(work.layers) + sum(sum(layer.targets.values()) for layer in work.typed)
    estimate.add(
        OVERHEAD, "starting operations", "steps * (step + layers * layer)",
        steps=times, layers=convolutions, step=run.machine.step, layer=run.machine.layer,
    )  # fmt: skip


def add_memory(
    estimate: Estimate, run: PlannedRun, nodes: float, edges: float, *, converted: int | None = None
) -> None:
    """Add the memory of a full batch: what the layers keep for the backward pass, and what is alive at its peak.

    Args:
        estimate: to which terms are added.
        run: the run.
        nodes: nodes that a rank computes.
        edges: edges that point at them.
        converted: copies of the features in another precision than the stored one; None: one for training, and one
            for validation or test.
    """
    work = run.workload
    estimate.add(MEMORY, "imports", "imports", imports=run.machine.imports)
    if edges:
        estimate.add(MEMORY, "edges", "edges * each", edges=edges, each=EDGE_BYTES)
    for number, layer in enumerate(work.layers, start=1):
        add_layer_memory(estimate, run, number, layer, nodes, edges)
    add_norms_and_jumps(estimate, run, nodes)
    add_converted(estimate, run, nodes, 1 + int(ranks_held_out(run)) if converted is None else converted)
    add_parameters(estimate, run)
    widest = max([max(layer.width, layer.outputs) for layer in work.layers], default=0)
    if widest:
        estimate.add(
            MEMORY, "gradients at the peak", "2 * nodes * width * item", nodes=nodes, width=widest, item=work.item
        )


def add_converted(estimate: Estimate, run: PlannedRun, nodes: float, copies: int = 1) -> None:
    """Add the dense features in the precision of the run; in that of the store they are mapped from its files."""
    work = run.workload
    if work.num_features and work.entries is None and work.item != STORED_ITEM:
        estimate.add(
            MEMORY, "features in the precision of the run", "copies * nodes * features * item",
            copies=copies, nodes=nodes, features=work.num_features, item=work.item,
        )  # fmt: skip


def add_norms_and_jumps(estimate: Estimate, run: PlannedRun, nodes: float, kept: float = 1) -> None:
    """Add what ``model.norm`` and ``model.jk`` keep for the backward pass.

    Args:
        estimate: to which terms are added.
        run: the run.
        nodes: rows of a layer.
        kept: memory that stays allocated, in parts of what is needed.

    Raises:
        NotEstimated: the layers are joined by an LSTM.
    """
    work, model = run.workload, run.config["model"]
    norm, jump, count = model.get("norm"), model.get("jk"), len(work.layers)
    if not count:
        return
    if jump == "lstm":
        raise NotEstimated("no formula covers model.jk=lstm")
    if norm not in (None, "none") and (norms := count if jump else count - 1):
        estimate.add(
            MEMORY, "inputs of norms", "kept * nodes * columns * item",
            kept=kept, nodes=nodes, columns=sum(layer.outputs for layer in work.layers[:norms]), item=work.item,
        )  # fmt: skip
    if jump:
        # The results of all layers after activation, and their copies in one matrix.
        estimate.add(
            MEMORY, "results of all layers, joined", "2 * kept * nodes * columns * item",
            kept=kept, nodes=nodes, columns=sum(layer.outputs for layer in work.layers), item=work.item,
        )  # fmt: skip


def check_engine(run: PlannedRun) -> None:
    """Refuse a run whose convolutions run by PyG's own methods: formulas are those of the layer engine.

    Raises:
        NotEstimated: it is one.
    """
    work = run.workload
    if run.settings.get("layers") == "plain" and (work.layers or work.typed):
        raise NotEstimated("no formula covers convolutions that run as PyG wrote them")


def check_layer(layer: Layer) -> None:
    """Refuse a convolution without a formula.

    Raises:
        NotEstimated: it is one.
    """
    if layer.kind == OTHER:
        raise NotEstimated(f"no formula covers {layer.name}")


def add_layer_memory(
    estimate: Estimate, run: PlannedRun, number: int, layer: Layer, nodes: float, edges: float
) -> None:
    """Add what a layer of ``nodes`` rows and ``edges`` keeps for the backward pass."""
    work = run.workload
    check_layer(layer)
    if layer.kind in (RELATIONAL, IDS):
        # Rows of pairs of relation and node, of which there are at most as many as edges, and their gradients.
        width = layer.outputs if layer.kind == IDS else layer.inputs + layer.outputs
        estimate.add(
            MEMORY, f"rows by relation of layer {number}, and their gradients", "edges * (2 * width * item + each)",
            edges=edges, width=width, item=work.item, each=RELATION_BYTES,
        )  # fmt: skip
    elif not layer.transforms_first:
        name = "cached aggregate" if layer.constant else "aggregate"
        estimate.add(
            MEMORY, f"{name} of layer {number}", "nodes * inputs * item",
            nodes=nodes, inputs=layer.inputs, item=work.item,
        )  # fmt: skip
    if layer.kind == ATTENTION:
        estimate.add(
            MEMORY, f"rows and result of layer {number}", "nodes * (2 * width + 4 * heads) * item",
            nodes=nodes, width=layer.width, heads=layer.heads, item=work.item,
        )  # fmt: skip
    if number < len(work.layers):
        estimate.add(
            MEMORY, f"result of layer {number}, and after dropout", "copies * nodes * outputs * item",
            copies=2 if work.dropout else 1, nodes=nodes, outputs=layer.outputs, item=work.item,
        )  # fmt: skip


def hidden_columns(work: Workload) -> dict[str, float]:
    """Return the columns of hidden layers of a model without convolutions, and their copies at the peak, by name.

    Dropout keeps its result, and a mask, beside the result of the activation, whose gradient comes after its own.
    """
    widths = [*(table.dim for table in work.tables), *work.dense_widths][:-1]
    copies, peak = (2.25, 1) if work.dropout else (1, 2)
    return {"copies": copies, "width": sum(widths), "peak": peak, "widest": max(widths, default=0)}


def add_hidden_memory(estimate: Estimate, run: PlannedRun, rows: float) -> None:
    """Add what the hidden layers of a model without convolutions keep of a step's rows, and their gradients."""
    estimate.add(
        MEMORY, "hidden layers, and gradients at the peak", "rows * (copies * width + peak * widest) * item",
        rows=rows, item=run.workload.item, **hidden_columns(run.workload),
    )  # fmt: skip


def add_parameters(estimate: Estimate, run: PlannedRun) -> None:
    """Add the memory of parameters, their gradients and the optimizer's states."""
    estimate.add(
        MEMORY, "parameters", "(2 + states) * parameters * item",
        states=run.workload.states, parameters=run.workload.parameters, item=run.workload.item,
    )  # fmt: skip


def add_gradient_sum(estimate: Estimate, run: PlannedRun) -> None:
    """Add the memory in which ranks sum the gradients: a flat copy, and the shares that a rank receives and adds up."""
    estimate.add(
        MEMORY, "sum of gradients", "2 * parameters * item", parameters=run.workload.parameters, item=run.workload.item
    )
