"""What a run of ``strategy=sar`` costs: a part of the graph for each rank, and halo rows between them.

A rank sends the rows that others read in the forward pass, and the gradients of the rows that it reads in the backward
pass; :mod:`gtrain.engine` decides which rows of a layer travel, and how wide they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gtrain.plan import layers, typed_layers, wide
from gtrain.plan.counts import Parts
from gtrain.plan.estimate import BANDWIDTH, MEMORY, NETWORK, SENT, Estimate, NotEstimated, PlannedRun, Planner
from gtrain.plan.workload import ATTENTION, IDS, Layer
from gtrain_sar.config import MODES

_HIDDEN = 0.65  # of the computation behind transfers, measured: docs/benchmarks.md
_GATHERED = 1032  # bytes of a small all-gather to each other rank
_SCALARS, _ANSWERED = 2, 1  # numbers per head beside a target's gradient, and in the answer of a source's owner


class SarPlanner(Planner):
    """The formulas of sharded full batches, in three modes."""

    def variants(self, config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        first = int(config["strategy"]["mode"])
        return [{"mode": mode} for mode in sorted(MODES, key=lambda mode: mode != first)]

    def estimate(self, run: PlannedRun) -> Estimate:
        layers.check_engine(run)
        if str(run.settings.get("cache_inputs")).lower() == "false":
            uncached = tuple(replace(layer, constant=False) for layer in run.workload.layers)
            run = replace(run, workload=replace(run.workload, layers=uncached))
        work = run.workload
        if work.heterogeneous:
            return _typed(run)
        if not work.layers:
            raise NotEstimated("the model's layers are not known before its data are read")
        parts = work.parts(run.ranks)
        estimate = Estimate(hidden=_HIDDEN)
        if not parts.exact:
            estimate.assumptions.append(f"parts are {parts.origin}")
        nodes, edges = max(parts.nodes), max(parts.edges)
        layers.add_memory(estimate, run, nodes, edges, converted=1)
        _add_tables(estimate, run)
        layers.add_time(estimate, run, nodes, edges, max(parts.seeds))
        if work.task == "link":
            layers.add_scored_edges(estimate, run, work.num_seeds / run.ranks, run.ranks, 1)
        if run.ranks > 1:
            # The rank that sends most; the backward pass sends what the forward pass receives.
            rank = max(range(run.ranks), key=lambda p: parts.halo[p] + parts.served[p])
            for number, layer in enumerate(work.layers, start=1):
                _add_bytes(estimate, run, parts, rank, number, layer)
                _add_halo_memory(estimate, run, parts, rank, number, layer)
            if work.task == "link":
                _add_edge_bytes(estimate, run, rank)
            _add_exchange(estimate, run, len(work.layers))
        return estimate


def _typed(run: PlannedRun) -> Estimate:
    """Estimate a network over several types, whose layers exchange the rows of all types at once."""
    typed_layers.check(run)
    work = run.workload
    by_type, mode = work.parts_by_type(run.ranks), int(run.settings["mode"])
    estimate = Estimate(hidden=_HIDDEN)
    estimate.assumptions += sorted({f"parts are {parts.origin}" for parts in by_type.values() if not parts.exact})
    largest = max(range(run.ranks), key=lambda p: sum(parts.nodes[p] for parts in by_type.values()))
    nodes = {node_type: parts.nodes[largest] for node_type, parts in by_type.items()}
    sources = {node_type: parts.nodes[largest] + parts.halo[largest] for node_type, parts in by_type.items()}
    edges = max(sum(parts.edges[p] for parts in by_type.values()) for p in range(run.ranks))
    typed_layers.add_memory(
        estimate, run, nodes, edges, sources=sources, packed=run.ranks > 1, recomputed=mode == 1 and run.ranks > 1
    )
    _add_tables(estimate, run)
    typed_layers.add_time(estimate, run, nodes, edges)
    if work.task == "link":
        layers.add_scored_edges(estimate, run, work.num_seeds / run.ranks, run.ranks, 1)
    if run.ranks > 1:
        halo = [sum(parts.halo[p] for parts in by_type.values()) for p in range(run.ranks)]
        served = [sum(parts.served[p] for parts in by_type.values()) for p in range(run.ranks)]
        for number, layer in enumerate(work.typed, start=1):
            # A layer that runs again in the backward pass fetches its rows again.
            times = 2 if mode == 1 and not layer.sums else 1
            rank = max(range(run.ranks), key=lambda p: times * served[p] + halo[p])
            estimate.add(
                SENT, f"rows of layer {number}, and gradients", "(times * served + halo) * width * item",
                times=times, served=served[rank], halo=halo[rank], width=layer.inputs, item=_computed_item(run),
            )  # fmt: skip
        widest = max(layer.inputs for layer in work.typed)
        estimate.add(
            MEMORY, "halo rows in flight", "(halo + served) * width * item",
            halo=max(halo), served=max(served), width=widest, item=_computed_item(run),
        )  # fmt: skip
        if work.task == "link":
            _add_edge_bytes(estimate, run, max(range(run.ranks), key=lambda p: halo[p] + served[p]))
        _add_exchange(estimate, run, len(work.typed))
    return estimate


def _add_tables(estimate: Estimate, run: PlannedRun) -> None:
    """Add the tables twice: a checkpoint, and the sum over the ranks, copy the rows."""
    for table in run.workload.tables:
        wide.add_table_memory(estimate, run, MEMORY, table, 2)


def _add_exchange(estimate: Estimate, run: PlannedRun, exchanges: int) -> None:
    """Add the sum of gradients, and the time of everything that is sent, with a number of exchanges of rows."""
    work = run.workload
    layers.add_gradient_sum(estimate, run)
    estimate.add(
        SENT, "sum of gradients", "(parameters + tables) * item",
        parameters=work.parameters, tables=sum(table.rows * table.dim for table in work.tables), item=work.item,
    )  # fmt: skip
    layers.add_reduce_time(estimate, run, work.parameters + sum(table.rows * table.dim for table in work.tables))
    sent, others = estimate.total(SENT), run.ranks - 1
    estimate.add(NETWORK, "transfer", "sent / link", sent=sent, link=run.link)
    estimate.add(
        NETWORK, "waiting for first bytes", "messages * latency",
        messages=2 * exchanges * others + 2 * others, latency=run.latency,
    )  # fmt: skip
    estimate.add(BANDWIDTH, "packing and adding rows", "4 * sent / stream", sent=sent, stream=run.stream)


def _add_bytes(estimate: Estimate, run: PlannedRun, parts: Parts, rank: int, number: int, layer: Layer) -> None:
    """Add the bytes that a rank sends for one layer."""
    item = _item(run, layer)
    served, halo = parts.served[rank], parts.halo[rank]
    if layer.kind == ATTENTION:
        _add_attention_bytes(estimate, run, parts, rank, number, layer)
        return
    layers.check_layer(layer)
    if layer.kind == IDS:
        estimate.add(
            SENT,
            f"ids of layer {number}, once in all epochs",
            "8 * served / epochs",
            served=served,
            epochs=wide.epochs_of(run),
        )
        return
    if layer.sums_forward:
        estimate.add(
            SENT, f"rows of layer {number}", "served * width * item", served=served, width=layer.width, item=item
        )
    else:
        estimate.add(
            SENT, f"constant inputs of layer {number}, once in all epochs", "served * width * item / epochs",
            served=served, width=layer.width, item=item, epochs=wide.epochs_of(run),
        )  # fmt: skip
    if layer.sums_backward:
        estimate.add(
            SENT, f"gradients of layer {number}", "halo * width * item", halo=halo, width=layer.width, item=item
        )


def _add_attention_bytes(
    estimate: Estimate, run: PlannedRun, parts: Parts, rank: int, number: int, layer: Layer
) -> None:
    """Add the bytes of an attention layer, whose backward pass runs at the sources' owners if that sends less."""
    item, mode = _item(run, layer), int(run.settings["mode"])
    served, halo = parts.served[rank], parts.halo[rank]
    # Numbers of heads and gradients of targets are float32 also beside rows of bfloat16.
    number_bytes = item if run.settings["wire_dtype"] == "bfloat16" else max(item, 4)
    estimate.add(
        SENT, f"rows and logits of layer {number}", "served * (width * item + heads * number)",
        served=served, width=layer.width, heads=layer.heads, item=item, number=number_bytes,
    )  # fmt: skip
    over_halo = sum(parts.sent_targets) / max(sum(parts.halo), 1)
    if over_halo <= (2 if mode == 1 else 1):
        estimate.add(
            SENT, f"gradients of targets of layer {number}", "targets * (width * item + scalars * heads * number)",
            targets=parts.sent_targets[rank], width=layer.width, scalars=_SCALARS, heads=layer.heads, item=number_bytes,
            number=number_bytes,
        )  # fmt: skip
        estimate.add(
            SENT, f"answers to targets of layer {number}", "answered * scalars * heads * number",
            answered=parts.received_targets[rank], scalars=_ANSWERED, heads=layer.heads, number=number_bytes,
        )  # fmt: skip
        return
    if mode == 1:
        estimate.add(
            SENT, f"rows and logits of layer {number}, again", "served * (width * item + heads * number)",
            served=served, width=layer.width, heads=layer.heads, item=item, number=number_bytes,
        )  # fmt: skip
    estimate.add(
        SENT, f"gradients of layer {number}", "halo * (width * item + heads * number)",
        halo=halo, width=layer.width, heads=layer.heads, item=item, number=number_bytes,
    )  # fmt: skip


