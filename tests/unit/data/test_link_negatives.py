"""Negative edges: uniform, the same however the graph is cut and whoever draws them, and in PyG's forms where asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.loader import SeedLoader
from gtrain.data.batches.negatives import Negatives
from gtrain.data.batches.part_edges import PartEdges
from gtrain.data.batches.sampling import Sampling
from gtrain.data.batches.scored_edges import ScoredEdges
from gtrain.data.module import GraphDataModule
from gtrain.errors import ConfigError
from gtrain.graph.store import Store
from gtrain.graph.store.numbering import GlobalIds
from gtrain.kernels.splitmix import below, key
from gtrain.model.link_predictor import LinkPredictor


class Given(GraphDataModule):
    """A data module around a graph in memory."""

    name = "given"

    def __init__(self, graph: Data | HeteroData, folder: Path, **options: Any) -> None:
        super().__init__(store=str(folder), **{"split": "random", "task": "link", **options})
        self.graph = graph

    def identity(self) -> dict[str, Any]:
        return {}

    def read(self) -> Data | HeteroData:
        return self.graph.clone()


def stored(graph: Data | HeteroData, folder: Path, parts: int, **options: Any) -> Store:
    module = Given(graph, folder / str(parts), num_parts=parts, partitioner="random", **options)
    module.prepare_data()
    return module.open_store()


def plain(times: bool = False) -> Data:
    generator = torch.Generator().manual_seed(0)
    graph = Data(
        num_nodes=50,
        edge_index=torch.randint(0, 50, (2, 400), generator=generator),
        edge_type=torch.randint(0, 3, (400,), generator=generator),
        edge_weight=torch.rand(400, generator=generator),
    )
    if times:
        graph.edge_time = torch.randint(10, 60, (400,), generator=generator)
        graph.time = torch.randint(0, 50, (50,), generator=generator)
    return graph


def typed() -> HeteroData:
    generator = torch.Generator().manual_seed(0)
    graph = HeteroData()
    graph["user"].x, graph["item"].x = torch.randn(30, 3), torch.randn(20, 2)
    index = torch.stack([torch.randint(0, n, (200,), generator=generator) for n in (30, 20)])
    graph["user", "likes", "item"].edge_index = index
    graph["item", "liked", "user"].edge_index = index.flip(0)[:, :50]
    return graph


def orig_edges(batch: Any, ids: Tensor) -> Tensor:
    return batch.orig_id[ids]


# ------------------------------------------------------------------------------------------------------- counters


def test_numbers_are_uniform_and_follow_from_what_they_are_for() -> None:
    drawn = below(40, key(1, 2, 3), torch.arange(20000).numpy(), 3)
    assert drawn.shape == (20000, 3) and drawn.min() == 0 and drawn.max() == 39
    for column in drawn.T:
        assert chisquare(torch.bincount(torch.from_numpy(column), minlength=40)).pvalue > 1e-3
    pairs = torch.bincount(torch.from_numpy(drawn[:, 0] * 40 + drawn[:, 1]), minlength=1600)
    assert chisquare(pairs).pvalue > 1e-3  # draws of an edge do not depend on each other
    neighbours = torch.bincount(torch.from_numpy(drawn[:-1, 0] * 40 + drawn[1:, 0]), minlength=1600)
    assert chisquare(neighbours).pvalue > 1e-3  # nor those of edges side by side
    some = torch.tensor([7, 19000, 0])
    assert (below(40, key(1, 2, 3), some.numpy(), 5)[:, :3] == drawn[some]).all()
    assert key(1, 2) != key(2, 1) != key(1, 2, 0)
    assert below(1, key(0), some.numpy(), 2).tolist() == [[0, 0]] * 3


def test_the_finaliser_is_splitmix64() -> None:
    """The first outputs of SplitMix64 with seed 1234567, from its authors' reference program."""
    from gtrain.kernels.splitmix import GOLDEN, mix

    state = torch.arange(1, 4).numpy().astype("uint64") * GOLDEN + torch.tensor([1234567]).numpy().astype("uint64")
    assert mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_orig_ids_are_found_in_every_part(tmp_path: Path, parts: int) -> None:
    store = stored(plain(), tmp_path, parts)
    orig = torch.cat([store.node("orig_id", part) for part in range(parts)])
    wanted = torch.tensor([[0, 49, 7], [7, 21, 33]])
    assert torch.equal(orig[GlobalIds(store)(wanted)], wanted)


# ---------------------------------------------------------------------------------------------------- loaders


