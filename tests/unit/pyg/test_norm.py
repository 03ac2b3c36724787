"""gtrain_pyg.norm and gtrain_pyg.norm: sampled subgraphs are normalised by the whole graph's degrees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_graphs import random_parts, stored
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    DNAConv,
    EGConv,
    FAConv,
    GCN2Conv,
    GCNConv,
    HeteroConv,
    LGConv,
    MixHopConv,
    PDNConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TAGConv,
)
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.nn.models import GCN

from gtrain.errors import ConfigError
from gtrain.graph.sampling import Columns, NeighborSampler
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.shard.whole import whole_edges, whole_indptr
from gtrain.graph.store import Store
from gtrain.model.classification import NodeClassifier
from gtrain.nn.depth import conv_hops
from gtrain_pyg import norm as degrees
from gtrain_pyg.norm import Degrees, SampledGcnNorm, degree_rows

SIZE, EDGES, WIDTH = 300, 1200, 4
SEEDS = [3, 50, 4, 299, 17]


@pytest.fixture(autouse=True)
def exactly() -> Iterator[None]:
    """Compute in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[False, True], ids=["plain", "weighted"])
def graph(request: Any, tmp_path: Path) -> Store:
    """A stored graph in three parts, with loops (some of them several times), parallel edges and lone nodes."""
    return make_graph(tmp_path, weighted=request.param)


def make_graph(path: Path, *, weighted: bool, loops: bool = True) -> Store:
    rng = np.random.default_rng(0)
    edges = rng.integers(0, SIZE - 2, (2, EDGES))
    if loops:
        edges[:, :4], edges[1, 4:12] = [[3, 3, 4, 50], [3, 3, 4, 50]], edges[0, 4:12]
    else:
        edges = edges[:, edges[0] != edges[1]]
    data = Data(x=torch.from_numpy(rng.normal(size=(SIZE, WIDTH))), edge_index=torch.from_numpy(edges))
    if weighted:
        data.edge_weight = torch.from_numpy(rng.random(edges.shape[1]) + 0.1)
    return stored(path / "store", data, random_parts(SIZE, 3))


class Sampled:
    """Batches of a store, as the strategy makes them, without ranks."""

    def __init__(self, store: Store, options: SamplingOptions, *, degrees: bool = True, drawn_by: bool = False) -> None:
        index = [whole_indptr(store).numpy(), whole_edges(store, "indices").numpy()]
        self.weight = whole_edges(store, "edge_weight") if "edge_weight" in store.edge_tensors() else None
        columns = Columns(*index, weight=self.weight.numpy() if drawn_by and self.weight is not None else None)
        self.x = torch.cat([store.node("x", part) for part in range(store.num_parts)])
        target = torch.arange(len(self.x)).repeat_interleave(torch.from_numpy(np.diff(index[0])))
        self.whole = Data(x=self.x, edge_index=torch.stack([torch.from_numpy(index[1]).long(), target]))
        if self.weight is not None:
            self.whole.edge_weight = self.weight
        self.whole.seeds = torch.tensor(SEEDS)
        self.options = options
        self.sampler = NeighborSampler(columns, options.num_neighbors, replace=options.replace, seed=1)
        self.rows = None
        if degrees:
            made = SampledGcnNorm.tensors(store, range(store.num_parts), options.weight, torch.float64)
            self.rows = torch.cat(list(made["node"]["in_degree"].values()))

    def batch(self, number: int = 0, *, trim: bool = True) -> Data:
        found = self.sampler.sample(SEEDS, batch=number)
        batch = Data(x=self.x[found.node], edge_index=torch.from_numpy(np.stack([found.row, found.col])))
        if self.weight is not None:
            batch.edge_weight = self.weight[found.edge]
        if self.rows is not None:
            batch.in_degree = self.rows[found.node]
        batch.num_sampled_nodes, batch.num_sampled_edges = found.num_sampled_nodes, found.num_sampled_edges
        batch.seeds, batch.trim = torch.from_numpy(found.seeds), trim
        return batch