def _add_edge_bytes(estimate: Estimate, run: PlannedRun, rank: int) -> None:
    """Add the embeddings of remote ends of scored edges: sources are in the halo, negatives anywhere."""
    work, others = run.workload, run.ranks - 1
    ends = work.ends(run.ranks)
    halo, served = ends.sources.halo[rank], ends.sources.served[rank]
    own, total = ends.targets.nodes[rank], sum(ends.targets.nodes)
    # Negatives of the sources' type may be in the halo as well; rows are sent once.
    fetched, given = "halo + remote * (1 - exp(-draws / total))", "served + remote * (1 - exp(-draws / total))"
    numbers = {"draws": work.num_seeds / run.ranks * layers.negatives_of(run), "total": total}
    remote = total - own - (halo if ends.one_type else 0)
    estimate.add(
        SENT, "ids of remote ends of edges", f"8 * ({fetched}) + others * header",
        halo=halo, remote=remote, others=others, header=_GATHERED, **numbers,
    )  # fmt: skip
    estimate.add(
        SENT, "embeddings of ends of edges", f"({given}) * dim * item",
        served=served, remote=others * own - (served if ends.one_type else 0), dim=work.embedding_width,
        item=_computed_item(run), **numbers,
    )  # fmt: skip
    estimate.add(
        SENT, "gradients of embeddings", f"({fetched}) * dim * item",
        halo=halo, remote=remote, dim=work.embedding_width, item=_computed_item(run), **numbers,
    )  # fmt: skip


