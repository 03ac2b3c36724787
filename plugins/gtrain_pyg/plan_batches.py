"""The mean batch of a rank, which :mod:`gtrain_pyg.plan` reads, with what it requests from other ranks.

A homogeneous graph has the node type ``node``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import expm1, sqrt
from typing import Any

import numpy as np

from gtrain.graph.owners import owner_of
from gtrain.graph.sampling.output import HeteroSample
from gtrain.graph.shard.whole import whole_indptr
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
from gtrain.plan.estimate import NotEstimated, PlannedRun
from gtrain_pyg.features.cache import BITMAP_BYTES, choose_rows, expected_visits
from gtrain_pyg.features.feature_store import HELD_BATCHES
from gtrain_pyg.features.requests import WIDE_BYTES
from gtrain_pyg.graph_structure import halo_nodes
from gtrain_pyg.peers import PartBook

_INDEX_BYTES = 8  # of the source of a copied edge
SHARED = 24
"""Successive batches of which the requested rows are counted."""


@dataclass(frozen=True)
class RankBatch(MeanBatch):
    """The mean batch of a rank, and what it requests.

    Attributes:
        requested: by node type, remote nodes whose rows are requested: not those of recent batches or of the cache.
        reply_bytes: of their rows on the wire.
        expanded: nodes of other ranks whose neighbours are requested, over all hops.
        counts: the same, once for each edge type that ends there.
        replied_edges: edges that are sampled at them.
        remote_edges: edges that point at nodes of other ranks, those whose columns are copied included.
        cached_bytes: of a machine's cache of remote rows.
        copied_bytes: of a machine's copies of columns around its parts.
    """

    requested: Mapping[str, float]
    reply_bytes: float
    expanded: float
    counts: float
    replied_edges: float
    remote_edges: float
    cached_bytes: float
    copied_bytes: float


def mean_batch(run: PlannedRun, seeds: float, fan_out: Any, steps: int) -> RankBatch:
    """Return the mean batch of a rank.

    Args:
        run: the run.
        seeds: training nodes, or edges, of a rank in a step.
        fan_out: the setting ``data.num_neighbors``, not None.
        steps: of an epoch.
    """
    if run.config["data"]["subgraph_type"] != "directional":
        raise NotEstimated(f"no formula covers data.subgraph_type={run.config['data']['subgraph_type']}")
    store = store_to_draw_from(run)
    if store is None:
        return _expected(run, seeds, fan_out, steps)
    return _Drawing(store, run, max(round(seeds), 1), fan_out, steps).mean()


def store_parts(run: PlannedRun) -> int | None:
    """Return the parts of the store from which batches are drawn; None: they are computed."""
    store = store_to_draw_from(run)
    return None if store is None else store.num_parts


def requests_rows(run: PlannedRun) -> bool:
    """Whether ranks request rows of each other; otherwise each maps the parts of all."""
    return run.ranks > 1 and (run.num_machines > 1 or run.settings["transport"] == "tcp")


def hosted_parts(run: PlannedRun) -> int:
    """Return the parts that a rank maps, which have a cache and copied columns in common."""
    return 1 if run.settings["transport"] == "tcp" else run.ranks_per_machine


def _drawing_rules(run: PlannedRun) -> dict[str, bool]:
    """Return the arguments of a drawing; neighbourhoods that depend on the seed's time are disjoint."""
    data = run.config["data"]
    disjoint = data["disjoint"] or data["temporal_strategy"] is not None
    return {"replace": bool(data["replace"]), "disjoint": bool(disjoint)}


def _copied_hops(run: PlannedRun) -> int:
    """Return the hops beyond the own parts whose columns are copied; 0 also if those of all parts are mapped."""
    hops = run.settings["halo_hops"]
    return int(hops) if hops != "all" and requests_rows(run) else 0


def _cache_bytes(run: PlannedRun) -> float:
    """Return the most bytes of a machine's cache."""
    return int(run.settings["cache_bytes"]) * hosted_parts(run) if requests_rows(run) else 0


