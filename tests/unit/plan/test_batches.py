"""Mean batches of sampled neighbourhoods against sizes that are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_graphs import stored
from torch_geometric.data import Data

from gtrain.graph.store import Store
from gtrain.plan import batches
from gtrain_ps.costs import Load
from gtrain_ps.plan_batches import epoch_batches


def planned_run(store: Store | None = None, **more: Any) -> Any:
    """A run on two ranks, with a batch of 8 seeds of 12."""
    fields = {"store": store, "num_seeds": 12, "num_nodes": 12, "num_edges": 24, "task": "node", "typed": ()} | more
    work = SimpleNamespace(**fields, layers=(0, 0), entries=None, num_features=0, feature_bytes=0)
    work.store_of = lambda ranks: None
    data = {"num_neighbors": [-1, -1], "batch_size": 8, "replace": False}
    return SimpleNamespace(workload=work, ranks=2, config={"data": data})


def ring(folder: Path) -> Store:
    """A ring of 12 nodes, whose in-edges come from both sides, with a sparse row of ``node % 3`` entries each."""
    nodes = torch.arange(12)
    ends = torch.stack([torch.cat([(nodes + 1) % 12, (nodes - 1) % 12]), torch.cat([nodes, nodes])])
    x = torch.zeros(12, 5)
    x[nodes % 3 > 0, 0] = 1
    x[nodes % 3 > 1, 4] = 1
    masks = {f"{split}_mask": torch.full((12,), split == "train") for split in ("train", "val", "test")}
    data = Data(x=x.to_sparse_csr(), y=nodes % 2, edge_index=ends, num_nodes=12, **masks)
    return stored(folder, data, nodes % 2)


def test_a_batch_of_all_neighbours_has_the_nodes_around_its_seeds(tmp_path: Path) -> None:
    store = ring(tmp_path / "store")
    drawing = batches.BatchDrawing(store, planned_run(store), [-1, -1])
    batch = drawing.mean(drawing.samples(1, 3))
    # Each hop reads two further nodes, one on each side, and the two in-edges of the nodes before.
    assert batch.nodes == {"node": [1, 3, 5]} and batch.edges == [2, 4] and batch.origin == "3 drawn batches"
    (row,) = drawing.row_bytes.values()
    assert batch.row_bytes == 5 * row


def test_computed_sizes_are_those_of_edges_to_random_nodes() -> None:
    run = planned_run(num_nodes=1e9, num_edges=4e9)
    batch = batches.expected_batch(run, 10, [2, -1])
    assert batch.edges == pytest.approx([20, 80]) and batch.nodes["node"] == pytest.approx([10, 30, 110])
    # With replacement also a node of degree 4 has 6 draws.
    (few,), (many,) = (batches.expected_batch(run, 10, [6], replace=replace).edges for replace in (False, True))
    assert (few, many) == pytest.approx((40, 60))


def test_the_last_batch_of_an_epoch_may_be_smaller(tmp_path: Path) -> None:
    """Steps of 8 and 4 seeds: a worker has 4 and 2; four neighbourhoods of 5 nodes cover most of the ring."""
    store = ring(tmp_path / "store")
    epoch = epoch_batches(planned_run(store))
    sizes = [each.graph.nodes["node"] for each in (epoch.full, epoch.last)]
    assert epoch.steps == 2 and [size[0] for size in sizes] == [4, 2]
    assert epoch.rows("node") == (sizes[0][-1] + sizes[1][-1]) / 2


def test_entries_are_those_of_the_nodes_that_were_drawn(tmp_path: Path) -> None:
    store = ring(tmp_path / "store")
    run = planned_run(store)
    run.config["data"] |= {"num_neighbors": [-1] * 6, "batch_size": None}
    # Six hops from six seeds reach all nodes: a third has one entry, a third two, in two columns.
    assert epoch_batches(run).load == Load(12, 2, 12)