def _add_halo_memory(estimate: Estimate, run: PlannedRun, parts: Parts, rank: int, number: int, layer: Layer) -> None:
    """Add the rows in flight of the widest layer, and those that modes 2 and 3 keep of others."""
    work, mode = run.workload, int(run.settings["mode"])
    if number != max(range(1, len(work.layers) + 1), key=lambda k: work.layers[k - 1].width):
        return
    ahead = run.ranks - 1 if mode != 1 else min(run.ranks - 1, 1 + int(run.settings["prefetch"]))
    estimate.add(
        MEMORY, "halo rows in flight", "(halo + served) * width * item * blocks / others",
        halo=parts.halo[rank], served=parts.served[rank], width=layer.width, item=_item(run, layer), blocks=ahead,
        others=run.ranks - 1,
    )  # fmt: skip


def _item(run: PlannedRun, layer: Layer) -> int:
    """Return the bytes of a number that travels."""
    # Rows of the data are summed as they are, without a product before.
    stored = not layer.trained_input and not layer.transforms_first
    return _wire_item(run) if stored else _computed_item(run)


def _computed_item(run: PlannedRun) -> int:
    """Return the bytes of a number of a layer's result that travels."""
    return 2 if str(run.config["trainer"]["precision"]).startswith("bf16") else _wire_item(run)


def _wire_item(run: PlannedRun) -> int:
    return 2 if run.settings["wire_dtype"] == "bfloat16" else run.workload.item
