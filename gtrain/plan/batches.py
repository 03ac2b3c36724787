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
from torch import Tensor

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
    """Return the store from which batches are drawn, with a part per rank if there is one; None: compute them.

    Raises:
        NotEstimated: the graph has several types, and is too large to draw from.
    """
    store = run.workload.store_of(run.ranks) or run.workload.store
    if store is None or store.num_edges <= MOST_EDGES:
        return store
    if store.is_hetero:
        raise NotEstimated(f"batches of a graph with several types are drawn from at most {MOST_EDGES:,} edges")
    return None


class BatchDrawing:
    """Draws batches from a store.

    Args:
        store: the graph.
        run: the run.
        fan_out: of :func:`fan_out_of`.
        first_part: whether seeds are those of part 0 alone.
        sharing: ranks that divide the seeds of a step by owner, of which the first draws; each owns a part.
        replace: whether neighbours are drawn with replacement.
        disjoint: whether each seed has a separate neighbourhood.

    Attributes:
        fan_out: by edge type.
        row_bytes: by node type, bytes of a row.
    """

    def __init__(
        self,
        store: Store,
        run: PlannedRun,
        fan_out: Any,
        *,
        first_part: bool = False,
        sharing: int = 1,
        replace: bool = False,
        disjoint: bool = False,
    ) -> None:
        self._store, self._run, self._first_part = store, run, first_part
        self._sharing, self._disjoint = sharing, disjoint
        columns: dict[EdgeType, Columns] = {}
        for edge_type in store.edge_types:
            indptr, indices = whole_indptr(store, edge_type), whole_edges(store, "indices", edge_type)
            columns[edge_type] = Columns(indptr.numpy(), indices.numpy(), num_sources=store.num_nodes_of(edge_type[0]))
        counts = {node_type: store.num_nodes_of(node_type) for node_type in store.node_types}
        self.fan_out = SamplingOptions(num_neighbors=fan_out).fan_out(store.edge_types)
        self._sampler = HeteroNeighborSampler(columns, counts, self.fan_out, replace=replace, disjoint=disjoint)
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

    def seeds(self) -> dict[str, Array]:
        """Return the distinct nodes around which batches of an epoch are drawn, by type, but ends of negative edges."""
        if self._run.workload.task != "link":
            return {self._target: self._train().numpy()}
        store, edge_type = self._store, target_edge_type(self._store)
        indptr = self._target_columns(edge_type)
        source = whole_edges(store, "indices", edge_type)[: int(indptr[-1])]
        ends = [(edge_type[0], source.to(torch.int64)), (edge_type[2], indptr.diff().nonzero().flatten())]
        return _distinct(ends)

    @property
    def _target(self) -> str:
        return str(self._store.facts.get("target") or NODE_TYPE)

    def _train(self) -> Tensor:
        """Return the training nodes."""
        store, target = self._store, self._target
        masks = [store.node("train_mask", part, target) for part in range(store.num_parts)]
        return (masks[0] if self._first_part else torch.cat([mask.clone() for mask in masks])).nonzero().flatten()

    def _target_columns(self, edge_type: EdgeType) -> Tensor:
        """Return the columns of the edges to predict, of part 0 or of all parts."""
        store, second = self._store, edge_type[2]
        targets = int(store.offsets_of(second)[1]) if self._first_part else store.num_nodes_of(second)
        return whole_indptr(store, edge_type)[: targets + 1]

    def _share(self, seeds: Tensor, ends: Tensor, node_type: str) -> Tensor:
        """Return the first rank's share of a step's seeds, each of which the owner of its end owns."""
        if self._sharing == 1:
            return seeds
        owner = torch.searchsorted(self._store.offsets_of(node_type), ends, right=True)
        return seeds[owner.argsort(stable=True)].tensor_split(self._sharing)[0]

    def _nodes(self, seeds: int) -> Iterator[dict[str, Array]]:
        """Yield the seeds of successive steps: an epoch's order in pieces."""
        train, target, step = self._train(), self._target, seeds * self._sharing
        generator = torch.Generator().manual_seed(0)
        while True:
            order = train[torch.randperm(len(train), generator=generator)]
            for piece in order.split(step):
                if len(piece) == min(step, len(train)):
                    yield {target: self._share(piece, piece, target).numpy()}

    def _edges(self, seeds: int) -> Iterator[dict[str, Array]]:
        """Yield the ends of edges and of their negative edges, whose targets are any nodes of their type.

        They are distinct, unless neighbourhoods are disjoint.
        """
        store, negatives, edge_type = self._store, layers.negatives_of(self._run), target_edge_type(self._store)
        first, _, second = edge_type
        indptr, indices = self._target_columns(edge_type), whole_edges(store, "indices", edge_type)
        targets, num_edges, rng = store.num_nodes_of(second), int(indptr[-1]), np.random.default_rng(0)
        while True:
            # Without replacement it takes memory for what it draws alone.
            chosen = rng.choice(num_edges, min(seeds * self._sharing, num_edges), replace=False, shuffle=False)
            edges = torch.from_numpy(chosen)
            edges = self._share(edges, torch.searchsorted(indptr, edges, right=True) - 1, second)
            target = torch.searchsorted(indptr, edges, right=True) - 1
            other = torch.from_numpy(rng.integers(targets, size=len(edges) * negatives))
            ends = [(first, indices[edges].to(torch.int64)), (second, target), (second, other)]
            yield _distinct(ends, merged=not self._disjoint)


def _distinct(ends: Sequence[tuple[str, Tensor]], *, merged: bool = True) -> dict[str, Array]:
    """Return nodes by type, each of them once if ``merged``."""
    by_type = {name: torch.cat([ids for end, ids in ends if end == name]) for name, _ in ends}
    return {name: (ids.unique() if merged else ids).numpy() for name, ids in by_type.items()}


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


def expected_batch(
    run: PlannedRun, seeds: float, fan_out: Sequence[int], *, replace: bool = False, disjoint: bool = False
) -> MeanBatch:
    """Return the batch in which each edge leads to a node at random; arguments as for :class:`BatchDrawing`."""
    work = run.workload
    if work.task == "link":
        ends = seeds * (2 + layers.negatives_of(run))
        seeds = ends if disjoint else -work.num_nodes * expm1(-ends / work.num_nodes)
    # Disjoint neighbourhoods share no nodes: a batch is as many of them as it has seeds.
    times, frontier = (seeds, 1.0) if disjoint else (1.0, seeds)
    degree = work.num_edges / work.num_nodes
    nodes, edges = [frontier], []
    for count in fan_out:
        drawn = frontier * (degree if count < 0 else count if replace else min(count, degree))
        edges.append(drawn)
        frontier = -(work.num_nodes - nodes[-1]) * expm1(-drawn / work.num_nodes)
        nodes.append(nodes[-1] + frontier)
    nodes, edges = [times * count for count in nodes], [times * count for count in edges]
    row = IDS_BYTES + work.feature_bytes
    return MeanBatch({NODE_TYPE: nodes}, edges, nodes[-1] * row, "those of random edges")
