"""gtrain.data.batches.loader: the description of batches, and the full batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_graphs import messy_graph, random_parts, stored
from torch_geometric.data import Data

from gtrain.data.batches.loader import SeedLoader, full_batch
from gtrain.errors import ConfigError, DataError, StoreError
from gtrain.graph.shard import load_shard


def test_the_shards_seeds_together_are_the_split(tmp_path: Path) -> None:
    data = messy_graph()
    store = stored(tmp_path / "s", data, random_parts(40, 3))
    for split in ("train", "val", "test"):
        found: list[int] = []
        for part in range(3):
            batch = full_batch(load_shard(store, part), split)
            assert batch.batch_size == batch.seeds.numel()
            found += batch.orig_id[batch.seeds].tolist()
        assert sorted(found) == data[f"{split}_mask"].nonzero().flatten().tolist()


def test_fields_of_a_batch(tmp_path: Path) -> None:
    data = messy_graph()
    store = stored(tmp_path / "s", data, random_parts(40, 3))
    shard = load_shard(store, 1)
    batch = full_batch(shard, "predict", torch.float64)
    assert batch.num_nodes == shard.num_local == batch.x.size(0)
    assert torch.equal(batch.seeds, torch.arange(shard.num_local))
    assert torch.equal(batch.n_id, shard.global_id(batch.seeds))
    assert (batch.x.dtype, batch.edge_weight.dtype, batch.edge_attr.dtype) == (*[torch.float64] * 2, torch.int64)
    assert full_batch(shard, "train").x.dtype == torch.float32
    assert torch.equal(batch.edge_index, shard.edge_index)


def test_iterated_alone_it_yields_the_whole_graph(tmp_path: Path) -> None:
    data = messy_graph()
    loader = SeedLoader(stored(tmp_path / "s", data, random_parts(40, 3)), "train")
    assert len(loader) == 1
    (batch,) = loader
    assert (batch.num_nodes, batch.num_edges, batch.batch_size) == (40, 300, int(data.train_mask.sum()))
    assert torch.equal(batch.x, data.x[batch.orig_id])


def test_nothing_is_loaded_before_a_batch_is_asked_for(tmp_path: Path) -> None:
    """Lightning calls iter() on every loader to check it, in every rank and whatever the strategy."""
    store = stored(tmp_path / "s", messy_graph(), random_parts(40, 2))
    batches = iter(SeedLoader(store, "train"))
    damaged = store.path / "part-0/nodes/node/x.npy"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(StoreError, match="damaged"):
        next(batches)


def test_groups_of_seeds(tmp_path: Path) -> None:
    data = messy_graph()
    store = stored(tmp_path / "s", data, random_parts(40, 2))
    loader = SeedLoader(store, "train", batch_size=6, shuffle=True, seed=3)
    first, second = ([batch.seeds.tolist() for batch in loader] for _ in range(2))
    assert len(first) == len(loader) == -(-int(data.train_mask.sum()) // 6)
    assert sorted(sum(first, [])) == sorted(sum(second, [])) and first != second
    again = [batch.seeds.tolist() for batch in SeedLoader(store, "train", batch_size=6, shuffle=True, seed=3)]
    assert again == first


def test_errors(tmp_path: Path) -> None:
    store = stored(tmp_path / "s", messy_graph(), random_parts(40, 2))
    with pytest.raises(ConfigError, match="'valid' is not a split"):
        SeedLoader(store, "valid")
    with pytest.raises(ConfigError, match=r"num_neighbors=\[5,5\]"):
        next(iter(SeedLoader(store, "train", num_neighbors=[5, 5])))
    bare = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    unlabelled = stored(tmp_path / "u", bare, torch.tensor([0, 0]))
    with pytest.raises(DataError, match="no train split, because it was prepared without labels"):
        SeedLoader(unlabelled, "train")
    with pytest.raises(DataError, match="no val split"):
        full_batch(load_shard(unlabelled, 0), "val")
    assert SeedLoader(unlabelled, "predict").num_seeds == 2


def test_an_epoch_has_the_number_that_the_clock_says_when_its_first_batch_is_asked_for(tmp_path: Path) -> None:
    """Lightning makes an iterator that it never asks, and goes on in the middle of a run."""
    store = stored(tmp_path / "s", messy_graph(), random_parts(40, 1))

    def loader() -> SeedLoader:
        return SeedLoader(store, "train", 4, shuffle=True)

    counted = loader()
    orders = [[batch.seeds.tolist() for batch in counted] for _ in range(4)]
    assert orders[2] != orders[3]
    resumed, epoch = loader(), 1
    resumed.clock = lambda: epoch
    iter(resumed)
    epoch = 2
    assert [batch.seeds.tolist() for batch in resumed] == orders[2]
    epoch = 3
    assert [batch.seeds.tolist() for batch in resumed] == orders[3]
