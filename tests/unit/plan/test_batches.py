"""Mean batches of sampled neighbourhoods against sizes that are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_graphs import messy_graph, random_parts, stored
from torch_geometric.data import Data, HeteroData

from gtrain.graph.store import Store
from gtrain.graph.store.writer import write_store
from gtrain.plan import batches
from gtrain.plan.estimate import MEMORY, SENT, Estimate, NotEstimated, PlannedRun
from gtrain.plan.machine import Machine
from gtrain.plan.workload import LINEAR, OTHER, Layer, Workload
from gtrain_ps.costs import Load
from gtrain_ps.plan_batches import epoch_batches
from gtrain_pyg.config import PygConfig
from gtrain_pyg.plan import PygPlanner
from gtrain_pyg.plan_batches import RankBatch, foreign_seeds, mean_batch
from gtrain_pyg.seeds import global_shares


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


def pyg_run(work: Workload, data: dict[str, Any] | None = None, ranks: int = 2, **strategy: Any) -> PlannedRun:
    """A run of ``strategy=pyg`` with a rank on each machine, and one hop of all neighbours after one of 2."""
    defaults = {"num_neighbors": [2, -1], "batch_size": 64, "replace": False, "disjoint": False}
    sampling = {**defaults, "subgraph_type": "directional", "temporal_strategy": None, **(data or {})}
    trainer = {"num_nodes": ranks, "devices": 1, "precision": "32-true"}
    config = {"data": sampling, "strategy": vars(PygConfig(**strategy)), "trainer": trainer, "model": {}}
    return PlannedRun(config, work, Machine(), ranks)


def counted(**more: Any) -> Workload:
    """A graph that is given by counts, of which a quarter of the edges are cut, and a layer of GraphSAGE."""
    layer = Layer("SAGEConv", LINEAR, 16, 8, 1, 256, constant=True, trained_input=False)
    fields = {"num_nodes": 1e5, "num_edges": 1e6, "num_seeds": 1e4, "num_features": 16, "layers": (layer,)}
    return Workload(**{**fields, **more})


def batch_of(work: Workload, data: dict[str, Any] | None = None, **settings: Any) -> RankBatch:
    """The batch of 32 seeds of a rank, two hops."""
    return mean_batch(pyg_run(work, data, **settings), 32, [2, -1], 100)


def estimated(work: Workload, data: dict[str, Any] | None = None, **settings: Any) -> Estimate:
    return PygPlanner().estimate(pyg_run(work, data, **settings))


def value(estimate: Estimate, name: str) -> float:
    return sum(term.value for term in estimate.terms if name in term.name)


def partitioned(folder: Path) -> Workload:
    """A stored graph of 400 nodes in two parts, in which each rank needs most nodes of the other."""
    store = stored(folder, messy_graph(400, 1200), random_parts(400, 2))
    return counted(num_nodes=400, num_edges=1200, num_seeds=200, store=store)


def test_batches_of_a_large_graph_with_several_types_are_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = HeteroData({"a": {"num_nodes": 9}, "b": {"num_nodes": 5}})
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1], [2, 3]])
    parts = {name: torch.zeros(data[name].num_nodes, dtype=torch.int64) for name in ("a", "b")}
    store = write_store(tmp_path / "store", data, parts, 1, source={"a": 1}, facts={}, partitioner="file", seed=0)
    assert batches.store_to_draw_from(planned_run(store)) is store
    monkeypatch.setattr(batches, "MOST_EDGES", 1)
    with pytest.raises(NotEstimated, match="several types are drawn from at most 1 edges"):
        batches.store_to_draw_from(planned_run(store))


def test_disjoint_neighbourhoods_share_no_nodes(tmp_path: Path) -> None:
    store = ring(tmp_path / "store")
    drawing = batches.BatchDrawing(store, planned_run(store), [-1, -1], disjoint=True)
    assert drawing.mean(drawing.samples(6, 3)).nodes == {"node": [6, 18, 30]}
    run = planned_run(num_nodes=60, num_edges=240)
    one, many = (batches.expected_batch(run, seeds, [2, -1], disjoint=True) for seeds in (1, 30))
    assert many.nodes["node"] == pytest.approx([30 * count for count in one.nodes["node"]])
    assert many.nodes["node"][-1] > 60 > batches.expected_batch(run, 30, [2, -1]).nodes["node"][-1]


@pytest.mark.parametrize("drawn", [False, True])
def test_pyg_samples_as_it_is_set(drawn: bool, tmp_path: Path) -> None:
    work = partitioned(tmp_path / "store") if drawn else counted(num_nodes=400, num_edges=1200, num_seeds=200)
    plain = batch_of(work).nodes["node"][-1]
    for setting in ({"disjoint": True}, {"temporal_strategy": "last"}):
        assert batch_of(work, setting).nodes["node"][-1] > plain
    many = {"replace": True}
    few, more = (mean_batch(pyg_run(work, data), 32, [9], 100).edges for data in ({}, many))
    assert more == [32 * 9] if not drawn else more > few
    with pytest.raises(NotEstimated, match="subgraph_type=induced"):
        batch_of(work, {"subgraph_type": "induced"})


@pytest.mark.parametrize("drawn", [False, True])
def test_cached_rows_take_memory_and_are_not_requested(drawn: bool, tmp_path: Path) -> None:
    work = partitioned(tmp_path / "store") if drawn else counted(num_nodes=400, num_edges=1200, num_seeds=200)
    none, some, all_rows = (batch_of(work, cache_bytes=count, lookahead=1) for count in (0, 6_000, 10**9))
    requested = [sum(batch.requested.values()) for batch in (none, some, all_rows)]
    assert requested[0] > requested[1] > requested[2] == pytest.approx(0) and none.cached_bytes == 0
    assert 5_000 < some.cached_bytes <= 6_000 < all_rows.cached_bytes < 40_000
    cached, plain = estimated(work, cache_bytes=6_000, lookahead=1), estimated(work, lookahead=1)
    assert value(cached, "cached rows of others") == pytest.approx(some.cached_bytes)
    assert cached.total(MEMORY) > plain.total(MEMORY) and cached.total(SENT) < plain.total(SENT)
    # Ranks that map all parts have no cache.
    assert batch_of(work, cache_bytes=6_000, ranks=1).cached_bytes == 0


@pytest.mark.parametrize("drawn", [False, True])
def test_copied_columns_are_not_requested(drawn: bool, tmp_path: Path) -> None:
    work = partitioned(tmp_path / "store") if drawn else counted(num_nodes=400, num_edges=1200, num_seeds=200)
    none, one, two = (mean_batch(pyg_run(work, halo_hops=hops), 32, [2, 2, 2, -1], 100) for hops in (0, 1, 2))
    assert none.expanded > one.expanded > two.expanded and none.replied_edges > one.replied_edges > two.replied_edges
    assert none.remote_edges == one.remote_edges == two.remote_edges, "their numbers are requested anyway"
    assert none.copied_bytes == 0 < one.copied_bytes < two.copied_bytes
    assert value(estimated(work, halo_hops=1), "copied edges of others") == pytest.approx(one.copied_bytes)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_share_of_the_seeds_of_all_ranks_is_foreign(ranks: int) -> None:
    """As in the shares of a run: those of even parts, of which a rank gets its own seeds as far as it can."""
    generator = torch.Generator().manual_seed(0)
    owner = torch.randint(ranks, (40_000,), generator=generator)
    shares = [global_shares(owner, 64, 1, rank, ranks) for rank in range(ranks)]
    foreign = sum(int((owner[share] != rank).sum()) for rank, steps in enumerate(shares) for share in steps)
    assert foreign_seeds(64 / ranks, ranks) == pytest.approx(foreign / 40_000, rel=0.1)
    work = counted()
    local, everywhere = (batch_of(work, ranks=ranks, seeds=seeds) for seeds in ("local", "global"))
    assert sum(everywhere.requested.values()) > sum(local.requested.values()) and everywhere.expanded > local.expanded


def test_edges_of_remote_nodes_may_lead_back() -> None:
    """Of two parts with most edges cut, the nodes after two hops are most often at home."""
    batch = mean_batch(pyg_run(counted(num_nodes=1e8, num_edges=2e8, cut_share=0.9)), 1, [1, 1, 1], 1)
    assert batch.expanded == pytest.approx(0.9 + 0.18, rel=0.01)


def test_pyg_estimates_no_layer_without_a_formula() -> None:
    layer = Layer("SAGEConv", OTHER, 16, 8, 1, 256, constant=True, trained_input=False)
    with pytest.raises(NotEstimated, match="no formula covers SAGEConv"):
        estimated(counted(layers=(layer,)))


def test_pyg_estimates_a_graph_without_training_nodes() -> None:
    """A run takes a step without seeds."""
    estimate = estimated(counted(num_nodes=3, num_edges=4, num_seeds=0))
    assert estimate.total(MEMORY) > 0 and estimate.seconds > 0
