"""gtrain.data.prepare.split_edges and edge_seeds: what is held out, and what a batch of edges says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import is_undirected, to_undirected

from gtrain.data.batches.edge_seeds import KnownEdges
from gtrain.data.module import GraphDataModule
from gtrain.data.prepare.graph import split_arrays
from gtrain.data.prepare.split import SplitOptions
from gtrain.data.prepare.split_edges import split_edges
from gtrain.errors import ConfigError
from gtrain.graph.store.tables import EdgeArrays


class Given(GraphDataModule):
    """A data module around a graph in memory."""

    name = "given"

    def __init__(self, graph: Data | HeteroData, folder: Path, **options: Any) -> None:
        super().__init__(store=str(folder), **options)
        self.graph = graph

    def identity(self) -> dict[str, Any]:
        return {}

    def read(self) -> Data | HeteroData:
        return self.graph.clone()


def knowledge() -> Data:
    """A graph of 40 nodes with relations and times."""
    generator = torch.Generator().manual_seed(0)
    return Data(
        num_nodes=40,
        edge_index=torch.randint(0, 40, (2, 200), generator=generator),
        edge_type=torch.randint(0, 3, (200,), generator=generator),
        edge_time=torch.randperm(200, generator=generator),
    )


def triples(index: torch.Tensor, relation: torch.Tensor) -> list[tuple[int, int, int]]:
    return sorted(zip(index[0].tolist(), relation.tolist(), index[1].tolist(), strict=True))


def test_random_split_loses_no_edge() -> None:
    graph, before = knowledge(), knowledge()
    sizes = split_edges(graph, None, SplitOptions("random", train_fraction=0.7, val_fraction=0.1, seed=3))
    assert sizes == {"train": 140, "val": 20, "test": 40}
    pieces = [triples(graph[f"{p}edge_index"], graph[f"{p}edge_type"]) for p in ("", "val_", "test_")]
    assert sorted(sum(pieces, [])) == triples(before.edge_index, before.edge_type)
    assert graph.edge_time.numel() == 140 and graph.val_edge_time.numel() == 20


@pytest.mark.parametrize("form", ["edges", "relations", "types"])
def test_copies_of_an_edge_are_held_out_together(form: str) -> None:
    """Else a held-out edge would be among those that train."""
    generator = torch.Generator().manual_seed(0)
    once = torch.cat([torch.randint(0, 40, (2, 300), generator=generator), torch.randint(0, 3, (1, 300))]).unique(dim=1)
    twice = torch.cat([once, once], 1)
    graph, target = Data(num_nodes=40, edge_index=twice[:2]), None
    if form == "relations":
        graph.edge_type = twice[2]
    if form == "types":
        target = ("a", "to", "b")
        graph = HeteroData({"a": {"num_nodes": 40}, "b": {"num_nodes": 40}, target: {"edge_index": twice[:2]}})
    split_edges(graph, target, SplitOptions("random", seed=0))
    edges = graph[target] if target else graph

    def listed(split: str) -> list[tuple[int, int, int]]:
        index = edges[f"{split}edge_index"]
        return triples(index, edges.get(f"{split}edge_type", torch.zeros_like(index[0])))

    kept, *held = map(listed, ("", "val_", "test_"))
    assert len(held[0]) == len(set(held[0])) > 20 and len(held[1]) == len(set(held[1])) > 20
    assert not set(kept) & {*held[0], *held[1]} and not set(held[0]) & set(held[1])
    assert len(kept) > len(set(kept))


def test_the_past_trains_and_the_future_tests() -> None:
    graph = knowledge()
    split_edges(graph, None, SplitOptions("time", train_fraction=0.7, val_fraction=0.15))
    assert graph.edge_time.max() < graph.val_edge_time.min()
    assert graph.val_edge_time.max() < graph.test_edge_time.min()


def test_both_directions_of_an_edge_stay_together() -> None:
    pairs = torch.randint(0, 30, (2, 150), generator=torch.Generator().manual_seed(1))
    graph = Data(num_nodes=30, edge_index=to_undirected(pairs))
    total = graph.num_edges
    sizes = split_edges(graph, None, SplitOptions("random", train_fraction=0.5, val_fraction=0.25, seed=0))
    assert is_undirected(graph.edge_index, num_nodes=30)
    kept = {tuple(edge) for edge in graph.edge_index.t().tolist()}
    for split in ("val", "test"):
        held = [tuple(edge) for edge in graph[f"{split}_edge_index"].t().tolist()]
        assert not kept & {*held, *((b, a) for a, b in held)}
    loops = int((pairs[0] == pairs[1]).any()) and len({a for a, b in pairs.t().tolist() if a == b})
    assert (total + loops) / 2 == len({tuple(sorted(e)) for e in kept}) + sizes["val"] + sizes["test"]


def test_events_between_the_same_nodes_are_split_by_their_times() -> None:
    """All pairs meet in both directions, again and again: it is no undirected graph all the same."""
    index = torch.cartesian_prod(torch.arange(4), torch.arange(4)).t().repeat(1, 10)
    graph = Data(num_nodes=4, edge_index=index, edge_time=torch.arange(160))
    assert split_edges(graph, None, SplitOptions("time", train_fraction=0.7, val_fraction=0.15)) == {
        "train": 112,
        "val": 24,
        "test": 24,
    }
    assert graph.edge_time.max() < graph.val_edge_time.min() < graph.test_edge_time.min()


def test_events_listed_in_both_directions_stay_together() -> None:
    pairs = torch.randint(0, 9, (2, 50), generator=torch.Generator().manual_seed(0))
    pairs = pairs[:, pairs[0] != pairs[1]]
    graph = Data(num_nodes=9, edge_index=torch.cat([pairs, pairs.flip(0)], dim=1))
    graph.edge_time = torch.arange(pairs.size(1)).repeat(2)
    sizes = split_edges(graph, None, SplitOptions("time", train_fraction=0.6, val_fraction=0.2))
    assert sizes["train"] / 2 + sizes["val"] + sizes["test"] == pairs.size(1)
    assert graph.edge_time.max() < graph.val_edge_time.min()


def test_relations_between_all_pairs_are_triples_of_their_own() -> None:
    index = torch.cartesian_prod(torch.arange(5), torch.arange(5)).t().repeat(1, 4)
    relation = torch.arange(4).repeat_interleave(25) + (index[0] < index[1])  # not symmetric
    graph = Data(num_nodes=5, edge_index=index, edge_type=relation)
    sizes = split_edges(graph, None, SplitOptions("random", train_fraction=0.6, val_fraction=0.2))
    assert sizes == {"train": 60, "val": 20, "test": 20}


def test_relations_and_their_ways_back_stay_together() -> None:
    """Relations 2r and 2r + 1, as data=entities has them."""
    generator = torch.Generator().manual_seed(0)
    there, relation = torch.randint(0, 20, (2, 90), generator=generator), torch.arange(90) % 3
    graph = Data(num_nodes=20, edge_index=torch.cat([there, there.flip(0)], dim=1))
    graph.edge_type = torch.cat([2 * relation, 2 * relation + 1])
    split_edges(graph, None, SplitOptions("random", train_fraction=0.6, val_fraction=0.2))
    kept = {(a, r ^ 1, b) for b, r, a in triples(graph.edge_index, graph.edge_type)}
    assert not kept & set(triples(graph.test_edge_index, graph.test_edge_type))


def test_edges_of_a_mirror_type_leave_with_their_originals() -> None:
    index = torch.stack([torch.arange(60) % 20, torch.arange(60) % 7])
    graph = HeteroData()
    graph["user"].num_nodes, graph["film"].num_nodes = 20, 7
    graph["user", "saw", "film"].edge_index = index
    graph["film", "seen_by", "user"].edge_index = index.flip(0)
    split_edges(graph, ("user", "saw", "film"), SplitOptions("random", seed=0))
    kept, mirror = graph["user", "saw", "film"].edge_index, graph["film", "seen_by", "user"].edge_index
    assert sorted(map(tuple, kept.t().tolist())) == sorted(map(tuple, mirror.flip(0).t().tolist()))


def test_what_cannot_be_split_is_said() -> None:
    with pytest.raises(ConfigError, match="holds no edges out"):
        split_edges(knowledge(), None, SplitOptions("public"))
    timeless = knowledge()
    del timeless.edge_time
    with pytest.raises(ConfigError, match="the edges have no times"):
        split_edges(timeless, None, SplitOptions("time"))
    with pytest.raises(ConfigError, match="splits nodes"):
        split_edges(knowledge(), None, SplitOptions("per_class"))


@pytest.mark.parametrize("parts", [1, 3])
def test_batches_are_those_of_the_source_data_however_it_is_cut(parts: int, tmp_path: Path) -> None:
    module = Given(knowledge(), tmp_path, task="link", split="random", seed=5, num_parts=parts, batch_size=30)
    module.prepare_data()
    reference = knowledge()
    split_edges(reference, None, SplitOptions("random", seed=5))
    (batch, *more) = list(module.val_dataloader())
    assert [b.batch_size for b in (batch, *more)] == [30, 10]
    found = batch.orig_id[batch.edge_label_index]
    assert torch.equal(found, reference.val_edge_index[:, :30])
    assert torch.equal(batch.edge_label_type, reference.val_edge_type[:30])
    assert torch.equal(batch.seeds, torch.arange(30))
    train = torch.cat([b.orig_id[b.edge_label_index] for b in module.train_dataloader()], dim=1)
    assert sorted(train.t().tolist()) == sorted(reference.edge_index.t().tolist())


@pytest.mark.parametrize("parts", [1, 3])
def test_training_edges_may_be_held_out(parts: int, tmp_path: Path) -> None:
    """No message passes along them; those of the graph are trained on no more."""
    whole, graph = knowledge(), knowledge()
    split_edges(graph, None, SplitOptions("random", train_fraction=0.7, val_fraction=0.1, seed=3))
    for name in ("edge_index", "edge_type", "edge_time"):
        value = graph[name]
        graph[f"train_{name}"], graph[name] = value[..., :60], value[..., 60:]
    module = Given(graph, tmp_path, task="link", split="public", num_parts=parts, batch_size=25)
    module.prepare_data()
    assert module.open_store().facts["split"]["sizes"] == {"train": 60, "val": 20, "test": 40}
    batches = list(module.train_dataloader())
    assert [batch.num_edges for batch in batches] == [80, 80, 80]
    trained = [triples(b.orig_id[b.edge_label_index], b.edge_label_type) for b in batches]
    assert sorted(sum(trained, [])) == triples(graph.train_edge_index, graph.train_edge_type)
    (batch, *_) = module.val_dataloader()
    head, relation = int(batch.orig_id[batch.edge_label_index[0, 0]]), int(batch.edge_label_type[0])
    held_out = [triples(graph[f"{p}_edge_index"], graph[f"{p}_edge_type"]) for p in ("train", "val", "test")]
    answers = batch.orig_id[batch.known_tail[: batch.known_tail_ptr[1]]]
    assert sorted(answers.tolist()) == sorted(t for h, r, t in sum(held_out, []) if (h, r) == (head, relation))
    assert triples(whole.edge_index, whole.edge_type) == sorted(
        sum([triples(graph.edge_index, graph.edge_type), *held_out], [])
    )


def test_known_answers_are_those_of_all_splits(tmp_path: Path) -> None:
    module = Given(knowledge(), tmp_path, task="link", split="random")
    module.prepare_data()
    (batch,) = module.test_dataloader()
    everything = triples(knowledge().edge_index, knowledge().edge_type)
    for query in range(0, batch.batch_size, 7):
        head, tail = batch.orig_id[batch.edge_label_index[:, query]].tolist()
        relation = int(batch.edge_label_type[query])
        tails = batch.known_tail[batch.known_tail_ptr[query] : batch.known_tail_ptr[query + 1]]
        heads = batch.known_head[batch.known_head_ptr[query] : batch.known_head_ptr[query + 1]]
        assert sorted(batch.orig_id[tails].tolist()) == [t for h, r, t in everything if (h, r) == (head, relation)]
        assert sorted(batch.orig_id[heads].tolist()) == sorted(
            h for h, r, t in everything if (r, t) == (relation, tail)
        )


def test_known_edges_without_relations() -> None:
    known = KnownEdges(torch.tensor([[0, 0, 1], [1, 2, 2]]), None)
    pointer, tails = known.tails(torch.tensor([0, 2, 1]), None)
    assert pointer.tolist() == [0, 2, 2, 3] and tails.tolist() == [1, 2, 2]


def test_the_edge_type_to_predict_must_be_clear(tmp_path: Path) -> None:
    graph = HeteroData()
    graph["a"].num_nodes, graph["b"].num_nodes = 3, 3
    graph["a", "to", "b"].edge_index = graph["b", "back", "a"].edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    module = Given(graph, tmp_path, task="link", split="random")
    with pytest.raises(ConfigError, match="a__to__b; b__back__a"):
        module.prepare_data()
    for target in ("a__to__b", "a,to,b"):
        module = Given(graph, tmp_path, task="link", split="random", target=target)
        module.prepare_data()
        assert module.facts["target_edge"] == ["a", "to", "b"]


def test_both_directions_of_a_list_on_disk_stay_together() -> None:
    ends = np.random.default_rng(0).integers(0, 400, (2, 20_000)).astype(np.int32)
    arrays = EdgeArrays(400, np.concatenate([ends[0], ends[1]]), np.concatenate([ends[1], ends[0]]), {}, {})
    sizes = split_arrays(arrays, SplitOptions("random", train_fraction=0.7, val_fraction=0.1, seed=3))
    assert sum(sizes.values()) == 40_000
    assert [sizes[split] / 40_000 for split in ("train", "val", "test")] == pytest.approx([0.7, 0.1, 0.2], abs=0.01)
    splits = [(arrays.source, arrays.target), *((held["source"], held["target"]) for held in arrays.held_out.values())]
    pairs = [set(zip(np.minimum(*both).tolist(), np.maximum(*both).tolist(), strict=True)) for both in splits]
    assert all(pairs) and not any(a & b for a, b in itertools.combinations(pairs, 2))
    other = EdgeArrays(400, ends[0], ends[1], {}, {})
    split_arrays(other, SplitOptions("random", train_fraction=0.7, val_fraction=0.1, seed=4))
    assert set(zip(other.source.tolist(), other.target.tolist(), strict=True)) - pairs[0], "the seed matters"
