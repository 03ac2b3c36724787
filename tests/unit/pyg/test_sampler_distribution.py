"""How often two ranks sample what, by chi-square against a plain numpy sampler of the whole graph.

The reference draws with numpy's own generators, in Python, node by node, and shares no code with gtrain. Each batch
gives one observation of each kind, so that observations are independent whatever the edges within a batch are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyg_jobs import job_of, samplers
from scipy.stats import chi2_contingency
from torch_geometric.data import Data, HeteroData

from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.graph.store.writer import write_store
from gtrain_pyg.peers import PartBook

BATCHES = 800
SIGNIFICANCE = 1e-3  # seeds are fixed, so a test that passes always passes
LIMIT = 60
LIKES, KNOWS = ("user", "likes", "item"), ("item", "near", "item")

VARIANTS: dict[str, dict[str, Any]] = {
    "uniform": {"num_neighbors": (3, 2)},
    "replace": {"num_neighbors": (3, 2), "replace": True},
    "weighted": {"num_neighbors": (3, 2), "weight": "edge_weight"},
    "edge times": {"num_neighbors": (3, 2), "temporal": "uniform", "edge_time": "edge_time"},
    "node times": {"num_neighbors": (3, 2), "temporal": "uniform", "node_time": "time"},
    "typed": {"num_neighbors": {LIKES: (2, 1), KNOWS: (3, 2)}},
    "typed, weighted": {"num_neighbors": {LIKES: (2, 1), KNOWS: (3, 2)}, "weight": "edge_weight"},
}


def edges_of(rng: np.random.Generator, count: int, sources: int, targets: int) -> dict[str, torch.Tensor]:
    ends = np.stack([rng.integers(0, sources, count), rng.integers(0, targets, count)])
    values = {
        "edge_index": ends,
        "edge_weight": rng.random(count).astype(np.float32) * (rng.random(count) < 0.8),
        "edge_time": rng.integers(0, 100, count),
    }
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in values.items()}


def make(typed: bool) -> Data | HeteroData:
    """A multigraph of 24 nodes, or of 15 users and 20 items."""
    rng = np.random.default_rng(2)
    if not typed:
        return Data(**edges_of(rng, 200, 24, 24), time=torch.from_numpy(rng.integers(0, 100, 24)), num_nodes=24)
    data = HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = 15, 20
    for kind, count in ((LIKES, 110), (KNOWS, 130)):
        for name, tensor in edges_of(rng, count, data[kind[0]].num_nodes, data[kind[2]].num_nodes).items():
            data[kind][name] = tensor
    return data


def store_of(path: Path, data: Data | HeteroData) -> Store:
    """Two parts, alternating, so that half of all edges are cut."""
    sizes = {"node": 24} if isinstance(data, Data) else {"user": 15, "item": 20}
    parts: Any = {name: torch.arange(size) % 2 for name, size in sizes.items()}
    parts = parts["node"] if isinstance(data, Data) else parts
    return write_store(path / "s", data, parts, 2, source={}, facts={}, partitioner="file", seed=0)


class Plain:
    """The reference: in-edges in lists, numpy's generator, one node after the other."""

    def __init__(self, data: Data | HeteroData, options: SamplingOptions) -> None:
        kinds = [("node", "to", "node")] if isinstance(data, Data) else list(data.edge_types)
        self._options, self._fan_out = options, options.fan_out(kinds)
        edges = {kind: data if len(kinds) == 1 else data[kind] for kind in kinds}
        self._source = {kind: edges[kind].edge_index[0].numpy() for kind in kinds}
        self._able = {kind: _able(edges[kind], options, data) for kind in kinds}
        self._rng = np.random.default_rng(0)

    def sample(self, kind: str, seeds: list[int]) -> list[tuple[int, Any, int]]:
        """The sampled edges: hop, type and position in the source data."""
        if self._options.disjoint:
            return [edge for seed in seeds for edge in self._grow({kind: [seed]})]
        return self._grow({kind: seeds})

    def _grow(self, frontier: dict[str, list[int]]) -> list[tuple[int, Any, int]]:
        seen = {(name, node) for name, nodes in frontier.items() for node in nodes}
        found = []
        for hop in range(self._options.num_hops):
            new: dict[str, list[int]] = {}
            for kind in self._able:
                for node in frontier.get(kind[2], []):
                    for edge in self._draw(kind, node, self._fan_out[kind][hop]):
                        found.append((hop, kind, int(edge)))
                        source = (kind[0], int(self._source[kind][edge]))
                        if source not in seen:
                            seen.add(source)
                            new.setdefault(kind[0], []).append(source[1])
            frontier = new
        return found

    def _draw(self, kind: Any, node: int, count: int) -> np.ndarray:
        able, share = self._able[kind].get(node, (np.empty(0, np.int64), None))
        if able.size == 0 or (able.size <= count and not self._options.replace):
            return able
        return self._rng.choice(able, count, replace=self._options.replace, p=share)


def _able(edges: Any, options: SamplingOptions, data: Any) -> dict[int, tuple[np.ndarray, np.ndarray | None]]:
    """By node the in-edges that may be chosen, and the share of each where there are weights."""
    good = torch.ones(edges.edge_index.shape[1], dtype=torch.bool)
    if options.node_time:
        good &= data.time[edges.edge_index[0]] <= LIMIT
    if options.edge_time:
        good &= edges.edge_time <= LIMIT
    if options.weight:
        good &= edges.edge_weight > 0
    found = {}
    for node in edges.edge_index[1].unique().tolist():
        able = torch.nonzero(good & (edges.edge_index[1] == node)).flatten().numpy()
        weight = edges.edge_weight[able].double().numpy() if options.weight else None
        found[node] = able, None if weight is None else weight / weight.sum()
    return found


