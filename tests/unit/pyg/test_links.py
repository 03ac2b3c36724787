"""gtrain_pyg.seeds: what batches of edges are grown from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from gtrain.data.batches.part_edges import PartEdges
from gtrain.graph.store.manifest import EDGE_TYPE
from gtrain.graph.store.writer import write_store
from gtrain_pyg.seeds import LinkSeeds, Step


@pytest.mark.parametrize("timed", [True, False])
def test_an_edge_is_no_neighbour_of_its_own_ends(timed: bool, tmp_path: Path) -> None:
    """Sampling takes what is not later than a root, so roots are what their edges' ends were just before."""
    edge_index, time = torch.tensor([[0, 1, 2, 0], [1, 2, 1, 2]]), torch.tensor([5, 7, 7, 9])
    graph = Data(edge_index=edge_index, edge_time=time, num_nodes=3)
    store = write_store(
        tmp_path / "s", graph, torch.zeros(3, dtype=torch.long), 1, source={}, facts={}, partitioner="file", seed=0
    )
    edges = PartEdges(store, EDGE_TYPE, "train", [0])
    options = {"order": None, "total": 4, "owner": None, "timed": timed, "disjoint": False}
    roots = LinkSeeds(edges, EDGE_TYPE, None, **options).roots(Step(0, 0, 0, torch.tensor([3, 0])))
    chosen = edges.select(torch.tensor([3, 0]))
    if not timed:
        assert roots.time is None and sorted(roots.ids["node"]) == sorted(
            {*chosen.source.tolist(), *chosen.target.tolist()}
        )
        return
    assert roots.time is not None
    assert roots.ids["node"].tolist() == [*chosen.source.tolist(), *chosen.target.tolist()]
    assert roots.time["node"].tolist() == [time - 1 for time in chosen.extra["time"].tolist()] * 2
