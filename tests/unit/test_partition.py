"""gtrain.graph.partition: who owns which node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gtrain.errors import ConfigError, DataError
from gtrain.graph.partition import partition_nodes, read_assignment


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


def test_metis_finds_the_cliques() -> None:
    edges = ring_of_cliques(4, 12)
    metis = partition_nodes(edges, 48, 4, "metis")
    assert cut(edges, metis) == 8
    assert metis.bincount().tolist() == [12, 12, 12, 12]
    assert cut(edges, partition_nodes(edges, 48, 4, "random")) > 100


def test_metis_takes_one_way_edges_loops_and_parallel_edges() -> None:
    edges = ring_of_cliques(2, 10)
    one_way = edges[:, edges[0] < edges[1]]
    messy = torch.cat([one_way, one_way, torch.arange(20).repeat(2, 1)], dim=1)
    parts = partition_nodes(messy, 20, 2, "metis")
    assert cut(edges, parts) == 4


def test_metis_balances_the_training_nodes() -> None:
    edges = ring_of_cliques(8, 10)
    train = torch.zeros(80, dtype=torch.bool)
    train[:40] = True  # cliques 0 to 3
    parts = partition_nodes(edges, 80, 2, "metis", train_mask=train)
    trained = parts[train].bincount(minlength=2)
    assert trained.max() <= 26, trained
    assert parts.bincount().max() <= 48


@pytest.mark.parametrize("method", ["metis", "random"])
def test_seeded(method: str) -> None:
    edges = torch.randint(0, 300, (2, 3000), generator=torch.Generator().manual_seed(1))
    first, again, other = (partition_nodes(edges, 300, 3, method, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("nodes", [3, 7, 10])
@pytest.mark.parametrize("method", ["metis", "random"])
def test_every_part_has_a_node(method: str, nodes: int) -> None:
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    for parts in range(1, nodes + 1):
        sizes = partition_nodes(edges, nodes, parts, method).bincount(minlength=parts)
        assert sizes.min() >= 1 and sizes.sum() == nodes and sizes.numel() == parts


def test_random_is_balanced() -> None:
    sizes = partition_nodes(torch.empty(2, 0, dtype=torch.int64), 1003, 4, "random").bincount()
    assert sorted(sizes.tolist()) == [250, 251, 251, 251]


@pytest.mark.parametrize("method", ["metis", "random"])
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
    with pytest.raises(DataError, match="no such file"):
        read_assignment(tmp_path / "c.npy")
