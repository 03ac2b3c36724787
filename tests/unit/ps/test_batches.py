"""A worker's batches: by a thread or between steps they are the same, and sent ahead of their step; sampled ones."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small_graphs import messy_graph, random_parts, stored
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from gtrain.data.batches.loader import SeedLoader, graph_batch
from gtrain.graph.shard import load_whole
from gtrain.model.inputs import input_names, run_network
from gtrain_ps.worker.batches import WholeGraph, WorkerBatches, samples
from gtrain_ps.worker.planning import estimate_load, estimate_sampled_load


class Seeds:
    """Ten seeds, of which the last cannot be read if it is said to be bad."""

    def __init__(self, bad: bool = False) -> None:
        self.bad, self.threads = bad, set[str]()

    def seeds(self, loader: Any) -> Tensor:
        return torch.arange(10)

    def batch(self, seeds: Tensor, chosen: Tensor, epoch: int, step: int) -> Data:
        self.threads.add(threading.current_thread().name)
        if self.bad and 9 in chosen:
            raise ValueError("seed 9")
        return Data(seeds=seeds[chosen], place=(epoch, step))


class Loader:
    """What a loader says of its steps: three seeds each."""

    batch_size, shuffle, seed = 3, True, 5
    step_positions = SeedLoader.step_positions

    def __init__(self) -> None:
        self.epoch = 0

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch - 1

    def __len__(self) -> int:
        return 4


def read(shares: WorkerBatches, sent: list[int]) -> list[tuple[list[int], tuple[int, int], int]]:
    """An epoch's batches, each with the number of those that were sent by the time that its step is sent."""
    found = []
    for batch in shares:
        shares.build_ahead()
        found.append((batch.seeds.tolist(), batch.place, len(sent)))
    return found


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_batches_made_between_steps_are_those_of_a_thread(prefetch: int) -> None:
    epochs, sources = {}, {}
    for inline in (True, False):
        sent: list[int] = []
        sources[inline] = Seeds()
        shares = WorkerBatches(
            Loader(),
            sources[inline],
            (1, 2),
            prefetch,
            lambda batch, number, sent=sent: sent.append(number),
            lambda: None,
            inline,
        )
        epochs[inline] = [read(shares, sent) for _ in range(2)]
        assert sent == [0, 1, 2, 3] * 2
        assert shares.state_dict() == {"epoch": 1, "done": 4}
    plain = {inline: [[row[:2] for row in epoch] for epoch in found] for inline, found in epochs.items()}
    assert plain[True] == plain[False]
    assert [[ahead for *_, ahead in epoch] for epoch in epochs[True]] == [
        [min(4, step + 1 + prefetch) + 4 * epoch for step in range(4)] for epoch in range(2)
    ]
    assert sources[True].threads == {"MainThread"}
    assert sources[False].threads == ({"gtrain-input_0"} if prefetch else {"MainThread"})


@pytest.mark.parametrize("inline", [True, False])
def test_what_cannot_be_read_is_raised(inline: bool) -> None:
    shares = WorkerBatches(Loader(), Seeds(bad=True), (0, 1), 2, lambda batch, number: None, lambda: None, inline)
    with pytest.raises(ValueError, match="seed 9"):
        read(shares, [])


def test_layers_over_a_sampled_batch_leave_out_what_its_seeds_do_not_need(tmp_path: Path) -> None:
    store = stored(tmp_path / "s", messy_graph(), random_parts(40, 2))
    whole = WholeGraph(graph_batch(load_whole(store), torch.float64))
    loader = SeedLoader(store, "train", batch_size=3, num_neighbors=[2, 3])
    network = GraphSAGE(int(messy_graph().x.size(1)), 4, 2).double()
    rows: list[list[int]] = []
    for conv in network.convs:
        conv.register_forward_hook(lambda module, inputs, out: rows[-1].append(len(out)))
    results = []
    for trim in (True, False):
        rows.append([])
        source = whole.for_loader(loader, trim=trim)
        batch = source.batch(source.seeds(loader), torch.tensor([4, 1, 7]), 0, 0)
        results.append(run_network(network, input_names(network), None, batch)[batch.seeds])
        sizes = batch.num_sampled_nodes
        assert sum(sizes) == batch.num_nodes and sum(batch.num_sampled_edges) == batch.num_edges
    assert torch.allclose(*results, rtol=0, atol=1e-14)
    assert rows == [[sum(sizes[:2]), sizes[0]], [sum(sizes), sum(sizes)]]


def test_the_load_of_a_table_is_that_of_sampled_batches(tmp_path: Path) -> None:
    graph = messy_graph()
    graph.x = (graph.x > 0.5).float().to_sparse_csr()
    store = stored(tmp_path / "s", graph, random_parts(40, 2))
    loader = SeedLoader(store, "train", batch_size=4, num_neighbors=[2])
    source = WholeGraph(graph_batch(load_whole(store), torch.float32)).for_loader(loader, trim=False)
    load, weighted = estimate_sampled_load(loader, source, workers=2)
    seeds, steps = source.seeds(loader), loader.step_positions(len(source.seeds(loader)), 0)
    batches = [source.batch(seeds, chunk[:2], 0, step).x for step, chunk in enumerate(steps)][:4]
    assert load.rows == sum(x.num_rows for x in batches) / 4
    assert load.entries == sum(len(x.ids) for x in batches) / 4
    assert load.unique == sum(len(x.ids.unique()) for x in batches) / 4
    assert not weighted
    whole, _ = estimate_load(loader, workers=2)
    assert whole.rows == 40 > load.rows
    for split, fan_out in (("train", None), ("val", [2])):
        assert not samples(SeedLoader(store, split, batch_size=4, num_neighbors=fan_out))


@pytest.mark.parametrize("inline", [True, False])
def test_an_epoch_that_was_left_early_ends_before_the_next_one(inline: bool) -> None:
    """Whoever reads the batches may hold its old iterator for longer."""
    events: list[Any] = []
    shares = WorkerBatches(
        Loader(), Seeds(), (0, 1), 2, lambda batch, number: events.append(number), lambda: events.append("end"), inline
    )
    left = iter(shares)
    next(left)
    shares.build_ahead()
    assert next(left).place == (0, 1)
    second = iter(shares)
    assert next(second).place == (1, 0)
    ends = events.index("end")
    assert events[:ends] == list(range(ends)) and events[ends + 1] == 0
    left.close()
    assert [batch.place for batch in second] == [(1, 1), (1, 2), (1, 3)]
    assert events.count("end") == 2 and events[-1] == "end"
