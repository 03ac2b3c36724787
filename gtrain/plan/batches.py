"""The mean batch of sampled neighbourhoods, which several backends share: drawn from the store, or from counts.

A homogeneous graph has the node type ``node``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import expm1
from typing import Any

import numpy as np
import torch

from gtrain.data.batches.loader import target_edge_type
from gtrain.graph.sampling.columns import Columns
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.sampling.output import HeteroSample
from gtrain.graph.sampling.sampler import HeteroNeighborSampler
from gtrain.graph.shard.whole import whole_edges, whole_indptr
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import NODE_TYPE, EdgeType, TensorSpec
from gtrain.plan import layers
from gtrain.plan.estimate import NotEstimated, PlannedRun

DRAWN = 4
"""Batches whose sizes are averaged."""
MOST_EDGES = 200_000_000
"""Edges of a store from which batches are drawn."""
IDS_BYTES = 16
"""Bytes of a node's label and id, of data that are given by counts."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MeanBatch:
    """The mean batch of a rank.

    Attributes:
        nodes: by node type, nodes after each hop, the seeds first: cumulative.
        edges: edges of all types, of each hop.
        row_bytes: of the rows of all nodes.
        origin: a clause that says how the numbers were found.
    """

    nodes: Mapping[str, Sequence[float]]
    edges: Sequence[float]
    row_bytes: float
    origin: str

    @property
    def hops(self) -> int:
        """Hops of the fan-out."""
        return len(self.edges)

    def after(self, hop: int) -> dict[str, float]:
        """Return the nodes of each type after a hop."""
        return {node_type: counts[hop] for node_type, counts in self.nodes.items()}


def fan_out_of(run: PlannedRun) -> Any:
    """Return the neighbours of each hop: a list, or one for each edge type."""
    fan_out, work = run.config["data"]["num_neighbors"], run.workload
    if fan_out is None:
        return [-1] * (len(work.typed) or len(work.layers))
    if isinstance(fan_out, list):
        return [int(count) for count in fan_out]
    if not work.typed:
        raise NotEstimated("no formula covers fan-outs by edge type")
    return fan_out


def store_to_draw_from(run: PlannedRun) -> Store | None:
    """Return the store from which batches are drawn, with a part per rank if there is one; None: compute them."""
    store = run.workload.store_of(run.ranks) or run.workload.store
    return None if store is None or store.num_edges > MOST_EDGES else store


class BatchDrawing:
    """Draws batches from a store.

    Args:
        store: the graph.
        run: the run.
        fan_out: of :func:`fan_out_of`.
        first_part: whether seeds are those of part 0 alone.
        replace: whether neighbours are drawn with replacement.
    """

    def __init__(
        self, store: Store, run: PlannedRun, fan_out: Any, *, first_part: bool = False, replace: bool = False
    ) -> None:
        self._store, self._run, self._first_part = store, run, first_part
        columns: dict[EdgeType, Columns] = {}
        for edge_type in store.edge_types:
            indptr, indices = whole_indptr(store, edge_type), whole_edges(store, "indices", edge_type)
            columns[edge_type] = Columns(indptr.numpy(), indices.numpy(), num_sources=store.num_nodes_of(edge_type[0]))
        counts = {node_type: store.num_nodes_of(node_type) for node_type in store.node_types}
        by_type = SamplingOptions(num_neighbors=fan_out).fan_out(store.edge_types)
        self._sampler = HeteroNeighborSampler(columns, counts, by_type, replace=replace)
        self.row_bytes = {name: row_bytes(store, name) for name in store.node_types}

    def samples(self, seeds: int, count: int) -> list[HeteroSample]:
        """Return successive batches.

        Args:
            seeds: training nodes, or edges, of a batch.
            count: batches.
        """
        draw = self._edges(seeds) if self._run.workload.task == "link" else self._nodes(seeds)
        return [self._sampler.sample(seeds, batch=number) for number, seeds in zip(range(count), draw)]  # noqa: B905

    def mean(self, samples: Sequence[HeteroSample]) -> MeanBatch:
        """Return the mean of drawn batches."""
        types = self._store.node_types
        sizes = [np.cumsum([sample.num_sampled_nodes[name] for name in types], axis=1) for sample in samples]
        edges = [np.sum(list(sample.num_sampled_edges.values()), axis=0) for sample in samples]
        nodes = dict(zip(types, np.mean(sizes, axis=0).tolist(), strict=True))
        return MeanBatch(
            nodes,
            np.mean(edges, axis=0).tolist(),
            sum(self.row_bytes[name] * counts[-1] for name, counts in nodes.items()),
            f"{len(samples)} drawn batches",
        )

    def _nodes(self, seeds: int) -> Iterator[dict[str, Array]]:
        """Yield the seeds of successive steps: an epoch's order in pieces."""
        store, target = self._store, self._store.facts.get("target") or NODE_TYPE
        masks = [store.node("train_mask", part, target) for part in range(store.num_parts)]
        train = (masks[0] if self._first_part else torch.cat([mask.clone() for mask in masks])).nonzero().flatten()
        generator = torch.Generator().manual_seed(0)
        while True:
            order = train[torch.randperm(len(train), generator=generator)]
            yield from ({target: piece.numpy()} for piece in order.split(seeds) if len(piece) == min(seeds, len(train)))

    def _edges(self, seeds: int) -> Iterator[dict[str, Array]]:
        """Yield the distinct ends of edges and of their negative edges, whose targets are any nodes of their type."""
        store, negatives, edge_type = self._store, layers.negatives_of(self._run), target_edge_type(self._store)
        first, _, second = edge_type
        indptr, indices = whole_indptr(store, edge_type), whole_edges(store, "indices", edge_type)
        targets = store.num_nodes_of(second)
        indptr = indptr[: (int(store.offsets_of(second)[1]) if self._first_part else targets) + 1]
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


def expected_batch(run: PlannedRun, seeds: float, fan_out: Sequence[int], *, replace: bool = False) -> MeanBatch:
    """Return the batch in which each edge leads to a node at random; arguments as for :class:`BatchDrawing`."""
    work = run.workload
    if work.task == "link":
        ends = seeds * (2 + layers.negatives_of(run))
        seeds = -work.num_nodes * expm1(-ends / work.num_nodes)
    degree, frontier = work.num_edges / work.num_nodes, seeds
    nodes, edges = [seeds], []
    for count in fan_out:
        drawn = frontier * (degree if count < 0 else count if replace else min(count, degree))
        edges.append(drawn)
        frontier = -(work.num_nodes - nodes[-1]) * expm1(-drawn / work.num_nodes)
        nodes.append(nodes[-1] + frontier)
    row = IDS_BYTES + work.feature_bytes
    return MeanBatch({NODE_TYPE: nodes}, edges, nodes[-1] * row, "those of random edges")