def sampled(
    store: Store, options: SamplingOptions, kind: str, seeds: list[int]
) -> Iterator[list[tuple[int, Any, int]]]:
    """The same of two ranks, which take turns; with positions in the source data."""
    book = PartBook.of(store)
    ids = {
        edge_type: np.concatenate([store.edge("edge_id", part, edge_type).numpy() for part in range(2)])
        for edge_type in store.edge_types
    }
    orig = np.concatenate([store.node("orig_id", part, kind).numpy() for part in range(2)])
    chosen = {kind: np.argsort(orig)[seeds]}
    assert set(book.owner(kind, chosen[kind]).tolist()) == {0, 1}
    times = {kind: np.full(len(seeds), LIMIT)} if options.temporal else None
    with job_of(store) as job:
        made = samplers(job, options, seed=3)
        for batch in range(BATCHES):
            found = made[batch % 2].sample(chosen, epoch=0, batch=batch, seed_time=times)
            edges = []
            for edge_type, positions in found.edge.items():
                hops = np.repeat(range(options.num_hops), found.num_sampled_edges[edge_type])
                edges += [(int(h), edge_type, int(i)) for h, i in zip(hops, ids[edge_type][positions], strict=True)]
            yield edges


def observe(batches: Iterator[list[tuple[int, Any, int]]], ends: Any) -> dict[str, Counter]:
    """One observation of each kind a batch.

    ``first``, ``second``: an edge of that hop drawn at random; ``size``: how many edges the second hop has;
    ``degree``: how many edges of the second hop leave from the node that a random one of them leaves from.
    """
    rng, seen = np.random.default_rng(1), {name: Counter() for name in ("first", "second", "size", "degree")}
    for edges in batches:
        hops = [sorted((str(kind), i, ends[kind][0, i].item()) for hop, kind, i in edges if hop == h) for h in (0, 1)]
        for name, hop in zip(("first", "second"), hops, strict=True):
            seen[name][hop[rng.integers(len(hop))][:2] if hop else None] += 1
        seen["size"][len(hops[1])] += 1
        out = Counter((kind, source) for kind, _, source in hops[1])
        seen["degree"][out[list(out)[rng.integers(len(out))]] if out else 0] += 1
    return seen


def p_value(one: Counter, other: Counter) -> float:
    """Of the hypothesis that both come from one distribution; rare outcomes are put together."""
    counts = np.array([(one[key], other[key]) for key in {*one, *other}])
    rare = counts.sum(1) < 10
    counts = np.concatenate([counts[~rare], counts[rare].sum(0, keepdims=True)])
    counts = counts[counts.sum(1) > 0]
    return float(chi2_contingency(counts.T).pvalue) if len(counts) > 1 else 1.0


@pytest.mark.parametrize(
    "variant", [next(iter(VARIANTS)), *(pytest.param(name, marks=pytest.mark.slow) for name in list(VARIANTS)[1:])]
)
def test_ranks_sample_edges_and_degrees_as_often_as_a_plain_sampler(tmp_path: Path, variant: str) -> None:
    typed = variant.startswith("typed")
    data, options = make(typed), SamplingOptions(**VARIANTS[variant])
    kind, seeds = ("item", [0, 3, 5]) if typed else ("node", [0, 3, 5])
    ends = {edge_type: data[edge_type].edge_index for edge_type in data.edge_types} if typed else None
    ends = ends or {("node", "to", "node"): data.edge_index}
    plain = Plain(data, options)
    wanted = observe((plain.sample(kind, seeds) for _ in range(BATCHES)), ends)
    found = observe(sampled(store_of(tmp_path, data), options, kind, seeds), ends)
    values = {name: p_value(found[name], wanted[name]) for name in wanted}
    assert min(values.values()) > SIGNIFICANCE, values
    assert len(wanted["second"]) > 30  # there was something to tell apart


def test_the_last_neighbours_are_certain(tmp_path: Path) -> None:
    """With ``temporal=last`` nothing is random: the latest in-edges of each seed, not later than it."""
    data = make(typed=False)
    store = store_of(tmp_path, data)
    options = SamplingOptions(num_neighbors=(3,), temporal="last", edge_time="edge_time")
    found = next(sampled(store, options, "node", [0, 3, 5]))
    times = []
    for seed in (0, 3, 5):
        able = data.edge_time[(data.edge_index[1] == seed) & (data.edge_time <= LIMIT)]
        times += able.sort().values[-3:].tolist()
    assert sorted(data.edge_time[i].item() for _, _, i in found) == sorted(times)


def test_the_test_would_notice() -> None:
    """Weights that are ignored are seen by as many observations."""
    data, kind = make(typed=False), ("node", "to", "node")
    plain, weighted = (Plain(data, SamplingOptions(**VARIANTS[name])) for name in ("uniform", "weighted"))
    seen = [
        observe((p.sample("node", [0, 3, 5]) for _ in range(BATCHES)), {kind: data.edge_index})
        for p in (plain, weighted)
    ]
    assert p_value(seen[0]["first"], seen[1]["first"]) < 1e-9
