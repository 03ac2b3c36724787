"""gtrain.graph.partition.{metis,clusters}: neighbours near each other within a part."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from gtrain.graph import partition
from gtrain.graph.partition import clusters, metis
from gtrain.graph.partition.adjacency import Adjacency
from gtrain.graph.partition.clusters import locality_order
from gtrain.graph.partition.metis import group_nodes
from gtrain.graph.store.numbering import GlobalIds
from gtrain.graph.store.writer import write_store

needs_metis = pytest.mark.skipif(not metis.available(), reason="pymetis is not installed; ARM has no wheel of it")


def cliques(count: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cliques whose members' ids are dealt at random, and the clique of each node."""
    order = torch.randperm(count * size, generator=torch.Generator().manual_seed(seed))
    inside = torch.combinations(torch.arange(size)).t()
    edges = torch.cat([order[inside + clique * size] for clique in range(count)], dim=1)
    of = torch.empty(count * size, dtype=torch.int64)
    of[order] = torch.arange(count * size) // size
    return torch.cat([edges, edges.flip(0)], dim=1), of


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "GROUP_NODES", 20)


@needs_metis
def test_cliques_become_groups(small_groups: None) -> None:
    edges, clique = cliques(6, 20)
    parts = (clique >= 3).long().numpy()
    groups = group_nodes(edges[0].numpy(), edges[1].numpy(), parts, 2)
    assert groups is not None
    for one in range(6):
        assert len(set(groups[(clique == one).numpy()])) == 1
    assert sorted(set(zip(parts.tolist(), groups.tolist(), strict=True))) == [(p, g) for p in (0, 1) for g in range(3)]


def test_small_parts_keep_their_order() -> None:
    edges, clique = cliques(4, 10)
    assert group_nodes(edges[0].numpy(), edges[1].numpy(), (clique >= 2).long().numpy(), 2) is None


def test_a_part_without_inner_edges(small_groups: None) -> None:
    source, target = np.arange(40), np.arange(40, 80)
    groups = group_nodes(source, target, np.arange(80) // 40, 2)
    assert groups is not None and not groups.any()


@needs_metis
def test_types_are_grouped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "GROUP_NODES", 40)
    data = HeteroData()
    edges, clique = cliques(4, 20)
    data["a"].num_nodes = data["b"].num_nodes = 80
    data["a", "to", "b"].edge_index = edges
    parts = (clique >= 2).long()
    # An assignment may name the types in another order than the graph.
    groups = partition.group_nodes(data, {"b": parts, "a": parts}, 2)
    assert groups is not None
    for one in range(4):
        mine = (clique == one).numpy()
        assert set(groups["a"][mine]) == set(groups["b"][mine]) and len(set(groups["a"][mine])) == 1