class _Drawing:
    """Draws batches of rank 0 from a store; seeds are those of its part first."""

    def __init__(self, store: Store, run: PlannedRun, seeds: int, fan_out: Any, steps: int) -> None:
        self._store, self._run, self._seeds, self._steps = store, run, seeds, steps
        own_parts, local = run.ranks == store.num_parts, run.settings["seeds"] == "local"
        sharing = run.ranks if own_parts and not local else 1
        self._batches = BatchDrawing(
            store, run, fan_out, first_part=own_parts and local, sharing=sharing, **_drawing_rules(run)
        )
        self._row_bytes = self._batches.row_bytes
        self._offsets = {name: _offsets(store, name, run.ranks) for name in store.node_types}
        self._into = {name: sum(t[2] == name for t in store.edge_types) for name in store.node_types}
        hops = _copied_hops(run) if own_parts else 0
        self._copied = halo_nodes(store, PartBook.of(store), (0,), hops) if hops else {}
        self._cached = self._cache() if _cache_bytes(run) else {}

    def mean(self) -> RankBatch:
        """Return the mean of the drawn batches."""
        successive = min(self._steps, SHARED) if self._run.ranks > 1 else 1
        samples = self._batches.samples(self._seeds, max(DRAWN, successive))
        remote = np.mean([self._remote(sample) for sample in samples[:DRAWN]], axis=0)
        expanded, counts, replied_edges, remote_edges = remote.tolist()
        requested, halves = self._requested(samples[:successive]), self._run.settings["wire_dtype"] != "float32"
        return RankBatch(
            **vars(self._batches.mean(samples[:DRAWN])),
            requested=requested,
            reply_bytes=sum(row_bytes(self._store, name, halves=halves) * count for name, count in requested.items()),
            expanded=expanded,
            counts=counts,
            replied_edges=replied_edges,
            remote_edges=remote_edges,
            cached_bytes=self._cached_bytes(),
            copied_bytes=self._copied_bytes(),
        )

    def _cache(self) -> dict[str, Array]:
        """Mark the cached nodes, by node type."""
        types, seeds = self._store.node_types, self._batches.seeds()
        visits = expected_visits(self._store, seeds, self._seeds, self._batches.fan_out)
        remote = {}
        for name in types:
            visited = np.flatnonzero(visits[name] > 0)
            remote[name] = visited[self._away(name, visited)]
        budget = _cache_bytes(self._run) - sum(BITMAP_BYTES * len(marks) for marks in visits.values())
        cached = {name: np.zeros(len(visits[name]), bool) for name in types}
        for name, ids in choose_rows(remote, visits, self._row_bytes, budget).items():
            cached[name][ids] = True
        return cached

    def _cached_bytes(self) -> float:
        return sum(
            self._row_bytes[name] * marks.sum() + BITMAP_BYTES * len(marks) for name, marks in self._cached.items()
        )

    def _copied_bytes(self) -> float:
        """Return the bytes of sources, and of two numbers for each node whose columns are copied."""
        total = 0.0
        for edge_type in self._store.edge_types if self._copied else ():
            marks = self._copied[edge_type[2]]
            edges = whole_indptr(self._store, edge_type).diff().numpy()[marks].sum()
            total += edges * self._store.edge("indices", 0, edge_type).element_size() + 16 * marks.sum()
        return float(total)

    def _remote(self, sample: HeteroSample) -> tuple[float, float, float, float]:
        """Return a batch's expanded nodes, counts, edges in replies, and remote edges."""
        inner, asked = {}, {}
        for name, ids in sample.node.items():
            expanded = ids[: sum(sample.num_sampled_nodes[name][:-1])]
            inner[name] = self._away(name, expanded)
            asked[name] = inner[name] & ~self._copied[name][expanded] if self._copied else inner[name]
        columns = [(edge_type[2], ends) for edge_type, ends in sample.col.items() if len(ends)]
        return (
            float(sum(away.sum() for name, away in asked.items() if self._into[name])),
            float(sum(away.sum() * self._into[name] for name, away in asked.items())),
            float(sum(asked[name][ends].sum() for name, ends in columns)),
            float(sum(inner[name][ends].sum() for name, ends in columns)),
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
                remote = ids[self._away(name, ids)]
                if self._cached:
                    remote = remote[~self._cached[name][remote]]
                if self._row_bytes[name] >= WIDE_BYTES:
                    known = [request[name] for request in recent]
                    remote = np.setdiff1d(remote, np.concatenate(known)) if known else np.unique(remote)
                new[name] = remote
            recent.append(new)
            held += self._bytes(new)
            requested.append({name: len(ids) for name, ids in new.items()})
        # Of a long epoch, the first batches request more than the others.
        steady = requested[len(requested) // 2 :] if self._steps > len(requested) else requested
        return {name: float(np.mean([counts[name] for counts in steady])) for name in self._store.node_types}

    def _bytes(self, rows: Mapping[str, Array]) -> float:
        return sum(self._row_bytes[name] * len(ids) for name, ids in rows.items())


def _offsets(store: Store, node_type: str, ranks: int) -> Array:
    """Return the first node of each rank's part, and their number: equal ranges if the store has other parts."""
    if ranks == store.num_parts:
        return store.offsets_of(node_type).numpy()
    return np.linspace(0, store.num_nodes_of(node_type), ranks + 1).astype(np.int64)


def _expected(run: PlannedRun, seeds: float, fan_out: Sequence[int], steps: int) -> RankBatch:
    """Return the batch in which each edge leads to a node at random, a cut edge to a remote one."""
    work, batch, local = run.workload, expected_batch(run, seeds, fan_out, **_drawing_rules(run)), _seeds_are_local(run)
    (nodes,), row = batch.nodes.values(), IDS_BYTES + work.feature_bytes
    reached = [nodes[0], *(after - before for before, after in zip(nodes, nodes[1:], strict=False))]
    away = _away(run, 0.0 if local else foreign_seeds(seeds, run.ranks), len(fan_out))
    # Copied are the columns of all nodes within some hops of the own ones, which the first hops of own seeds are.
    hops, others = _copied_hops(run), max(work.num_nodes * (1 - 1 / run.ranks), 1.0)
    copied = _copied_nodes(run, hops, others)
    asked = [0.0 if local and hop <= hops else share * (1 - copied / others) for hop, share in enumerate(away)]
    cached = min(max(_cache_bytes(run) - BITMAP_BYTES * work.num_nodes, 0) / row, others)
    remote = sum(new * share for new, share in zip(reached, away, strict=True)) * (1 - cached / others)
    expanded = sum(new * share for new, share in zip(reached[:-1], asked[:-1], strict=True))
    requested = remote / _shared(run, remote, nodes[-1], steps)
    halves = run.settings["wire_dtype"] != "float32" and work.entries is None
    return RankBatch(
        **vars(batch),
        requested={NODE_TYPE: requested},
        reply_bytes=requested * (IDS_BYTES + work.feature_bytes / (2 if halves else 1)),
        expanded=expanded,
        counts=expanded,
        replied_edges=sum(drawn * share for drawn, share in zip(batch.edges, asked, strict=False)),
        remote_edges=sum(drawn * share for drawn, share in zip(batch.edges, away, strict=False)),
        cached_bytes=cached * row + BITMAP_BYTES * work.num_nodes if cached else 0,
        copied_bytes=copied * (work.num_edges / work.num_nodes * _INDEX_BYTES + 16),
    )


def _seeds_are_local(run: PlannedRun) -> bool:
    return bool(run.settings["seeds"] == "local")


def foreign_seeds(seeds: float, ranks: int) -> float:
    """Return the share of a rank's seeds that others own, if each step's are drawn from even parts.

    They are sorted by owner and divided equally. Of B seeds a bound between two shares differs from that of the owners
    by 0.8 standard deviations of a binomial distribution, and each seed between the two goes to another rank.

    Args:
        seeds: of a rank in a step.
        ranks: P.
    """
    total = max(seeds * ranks, 1.0)
    moved = sum(0.8 * sqrt(total * part / ranks * (1 - part / ranks)) for part in range(1, ranks))
    return min(moved / total, 1 - 1 / ranks)


def _away(run: PlannedRun, first: float, hops: int) -> list[float]:
    """Return the share of the nodes of each hop that are remote; a cut edge of a remote node may lead back."""
    cut = run.workload.parts(run.ranks).cut / max(run.workload.num_edges, 1)
    away = [first]
    for _ in range(hops):
        away.append(away[-1] * (1 - cut / max(run.ranks - 1, 1)) + (1 - away[-1]) * cut)
    return away


def _copied_nodes(run: PlannedRun, hops: int, others: float) -> float:
    """Return the nodes of others whose columns are copied."""
    parts, copied = run.workload.parts(run.ranks), 0.0
    for hop in range(hops):
        edges = parts.cut / run.ranks + copied * run.workload.num_edges / run.workload.num_nodes
        copied = -others * expm1(-edges / others) if hop else parts.halo[0]
    return copied


def _shared(run: PlannedRun, remote: float, nodes: float, steps: int) -> float:
    """Return how many batches of a window need a remote row that is requested once for all of them."""
    window = min(int(run.settings["lookahead"]), steps)
    pool = max(sum(run.workload.parts(run.ranks).halo) / run.ranks, remote)
    share = min(remote / pool, 1.0) if pool else 0.0
    union = pool * (1 - (1 - share) ** window)
    # Held rows take no more memory than the rows of a batch, so fewer batches share them.
    return max(window * remote / union, 1.0) if 0 < union <= max(nodes, 1.0) else 1.0
