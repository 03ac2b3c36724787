"""The mean batch of a rank, for the formulas of :mod:`gtrain_pyg.plan`: drawn from the store, or computed from counts.

A homogeneous graph has the node type ``node``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import expm1
from typing import Any

import numpy as np
import torch

from gtrain.data.batches.loader import target_edge_type
from gtrain.graph.owners import owner_of
from gtrain.graph.sampling.columns import Columns
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.sampling.output import HeteroSample
from gtrain.graph.sampling.sampler import HeteroNeighborSampler
from gtrain.graph.shard.whole import whole_edges, whole_indptr
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import NODE_TYPE, EdgeType, TensorSpec
from gtrain.plan import layers
from gtrain.plan.estimate import PlannedRun
from gtrain_pyg.features.feature_store import HELD_BATCHES
from gtrain_pyg.features.requests import WIDE_BYTES

DRAWN, SHARED = 4, 24
"""Batches whose sizes are averaged, and successive batches of which the requested rows are counted."""
MOST_EDGES = 200_000_000
"""Edges of a store from which batches are drawn."""
_IDS_BYTES = 16  # of a node's label and id
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MeanBatch:
    """The mean batch of a rank.

    Attributes:
        nodes: by node type, nodes after each hop, the seeds first: cumulative.
        edges: edges of all types, of each hop.
        row_bytes: of the rows of all nodes.
        requested: by node type, remote nodes whose rows are requested, those of recent batches not again.
        reply_bytes: of their rows on the wire.
        expanded: nodes of other ranks whose neighbours are sampled, over all hops.
        counts: the same, once for each edge type that ends there.
        remote_edges: edges that are sampled at them.
        origin: a clause that says how the numbers were found.
    """

    nodes: Mapping[str, Sequence[float]]
    edges: Sequence[float]
    row_bytes: float
    requested: Mapping[str, float]
    reply_bytes: float
    expanded: float
    counts: float
    remote_edges: float
    origin: str

    @property
    def hops(self) -> int:
        """Hops of the fan-out."""
        return len(self.edges)

    def after(self, hop: int) -> dict[str, float]:
        """Return the nodes of each type after a hop."""
        return {node_type: counts[hop] for node_type, counts in self.nodes.items()}


def mean_batch(run: PlannedRun, seeds: float, fan_out: Any, steps: int) -> MeanBatch:
    """Return the mean batch of a rank.

    Args:
        run: the run.
        seeds: training nodes, or edges, of a rank in a step.
        fan_out: the setting ``data.num_neighbors``, not None.
        steps: of an epoch.
    """
    store = run.workload.store_of(run.ranks) or run.workload.store
    if store is None or store.num_edges > MOST_EDGES:
        return _expected(run, seeds, fan_out, steps)
    return _Drawing(store, run, max(round(seeds), 1), fan_out, steps).mean()


class _Drawing:
    """Draws batches of rank 0 from a store; seeds are those of its part, as with ``strategy.seeds=local``."""

    def __init__(self, store: Store, run: PlannedRun, seeds: int, fan_out: Any, steps: int) -> None:
        self._store, self._run, self._steps = store, run, steps
        columns: dict[EdgeType, Columns] = {}
        for edge_type in store.edge_types:
            indptr, indices = whole_indptr(store, edge_type), whole_edges(store, "indices", edge_type)
            columns[edge_type] = Columns(indptr.numpy(), indices.numpy(), num_sources=store.num_nodes_of(edge_type[0]))
        counts = {node_type: store.num_nodes_of(node_type) for node_type in store.node_types}
        by_type = SamplingOptions(num_neighbors=fan_out).fan_out(store.edge_types)
        self._sampler = HeteroNeighborSampler(columns, counts, by_type)
        self._offsets = {node_type: store.offsets_of(node_type).numpy() for node_type in store.node_types}
        self._row_bytes = {name: row_bytes(store, name) for name in store.node_types}
        self._into = {name: sum(t[2] == name for t in store.edge_types) for name in store.node_types}
        own = run.ranks == store.num_parts and run.settings["seeds"] == "local"
        self._draw = self._edges(seeds, own) if run.workload.task == "link" else self._nodes(seeds, own)

    def mean(self) -> MeanBatch:
        """Return the mean of the drawn batches."""
        successive = min(self._steps, SHARED) if self._run.ranks > 1 else 1
        count = max(DRAWN, successive)
        samples = [self._sampler.sample(seeds, batch=number) for number, seeds in zip(range(count), self._draw)]  # noqa: B905
        sizes = [self._sizes(sample) for sample in samples[:DRAWN]]
        expanded, counts, remote_edges = np.mean([size[2:] for size in sizes], axis=0).tolist()
        rows = np.mean([size[0] for size in sizes], axis=0).tolist()
        nodes = dict(zip(self._store.node_types, rows, strict=True))
        requested, halves = self._requested(samples[:successive]), self._run.settings["wire_dtype"] != "float32"
        return MeanBatch(
            nodes,
            np.mean([size[1] for size in sizes], axis=0).tolist(),
            sum(self._row_bytes[name] * counts[-1] for name, counts in nodes.items()),
            requested,
            sum(row_bytes(self._store, name, halves=halves) * count for name, count in requested.items()),
            expanded,
            counts,
            remote_edges,
            f"{DRAWN} drawn batches",
        )

    def _nodes(self, seeds: int, own: bool) -> Iterator[dict[str, Array]]:
        """Yield the seeds of successive steps: an epoch's order in pieces."""
        store, target = self._store, self._store.facts.get("target") or NODE_TYPE
        masks = [store.node("train_mask", part, target) for part in range(store.num_parts)]
        train = (masks[0] if own else torch.cat([mask.clone() for mask in masks])).nonzero().flatten()
        generator = torch.Generator().manual_seed(0)
        while True:
            order = train[torch.randperm(len(train), generator=generator)]
            yield from ({target: piece.numpy()} for piece in order.split(seeds) if len(piece) == min(seeds, len(train)))

    def _edges(self, seeds: int, own: bool) -> Iterator[dict[str, Array]]:
        """Yield the distinct ends of edges and of their negative edges, whose targets are any nodes of their type."""
        store, negatives, edge_type = self._store, layers.negatives_of(self._run), target_edge_type(self._store)
        first, _, second = edge_type
        indptr, indices = whole_indptr(store, edge_type), whole_edges(store, "indices", edge_type)
        targets = store.num_nodes_of(second)
        indptr = indptr[: (int(store.offsets_of(second)[1]) if own else targets) + 1]
        num_edges, rng = int(indptr[-1]), np.random.default_rng(0)
        while True:
            # Without replacement it takes memory for what it draws alone.
            edges = torch.from_numpy(rng.choice(num_edges, min(seeds, num_edges), replace=False, shuffle=False))
            target = torch.searchsorted(indptr, edges, right=True) - 1
            other = torch.from_numpy(rng.integers(targets, size=len(edges) * negatives))
            ends = [(first, indices[edges].to(torch.int64)), (second, target), (second, other)]
            yield {
                name: torch.cat([ids for end, ids in ends if end == name]).unique().numpy() for name in {first, second}
            }

    def _sizes(self, sample: HeteroSample) -> tuple[Array, Array, float, float, float]:
        """Return nodes of each type after each hop, edges of each hop, expanded nodes, counts and remote edges."""
        inner = {
            name: self._away(name, ids)[: sum(sample.num_sampled_nodes[name][:-1])] for name, ids in sample.node.items()
        }
        return (
            np.cumsum([sample.num_sampled_nodes[name] for name in self._store.node_types], axis=1),
            np.sum(list(sample.num_sampled_edges.values()), axis=0),
            float(sum(away.sum() for name, away in inner.items() if self._into[name])),
            float(sum(away.sum() * self._into[name] for name, away in inner.items())),
            float(sum(inner[edge_type[2]][ends].sum() for edge_type, ends in sample.col.items() if len(ends))),
        )

    def _away(self, node_type: str, ids: Array) -> Array:
        away: Array = owner_of(ids, self._offsets[node_type]) != 0
        return away

    def _requested(self, samples: Sequence[HeteroSample]) -> dict[str, float]:
        """Count the rows that successive batches request, as :class:`~gtrain_pyg.features.feature_store.Prefetcher`."""
        window = int(self._run.settings["lookahead"])
        recent: deque[dict[str, Array]] = deque()
        requested: list[dict[str, int]] = []
        largest = held = 0.0
        for sample in samples:
            largest = max(largest, sum(self._row_bytes[name] * len(ids) for name, ids in sample.node.items()))
            while recent and (len(recent) >= window or held > HELD_BATCHES * largest):
                held -= self._bytes(recent.popleft())
            new = {}
            for name, ids in sample.node.items():
                known = [request[name] for request in recent] if self._row_bytes[name] >= WIDE_BYTES else []
                remote = ids[self._away(name, ids)]
                new[name] = np.setdiff1d(remote, np.concatenate(known)) if known else remote
            recent.append(new)
            held += self._bytes(new)
            requested.append({name: len(ids) for name, ids in new.items()})
        # Of a long epoch, the first batches request more than the others.
        steady = requested[len(requested) // 2 :] if self._steps > len(requested) else requested
        return {name: float(np.mean([counts[name] for counts in steady])) for name in self._store.node_types}

    def _bytes(self, rows: Mapping[str, Array]) -> float:
        return sum(self._row_bytes[name] * len(ids) for name, ids in rows.items())


def row_bytes(store: Store, node_type: str, *, halves: bool = False) -> float:
    """Return the bytes of a node's row in a batch: all tensors but masks, as stored or with ``halves`` of floats."""
    specs = store.manifest.node_types[node_type].tensors
    return sum(_bytes(spec, halves and name != "y") for name, spec in specs.items() if not name.endswith("_mask"))


def _bytes(spec: TensorSpec, halves: bool) -> float:
    """Return the bytes of one row of a stored tensor; an entry of one in CSR form has a column number."""
    item = np.dtype(spec.dtype).itemsize
    if spec.nnz is not None:
        return spec.nnz / max(spec.shape[0], 1) * (item + 4)
    half = halves and len(spec.shape) > 1 and spec.dtype == "float32"
    return float(np.prod(spec.shape[1:], dtype=np.int64)) * (item / 2 if half else item)


def _expected(run: PlannedRun, seeds: float, fan_out: Sequence[int], steps: int) -> MeanBatch:
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
    requested = remote / _shared(run, remote, nodes[-1], steps)
    halves = run.settings["wire_dtype"] != "float32" and work.entries is None
    row = _IDS_BYTES + work.feature_bytes
    return MeanBatch(
        nodes={NODE_TYPE: nodes},
        edges=edges,
        row_bytes=nodes[-1] * row,
        requested={NODE_TYPE: requested},
        reply_bytes=requested * (_IDS_BYTES + work.feature_bytes / (2 if halves else 1)),
        expanded=expanded,
        counts=expanded,
        remote_edges=remote_edges,
        origin="those of random edges",
    )


def _shared(run: PlannedRun, remote: float, nodes: float, steps: int) -> float:
    """Return how many batches of a window need a remote row that is requested once for all of them."""
    window = min(int(run.settings["lookahead"]), steps)
    pool = max(sum(run.workload.parts(run.ranks).halo) / run.ranks, remote)
    share = min(remote / pool, 1.0) if pool else 0.0
    union = pool * (1 - (1 - share) ** window)
    # Held rows take no more memory than the rows of a batch, so fewer batches share them.
    return max(window * remote / union, 1.0) if 0 < union <= max(nodes, 1.0) else 1.0
