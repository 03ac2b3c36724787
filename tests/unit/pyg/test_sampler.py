"""gtrain_pyg.sampling: what ranks sample together is what one process samples of the whole graph, edge by edge."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pyg_jobs import Rank, job_of, samplers, whole_columns, whole_nodes
from small_graphs import messy_graph, random_parts, stored
from torch_geometric.sampler import HeteroSamplerOutput
from typed_library import library, library_parts, write

from gtrain.graph.sampling import HeteroNeighborSampler
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain_pyg.sampling.sampler import Subgraph

LIMIT = 25  # the time of every seed

CASES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "replace": {"replace": True},
    "weighted": {"weight": "edge_weight"},
    "weighted, replace": {"weight": "edge_weight", "replace": True},
    "disjoint": {"disjoint": True},
    "induced": {"subgraph_type": "induced"},
    "induced, disjoint, weighted": {"subgraph_type": "induced", "disjoint": True, "weight": "edge_weight"},
    "induced, node times": {"subgraph_type": "induced", "temporal": "uniform", "node_time": "time"},
    "edge times": {"temporal": "uniform", "edge_time": "edge_time"},
    "last edge times": {"temporal": "last", "edge_time": "edge_time"},
    "last rough times": {"temporal": "last", "edge_time": "rough_time"},
    "edge times, replace": {"temporal": "uniform", "edge_time": "edge_time", "replace": True},
    "edge times, weighted": {"temporal": "uniform", "edge_time": "edge_time", "weight": "edge_weight"},
    "node times": {"temporal": "uniform", "node_time": "time"},
    "last node times": {"temporal": "last", "node_time": "time"},
    "node times, weighted": {"temporal": "uniform", "node_time": "time", "weight": "edge_weight"},
}


def graph() -> Any:
    data = messy_graph(40, 300)
    data.edge_time = torch.randint(0, 50, (300,), generator=torch.Generator().manual_seed(1))
    data.edge_weight[::5] = 0
    data.rough_time = rough(data.edge_time)
    return data


def rough(times: torch.Tensor) -> torch.Tensor:
    """Times with many ties, by which the columns of some parts are sorted, as they are by ``times``, and others not."""
    rough = times // 10
    rough[3:4] = torch.where(rough[3:4] < 4, 9, 0)
    return rough


def typed_graph() -> Any:
    data = library()
    for kind in data.edge_types:
        count = data[kind].num_edges
        data[kind].edge_time = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(count))
        data[kind].rough_time = rough(data[kind].edge_time)
    data["author"].time = torch.arange(30)
    return data


STORES = {
    "one part": lambda path: stored(path, graph(), torch.zeros(40, dtype=torch.int64)),
    "two parts": lambda path: stored(path, graph(), random_parts(40, 2)),
    "four parts": lambda path: stored(path, graph(), random_parts(40, 4)),
    "two parts, typed": lambda path: write(path, typed_graph(), library_parts(2), 2),
    "three parts, typed": lambda path: write(path, typed_graph(), library_parts(3), 3),
}


SETTINGS = [
    "one part; tcp",
    "two parts; tcp",
    "two parts; shm",
    "two parts; tcp; 1 hop",
    "four parts; tcp",
    "four parts; shm",
    "four parts; tcp; 2 hops",
    "two parts, typed; tcp; 1 hop",
    "three parts, typed; tcp",
    "three parts, typed; shm",
    "three parts, typed; tcp; all",
]
HOPS = {"": 0, "1 hop": 1, "2 hops": 2, "all": None}


@pytest.fixture(scope="module", params=SETTINGS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Rank]]:
    name, transport, hops = (*request.param.split("; "), "")[:3]
    store = STORES[name](tmp_path_factory.mktemp("stores") / "s")
    with job_of(store, transport, hops=HOPS[hops]) as made:
        yield made


@pytest.fixture
def store(job: list[Rank]) -> Store:
    return job[0].structure.store


def seeds_of(store: Store) -> dict[str, np.ndarray]:
    """Seeds of all parts, some twice."""
    kind = "paper" if store.is_hetero else "node"
    chosen = np.random.default_rng(5).integers(0, store.num_nodes_of(kind), 12)
    return {kind: np.concatenate([chosen, chosen[:2]])}


def reference(store: Store, options: SamplingOptions, seed: int) -> HeteroNeighborSampler:
    """One process with the whole graph."""
    names = [f"weight={options.weight}"] if options.weight else []
    sort = "edge_time" if options.edge_time == "edge_time" else "source_time"  # in any order
    names += [f"{sort}={options.edge_time}"] if options.edge_time else []
    times = None
    if options.node_time:
        timed = [kind for kind in store.node_types if options.node_time in store.node_tensors(kind)]
        times = {kind: whole_nodes(store, options.node_time, kind) for kind in timed}
    return HeteroNeighborSampler(
        whole_columns(store, *names),
        {kind: store.num_nodes_of(kind) for kind in store.node_types},
        options.fan_out(store.edge_types),
        replace=options.replace,
        temporal=options.temporal,
        node_time=times,
        disjoint=options.disjoint,
        induced=options.subgraph_type == "induced",
        seed=seed,
    )


def edges_by_hop(found: Any) -> dict[Any, list[list[tuple[int, ...]]]]:
    """For each edge type and hop the sorted edges: position, source, target, and subgraph, by global ids."""
    result = {}
    for kind, edge in found.edge.items():
        rows = found.edge_index[kind] if isinstance(found, Subgraph) else (found.row[kind], found.col[kind])
        columns = [edge, found.node[kind[0]][rows[0]], found.node[kind[2]][rows[1]]]
        if found.batch is not None:
            columns += [found.batch[kind[0]][rows[0]], found.batch[kind[2]][rows[1]]]
        bounds = np.cumsum([0, *found.num_sampled_edges[kind]])
        assert bounds[-1] == edge.size
        lines = np.stack(columns, axis=1).tolist()
        result[kind] = [sorted(map(tuple, lines[a:b])) for a, b in zip(bounds, bounds[1:], strict=False)]
    return result


def assert_same(found: Subgraph, wanted: Any, seeds: dict[str, np.ndarray]) -> None:
    """The same edges in each hop, and the same nodes found in each hop."""
    assert edges_by_hop(found) == edges_by_hop(wanted)
    assert found.num_sampled_edges == wanted.num_sampled_edges and found.num_sampled_nodes == wanted.num_sampled_nodes
    for kind, nodes in found.node.items():
        bounds = np.cumsum([0, *found.num_sampled_nodes[kind]])
        for a, b in zip(bounds, bounds[1:], strict=False):
            both = [(nodes, found.batch), (wanted.node[kind], wanted.batch)]
            one, other = (
                sorted(zip(ids[a:b].tolist(), (batch[kind] if batch else ids)[a:b].tolist(), strict=True))
                for ids, batch in both
            )
            assert one == other
    for kind, ids in seeds.items():
        assert np.array_equal(found.node[kind][found.seeds[kind]], ids)


@pytest.mark.parametrize(
    ("case", "fan_out"),
    [*((case, (3, 2, 2)) for case in CASES), *((case, (-1, 4)) for case in ("uniform", "weighted", "node times"))],
)
def test_parts_sample_what_one_process_samples(
    store: Store, job: list[Rank], case: str, fan_out: tuple[int, ...]
) -> None:
    """Whoever asks, hosts and answers; ranks and batches differ in nothing but what they are asked for."""
    options = SamplingOptions(num_neighbors=fan_out, **CASES[case])
    seeds = seeds_of(store)
    times = {kind: np.full(ids.size, LIMIT) for kind, ids in seeds.items()} if options.temporal else None
    one = reference(store, options, seed=7)
    orders = []
    for sampler in samplers(job, options, seed=7):
        for batch in range(2):
            found = sampler.sample(seeds, epoch=1, batch=batch, seed_time=times)
            wanted = one.sample(seeds, epoch=1, batch=batch, seed_time=times)
            assert_same(found, wanted, seeds)
        orders.append({kind: index.tolist() for kind, index in found.edge_index.items()})
    assert all(order == orders[0] for order in orders)


def pairs(index: np.ndarray) -> set[tuple[int, int]]:
    return set(zip(*index.tolist(), strict=True))


def test_bidirectional_subgraphs_hold_the_reverse_of_each_edge(store: Store, job: list[Rank]) -> None:
    """As PyG's own conversion of the directional sample does it."""
    seeds, fan_out = seeds_of(store), (3, 2)
    plain, both = (
        samplers(job, SamplingOptions(num_neighbors=fan_out, subgraph_type=kind))
        for kind in ("directional", "bidirectional")
    )
    for one, other in zip(plain, both, strict=True):
        sampled, found = (sampler.sample(seeds, epoch=0, batch=3) for sampler in (one, other))
        wanted = pyg_bidirectional(sampled)
        for kind, index in found.edge_index.items():
            assert pairs(index) == pairs(wanted[kind]) and len(pairs(index)) == index.shape[1]
            assert found.num_sampled_edges[kind] == [index.shape[1]]
            if kind in found.edge:
                edges = whole_columns(store)[kind]
                target = np.searchsorted(edges.indptr, found.edge[kind], side="right") - 1
                ends = found.node[kind[0]][index[0]], found.node[kind[2]][index[1]]
                stored_ends = edges.indices[found.edge[kind]], target
                assert ((np.stack(ends) == stored_ends).all(0) | (np.stack(ends) == stored_ends[::-1]).all(0)).all()


def pyg_bidirectional(sampled: Subgraph) -> dict[Any, np.ndarray]:
    """What PyG makes of a directional sample."""
    tensors = {kind: torch.from_numpy(index) for kind, index in sampled.edge_index.items()}
    output = HeteroSamplerOutput(
        node={kind: torch.from_numpy(ids) for kind, ids in sampled.node.items()},
        row={kind: index[0] for kind, index in tensors.items()},
        col={kind: index[1] for kind, index in tensors.items()},
        edge=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some edge types have no reverse
        done = output.to_bidirectional()
    return {kind: np.stack([done.row[kind].numpy(), done.col[kind].numpy()]) for kind in tensors}
