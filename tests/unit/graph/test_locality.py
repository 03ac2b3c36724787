"""gtrain.graph.partition.metis: neighbours near each other within a part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from gtrain.graph.partition import group_hetero, metis
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
    groups = group_hetero(data, {"a": parts, "b": parts}, 2)
    assert groups is not None
    for one in range(4):
        mine = (clique == one).numpy()
        assert set(groups["a"][mine]) == set(groups["b"][mine]) and len(set(groups["a"][mine])) == 1


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
