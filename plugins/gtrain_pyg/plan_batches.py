"""The mean batch of a rank, which :mod:`gtrain_pyg.plan` reads, with what it requests from other ranks.

A homogeneous graph has the node type ``node``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gtrain.graph.owners import owner_of
from gtrain.graph.sampling.output import HeteroSample
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import NODE_TYPE
from gtrain.plan.batches import (
    DRAWN,
    IDS_BYTES,
    Array,
    BatchDrawing,
    MeanBatch,
    expected_batch,
    row_bytes,
    store_to_draw_from,
)
from gtrain.plan.estimate import PlannedRun
from gtrain_pyg.features.feature_store import HELD_BATCHES
from gtrain_pyg.features.requests import WIDE_BYTES

SHARED = 24
"""Successive batches of which the requested rows are counted."""


@dataclass(frozen=True)
class RankBatch(MeanBatch):
    """The mean batch of a rank, and what it requests.

    Attributes:
        requested: by node type, remote nodes whose rows are requested, those of recent batches not again.
        reply_bytes: of their rows on the wire.
        expanded: nodes of other ranks whose neighbours are sampled, over all hops.
        counts: the same, once for each edge type that ends there.
        remote_edges: edges that are sampled at them.
    """

    requested: Mapping[str, float]
    reply_bytes: float
    expanded: float
    counts: float
    remote_edges: float


def mean_batch(run: PlannedRun, seeds: float, fan_out: Any, steps: int) -> RankBatch:
    """Return the mean batch of a rank.

    Args:
        run: the run.
        seeds: training nodes, or edges, of a rank in a step.
        fan_out: the setting ``data.num_neighbors``, not None.
        steps: of an epoch.
    """
    store = store_to_draw_from(run)
    if store is None:
        return _expected(run, seeds, fan_out, steps)
    return _Drawing(store, run, max(round(seeds), 1), fan_out, steps).mean()


class _Drawing:
    """Draws batches of rank 0 from a store; seeds are those of its part, as with ``strategy.seeds=local``."""

    def __init__(self, store: Store, run: PlannedRun, seeds: int, fan_out: Any, steps: int) -> None:
        self._store, self._run, self._seeds, self._steps = store, run, seeds, steps
        first_part = run.ranks == store.num_parts and run.settings["seeds"] == "local"
        self._batches = BatchDrawing(store, run, fan_out, first_part=first_part)
        self._row_bytes = self._batches.row_bytes
        self._offsets = {node_type: store.offsets_of(node_type).numpy() for node_type in store.node_types}
        self._into = {name: sum(t[2] == name for t in store.edge_types) for name in store.node_types}

    def mean(self) -> RankBatch:
        """Return the mean of the drawn batches."""
        successive = min(self._steps, SHARED) if self._run.ranks > 1 else 1
        samples = self._batches.samples(self._seeds, max(DRAWN, successive))
        remote = np.mean([self._remote(sample) for sample in samples[:DRAWN]], axis=0)
        expanded, counts, remote_edges = remote.tolist()
        requested, halves = self._requested(samples[:successive]), self._run.settings["wire_dtype"] != "float32"
        return RankBatch(
            **vars(self._batches.mean(samples[:DRAWN])),
            requested=requested,
            reply_bytes=sum(row_bytes(self._store, name, halves=halves) * count for name, count in requested.items()),
            expanded=expanded,
            counts=counts,
            remote_edges=remote_edges,
        )

    def _remote(self, sample: HeteroSample) -> tuple[float, float, float]:
        """Return a batch's expanded nodes, counts and remote edges."""
        inner = {
            name: self._away(name, ids)[: sum(sample.num_sampled_nodes[name][:-1])] for name, ids in sample.node.items()
        }
        return (
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


def _expected(run: PlannedRun, seeds: float, fan_out: Sequence[int], steps: int) -> RankBatch:
    """Return the batch in which each edge leads to a node at random, a cut edge to a remote one."""
    work, batch = run.workload, expected_batch(run, seeds, fan_out)
    (nodes,), cut = batch.nodes.values(), work.parts(run.ranks).cut / max(work.num_edges, 1)
    reached = [nodes[0], *(after - before for before, after in zip(nodes, nodes[1:], strict=False))]
    away = [1 - (1 - cut) ** hop for hop in range(len(nodes))]  # share of the nodes of each hop that are remote
    remote = sum(new * share for new, share in zip(reached, away, strict=True))
    expanded = sum(new * share for new, share in zip(reached[:-1], away[:-1], strict=True))
    requested = remote / _shared(run, remote, nodes[-1], steps)
    halves = run.settings["wire_dtype"] != "float32" and work.entries is None
    return RankBatch(
        **vars(batch),
        requested={NODE_TYPE: requested},
        reply_bytes=requested * (IDS_BYTES + work.feature_bytes / (2 if halves else 1)),
        expanded=expanded,
        counts=expanded,
        remote_edges=sum(drawn * share for drawn, share in zip(batch.edges, away, strict=False)),
    )


def _shared(run: PlannedRun, remote: float, nodes: float, steps: int) -> float:
    """Return how many batches of a window need a remote row that is requested once for all of them."""
    window = min(int(run.settings["lookahead"]), steps)
    pool = max(sum(run.workload.parts(run.ranks).halo) / run.ranks, remote)
    share = min(remote / pool, 1.0) if pool else 0.0
    union = pool * (1 - (1 - share) ** window)
    # Held rows take no more memory than the rows of a batch, so fewer batches share them.
    return max(window * remote / union, 1.0) if 0 < union <= max(nodes, 1.0) else 1.0