def test_clusters_order_the_nodes_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cliques of 20 in pairs, whose nodes are dealt at random: pairs, cliques and ids are consecutive in this order."""
    monkeypatch.setattr(clusters, "CLUSTER_NODES", (25, 50, 240))
    edges, clique = cliques(6, 20)
    order = torch.arange(120)[clique.argsort(stable=True)].view(6, 20)
    bridges = torch.cat([torch.stack([order[2 * pair, :2], order[2 * pair + 1, :2]]) for pair in range(3)], dim=1)
    source, target = torch.cat([edges, bridges], dim=1).numpy()
    parts = np.zeros(120, dtype=np.int64)
    parts[(clique == 5).numpy()] = 1
    positions = locality_order(Adjacency.of(source, target, 120), parts, 2)
    assert positions is not None
    for part, count in ((0, 100), (1, 20)):
        nodes = np.flatnonzero(parts == part)
        assert sorted(positions[nodes]) == list(range(count))
        ordered = clique.numpy()[nodes[positions[nodes].argsort()]].reshape(-1, 20)
        assert (ordered == ordered[:, :1]).all(), "a clique has consecutive positions"
        for row in ordered[:, 0]:
            members = np.flatnonzero((clique.numpy() == row) & (parts == part))
            assert (np.diff(positions[members]) > 0).all(), "ids ascend within a clique"
    pairs = [int(c) // 2 for c in clique.numpy()[np.flatnonzero(parts == 0)[positions[parts == 0].argsort()]]]
    assert sum(a != b for a, b in zip(pairs, pairs[1:], strict=False)) == 2, (
        "a pair of cliques has consecutive positions"
    )
    again = locality_order(Adjacency.of(source, target, 120), parts, 2)
    assert again is not None and (again == positions).all()


def test_clusters_of_graphs_without_edges_and_of_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    none = np.empty(0, dtype=np.int64)
    assert locality_order(Adjacency.of(none, none, 40), np.arange(40) % 2, 2) is None
    monkeypatch.setattr(clusters, "CLUSTER_NODES", (4, 8, 16))
    positions = locality_order(Adjacency.of(none, none, 40), np.arange(40) % 2, 2)
    assert positions is not None and positions.tolist() == [node // 2 for node in range(40)]


def test_rows_stay_in_a_cache_as_with_the_groups_of_metis(monkeypatch: pytest.MonkeyPatch) -> None:
    """An LRU cache of rows, on a graph of 40 communities whose ids are dealt at random."""
    monkeypatch.setattr(metis, "GROUP_NODES", 100)
    monkeypatch.setattr(clusters, "CLUSTER_NODES", (25, 100, 400))
    random = np.random.default_rng(0)
    community = random.permutation(np.arange(4000) % 40)
    members = np.argsort(community, kind="stable").reshape(40, 100)
    source = np.repeat(np.arange(4000), 8)
    inside = random.random(source.size) < 0.8
    near = members[community[source], random.integers(0, 100, source.size)]
    target = np.where(inside, near, random.integers(0, 4000, source.size))
    parts = (community >= 20).astype(np.int64)
    positions = locality_order(Adjacency.of(source, target, 4000), parts, 2)
    assert positions is not None
    original, ordered = (misses(source, target, parts, order, 200) for order in (np.zeros(4000), positions))
    assert ordered < 0.6 * original, (ordered, original)
    if metis.available():
        groups = group_nodes(source, target, parts, 2)
        assert groups is not None and ordered < 1.15 * misses(source, target, parts, groups, 200)


def misses(source: np.ndarray, target: np.ndarray, parts: np.ndarray, order: np.ndarray, capacity: int) -> int:
    """Rows that a sum over in-edges reads from outside of a least-recently-used cache."""
    position = np.empty(parts.size, dtype=np.int64)
    position[np.lexsort((order, parts))] = np.arange(parts.size)
    cache: OrderedDict[int, None] = OrderedDict()
    count = 0
    for _, row in sorted(zip(position[target].tolist(), position[source].tolist(), strict=True)):
        count += row not in cache
        cache[row] = None
        cache.move_to_end(row)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return count


@needs_metis
def test_a_store_of_groups_keeps_its_graph(small_groups: None, tmp_path: Path) -> None:
    edges, clique = cliques(6, 20)
    data = Data(edge_index=edges, x=torch.arange(120.0).unsqueeze(1), num_nodes=120)
    parts = (clique >= 3).long()
    groups = group_nodes(edges[0].numpy(), edges[1].numpy(), parts.numpy(), 2)
    assert groups is not None
    store = write_store(
        tmp_path / "store", data, parts, 2, groups={"node": groups}, source={}, facts={}, partitioner="metis", seed=0
    )
    orig = torch.cat([store.node("orig_id", part) for part in (0, 1)])
    assert clique[orig].diff().ne(0).sum() == 5, "each clique has its ids in a row"
    assert torch.equal(torch.cat([store.node("x", part) for part in (0, 1)]).flatten().long(), orig)
    place = GlobalIds(store)(torch.arange(120))
    assert torch.equal(orig[place], torch.arange(120))
