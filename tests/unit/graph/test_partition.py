"""gtrain.graph.partition: who owns which node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from gtrain.errors import ConfigError, DataError
from gtrain.graph.partition import (
    choose_method,
    explain_choice,
    kaminpar,
    methods,
    metis,
    partition_hetero,
    partition_nodes,
    read_assignment,
)
from gtrain.graph.partition.adjacency import Adjacency

needs_metis = pytest.mark.skipif(not metis.available(), reason="pymetis is not installed; ARM has no wheel of it")
METIS = pytest.param("metis", marks=needs_metis)
needs_kaminpar = pytest.mark.skipif(
    not kaminpar.available(), reason="kaminpar is not installed; 3.14 has no wheel of it"
)
KAMINPAR = pytest.param("kaminpar", marks=needs_kaminpar)


def ring_of_cliques(cliques: int, size: int) -> Tensor:
    """Cliques joined in a ring: the best cut into as many parts severs one undirected edge for each clique."""
    edges = []
    for c in range(cliques):
        edges += [(c * size + i, c * size + j) for i in range(size) for j in range(size) if i != j]
        here, there = c * size, ((c + 1) % cliques) * size + 1
        edges += [(here, there), (there, here)]
    return torch.tensor(edges).t()


def cut(edges: Tensor, parts: Tensor) -> int:
    return sum(int(parts[s]) != int(parts[t]) for s, t in edges.t().tolist())


@pytest.mark.parametrize("method", [METIS, KAMINPAR])
def test_cliques_stay_together(method: str) -> None:
    edges = ring_of_cliques(4, 12)
    parts = partition_nodes(edges, 48, 4, method)
    assert cut(edges, parts) == 8
    assert parts.bincount().tolist() == [12, 12, 12, 12]
    assert cut(edges, partition_nodes(edges, 48, 4, "random")) > 100


@pytest.mark.parametrize("method", [METIS, KAMINPAR])
def test_one_way_edges_loops_and_parallel_edges(method: str) -> None:
    edges = ring_of_cliques(2, 10)
    one_way = edges[:, edges[0] < edges[1]]
    messy = torch.cat([one_way, one_way, torch.arange(20).repeat(2, 1)], dim=1)
    parts = partition_nodes(messy, 20, 2, method)
    assert cut(edges, parts) == 4


@needs_metis
def test_metis_balances_the_training_nodes() -> None:
    edges = ring_of_cliques(8, 10)
    train = torch.zeros(80, dtype=torch.bool)
    train[:40] = True  # cliques 0 to 3
    parts = partition_nodes(edges, 80, 2, "metis", train_mask=train)
    trained = parts[train].bincount(minlength=2)
    assert trained.max() <= 26, trained
    assert parts.bincount().max() <= 48


def test_the_installation_of_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "pymetis", None)
    monkeypatch.setattr(kaminpar, "available", lambda: False)
    for name, package in (("metis", "pymetis"), ("kaminpar", "kaminpar")):
        with pytest.raises(ConfigError, match=f"data.partitioner={name} is set(.|\n)*pip install {package}"):
            partition_nodes(ring_of_cliques(2, 10), 20, 2, name)
    parts = partition_nodes(ring_of_cliques(2, 10), 20, 2, choose_method("auto", 182))
    assert cut(ring_of_cliques(2, 10), parts) == 4


@pytest.mark.parametrize(
    ("pymetis", "with_kaminpar", "small", "large", "reason"),
    [
        (True, True, "metis", "kaminpar", "for at least 4,000,000 edges"),
        (True, False, "metis", "metis", "kaminpar would be faster, and is not installed"),
        (False, True, "kaminpar", "kaminpar", "of what is installed"),
        (False, False, "ldg", "ldg", "which cut fewer edges, are not installed"),
    ],
)
def test_auto_follows_the_size_and_what_is_installed(
    pymetis: bool, with_kaminpar: bool, small: str, large: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metis, "available", lambda: pymetis)
    monkeypatch.setattr(kaminpar, "available", lambda: with_kaminpar)
    assert choose_method("auto", 3_999_999) == small and choose_method("auto", 4_000_000) == large
    assert reason in explain_choice(4_000_000) and "kaminpar would" not in explain_choice(3_999_999)
    assert choose_method("metis", 4_000_000) == "metis" and choose_method("random", 0) == "random"


@needs_kaminpar
def test_kaminpar_cuts_no_more_than_metis_and_balances() -> None:
    source, target = planted(20_000, 8)
    train = torch.zeros(20_000, dtype=torch.bool)
    train[:5000] = True
    edges = torch.from_numpy(np.stack([source, target]))
    parts = partition_nodes(edges, 20_000, 4, "kaminpar", train_mask=train)
    for counts in (parts.bincount(), parts[target].bincount(), parts[train].bincount()):
        assert counts.max() <= 1.05 * counts.sum() / 4, counts
    share = float((parts[source] != parts[target]).float().mean())
    assert share < 0.19, share  # 0.17 with whole blocks, of which a part has two
    if metis.available():
        other = partition_nodes(edges, 20_000, 4, "metis", train_mask=train)
        assert share <= 1.005 * float((other[source] != other[target]).float().mean())


def test_refinement_leaves_local_optima() -> None:
    """Against counted cuts: it never cuts more, stays within the limit, and reports by how much it cuts less."""
    from gtrain.graph.partition import kernels

    source, target = planted(3000, 3)
    graph, weights = Adjacency.of(source, target, 3000), np.ones(3000, dtype=np.int32)
    ends = np.repeat(np.arange(3000), np.diff(graph.starts))
    start = planted_blocks(3000, 3)
    start[np.random.default_rng(1).permutation(3000)[:900]] = np.arange(900) % 3
    for limit in (1000.0, 1010.0, 1100.0):
        parts, load = start.copy(), np.bincount(start, minlength=3)
        saved = kernels.refine(graph.starts, graph.adjacent, weights, parts, load, limit, 0.25, 4)
        before, after = (int((p[ends] != p[graph.adjacent]).sum()) // 2 for p in (start, parts))
        assert saved == before - after
        assert np.bincount(parts, minlength=3).max() <= max(limit, np.bincount(start, minlength=3).max())
    assert saved > 0.3 * before, (saved, before)
    best = int((planted_blocks(3000, 3)[ends] != planted_blocks(3000, 3)[graph.adjacent]).sum()) // 2
    assert after <= 1.01 * best, (after, best)


@needs_metis
@needs_kaminpar
def test_the_better_balanced_result_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training nodes are one of eight blocks: with the sum of nodes, edges and training nodes alone, a part may
    have all of the latter and fewer nodes than the others."""
    source, target = planted(4000, 8)
    train = np.zeros(4000, dtype=bool)
    train[planted_blocks(4000, 8) == 0] = True
    graph = Adjacency.of(source, target, 4000)
    weights = methods.node_weights(target, 4000, train)
    alone = kaminpar.kaminpar_partition(graph, 4, weights)
    assert methods.uneven(alone, 4, target, train) and max(methods.imbalances(alone, 4, target, train)) > 1.5
    by_metis = metis.metis_partition(graph, 4, weights)
    edges, mask = torch.from_numpy(np.stack([source, target])), torch.from_numpy(train)
    result = partition_nodes(edges, 4000, 4, "kaminpar", train_mask=mask).numpy()
    worst = [max(methods.imbalances(parts, 4, target, train)) for parts in (result, alone, by_metis)]
    assert worst[0] == min(worst[1:])
    monkeypatch.setattr(metis, "pymetis", None)
    assert (partition_nodes(edges, 4000, 4, "kaminpar", train_mask=mask).numpy() == alone).all()