def false_edges(store: Store, split: str, batch_size: int | None, epoch: int = 0) -> list[tuple[Any, ...]]:
    """Each true edge and its negative targets, by the ids of the source data, sorted."""
    loader = SeedLoader(store, split, batch_size, shuffle=True, seed=5, epoch=epoch, task="link", num_negatives=4)
    found: list[tuple[Any, ...]] = []
    for batch in loader:
        source, target = (orig_edges(batch, ids).tolist() for ids in batch.edge_label_index)
        false = orig_edges(batch, batch.dst_neg_index)
        assert false.shape == (batch.batch_size, 4)
        found += zip(source, target, batch.edge_label_type.tolist(), false.tolist(), strict=True)
    return sorted(found)


@pytest.mark.parametrize("split", ["train", "val"])
def test_false_edges_do_not_depend_on_parts_and_batches(tmp_path: Path, split: str) -> None:
    whole = false_edges(stored(plain(), tmp_path, 1), split, None)
    assert len(whole) > 50
    assert false_edges(stored(plain(), tmp_path, 4), split, 7) == whole
    assert false_edges(stored(plain(), tmp_path, 3), split, None) == whole
    again = false_edges(stored(plain(), tmp_path, 1), split, None, epoch=1)
    assert (again == whole) == (split == "val")


def test_a_module_says_how_many_false_edges_it_needs(tmp_path: Path) -> None:
    store = stored(plain(), tmp_path, 1)
    loader = SeedLoader(store, "train", task="link")
    assert "dst_neg_index" not in next(iter(loader))
    loader.set_num_negatives(3)
    assert next(iter(loader)).dst_neg_index.shape == (len(PartEdges(store, None, "train", [0])), 3)
    asked = SeedLoader(store, "train", task="link", sampling=Sampling(neg_sampling="binary"))
    with pytest.raises(
        ConfigError, match=r"data.neg_sampling=binary was set, and the model draws .*model.num_negatives=2"
    ):
        asked.set_num_negatives(2)
    asked.set_num_negatives(None)
    with pytest.warns(FutureWarning, match=r"draw_negatives\(\) is now set_num_negatives\(\)"):
        loader.draw_negatives(2)
    assert loader.num_negatives == 2