class Taken:
    """Convolutions with differing signatures behind one: features and edges in, rows out."""

    def __init__(self, conv: nn.Module, *, weights: bool = True, first: bool = False) -> None:
        self.conv, self.weights, self.first = conv, weights, first

    def __call__(self, batch: Data) -> Tensor:
        more = (batch.x,) if self.first else ()
        weight = {"edge_weight": batch.edge_weight} if self.weights and "edge_weight" in batch else {}
        x = batch.x.unsqueeze(1) if isinstance(self.conv, DNAConv) else batch.x
        out: Tensor = self.conv(x, *more, batch.edge_index, **weight)
        return out[batch.seeds]


CONVS: dict[str, Any] = {
    "gcn": lambda: Taken(GCNConv(WIDTH, 3)),
    "gcn_improved": lambda: Taken(GCNConv(WIDTH, 3, improved=True)),
    "gcn_without_loops": lambda: Taken(GCNConv(WIDTH, 3, add_self_loops=False)),
    "sg": lambda: Taken(SGConv(WIDTH, 3, K=2)),
    "ssg": lambda: Taken(SSGConv(WIDTH, 3, alpha=0.1, K=2)),
    "appnp": lambda: Taken(APPNP(K=2, alpha=0.1)),
    "tag": lambda: Taken(TAGConv(WIDTH, 3, K=2)),
    "arma": lambda: Taken(ARMAConv(WIDTH, 3, num_stacks=2, num_layers=2)),
    "mixhop": lambda: Taken(MixHopConv(WIDTH, 3, powers=[0, 1, 2])),
    "lg": lambda: Taken(LGConv()),
    "gcn2": lambda: Taken(GCN2Conv(WIDTH, alpha=0.1), first=True),
    "fa": lambda: Taken(FAConv(WIDTH), first=True, weights=False),
    "dna": lambda: Taken(DNAConv(WIDTH)),
    "eg": lambda: Taken(EGConv(WIDTH, 4, aggregators=["symnorm", "max"], num_heads=2), weights=False),
}


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_with_every_neighbour_it_is_the_whole_graphs(
    name: str, device: str, graph: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as on a GPU, where self-loops get a weight of 0 instead of being removed."""
    without_loops = degrees._without_loops
    monkeypatch.setattr(
        degrees, "_without_loops", lambda edges, weights, remove: without_loops(edges, weights, remove=device == "cpu")
    )
    torch.manual_seed(0)
    conv = CONVS[name]()
    sampled = Sampled(graph, SamplingOptions((-1,) * conv_hops(conv.conv)))
    expected = conv(sampled.whole)
    norm, batch = SampledGcnNorm(), sampled.batch()
    before = dict(gcn_conv.__dict__)
    assert SampledGcnNorm.applies_to(conv.conv)
    norm.install(conv.conv)
    norm.register(batch, sampled.options)
    torch.testing.assert_close(conv(batch), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(conv(sampled.whole), expected, rtol=0, atol=0)  # edges that nobody showed
    norm.uninstall()
    assert gcn_conv.__dict__ == before
    different = (conv(batch) - expected).abs().max()
    assert different > 1e-3, "PyG's own counts are those of the subgraph"


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("fan_out", [(-1, -1, -1), (3, 2, 2)])
def test_a_network_is_the_same_trimmed_or_not(trim: bool, fan_out: tuple[int, ...], graph: Store) -> None:
    torch.manual_seed(0)
    sampled, model = Sampled(graph, SamplingOptions(fan_out)), NodeClassifier(GCN(WIDTH, 8, 3, 3), 3)
    norm = SampledGcnNorm()
    norm.install(model)
    reference = sampled.whole if fan_out[0] == -1 else sampled.batch(trim=False)
    batch = sampled.batch(trim=trim)
    for shown in (reference, batch):
        if shown is not sampled.whole:
            norm.register(shown, sampled.options)
    for shown in (reference, batch):
        model.zero_grad()
        scores = model.seed_scores(shown)
        scores.square().sum().backward()
        shown.results = [scores, *[p.grad for p in model.parameters()]]
    for a, b in zip(reference.results, batch.results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    norm.uninstall()


def test_without_degrees_the_batch_is_counted_and_layers_agree_with_pyg(graph: Store) -> None:
    """As for sampling by times; PyG untrimmed is the reference, of which trimming alone would count too little."""
    torch.manual_seed(0)
    sampled = Sampled(graph, SamplingOptions((3, 2)), degrees=False)
    model, norm = NodeClassifier(GCN(WIDTH, 8, 2, 3), 3), SampledGcnNorm()
    expected = model.seed_scores(sampled.batch(trim=False))
    assert (model.seed_scores(sampled.batch()) - expected).abs().max() > 1e-3
    norm.install(model)
    batch = sampled.batch()
    norm.register(batch, sampled.options)
    torch.testing.assert_close(model.seed_scores(batch), expected, rtol=0, atol=1e-12)
    norm.uninstall()


# -------------------------------------------------------------------------------------------------------- without bias


def deviations(sampled: Sampled, conv: Taken, batches: int) -> tuple[Tensor, Tensor]:
    """How many standard errors the mean over batches is off the whole graph's result, and PyG's mean is."""
    norm = SampledGcnNorm()
    ours, theirs = [], []
    with torch.no_grad():
        expected = conv(sampled.whole)
        for number in range(batches):
            batch = sampled.batch(number)
            theirs.append(conv(batch))
            norm.install(conv.conv)
            norm.register(batch, sampled.options)
            ours.append(conv(batch))
            norm.uninstall()
    found = []
    for outcomes in (torch.stack(ours), torch.stack(theirs)):
        error = outcomes.std(0) / batches**0.5
        found.append(((outcomes.mean(0) - expected).abs() / error.clamp(min=1e-12))[error > 1e-9])
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replace"), [("gcn", False), ("gcn", True), ("gcn_without_loops", False), ("sg", False)]
)
def test_the_estimate_is_without_bias(name: str, replace: bool, graph: Store) -> None:
    """Also over two hops: what is drawn of one node is independent of what is drawn of another."""
    torch.manual_seed(0)
    sampled = Sampled(graph, SamplingOptions((2, 2) if name == "sg" else (2,), replace=replace))
    ours, theirs = deviations(sampled, CONVS[name](), 500)
    assert ours.max() < 4.5
    assert theirs.max() > 6


@pytest.mark.parametrize("fan_out", [(3,), (-1,), (40,)])
@pytest.mark.parametrize("replace", [False, True])
def test_drawing_by_weight(replace: bool, fan_out: tuple[int, ...], tmp_path: Path) -> None:
    """Without bias with replacement; exact where all are taken; without replacement close, and better than PyG's."""
    torch.manual_seed(0)
    store = make_graph(tmp_path, weighted=True)
    options = SamplingOptions(fan_out, replace=replace, weight="edge_weight")
    sampled, conv = Sampled(store, options, drawn_by=True), CONVS["gcn"]()
    if fan_out == (-1,) or (fan_out == (40,) and not replace):
        norm, batch = SampledGcnNorm(), sampled.batch()
        expected = conv(sampled.whole)
        norm.install(conv.conv)
        norm.register(batch, options)
        torch.testing.assert_close(conv(batch), expected, rtol=0, atol=1e-12)
        norm.uninstall()
        return
    ours, theirs = deviations(sampled, conv, 500)
    if replace:
        assert ours.max() < 4.5
    assert ours.mean() < theirs.mean() / 2


def test_edges_of_weight_zero_are_never_drawn_and_not_missed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    edges = torch.from_numpy(rng.integers(0, 40, (2, 300)))
    weight = torch.from_numpy(rng.random(300)) * (torch.arange(300) % 3 > 0)
    data = Data(x=torch.randn(SIZE, WIDTH), edge_index=edges, edge_weight=weight)
    store = stored(tmp_path / "zeros", data, random_parts(SIZE, 2))
    options = SamplingOptions((-1,), weight="edge_weight")
    sampled, conv, norm = Sampled(store, options, drawn_by=True), CONVS["gcn"](), SampledGcnNorm()
    expected, batch = conv(sampled.whole), sampled.batch()
    norm.install(conv.conv)
    norm.register(batch, options)
    torch.testing.assert_close(conv(batch), expected, rtol=0, atol=1e-12)
    norm.uninstall()


# ------------------------------------------------------------------------------------------------- what is left alone


def test_edges_and_weights_that_a_network_made_are_pygs(graph: Store) -> None:
    sampled, conv, norm = Sampled(graph, SamplingOptions((3,))), GCNConv(WIDTH, 3), SampledGcnNorm()
    batch = sampled.batch()
    other, weight = batch.edge_index.flip(1), torch.rand(batch.num_edges)
    expected = conv(batch.x, other), conv(batch.x, batch.edge_index, weight)
    norm.install(conv)
    norm.register(batch, sampled.options)
    assert torch.equal(conv(batch.x, other), expected[0])
    assert torch.equal(conv(batch.x, batch.edge_index, weight), expected[1])
    norm.uninstall()


def test_learned_weights_keep_their_gradient(tmp_path: Path) -> None:
    store = make_graph(tmp_path, weighted=False)
    sampled, conv, norm = Sampled(store, SamplingOptions((3,))), PDNConv(WIDTH, 3, 1, 2), SampledGcnNorm()
    batch = sampled.batch()
    norm.install(conv)
    norm.register(batch, sampled.options)
    conv(batch.x, batch.edge_index, torch.rand(batch.num_edges, 1)).sum().backward()
    assert all(p.grad is not None for p in conv.mlp.parameters())
    norm.uninstall()


def test_batches_are_forgotten(graph: Store) -> None:
    sampled, conv, norm = Sampled(graph, SamplingOptions((3,))), GCNConv(WIDTH, 3), SampledGcnNorm()
    norm.install(conv)
    for number in range(3):
        batch = sampled.batch(number)
        norm.register(batch, sampled.options)
        conv(batch.x, batch.edge_index)
        assert len(norm._edges) == 1
    del batch
    assert len(norm._edges) == 0
    norm.uninstall()


def test_layers_that_do_not_normalise_need_nothing() -> None:
    assert not SampledGcnNorm.applies_to(SAGEConv(2, 2))
    assert SampledGcnNorm.applies_to(HeteroConv({("a", "to", "a"): GCNConv(2, 2)}))


def test_cached_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the layer 1 \(SGConv\) was made with cached=True"):
        SampledGcnNorm().install(nn.Sequential(nn.Linear(2, 2), SGConv(2, 2, cached=True)))


def test_each_edge_type_has_degrees_of_its_own() -> None:
    """A type's layers are normalised by its own edges; between two types there is nothing to normalise by."""
    rng, batch = np.random.default_rng(0), HeteroData()
    kinds = [("a", "likes", "a"), ("a", "knows", "a"), ("b", "sees", "a")]
    conv = HeteroConv({kind: GCNConv(2, 3) if kind[0] == "a" else SAGEConv((2, 2), 3) for kind in kinds})
    batch["a"].x, batch["b"].x = torch.randn(6, 2), torch.randn(5, 2)
    for kind in kinds:
        batch[kind].edge_index = torch.from_numpy(rng.integers(0, 5, (2, 9)))
    for name, doubled in (("likes", 1.0), ("knows", 4.0)):
        index = batch["a", name, "a"].edge_index
        counted = Degrees.counted(index, None, 6, torch.float64)
        batch["a"][f"in_degree:{name}"] = Degrees(counted.edges * doubled, counted.loops * doubled).packed(
            torch.float64
        )
    assert SampledGcnNorm.names(kinds) == {kinds[0]: "in_degree:likes", kinds[1]: "in_degree:knows"}
    norm = SampledGcnNorm()
    norm.install(conv)
    expected = conv.convs[kinds[0]](batch["a"].x, batch[kinds[0]].edge_index)
    norm.register(batch, SamplingOptions((4,)))
    likes, knows = (conv.convs[kind](batch["a"].x, batch[kind].edge_index) for kind in kinds[:2])
    torch.testing.assert_close(likes, expected, rtol=0, atol=1e-12)
    norm.uninstall()
    assert (knows - conv.convs[kinds[1]](batch["a"].x, batch[kinds[1]].edge_index)).abs().max() > 1e-3
    assert conv(batch.x_dict, batch.edge_index_dict)["a"].shape == (6, 3)


def test_types_without_sampled_edges_have_degrees_of_their_own() -> None:
    """Storages of empty tensors all start at 0. Trimming passes a part of the edges."""
    conv, norm, batch = GCNConv(1, 1, bias=False), SampledGcnNorm(), HeteroData()
    conv.lin.weight.data.fill_(1.0)
    norm.install(nn.ModuleList([conv]))
    wanted = {"a": torch.zeros(2), "b": torch.tensor([3.0, 8.0])}
    for name, counts in wanted.items():
        batch[name].num_nodes = 2
        batch[name][f"in_degree:r{name}"] = Degrees(counts, torch.zeros(2)).packed(torch.float64)
        batch[name, f"r{name}", name].edge_index = torch.empty((2, 0), dtype=torch.int64)
    norm.register(batch, SamplingOptions((4,)))
    for name, counts in wanted.items():
        index = batch[name, f"r{name}", name].edge_index
        for edges in (index, index[:, :0]):
            torch.testing.assert_close(conv(torch.ones(2, 1), edges).flatten(), 1 / (1 + counts))
    norm.uninstall()


# -------------------------------------------------------------------------------------------------------------- degrees


@pytest.mark.parametrize("drawn_by", [None, "edge_weight"])
@pytest.mark.parametrize("piece", [7, 1 << 22])
def test_degrees_of_parts_are_those_of_the_graph(
    graph: Store, drawn_by: str | None, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(degrees, "_BLOCK_EDGES", piece)
    whole = Sampled(graph, SamplingOptions((1,)), degrees=False).whole
    weighted = "edge_weight" in whole
    expected = Degrees.counted(whole.edge_index, whole.edge_weight if weighted else None, SIZE, torch.float64)
    rows = [degree_rows(graph, graph.edge_types[0], part, drawn_by, torch.float64) for part in range(3)]
    assert all(part.dtype == torch.int64 for part in rows)
    found = Degrees.unpacked(torch.cat(rows), weighted, drawn_by is not None)
    for name in ("edges", "loops", "weight", "loop_weights", "last_loop"):
        if getattr(expected, name) is not None:
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-12, msg=name)
    if drawn_by is not None:
        assert torch.equal(found.drawable, found.edges)
        torch.testing.assert_close(found.drawable_weight, found.weight if weighted else found.edges)


def test_degrees_travel_as_integers() -> None:
    """What rounds features on the wire or casts them to another precision leaves them alone."""
    exact = Degrees(torch.tensor([16_000_001.0, 3.0]), torch.tensor([0.0, 1.0]))
    packed = exact.packed(torch.float32)
    assert packed.dtype == torch.int32 and packed.shape == (2, 2)
    found = Degrees.unpacked(packed, False, False)
    assert found.edges.tolist() == [16_000_001.0, 3.0] and found.loops.tolist() == [0.0, 1.0]
