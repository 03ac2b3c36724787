"""The mean batches of a worker, which :mod:`gtrain_ps.plan` reads: nodes, and entries of sparse features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch

from gtrain.graph.sampling.output import HeteroSample
from gtrain.graph.store import Store
from gtrain.nn import select_rows
from gtrain.plan import wide
from gtrain.plan.batches import (
    DRAWN,
    BatchDrawing,
    MeanBatch,
    expected_batch,
    fan_out_of,
    store_to_draw_from,
)
from gtrain.plan.estimate import PlannedRun
from gtrain_ps.costs import Load


@dataclass(frozen=True)
class WorkerBatch:
    """A worker's mean batch.

    Attributes:
        graph: its nodes and edges.
        load: its entries of sparse features.
    """

    graph: MeanBatch
    load: Load

    def rows(self, node_type: str) -> float:
        """Return the nodes of a type."""
        return self.graph.nodes[node_type][-1]


@dataclass(frozen=True)
class EpochBatches:
    """The batches of a worker's epoch.

    Attributes:
        full: a mean batch of all seeds that a step may have.
        last: the mean last batch, which may have fewer.
        steps: batches.
    """

    full: WorkerBatch
    last: WorkerBatch
    steps: int

    def rows(self, node_type: str) -> float:
        """Return the nodes of a type, the mean of the epoch."""
        return self._mean(self.full.rows(node_type), self.last.rows(node_type))

    @property
    def load(self) -> Load:
        """Entries of sparse features, the mean of the epoch."""
        pairs = zip(vars(self.full.load).values(), vars(self.last.load).values(), strict=True)
        return Load(*(self._mean(*pair) for pair in pairs))

    def _mean(self, full: float, last: float) -> float:
        return ((self.steps - 1) * full + last) / self.steps


def epoch_batches(run: PlannedRun) -> EpochBatches:
    """Return the batches of the largest share of the seeds."""
    work, data = run.workload, run.config["data"]
    seeds = min(data["batch_size"] or work.num_seeds, work.num_seeds)
    steps = wide.steps_of(run)
    last = work.num_seeds - (steps - 1) * seeds
    shares = [ceil(count / run.ranks) for count in (seeds, last)]
    fan_out, replace, store = fan_out_of(run), bool(data["replace"]), store_to_draw_from(run)
    if store is None:
        expected = [expected_batch(run, share, fan_out, replace=replace) for share in shares]
        full, smaller = (WorkerBatch(batch, _expected_load(run, batch)) for batch in expected)
        return EpochBatches(full, smaller, steps)
    drawing = BatchDrawing(store, run, fan_out, replace=replace)
    full = _drawn(store, drawing, shares[0])
    return EpochBatches(full, full if shares[0] == shares[1] else _drawn(store, drawing, shares[1]), steps)


def _drawn(store: Store, drawing: BatchDrawing, seeds: int) -> WorkerBatch:
    samples = drawing.samples(seeds, DRAWN)
    loads = [_load(store, sample) for sample in samples]
    return WorkerBatch(drawing.mean(samples), Load(*np.mean(loads, axis=0).tolist()))


def _load(store: Store, sample: HeteroSample) -> tuple[float, float, float]:
    """Return entries, distinct columns and rows of the sparse features of a batch's nodes."""
    entries = distinct = rows = 0
    for node_type, columns in _sparse_columns(store).items():
        nodes, offsets = torch.from_numpy(sample.node[node_type]), store.offsets_of(node_type)
        used = torch.zeros(columns, dtype=torch.bool)
        for part in range(store.num_parts):
            low, high = offsets[part], offsets[part + 1]
            chosen = nodes[(nodes >= low) & (nodes < high)] - low
            ids = select_rows(store.node("x", part, node_type), chosen).ids
            used[ids.long()] = True
            entries += ids.numel()
        distinct += int(used.sum())
        rows += nodes.numel()
    return entries, distinct, rows


def _sparse_columns(store: Store) -> Mapping[str, int]:
    """Return the columns of the features of each node type that has sparse ones."""
    specs = {name: spec.tensors["x"] for name, spec in store.manifest.node_types.items() if "x" in spec.tensors}
    return {name: spec.shape[1] for name, spec in specs.items() if spec.nnz is not None}


def _expected_load(run: PlannedRun, batch: MeanBatch) -> Load:
    """Return the load of nodes that are drawn at random."""
    work = run.workload
    rows = sum(counts[-1] for counts in batch.nodes.values())
    entries = rows * (work.entries or work.num_features)
    return Load(entries, work.columns_read(rows), rows)
