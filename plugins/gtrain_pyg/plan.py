"""What a run of ``strategy=pyg`` costs: sampled neighbourhoods, of which some rows belong to other ranks.

Batches of the run's fan-out are drawn from the store. Without a store their nodes are those that as many edges reach
at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, expm1
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gtrain.engine.fused_layers import costs_less_first
from gtrain.graph.owners import owner_of
from gtrain.graph.sampling.columns import Columns
from gtrain.graph.sampling.sampler import NeighborSampler
from gtrain.graph.shard.whole import whole_edges, whole_indptr
from gtrain.graph.store import Store
from gtrain.plan import layers
from gtrain.plan.estimate import (
    BANDWIDTH,
    MEMORY,
    NETWORK,
    SENT,
    Estimate,
    NotEstimated,
    PlannedRun,
    Planner,
)
from gtrain.plan.workload import ATTENTION, Layer

_HIDDEN = 0.8  # of the transfers, which are a batch ahead
_DRAWN = 4  # batches
_MOST_EDGES = 200_000_000  # of a store that is read for a sample
_EDGE_BYTES = 40  # of a sampled edge: ends and position, and their order by target and by source
_KEPT = 1.5  # freed memory that the C library keeps for the next batch, in parts of what a batch allocates


@dataclass(frozen=True)
class Sampled:
    """The mean batch of a rank.

    Attributes:
        nodes: nodes after each hop, the seeds first: cumulative.
        edges: edges of each hop.
        remote: nodes that other ranks own.
        expanded: nodes of other ranks whose neighbours are sampled, over all hops.
        remote_edges: edges that are sampled at them.
        origin: a clause that says how they were found.
    """

    nodes: list[float]
    edges: list[float]
    remote: float
    expanded: float
    remote_edges: float
    origin: str


class PygPlanner(Planner):
    """The formulas of mini-batches of sampled neighbourhoods."""

    exact_validation: ClassVar[Mapping[str, Any]] = {"evaluation": "exact"}

    def estimate(self, run: PlannedRun) -> Estimate:
        work, data = run.workload, run.config["data"]
        if work.heterogeneous:
            raise NotEstimated("no formula covers graphs with several types")
        if not work.layers:
            raise NotEstimated("no formula covers models without message passing")
        seeds = min(data["batch_size"] or work.num_seeds, work.num_seeds)
        steps, fan_out = ceil(work.num_seeds / seeds), _fan_out(run)
        batch = _sample(run, seeds / run.ranks, fan_out)
        estimate = Estimate(hidden=_HIDDEN)
        if work.store is None:
            estimate.assumptions.append(f"batches are {batch.origin}")
        if data["temporal_strategy"] is not None:
            estimate.assumptions.append("seeds see all neighbours, also later ones")
        self._add_memory(estimate, run, batch)
        hops = len(batch.edges)
        for number, layer in enumerate(work.layers, start=1):
            # The last layer computes the seeds; each earlier one the rows that the next one reads.
            hop = max(hops - number, 0)
            sources, targets = batch.nodes[min(hop + 1, hops)], batch.nodes[hop]
            edges = sum(batch.edges[: hop + 1])
            first = _transforms_first(layer, sources, targets, edges)
            rows = (sources + targets) / 2 if first and layer.name in ("SAGEConv", "GraphConv") else targets
            rows = sources if first and layer.name not in ("SAGEConv", "GraphConv") else rows
            layers.add_layer_time(estimate, run, number, layer, rows, edges, edges, steps)
        layers.add_step_time(estimate, run, steps)
        if work.task == "link":
            layers.add_scored_edges(estimate, run, seeds / run.ranks, work.num_nodes / run.ranks, steps)
            estimate.assumptions.append("the batches in which validation encodes all nodes take no more memory")
        estimate.add(
            BANDWIDTH, "sampling", "edges * steps / (cores * sampling)",
            edges=sum(batch.edges), steps=steps, cores=run.cores, sampling=run.machine.sampling,
        )  # fmt: skip
        estimate.add(
            BANDWIDTH, "features of batches", "2 * nodes * each * steps / gather",
            nodes=batch.nodes[-1], each=work.feature_bytes, steps=steps, gather=run.gather,
        )  # fmt: skip
        if run.ranks > 1:
            self._add_bytes(estimate, run, batch, steps)
        return estimate

    def _add_memory(self, estimate: Estimate, run: PlannedRun, batch: Sampled) -> None:
        work, ahead = run.workload, int(run.settings["prefetch"])
        estimate.add(MEMORY, "imports", "imports", imports=run.machine.imports)
        estimate.add(
            MEMORY, "edges of batches", "(1 + ahead) * edges * each",
            ahead=ahead, edges=sum(batch.edges), each=_EDGE_BYTES,
        )  # fmt: skip
        estimate.add(
            MEMORY, "features of a batch", "copies * nodes * each",
            copies=1 if run.ranks == 1 else 2, nodes=batch.nodes[-1], each=work.feature_bytes,
        )  # fmt: skip
        hops, widest = len(batch.edges), 0.0
        for number, layer in enumerate(work.layers, start=1):
            targets = batch.nodes[max(hops - number, 0)]
            widest = max(widest, targets * max(layer.outputs, layer.width))
            estimate.add(
                MEMORY, f"layer {number}", "kept * nodes * (inputs + copies * outputs) * item",
                kept=_KEPT, nodes=targets, inputs=0 if layer.kind == ATTENTION else layer.inputs,
                copies=3 if work.dropout and number < len(work.layers) else 2, outputs=layer.outputs, item=work.item,
            )  # fmt: skip
        estimate.add(MEMORY, "gradients at the peak", "2 * numbers * item", numbers=widest, item=work.item)
        layers.add_parameters(estimate, run)

    def _add_bytes(self, estimate: Estimate, run: PlannedRun, batch: Sampled, steps: int) -> None:
        work, hops = run.workload, len(batch.edges)
        estimate.add(
            SENT, "sums of gradients", "steps * parameters * item",
            steps=steps, parameters=work.parameters, item=work.item,
        )  # fmt: skip
        if run.num_machines > 1 or run.settings["transport"] == "tcp":
            if run.settings["halo_hops"] != "all":
                # A rank asks as many others as ask it.
                estimate.add(
                    SENT, "nodes whose neighbours are requested", "steps * expanded * 4",
                    steps=steps, expanded=batch.expanded,
                )  # fmt: skip
                estimate.add(
                    SENT, "neighbours in replies", "steps * (remote_edges * 8 + expanded * 4)",
                    steps=steps, remote_edges=batch.remote_edges, expanded=batch.expanded,
                )  # fmt: skip
            row = work.num_features * (2 if run.settings["wire_dtype"] != "float32" else work.item)
            estimate.add(
                SENT, "features in replies, and their ids", "steps * remote * (each + 4) / shared",
                steps=steps, remote=batch.remote, each=row if work.entries is None else work.feature_bytes,
                shared=_shared(run, batch, steps),
            )  # fmt: skip
            estimate.add(
                NETWORK, "waiting for replies", "steps * (hops + 1) * latency", steps=steps, hops=hops,
                latency=run.latency,
            )  # fmt: skip
        estimate.add(NETWORK, "transfer", "sent / link", sent=estimate.total(SENT), link=run.link)


def _fan_out(run: PlannedRun) -> Sequence[int]:
    fan_out = run.config["data"]["num_neighbors"]
    if fan_out is None:
        return [-1] * len(run.workload.layers)
    if not isinstance(fan_out, list):
        raise NotEstimated("no formula covers fan-outs by edge type")
    return [int(count) for count in fan_out]


def _transforms_first(layer: Layer, sources: float, targets: float, edges: float) -> bool:
    """Whether rows are multiplied before they are summed, as the layer engine decides in a batch."""
    if not layer.transforms_first and layer.kind != "linear":
        return False
    if layer.name not in ("SAGEConv", "GraphConv"):
        return layer.transforms_first
    return costs_less_first(sources, targets, edges, layer.inputs, layer.outputs)


def _shared(run: PlannedRun, batch: Sampled, steps: int) -> float:
    """Return how many batches of a window need a remote row that is requested once for all of them."""
    window = min(int(run.settings["lookahead"]), steps)
    pool = max(sum(run.workload.parts(run.ranks).halo) / run.ranks, batch.remote)
    share = min(batch.remote / pool, 1.0) if pool else 0.0
    union = pool * (1 - (1 - share) ** window)
    # Held rows take no more memory than the rows of a batch, so fewer batches share them.
    held = max(batch.nodes[-1], 1.0)
    return max(window * batch.remote / union, 1.0) if 0 < union <= held else 1.0


def _sample(run: PlannedRun, seeds: float, fan_out: Sequence[int]) -> Sampled:
    store = run.workload.store
    stores = [each for each in (store, *run.workload.stores) if each is not None and each.num_parts == run.ranks]
    store = stores[0] if stores else store
    if store is None or store.num_edges > _MOST_EDGES:
        return _expected(run, seeds, fan_out)
    return _drawn(store, run, seeds, fan_out)


def _drawn(store: Store, run: PlannedRun, seeds: float, fan_out: Sequence[int]) -> Sampled:
    """Draw batches of rank 0 from a store; seeds are those of its part, as with ``strategy.seeds=local``."""
    indptr, indices = whole_indptr(store), whole_edges(store, "indices")
    sampler = NeighborSampler(Columns(indptr=indptr.numpy(), indices=indices.numpy()), fan_out)
    own = run.ranks == store.num_parts and run.settings["seeds"] == "local"
    count = max(round(seeds), 1)
    if run.workload.task == "link":
        targets, numbers = int(store.offsets[1]) if own else store.num_nodes, (count, layers.negatives_of(run))
        rng = np.random.default_rng(0)
        draw = partial(_ends_of_edges, indptr[: targets + 1], indices, *numbers, store.num_nodes, rng)
    else:
        masks = [store.node("train_mask", part) for part in range(store.num_parts)]
        train = (masks[0] if own else torch.cat([mask.clone() for mask in masks])).nonzero().flatten()
        draw = partial(_choose, train, count, torch.Generator().manual_seed(0))
    offsets, totals = store.offsets.numpy(), []
    for number in range(_DRAWN):
        sample = sampler.sample(draw().numpy(), batch=number)
        nodes, edges = sample.num_sampled_nodes, sample.num_sampled_edges
        remote = owner_of(sample.node, offsets) != 0
        inner = remote[: sum(nodes[:-1])]
        reached = int(inner[sample.col].sum()) if len(inner) else 0
        totals.append([*np.cumsum(nodes), *edges, remote.sum(), inner.sum(), reached])
    mean = [float(value) for value in np.mean(totals, axis=0)]
    hops = len(fan_out)
    remote_nodes, expanded, reached_edges = mean[2 * hops + 1 :]
    nodes_by_hop, edges_by_hop = mean[: hops + 1], mean[hops + 1 : 2 * hops + 1]
    return Sampled(nodes_by_hop, edges_by_hop, remote_nodes, expanded, reached_edges, f"{_DRAWN} drawn batches")


def _choose(items: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return items[torch.randperm(len(items), generator=generator)[:count]]


def _ends_of_edges(
    indptr: Tensor, indices: Tensor, count: int, negatives: int, num_nodes: int, rng: np.random.Generator
) -> Tensor:
    """Return the distinct ends of some edges and of their negative edges, whose targets are any nodes.

    Args:
        indptr: of the targets whose edges are drawn, int64 ``[T + 1]``.
        indices: sources of all edges.
        count: edges.
        negatives: targets for each edge.
        num_nodes: nodes of the graph.
        rng: draws; without replacement it takes memory for what it draws alone.
    """
    num_edges = int(indptr[-1])
    edges = torch.from_numpy(rng.choice(num_edges, min(count, num_edges), replace=False, shuffle=False))
    target = torch.searchsorted(indptr, edges, right=True) - 1
    other = torch.from_numpy(rng.integers(num_nodes, size=len(edges) * negatives))
    return torch.cat([indices[edges].to(torch.int64), target, other]).unique()


def _expected(run: PlannedRun, seeds: float, fan_out: Sequence[int]) -> Sampled:
    """Return the batch in which each edge leads to a node at random, a cut edge to a remote one."""
    work = run.workload
    if work.task == "link":
        ends = seeds * (2 + layers.negatives_of(run))
        seeds = -work.num_nodes * expm1(-ends / work.num_nodes)
    degree, frontier = work.num_edges / work.num_nodes, seeds
    nodes, edges, expanded, remote_edges, local = [seeds], [], 0.0, 0.0, 1.0
    cut = work.parts(run.ranks).cut / max(work.num_edges, 1)
    for count in fan_out:
        drawn = frontier * (degree if count < 0 else min(count, degree))
        edges.append(drawn)
        expanded += frontier * (1 - local)
        remote_edges += drawn * (1 - local)
        new = -(work.num_nodes - nodes[-1]) * expm1(-drawn / work.num_nodes)
        nodes.append(nodes[-1] + new)
        local *= 1 - cut
        frontier = new
    reached = [after - before for before, after in zip(nodes, nodes[1:], strict=False)]
    remote = sum(new * (1 - (1 - cut) ** hop) for hop, new in enumerate(reached, start=1))
    return Sampled(nodes, edges, remote, expanded, remote_edges, "those of random edges")
