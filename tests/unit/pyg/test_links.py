"""gtrain_pyg.seeds: what batches of edges are grown from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from gtrain.data.batches.loader import SeedLoader
from gtrain.data.batches.part_edges import PartEdges
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE
from gtrain.graph.store.writer import write_store
from gtrain.strategy.group import Group
from gtrain.strategy.spread_edges import SpreadEdges
from gtrain_pyg.seeds import Step, evaluation_times, link_seeds


def stored(folder: Path, graph: Data) -> Store:
    parts = torch.zeros(int(graph.num_nodes or 0), dtype=torch.long)
    return write_store(folder / "s", graph, parts, 1, source={}, facts={}, partitioner="file", seed=0)


@pytest.mark.parametrize(("timed", "held_out"), [(True, False), (False, False), (True, True)])
def test_an_edge_is_no_neighbour_of_its_own_ends(timed: bool, held_out: bool, tmp_path: Path) -> None:
    """Sampling takes what is not later than a root, so roots are what their edges' ends were just before.

    Edges that are held out are nobody's neighbours: what happened at their time is known.
    """
    edge_index, time = torch.tensor([[0, 1, 2, 0], [1, 2, 1, 2]]), torch.tensor([5, 7, 7, 9])
    graph = Data(edge_index=edge_index, edge_time=time, num_nodes=3)
    if held_out:
        graph.train_edge_index, graph.train_edge_time = edge_index, time
        graph.edge_index, graph.edge_time = edge_index[:, :0], time[:0]
    store = stored(tmp_path, graph)
    edges = PartEdges(store, EDGE_TYPE, "train", [0])
    loader = SeedLoader(store, "train", task="link")
    seeds = link_seeds(loader, Group(0, 1), all_ranks=False, timed=timed)
    roots = seeds.roots(Step(0, 0, 0, torch.tensor([3, 0])))
    chosen = edges.select(torch.tensor([3, 0]))
    if not timed:
        assert roots.time is None and sorted(roots.ids["node"]) == sorted(
            {*chosen.source.tolist(), *chosen.target.tolist()}
        )
        return
    # A thread that is late with a step of one epoch leaves that of the next alone.
    seeds.roots(Step(1, 0, 0, torch.tensor([1])))
    assert len(seeds._pending) == 2
    seeds.roots(Step(2, 0, 0, torch.tensor([1])))
    assert {epoch for epoch, _ in seeds._pending} == {1, 2}, "edges of batches that nobody assembled stay in memory"
    assert roots.time is not None
    assert roots.ids["node"].tolist() == [*chosen.source.tolist(), *chosen.target.tolist()]
    assert roots.time["node"].tolist() == [time - (not held_out) for time in chosen.extra["time"].tolist()] * 2


def test_questions_are_ranked_at_their_times(tmp_path: Path) -> None:
    """Known are the answers to the same question, at the same time alone."""
    index, empty = torch.tensor([[0, 0, 0, 1], [1, 2, 3, 3]]), torch.empty(2, 0, dtype=torch.int64)
    graph = Data(edge_index=empty, edge_time=empty[0], num_nodes=4)
    graph.train_edge_index, graph.train_edge_time = index, torch.tensor([5, 5, 5, 5])
    graph.val_edge_index, graph.val_edge_time = index, torch.tensor([8, 8, 9, 9])
    loader = SeedLoader(stored(tmp_path, graph), "val", task="link")
    assert evaluation_times(Group(), loader, timed=True) == [8, 9]
    assert evaluation_times(Group(), loader, timed=False) == [None]
    batches = [SpreadEdges(Group(), loader, time).batch(Data(), 0) for time in (8, 9, None)]
    assert [batch.edge_label_index.tolist() for batch in batches] == [
        [[0, 0], [1, 2]],
        [[0, 1], [3, 3]],
        index.tolist(),
    ]
    known = [sorted(batch.spread.known_targets(torch.tensor([0]), None)[1].tolist()) for batch in batches]
    assert known == [[1, 2], [3], [1, 1, 2, 2, 3, 3]]