def test_a_link_predictor_says_what_the_batch_lacks(tmp_path: Path) -> None:
    class Fixed(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    from gtrain.model.decoders import make_decoder

    graph = plain()
    graph.x = torch.randn(50, 4)
    (batch,) = SeedLoader(stored(graph, tmp_path, 1), "train", task="link", num_negatives=1)
    model = LinkPredictor(Fixed(), make_decoder("dot", 4, None), num_negatives=3)
    with pytest.raises(ConfigError, match=r"dst_neg_index of the shape \[240, 3\].*it has dst_neg_index of .*240, 1"):
        model.training_step(batch, 0)


def test_no_false_target_is_later_than_its_edge(tmp_path: Path) -> None:
    graph = plain(times=True)
    found = []
    for parts in (1, 3):
        store = stored(graph, tmp_path, parts)
        edges = PartEdges(store, None, "train", range(parts))
        order = edges.edge_id().argsort()
        drawn = Negatives(store, None, "train", 0, 5, time="time")(edges.select(order), edges.edge_id(order), 2)
        orig = torch.cat([store.node("orig_id", part) for part in range(parts)])
        found.append(orig[drawn.negative_target])
        late = graph.time[found[-1]] > drawn.extra["time"].unsqueeze(1)
        earliest = int(graph.time.argmin())
        assert not late[found[-1] != earliest].any()
        assert graph.time.min() <= 10
        assert not late.any()
        free = Negatives(store, None, "train", 0, 5)(edges.select(order), edges.edge_id(order), 2)
        assert (graph.time[orig[free.negative_target]] > drawn.extra["time"].unsqueeze(1)).any()
        kept = ~(graph.time[orig[free.negative_target]] > drawn.extra["time"].unsqueeze(1))
        assert torch.equal(free.negative_target[kept], drawn.negative_target[kept])
    assert torch.equal(found[0], found[1])


# ------------------------------------------------------------------------------------------------- PyG's forms


def test_binary_as_pyg_has_it(tmp_path: Path) -> None:
    store = stored(plain(), tmp_path, 2)
    (batch,) = SeedLoader(store, "train", task="link", sampling=Sampling(neg_sampling="binary", neg_sampling_ratio=1.5))
    true, false = 240, 360
    assert batch.edge_label_index.shape == (2, true + false)
    assert batch.edge_label.tolist() == [1.0] * true + [0.0] * false
    repeated = batch.edge_label_type[torch.arange(true + false) % true]
    assert torch.equal(batch.edge_label_type, repeated)
    ends = batch.edge_label_index[:, true:]
    assert not torch.equal(ends[0], ends[1]) and ends.max() < 50
    for side in ends:
        assert chisquare(torch.bincount(side, minlength=50)).pvalue > 1e-3


@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_triplets_as_pyg_has_them(tmp_path: Path, ratio: float) -> None:
    store = stored(plain(), tmp_path, 2)
    asked = Sampling(neg_sampling="triplet", neg_sampling_ratio=ratio)
    (batch,) = SeedLoader(store, "train", task="link", sampling=asked)
    (same,) = SeedLoader(store, "train", task="link", num_negatives=int(ratio))
    assert torch.equal(torch.stack([batch.src_index, batch.dst_pos_index]), same.edge_label_index)
    assert "edge_label_index" not in batch
    assert batch.dst_neg_index.shape == ((240,) if ratio == 1 else (240, 3))
    assert torch.equal(batch.dst_neg_index.view(240, -1), same.dst_neg_index)


def test_types_have_their_entries_where_pyg_has_them(tmp_path: Path) -> None:
    store = stored(typed(), tmp_path, 2, target="user,likes,item")
    asked = Sampling(neg_sampling="triplet")
    (batch,) = SeedLoader(store, "train", task="link", sampling=asked)
    count = batch.batch_size
    assert batch["user"].src_index.shape == batch["item"].dst_pos_index.shape == batch["item"].dst_neg_index.shape
    assert batch["item"].dst_neg_index.max() < 20 <= batch["user"].src_index.max()
    (batch,) = SeedLoader(store, "train", task="link", sampling=Sampling(neg_sampling="binary"))
    assert batch["user", "likes", "item"].edge_label_index.shape == (2, 2 * count)
    assert batch["user", "likes", "item"].edge_label_index[0, count:].max() >= 20
    assert batch["user", "likes", "item"].edge_label.sum() == count


@pytest.mark.parametrize(
    ("form", "amount", "said"),
    [
        ("both", 1, "data.neg_sampling=both was set"),
        ("binary", 0, "data.neg_sampling_ratio=0 was set"),
        ("binary", float("nan"), "data.neg_sampling_ratio=nan was set"),
        ("triplet", 1.5, "a triplet has a whole number"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, form: str, amount: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Negatives(stored(plain(), tmp_path, 1), None, "train", 0, amount, form)


def test_renumbering_keeps_the_order_of_false_edges() -> None:
    source, target = torch.tensor([5, 6]), torch.tensor([7, 8])
    false = torch.tensor([[1, 2, 3], [4, 5, 6]])
    edges = ScoredEdges(source, target, {}, None, false)
    assert edges.at_targets().tolist() == [7, 8, 1, 4, 2, 5, 3, 6]
    moved = edges.renumbered(edges.at_sources() * 10, edges.at_targets() * 10)
    assert torch.equal(moved.negative_target, false * 10) and moved.source.tolist() == [50, 60]


# ------------------------------------------------------------------------------------------------- edges by part


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("parts", [1, 3])
def test_edges_of_parts_are_those_of_the_whole(tmp_path: Path, split: str, parts: int) -> None:
    store = stored(plain(times=True), tmp_path, parts)
    (batch,) = SeedLoader(store, split, task="link")
    edges = PartEdges(store, None, split, range(parts))
    order = edges.edge_id().argsort()
    chosen = edges.select(order)
    assert torch.equal(torch.stack([chosen.source, chosen.target]), batch.edge_label_index)
    for name in ("type", "weight", "time"):
        assert torch.equal(chosen.extra[name], batch[f"edge_label_{name}"])
    some = order[torch.tensor([5, 0, 17, 5])]
    assert torch.equal(edges.edge_id(some), edges.edge_id()[some])
    assert torch.equal(edges.select(some).target, edges.select().target[some])
    bounds = store.offsets
    assert torch.equal(edges.owner, torch.searchsorted(bounds, edges.select().target, right=True) - 1)
    own = PartEdges(store, None, split, [parts - 1])
    assert len(own) == int((edges.owner == parts - 1).sum()) and (own.select().target >= bounds[-2]).all()


def test_a_split_without_edges_has_none(tmp_path: Path) -> None:
    graph = plain()
    graph.val_edge_index, graph.val_edge_type = graph.edge_index[:, :5], graph.edge_type[:5]
    graph.val_edge_weight = graph.edge_weight[:5]
    store = stored(graph, tmp_path, 2, split="public")
    edges = PartEdges(store, None, "test", range(2))
    assert len(edges) == 0 and edges.select().source.numel() == 0 and edges.edge_id().numel() == 0
