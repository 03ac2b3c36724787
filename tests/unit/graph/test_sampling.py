"""Neighbour sampling: every sampled subgraph is checked against the graph, edge by edge, in plain numpy."""

from __future__ import annotations

import doctest
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gtrain.errors import ConfigError, DataError
from gtrain.graph.sampling import (
    Columns,
    HeteroNeighborSampler,
    NeighborSampler,
    Rule,
    Sample,
    batch_key,
    sample_hop,
    scratch,
)
from gtrain.graph.sampling import sampler as sampler_module

LIMIT = 60  # the time of every seed


class Graph:
    """A random multigraph with loops, parallel edges, isolated nodes, a hub, weights and both kinds of times."""

    def __init__(self, num_nodes: int = 120, num_edges: int = 900, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        target = np.sort(np.concatenate([rng.integers(0, num_nodes - 10, num_edges), np.full(150, 7)]))
        self.indptr = np.searchsorted(target, np.arange(num_nodes + 1))
        self.target, self.indices = target, rng.integers(0, num_nodes, target.size)
        self.weight = rng.random(target.size) * (rng.random(target.size) < 0.8)
        self.edge_time = np.sort(target * 100 + rng.integers(0, 100, target.size)) % 100
        self.node_time = rng.integers(0, 100, num_nodes)
        self.edge_id = rng.permutation(target.size)
        self.num_nodes = num_nodes

    def columns(self, *names: str, **given: Any) -> Columns:
        return Columns(
            self.indptr, self.indices, edge_id=self.edge_id, **{name: getattr(self, name) for name in names}, **given
        )

    def allowed(self, case: Case) -> np.ndarray:
        """Which edges may be chosen."""
        good = np.ones(self.indices.size, bool)
        if "weight" in case.columns:
            good &= self.weight > 0
        if case.options.get("temporal"):
            times = self.node_time[self.indices] if case.by_node else self.edge_time
            good &= times <= LIMIT
        return good


class Case:
    """A variant: arrays that the columns get, options of the sampler, whether times are the nodes'."""

    def __init__(self, *columns: str, by_node: bool = False, **options: Any) -> None:
        self.columns, self.by_node, self.options = columns, by_node, options

    def sampler(self, graph: Graph, fan_out: list[int]) -> NeighborSampler:
        times = {"node_time": graph.node_time} if self.by_node else {}
        return NeighborSampler(graph.columns(*self.columns), fan_out, **self.options, **times)

    def sample(self, graph: Graph, fan_out: list[int], seeds: Any, **more: Any) -> Sample:
        seed_time = np.full(len(seeds), LIMIT) if self.options.get("temporal") else None
        return self.sampler(graph, fan_out).sample(seeds, seed_time=seed_time, **more)


CASES = {
    "uniform": Case(),
    "replace": Case(replace=True),
    "weighted": Case("weight"),
    "weighted replace": Case("weight", replace=True),
    "disjoint": Case(disjoint=True),
    "edge times": Case("edge_time", temporal="uniform"),
    "edge times replace": Case("edge_time", temporal="uniform", replace=True),
    "edge times weighted": Case("edge_time", "weight", temporal="uniform"),
    "edge times last": Case("edge_time", temporal="last"),
    "node times": Case(by_node=True, temporal="uniform"),
    "node times weighted": Case("weight", by_node=True, temporal="uniform"),
    "node times last": Case(by_node=True, temporal="last"),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
SEEDS = np.array([7, 3, 119, 50, 7 + 1, 20])  # a hub, and 119 without in-edges


def first_seen(values: list[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def check(graph: Graph, case: Case, fan_out: list[int], sample: Sample, seeds: Any) -> None:
    """Hold a directional sample against the graph: direction, counts of every node and hop, order of discovery."""
    allowed, replace = graph.allowed(case), case.options.get("replace", False)
    owner = np.zeros(sample.node.size, np.int64) if sample.batch is None else sample.batch
    found = list(zip(owner.tolist(), sample.node.tolist(), strict=True))
    assert np.array_equal(graph.indices[sample.edge], sample.node[sample.row])
    assert np.array_equal(graph.target[sample.edge], sample.node[sample.col])
    assert np.array_equal(owner[sample.row], owner[sample.col])
    assert np.array_equal(sample.edge_id, graph.edge_id[sample.edge])
    assert allowed[sample.edge].all()
    disjoint = sample.batch is not None
    discovered = first_seen([(i if disjoint else 0, int(seed)) for i, seed in enumerate(seeds)])
    assert [found[i] for i in sample.seeds] == [(i if disjoint else 0, seed) for i, seed in enumerate(seeds)]
    counts, edge = [len(discovered)], 0
    for hop, count in enumerate(fan_out):
        layer = range(len(discovered) - counts[-1], len(discovered))
        wanted = {}
        for node in layer:
            v = found[node][1]
            degree = int(allowed[graph.indptr[v] : graph.indptr[v + 1]].sum())
            wanted[node] = degree if count < 0 else count * (degree > 0) if replace else min(degree, count)
        part = slice(edge, edge + sample.num_sampled_edges[hop])
        assert sample.col[part].tolist() == [node for node in layer for _ in range(wanted[node])]
        before = len(discovered)
        discovered = first_seen(discovered + [found[i] for i in sample.row[part]])
        counts.append(len(discovered) - before)
        edge = part.stop
    assert found == discovered
    assert counts == sample.num_sampled_nodes and edge == sample.row.size
    if not replace:
        assert len(set(zip(sample.col.tolist(), sample.edge.tolist(), strict=True))) == sample.edge.size


@each_case
@pytest.mark.parametrize("fan_out", [[4, 3, 2], [-1, 2], [40, 3], [0, 3], []], ids=str)
def test_every_edge_and_count(case: Case, fan_out: list[int]) -> None:
    graph = Graph()
    check(graph, case, fan_out, case.sample(graph, fan_out, SEEDS), SEEDS)


@each_case
def test_int32_mapped_from_disk(case: Case, tmp_path: Any) -> None:
    """The dtype of indices, memory maps and float32 weights change nothing."""
    graph = Graph()
    graph.weight = graph.weight.astype(np.float32)
    expected = case.sample(graph, [4, 3], SEEDS, epoch=2, batch=3)
    np.save(tmp_path / "indices.npy", graph.indices.astype(np.int32))
    graph.indices = np.load(tmp_path / "indices.npy", mmap_mode="r")
    found = case.sample(graph, [4, 3], SEEDS, epoch=2, batch=3)
    assert np.array_equal(found.edge, expected.edge) and np.array_equal(found.node, expected.node)


@pytest.mark.parametrize("by_node", [False, True])
def test_last_takes_the_latest(by_node: bool) -> None:
    graph = Graph()
    case = Case(*([] if by_node else ["edge_time"]), by_node=by_node, temporal="last")
    times = graph.node_time[graph.indices] if by_node else graph.edge_time
    for seed in range(30):
        sample = case.sample(graph, [5], [seed])
        column = times[graph.indptr[seed] : graph.indptr[seed + 1]]
        assert sorted(times[sample.edge]) == sorted(column[column <= LIMIT])[-5:]


@pytest.mark.parametrize("count", [0, 1, 3, 7, 40])
def test_last_is_the_same_by_times_of_edges_and_of_sources(count: int) -> None:
    """Of sorted columns with ties, also the order: a rank that has copies of some columns reads them either way."""
    graph = Graph()
    times, nodes, of = graph.edge_time // 10, np.arange(graph.num_nodes), np.zeros(graph.num_nodes, np.int64)
    found = [
        sample_hop(
            Columns(graph.indptr, graph.indices, **{name: times}),
            nodes,
            count,
            key=1,
            rule=Rule(temporal="last"),
            subgraph=of,
            seed_time=[LIMIT // 10],
        )
        for name in ("edge_time", "source_time")
    ]
    for name in ("position", "column", "source"):
        assert np.array_equal(*(getattr(sample, name) for sample in found))
    assert found[0].position.size or count == 0


def test_each_seed_has_its_own_time() -> None:
    graph = Graph()
    sampler = NeighborSampler(graph.columns("edge_time"), [-1, -1], temporal="uniform")
    times = np.array([0, 30, 99])
    sample = sampler.sample([7, 7, 7], seed_time=times)
    assert (graph.edge_time[sample.edge] <= times[sample.batch[sample.col]]).all()
    hub = graph.edge_time[graph.indptr[7] : graph.indptr[8]]
    for subgraph, time in enumerate(times):
        first_hop = sample.col[: sample.num_sampled_edges[0]] == subgraph
        assert first_hop.sum() == (hub <= time).sum()


def test_seeds_take_their_own_node_times() -> None:
    graph = Graph()
    sampler = NeighborSampler(graph.columns(), [-1, -1], temporal="uniform", node_time=graph.node_time)
    given = sampler.sample(SEEDS, seed_time=graph.node_time[SEEDS])
    assert np.array_equal(sampler.sample(SEEDS).edge, given.edge)
    assert (graph.node_time[given.node] <= graph.node_time[SEEDS][given.batch]).all()


def test_all_neighbours_of_two_hops() -> None:
    """Fan-out -1 finds what a search over sets finds."""
    graph = Graph()
    sample = Case().sample(graph, [-1, -1], SEEDS)
    near = set(SEEDS.tolist()) | set(graph.indices[np.isin(graph.target, SEEDS)].tolist())
    far = near | set(graph.indices[np.isin(graph.target, list(near))].tolist())
    assert set(sample.node.tolist()) == far
    assert sorted(sample.edge) == np.flatnonzero(np.isin(graph.target, list(near))).tolist()


@pytest.mark.parametrize("disjoint", [False, True])
def test_seeds_given_twice(disjoint: bool) -> None:
    graph, case, seeds = Graph(), Case(disjoint=disjoint), np.array([5, 7, 5, 5])
    sample = case.sample(graph, [3, 3], seeds)
    check(graph, case, [3, 3], sample, seeds)
    assert sample.seeds.tolist() == ([0, 1, 2, 3] if disjoint else [0, 1, 0, 0])
    assert sample.num_sampled_nodes[0] == (4 if disjoint else 2)
    if disjoint:
        chosen = {tuple(sample.edge[: sample.num_sampled_edges[0]][3 * i : 3 * i + 3]) for i in (0, 2, 3)}
        assert len(chosen) > 1, "each subgraph draws for itself"


def test_the_example_of_the_docstring() -> None:
    results = doctest.testmod(sampler_module)
    assert (results.failed, results.attempted) == (0, 4)


@each_case
def test_nothing_to_sample(case: Case) -> None:
    graph = Graph()
    for seeds in ([], [119]):
        sample = case.sample(graph, [3, 2], np.array(seeds, np.int64))
        assert sample.node.tolist() == seeds and sample.row.size == 0
        assert sample.num_sampled_nodes == [len(seeds), 0, 0] and sample.num_sampled_edges == [0, 0]


def test_a_graph_without_edges_or_nodes() -> None:
    nothing = np.empty(0, np.int64)
    assert NeighborSampler(Columns(np.zeros(4, np.int64), nothing), [2]).sample([2]).node.tolist() == [2]
    assert NeighborSampler(Columns(np.zeros(1, np.int64), nothing), [2]).sample(nothing).node.size == 0


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("temporal", [None, "uniform"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("by_node", [False, True])
def test_induced(disjoint: bool, temporal: str | None, weighted: bool, by_node: bool) -> None:
    """All edges between sampled nodes, also those of weight 0, found by comparing all pairs."""
    graph = Graph()
    columns = [*(() if by_node else ("edge_time",)), *(("weight",) if weighted else ())]
    case = Case(*columns, by_node=by_node, disjoint=disjoint, temporal=temporal)
    chosen = case.sample(graph, [3, 2], SEEDS)
    case.options["induced"] = True
    sample = case.sample(graph, [3, 2], SEEDS)
    assert np.array_equal(sample.node, chosen.node) and sample.num_sampled_edges == [sample.row.size]
    owner = np.zeros(sample.node.size, np.int64) if sample.batch is None else sample.batch
    case.columns, expected = tuple(name for name in columns if name != "weight"), set()
    for subgraph in range(owner.max() + 1):
        inside = sample.node[owner == subgraph]
        edges = np.isin(graph.target, inside) & np.isin(graph.indices, inside) & graph.allowed(case)
        expected |= {(subgraph, int(edge)) for edge in np.flatnonzero(edges)}
    found = list(zip(owner[sample.col].tolist(), sample.edge.tolist(), strict=True))
    assert len(found) == len(set(found)) and set(found) == expected
    assert np.array_equal(graph.indices[sample.edge], sample.node[sample.row])
    assert np.array_equal(graph.target[sample.edge], sample.node[sample.col])


# ------------------------------------------------------------------------------------------------------- determinism


def same(a: Sample, b: Sample) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("node", "row", "col", "edge"))


@each_case
def test_threads_change_nothing(case: Case) -> None:
    graph = Graph(400, 6000)
    sampler = case.sampler(graph, [5, 4, 3])
    times = np.full(32, LIMIT) if case.options.get("temporal") else None

    def draw(batch: int) -> Sample:
        seeds = np.random.default_rng(batch).integers(0, 400, 32)
        return sampler.sample(seeds, epoch=1, batch=batch, seed_time=times)

    alone = [draw(batch) for batch in range(12)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(draw, reversed(range(12))))[::-1]
    assert all(map(same, alone, together))


def test_seed_epoch_and_batch_change_what_is_drawn() -> None:
    graph = Graph()
    samples = [
        NeighborSampler(graph.columns(), [4, 4], seed=seed).sample(SEEDS, epoch=epoch, batch=batch)
        for seed, epoch, batch in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    assert not any(same(samples[i], samples[j]) for i in range(4) for j in range(i))
    assert same(samples[0], NeighborSampler(graph.columns(), [4, 4]).sample(SEEDS))


def test_a_hash_map_numbers_as_the_table_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph(400, 6000)
    dense = Case().sample(graph, [5, 4, 3], SEEDS)
    monkeypatch.setattr(scratch, "DENSE_LIMIT", 0)
    monkeypatch.setattr(scratch, "FIRST_SLOTS", 2)  # so that it grows
    assert same(Case().sample(graph, [5, 4, 3], SEEDS), dense)
    assert same(Case(induced=True).sample(graph, [5], SEEDS), Case(induced=True).sample(graph, [5], SEEDS))


def test_views_are_reused_and_copies_are_not() -> None:
    graph = Graph()
    sampler = NeighborSampler(graph.columns(), [4, 3])
    kept, view = sampler.sample(SEEDS, batch=0), sampler.sample(SEEDS, batch=0, copy=False)
    assert same(kept, view)
    again = sampler.sample(SEEDS - 1, batch=1, copy=False)
    assert np.shares_memory(view.row, again.row) and same(kept, sampler.sample(SEEDS, batch=0))


@each_case
def test_hops_asked_of_parts_build_the_same_subgraph(case: Case) -> None:
    """What the owners of a part choose for nodes in any company is what the sampler chose for them."""
    graph = Graph()
    sample = case.sample(graph, [4, 3], SEEDS, batch=5)
    owner = np.zeros(sample.node.size, np.int64) if sample.batch is None else sample.batch
    key, low, start = batch_key(0, 0, 5), 0, 0
    for hop, count in enumerate([4, 3]):
        layer = np.arange(low, low + sample.num_sampled_nodes[hop])
        edges = sample.edge[start : start + sample.num_sampled_edges[hop]]
        chosen = {int(i): sample.edge[start:][sample.col[start:] == i].tolist() for i in layer}
        for first, last in ((0, 40), (40, 120)):
            mine = layer[(sample.node[layer] >= first) & (sample.node[layer] < last)][::-1]
            part = slice(graph.indptr[first], graph.indptr[last])
            arrays = {name: getattr(graph, name)[part] for name in case.columns}
            columns = Columns(
                graph.indptr[first : last + 1] - part.start,
                graph.indices[part],
                num_sources=graph.num_nodes,
                first_target=first,
                **arrays,
            )
            if case.by_node:
                columns = columns.timed_by_sources(graph.node_time)
            rule = Rule(case.options.get("replace", False), case.options.get("temporal"))
            found = sample_hop(
                columns,
                sample.node[mine] - first,
                count,
                key=key,
                hop=hop,
                rule=rule,
                subgraph=None if sample.batch is None else owner[mine],
                seed_time=np.full(SEEDS.size, LIMIT),
            )
            assert np.array_equal(found.source, graph.indices[found.position + part.start])
            for i, node in enumerate(mine):
                assert (found.position[found.column == i] + part.start).tolist() == chosen[int(node)]
        low, start = low + layer.size, start + edges.size


# ----------------------------------------------------------------------------------------------------- heterogeneous

BUYS, BOUGHT, KNOWS = ("user", "buys", "item"), ("item", "bought by", "user"), ("user", "knows", "user")
NUM = {"user": 30, "item": 20}


def typed_graph() -> tuple[dict[Any, Columns], dict[Any, tuple[np.ndarray, np.ndarray]]]:
    """Columns and (source, target) of the edges of three types."""
    rng, columns, ends = np.random.default_rng(3), {}, {}
    for kind, size in ((BUYS, 160), (BOUGHT, 160), (KNOWS, 120)):
        target = np.sort(rng.integers(0, NUM[kind[2]] - 1, size))
        source = rng.integers(0, NUM[kind[0]], size)
        indptr = np.searchsorted(target, np.arange(NUM[kind[2]] + 1))
        columns[kind], ends[kind] = Columns(indptr, source, NUM[kind[0]]), (source, target)
    return columns, ends


def test_types_find_what_one_graph_of_all_nodes_finds() -> None:
    columns, ends = typed_graph()
    typed = HeteroNeighborSampler(columns, NUM, [-1, -1]).sample({"item": [2, 5], "user": [1]})
    first = {"user": 0, "item": NUM["user"]}
    source = np.concatenate([first[kind[0]] + ends[kind][0] for kind in columns])
    target = np.concatenate([first[kind[2]] + ends[kind][1] for kind in columns])
    order = np.argsort(target, kind="stable")
    indptr = np.searchsorted(target[order], np.arange(51))
    whole = NeighborSampler(Columns(indptr, source[order]), [-1, -1]).sample([32, 35, 1])
    nodes = np.concatenate([first[name] + typed.node[name] for name in NUM])
    assert sorted(nodes) == sorted(whole.node)
    pairs = []
    for kind in columns:
        assert np.array_equal(ends[kind][0][typed.edge[kind]], typed.node[kind[0]][typed.row[kind]])
        assert np.array_equal(ends[kind][1][typed.edge[kind]], typed.node[kind[2]][typed.col[kind]])
        pairs += zip(
            first[kind[0]] + typed.node[kind[0]][typed.row[kind]],
            first[kind[2]] + typed.node[kind[2]][typed.col[kind]],
            strict=True,
        )
    assert sorted(pairs) == sorted(zip(whole.node[whole.row], whole.node[whole.col], strict=True))
    hops = [sum(counts) for counts in zip(*typed.num_sampled_nodes.values(), strict=True)]
    assert hops == whole.num_sampled_nodes


@pytest.mark.parametrize("disjoint", [False, True])
def test_types_have_fan_outs_of_their_own(disjoint: bool) -> None:
    columns, ends = typed_graph()
    fan_out = {BUYS: [3, 0], BOUGHT: [0, 2], KNOWS: [2, 4]}
    seeds = {"item": [2, 5, 19], "user": [1, 2]}
    sample = HeteroNeighborSampler(columns, NUM, fan_out, disjoint=disjoint).sample(seeds)
    for kind, counts in fan_out.items():
        nodes, low, start = sample.node[kind[2]], 0, 0
        degree = np.diff(columns[kind].indptr)
        for hop, count in enumerate(counts):
            layer = np.arange(low, low + sample.num_sampled_nodes[kind[2]][hop])
            part = slice(start, start + sample.num_sampled_edges[kind][hop])
            assert sample.col[kind][part].tolist() == np.repeat(layer, np.minimum(degree[nodes[layer]], count)).tolist()
            low, start = low + layer.size, part.stop
        assert np.array_equal(ends[kind][0][sample.edge[kind]], sample.node[kind[0]][sample.row[kind]])
        if disjoint:
            assert np.array_equal(sample.batch[kind[0]][sample.row[kind]], sample.batch[kind[2]][sample.col[kind]])
    if disjoint:
        assert sample.batch["item"][:3].tolist() == [0, 1, 2] and sample.batch["user"][:2].tolist() == [3, 4]


def test_types_without_times_are_sampled_without_them() -> None:
    columns, ends = typed_graph()
    time = np.arange(30)
    sampler = HeteroNeighborSampler(columns, NUM, [-1, -1], temporal="uniform", node_time={"user": time})
    sample = sampler.sample({"user": [10, 20]})
    assert (time[sample.node["user"]] <= np.array([10, 20])[sample.batch["user"]]).all()
    bought = np.isin(ends[BOUGHT][1], [10]).sum() + np.isin(ends[BOUGHT][1], [20]).sum()
    assert sample.num_sampled_edges[BOUGHT][0] == bought


# ------------------------------------------------------------------------------------------------------- bad input


def columns_with(**changes: Any) -> Columns:
    good: dict[str, Any] = {"indptr": [0, 2, 3], "indices": [0, 1, 1]}
    return Columns(**{name: value if value is None else np.array(value) for name, value in {**good, **changes}.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": [0, 2, 4]}, "indptr runs from 0 to 4; with 3 edges it must run from 0 to 3"),
        ({"indptr": np.empty(0, np.int64)}, "indptr is empty"),
        ({"indptr": [0, 4, 3]}, "indptr descends after column 1"),
        ({"indices": [0, 1, 2]}, "indices hold source 2, and there are 2 sources"),
        ({"indices": [0, -1, 1]}, "indices hold source -1"),
        ({"indices": [0.0, 1.0, 1.0]}, "indices is float64"),
        ({"indices": [[0, 1, 1]]}, "indices has 2 dimensions"),
        ({"weight": [1.0, 2.0]}, "weight has 2 values for 3 edges"),
        ({"weight": [1.0, -2.0, 1.0]}, "the weight of edge 1 is -2.0"),
        ({"weight": [1.0, 2.0, np.nan]}, "the weight of edge 2 is nan"),
        ({"weight": [np.inf, 2.0, 1.0]}, "the weight of edge 0 is inf"),
        ({"edge_time": [5, 4, 1]}, "the edge times of column 0 are not ascending"),
        ({"edge_time": [0.5, 1.0, 1.0]}, "edge_time is float64"),
    ],
)
def test_bad_columns(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        columns_with(**changes)
    assert message in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("fan_out", "options", "error", "message"),
    [
        ([2, -2], {}, ConfigError, "num_neighbors holds -2"),
        ([2, 1.5], {}, ConfigError, "num_neighbors holds 1.5"),
        ({"a": [1]}, {}, ConfigError, "by edge type for a homogeneous graph"),
        ([2], {"temporal": "first"}, ConfigError, "temporal='first'"),
        ([2], {"temporal": "last"}, DataError, "neither edges nor source nodes have times"),
        ([2], {"temporal": "last", "node_time": [1, 2, 3]}, DataError, "node_time has 3 values for 2 source nodes"),
    ],
)
def test_bad_settings(fan_out: Any, options: dict[str, Any], error: type[ConfigError], message: str) -> None:
    with pytest.raises(error) as caught:
        NeighborSampler(columns_with(), fan_out, **options)
    assert message in caught.value.message and caught.value.hint


def test_last_has_no_use_for_weights() -> None:
    with pytest.raises(ConfigError, match="temporal=last was set for edges with weights"):
        NeighborSampler(columns_with(weight=[1.0, 1.0, 1.0], edge_time=[1, 2, 3]), [2], temporal="last")


def test_bad_fan_outs_by_type() -> None:
    columns, _ = typed_graph()
    for fan_out, message in (
        ({BUYS: [1]}, "leaves out"),
        ({BUYS: [1], BOUGHT: [1], KNOWS: [1], ("a", "b", "c"): [1]}, "names a,b,c"),
        ({BUYS: [1], BOUGHT: [1, 2], KNOWS: [1]}, "different lengths"),
    ):
        with pytest.raises(ConfigError) as caught:
            HeteroNeighborSampler(columns, NUM, fan_out)
        assert message in caught.value.message
    with pytest.raises(DataError, match="30 sources, and there are 31 nodes of user"):
        HeteroNeighborSampler(columns, {**NUM, "user": 31}, [1])
    with pytest.raises(DataError, match="seeds of type 'shop'"):
        HeteroNeighborSampler(columns, NUM, [1]).sample({"shop": [1]})


@pytest.mark.parametrize(
    ("seeds", "times", "message"),
    [
        ([0, 2], [1, 1], "seeds hold 2; the graph has 2 such nodes, 0 .. 1"),
        ([-1], [1], "seeds hold -1"),
        ([0.5], [1], "seeds is float64"),
        ([0], None, "sampling by times needs the time of each seed"),
        ([0], [1, 2], "seed_time has 2 values for 1 seeds"),
    ],
)
def test_bad_seeds(seeds: list[Any], times: list[int] | None, message: str) -> None:
    sampler = NeighborSampler(columns_with(edge_time=[1, 2, 3]), [2], temporal="uniform")
    with pytest.raises(DataError) as caught:
        sampler.sample(seeds, seed_time=times)
    assert message in caught.value.message and caught.value.hint