def test_chance_is_not_called_uneven() -> None:
    target, parts = np.arange(4000) % 40, np.arange(40) % 4
    train = np.isin(np.arange(40), [0, 1, 4, 8, 2, 3, 7])
    assert not methods.uneven(parts, 4, target, train) and methods.imbalances(parts, 4, target, train)[2] > 1.7
    assert methods.imbalances(parts, 4, target, None) == (1.0, 1.0, 1.0)
    assert methods.uneven(np.minimum(np.arange(4000) // 800, 3), 4, np.arange(4000), None)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_both_ways_to_the_symmetric_graph_agree(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted by numpy, and by the kernels in several pieces: with loops, parallel edges and nodes without edges."""
    monkeypatch.setattr("gtrain.graph.store.files.CHUNK_ROWS", 100)
    random = np.random.default_rng(0)
    source, target = random.integers(0, 60, (2, 1000)).astype(dtype)
    by_numpy, by_kernels = (Adjacency.of(source, target, 70, small=small) for small in (10**9, 0))
    neighbours = [set() for _ in range(70)]
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        neighbours[s].add(t)
        neighbours[t].add(s)
    for graph in (by_numpy, by_kernels):
        lists = np.split(graph.adjacent, graph.starts[1:-1])
        assert [part.tolist() for part in lists] == [sorted(ids - {node}) for node, ids in enumerate(neighbours)]


def test_ids_out_of_range_are_named() -> None:
    with pytest.raises(DataError, match="the target of edge 1 is 3, and there are 3 such nodes"):
        Adjacency.of(np.array([0, 1]), np.array([1, 3]), 3, small=0)


def test_the_graph_of_a_part() -> None:
    graph = Adjacency.of(*ring_of_cliques(3, 5).numpy(), 15)
    nodes, inside = graph.part(np.arange(15) // 5 % 2, 0)
    assert nodes.tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    lists = [part.tolist() for part in np.split(inside.adjacent, inside.starts[1:-1])]
    assert lists[0] == [1, 2, 3, 4] and lists[1] == [0, 2, 3, 4, 5] and lists[5] == [1, 6, 7, 8, 9]


@pytest.mark.parametrize("method", [METIS, KAMINPAR, "random"])
def test_seeded(method: str) -> None:
    edges = torch.randint(0, 300, (2, 3000), generator=torch.Generator().manual_seed(1))
    first, again, other = (partition_nodes(edges, 300, 3, method, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("nodes", [3, 7, 10])
@pytest.mark.parametrize("method", [METIS, KAMINPAR, "random"])
def test_every_part_has_a_node(method: str, nodes: int) -> None:
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    for parts in range(1, nodes + 1):
        sizes = partition_nodes(edges, nodes, parts, method).bincount(minlength=parts)
        assert sizes.min() >= 1 and sizes.sum() == nodes and sizes.numel() == parts


def test_random_is_balanced() -> None:
    sizes = partition_nodes(torch.empty(2, 0, dtype=torch.int64), 1003, 4, "random").bincount()
    assert sorted(sizes.tolist()) == [250, 251, 251, 251]


@pytest.mark.parametrize("method", [METIS, KAMINPAR, "random"])
def test_no_edges(method: str) -> None:
    parts = partition_nodes(torch.empty(2, 0, dtype=torch.int64), 10, 3, method)
    assert sorted(parts.bincount().tolist()) == [3, 3, 4]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ([0, 1, 1], r"has 3 entries, and the graph has 4 nodes"),
        ([0, 1, 2, 1], r"node 2 into part 2, and parts are 0\.\.1"),
        ([0, -1, 0, 1], r"node 1 into part -1"),
        ([0, 0, 0, 0], r"leaves part 1 of 2 without a node"),
    ],
)
def test_wrong_assignments_are_named(assignment: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        partition_nodes(torch.tensor([[0], [1]]), 4, 2, "file", assignment=torch.tensor(assignment))


def test_options_are_checked() -> None:
    edges = torch.tensor([[0], [1]])
    with pytest.raises(ConfigError, match="metis, kaminpar, random, file"):
        partition_nodes(edges, 4, 2, "Metis")
    with pytest.raises(DataError, match="more parts than nodes: 5 parts .* 4 nodes"):
        partition_nodes(edges, 4, 5, "metis")
    with pytest.raises(ConfigError, match="num_parts=0"):
        partition_nodes(edges, 4, 0, "metis")


def test_read_assignment(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 0, 1], dtype=np.int32))
    (tmp_path / "a.txt").write_text("1\n0\n1\n")
    for name in ("a.npy", "a.txt"):
        assert read_assignment(tmp_path / name).tolist() == [1, 0, 1]
    (tmp_path / "b.txt").write_text("1\n0.5\n")
    with pytest.raises(DataError, match=r"entry 2 is '0\.5'"):
        read_assignment(tmp_path / "b.txt")
    np.save(tmp_path / "b.npy", np.array([1.0]))
    with pytest.raises(DataError, match=r"float64 of shape \[1\]"):
        read_assignment(tmp_path / "b.npy")
    with pytest.raises(DataError, match="does not exist"):
        read_assignment(tmp_path / "c.npy")


# -------------------------------------------------------------------------------------------------- streaming


def planted_blocks(num_nodes: int, blocks: int, seed: int = 0) -> np.ndarray:
    """The block of each node of :func:`planted`."""
    return np.random.default_rng(seed).permutation(np.arange(num_nodes) % blocks)


def planted(num_nodes: int, blocks: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ten edges a node, four fifths of them inside its block; which block is no matter of the id."""
    random = np.random.default_rng(seed)
    block = random.permutation(np.arange(num_nodes) % blocks)
    members = np.argsort(block, kind="stable").reshape(blocks, -1)
    source = np.repeat(np.arange(num_nodes), 10)
    inside = random.random(source.size) < 0.8
    near = members[block[source], random.integers(0, members.shape[1], source.size)]
    return source, np.where(inside, near, random.integers(0, num_nodes, source.size))


@pytest.mark.parametrize("method", ["ldg", "fennel"])
def test_streaming_cuts_less_and_balances(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random cut severs 3/4 of the edges, the planted one 0.15; by one range of nodes and by many."""
    source, target = planted(8000, 40)
    train = torch.zeros(8000, dtype=torch.bool)
    train[:500] = True
    edges = torch.from_numpy(np.stack([source, target]))
    parts = partition_nodes(edges, 8000, 4, method, train_mask=train)
    share = float((parts[source] != parts[target]).float().mean())
    assert share < 0.3, share
    assert parts.bincount(minlength=4).max() <= 2000 * 1.05 + 2
    assert parts[train].bincount(minlength=4).max() <= -(-500 // 4) * 1.05 + 1
    assert parts[~train].bincount(minlength=4).max() <= 1875 * 1.05 + 1
    monkeypatch.setattr("gtrain.graph.store.csc.RANGE_EDGES", 20_000)
    arrays = (source.astype(np.int32), target.astype(np.int32))
    assert torch.equal(partition_nodes(arrays, 8000, 4, method, train_mask=train), parts)
    assert not torch.equal(partition_nodes(arrays, 8000, 4, method, train_mask=train, seed=1), parts)


@pytest.mark.parametrize("method", ["ldg", "fennel"])
def test_streaming_takes_loops_hubs_and_few_nodes(method: str) -> None:
    hub = torch.stack([torch.arange(50), torch.zeros(50, dtype=torch.int64)])
    for num_parts in (2, 7, 50):
        sizes = partition_nodes(hub, 50, num_parts, method).bincount(minlength=num_parts)
        assert sizes.min() >= 1 and sizes.sum() == 50
        assert sizes.max() <= -(-50 // num_parts) * 1.05 + 1


# --------------------------------------------------------------------------------------------- graphs with types


def two_types(seed: int = 0) -> HeteroData:
    """1600 users and 400 items in 4 blocks, and 3 nodes of a type that nothing points at."""
    source, target = planted(2000, 4, seed)
    kept = (source < 1600) & (target >= 1600)
    data = HeteroData()
    data["user"].num_nodes, data["item"].num_nodes, data["site"].num_nodes = 1600, 400, 3
    data["item"].train_mask = torch.arange(400) < 100
    ends = torch.from_numpy(np.stack([source[kept], target[kept] - 1600]))
    data["user", "buys", "item"].edge_index = ends
    data["item", "bought", "user"].edge_index = ends.flip(0)
    data["site", "sells", "item"].edge_index = torch.tensor([[0, 1, 2], [5, 6, 7]])
    return data


def hetero_cut(data: HeteroData, parts: dict[str, Tensor]) -> float:
    cut = total = 0
    for kind in data.edge_types:
        source, target = data[kind].edge_index
        cut += int((parts[kind[0]][source] != parts[kind[2]][target]).sum())
        total += source.numel()
    return cut / total


@pytest.mark.parametrize("method", [METIS, KAMINPAR, "ldg", "fennel", "random"])
def test_types_are_cut_together(method: str) -> None:
    data = two_types()
    parts = partition_hetero(data, 4, method, seed=1)
    assert {kind: ids.numel() for kind, ids in parts.items()} == {"user": 1600, "item": 400, "site": 3}
    assert (hetero_cut(data, parts) < 0.5) == (method != "random")
    for ids in parts.values():
        largest = int(ids.bincount(minlength=4).max())
        if method == "random":
            assert largest == -(-ids.numel() // 4)
        elif method not in ("metis", "kaminpar"):  # which balance all types together
            assert largest <= -(-ids.numel() // 4) * 1.05 + 2
    assert torch.equal(parts["user"], partition_hetero(data, 4, method, seed=1)["user"])


@pytest.mark.parametrize("method", [METIS, KAMINPAR, "ldg", "random"])
def test_every_part_has_a_node_of_some_type(method: str) -> None:
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 3, 4
    data["a", "to", "b"].edge_index = torch.tensor([[0, 0, 0], [1, 2, 3]])
    for num_parts in (1, 5, 7):
        parts = torch.cat(list(partition_hetero(data, num_parts, method).values()))
        assert parts.bincount(minlength=num_parts).min() >= 1
    with pytest.raises(DataError, match="8 parts were requested, and the graph has 7 nodes"):
        partition_hetero(data, 8, method)


def test_assignments_by_type_are_checked() -> None:
    data = two_types()
    given = {"user": torch.arange(1600) % 2, "item": torch.arange(400) % 2, "site": torch.tensor([0, 0, 0])}
    found = partition_hetero(data, 2, "file", assignment=given)
    assert all(torch.equal(found[kind], given[kind]) for kind in given)
    with pytest.raises(DataError, match="has 0 entries for site, and the graph has 3 such nodes"):
        partition_hetero(data, 2, "file", assignment={kind: given[kind] for kind in ("user", "item")})
    with pytest.raises(DataError, match="leaves part 2 of 3 without a node"):
        partition_hetero(data, 3, "file", assignment=given)
