"""gtrain.graph.partition: who owns which node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from gtrain.errors import ConfigError, DataError
from gtrain.graph.partition import installed_method, metis, partition_hetero, partition_nodes, read_assignment

needs_metis = pytest.mark.skipif(not metis.available(), reason="pymetis is not installed; ARM has no wheel of it")
METIS = pytest.param("metis", marks=needs_metis)


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


@needs_metis
def test_metis_finds_the_cliques() -> None:
    edges = ring_of_cliques(4, 12)
    metis = partition_nodes(edges, 48, 4, "metis")
    assert cut(edges, metis) == 8
    assert metis.bincount().tolist() == [12, 12, 12, 12]
    assert cut(edges, partition_nodes(edges, 48, 4, "random")) > 100


@needs_metis
def test_metis_takes_one_way_edges_loops_and_parallel_edges() -> None:
    edges = ring_of_cliques(2, 10)
    one_way = edges[:, edges[0] < edges[1]]
    messy = torch.cat([one_way, one_way, torch.arange(20).repeat(2, 1)], dim=1)
    parts = partition_nodes(messy, 20, 2, "metis")
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


def test_without_pymetis_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "pymetis", None)
    assert installed_method("auto") == "ldg" and installed_method("random") == "random"
    with pytest.raises(ConfigError, match="data.partitioner=metis is set(.|\n)*pip install pymetis"):
        partition_nodes(ring_of_cliques(2, 10), 20, 2, "metis")
    parts = partition_nodes(ring_of_cliques(2, 10), 20, 2, installed_method("auto"))
    assert cut(ring_of_cliques(2, 10), parts) == 4


@pytest.mark.parametrize("method", [METIS, "random"])
def test_seeded(method: str) -> None:
    edges = torch.randint(0, 300, (2, 3000), generator=torch.Generator().manual_seed(1))
    first, again, other = (partition_nodes(edges, 300, 3, method, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("nodes", [3, 7, 10])
@pytest.mark.parametrize("method", [METIS, "random"])
def test_every_part_has_a_node(method: str, nodes: int) -> None:
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    for parts in range(1, nodes + 1):
        sizes = partition_nodes(edges, nodes, parts, method).bincount(minlength=parts)
        assert sizes.min() >= 1 and sizes.sum() == nodes and sizes.numel() == parts


def test_random_is_balanced() -> None:
    sizes = partition_nodes(torch.empty(2, 0, dtype=torch.int64), 1003, 4, "random").bincount()
    assert sorted(sizes.tolist()) == [250, 251, 251, 251]


@pytest.mark.parametrize("method", [METIS, "random"])
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
    with pytest.raises(ConfigError, match="metis, random, file"):
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


@pytest.mark.parametrize("method", [METIS, "ldg", "fennel", "random"])
def test_types_are_cut_together(method: str) -> None:
    data = two_types()
    parts = partition_hetero(data, 4, method, seed=1)
    assert {kind: ids.numel() for kind, ids in parts.items()} == {"user": 1600, "item": 400, "site": 3}
    assert (hetero_cut(data, parts) < 0.5) == (method != "random")
    for ids in parts.values():
        largest = int(ids.bincount(minlength=4).max())
        if method == "random":
            assert largest == -(-ids.numel() // 4)
        elif method != "metis":  # which balances all types together
            assert largest <= -(-ids.numel() // 4) * 1.05 + 2
    assert torch.equal(parts["user"], partition_hetero(data, 4, method, seed=1)["user"])


@pytest.mark.parametrize("method", [METIS, "ldg", "random"])
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
