"""gtrain.model.inputs and gtrain.nn.depth: layers of a sampled batch leave out what the seeds no longer need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    GCNConv,
    HeteroConv,
    MessagePassing,
    MixHopConv,
    SAGEConv,
    SGConv,
    TAGConv,
    TransformerConv,
    to_hetero,
)
from torch_geometric.nn.models import GAT, GCN, GIN, PNA, EdgeCNN, GraphSAGE

from gtrain.graph.sampling import Columns, HeteroNeighborSampler, NeighborSampler
from gtrain.model.classification import NodeClassifier
from gtrain.model.encoder import NodeEncoder
from gtrain.model.networks import gat, gin, sage
from gtrain.model.relational import HGT, RGCN, HeteroSAGE
from gtrain.nn.depth import HopMeter, hop_bounds

TYPES = {("a", "to", "a"): 90, ("b", "to", "a"): 60, ("a", "to", "b"): 80}
SIZES = {"a": 60, "b": 40}


@pytest.fixture(autouse=True)
def exactly() -> Iterator[None]:
    """Compute in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def columns(edges: np.ndarray, targets: int, sources: int) -> Columns:
    """The edges [2, E] by target."""
    order = np.argsort(edges[1], kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(edges[1], minlength=targets))])
    return Columns(indptr, edges[0][order], num_sources=sources, edge_id=order)


def batch_of(fan_out: list[int], *, trim: bool = True, **options: Any) -> Data:
    """A sampled batch of a random graph with every tensor that a network may ask for."""
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 200, (2, 1500))
    found = NeighborSampler(columns(edges, 200, 200), fan_out, **options).sample([3, 50, 4, 199])
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(200, 6, generator=generator), torch.rand(1500, generator=generator)
    batch = Data(x=x[found.node], edge_index=torch.from_numpy(np.stack([found.row, found.col])))
    batch.edge_weight, batch.edge_attr = weight[found.edge_id], weight[found.edge_id].unsqueeze(1)
    batch.edge_type = torch.from_numpy(found.edge_id % 3)
    batch.num_sampled_nodes, batch.num_sampled_edges = found.num_sampled_nodes, found.num_sampled_edges
    batch.seeds, batch.batch_size, batch.trim = torch.from_numpy(found.seeds), 4, trim
    batch.y = torch.arange(batch.num_nodes) % 3
    return batch


def hetero_batch_of(fan_out: list[int], *, trim: bool = True) -> HeteroData:
    """A sampled batch of a random graph with types."""
    rng = np.random.default_rng(0)
    graph = {}
    for (source, _, target), count in TYPES.items():
        edges = np.stack([rng.integers(0, SIZES[source], count), rng.integers(0, SIZES[target], count)])
        graph[source, "to", target] = columns(edges, SIZES[target], SIZES[source])
    found = HeteroNeighborSampler(graph, SIZES, fan_out).sample({"a": [3, 4, 5]})
    generator, batch = torch.Generator().manual_seed(0), HeteroData()
    for kind, size in SIZES.items():
        batch[kind].x = torch.randn(size, 5 if kind == "a" else 7, generator=generator)[found.node[kind]]
        batch[kind].num_sampled_nodes = found.num_sampled_nodes[kind]
    for kind in TYPES:
        batch[kind].edge_index = torch.from_numpy(np.stack([found.row[kind], found.col[kind]]))
        batch[kind].num_sampled_edges = found.num_sampled_edges[kind]
    batch.seeds, batch.target, batch.trim = torch.from_numpy(found.seeds["a"]), "a", trim
    return batch


def rows_seen(network: nn.Module) -> list[Any]:
    """The nodes that each layer is given, sources and targets where it takes them apart; filled when it runs."""
    seen: list[Any] = []

    def note(conv: nn.Module, inputs: tuple[Any, ...]) -> None:
        first = inputs[0]
        if isinstance(first, tuple):
            seen.append(tuple(map(len, first)))
            return
        seen.append(sum(map(len, first.values())) if isinstance(first, dict) else len(first))

    inside = {conv for layer in network.modules() if isinstance(layer, HeteroConv) for conv in layer.convs.values()}
    for layer in network.modules():
        if isinstance(layer, (MessagePassing, HeteroConv)) and layer not in inside:
            layer.register_forward_pre_hook(note)
    return seen


class OwnNetwork(nn.Module):
    """A network of a user's that names PyG's arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = TransformerConv(6, 8), TransformerConv(8, 3)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        num_sampled_nodes_per_hop: Any = None,
        num_sampled_edges_per_hop: Any = None,
    ) -> Tensor:
        from torch_geometric.utils import trim_to_layer

        x = self.first(x, edge_index).relu()
        if num_sampled_nodes_per_hop is not None:
            x, edge_index, _ = trim_to_layer(1, num_sampled_nodes_per_hop, num_sampled_edges_per_hop, x, edge_index)
        return self.second(x, edge_index)


SIZED = {"in_channels": 6, "hidden_channels": 8, "num_layers": 3, "out_channels": 3}
DEGREES = torch.tensor([1, 2, 3])
NETWORKS = {
    "sage": lambda: GraphSAGE(6, 8, 2, 3, norm="LayerNorm", norm_kwargs={"mode": "node"}),
    "gat": lambda: GAT(6, 8, 3, 3, heads=2, v2=True, edge_dim=1),
    "gin": lambda: GIN(6, 8, 3, 3),
    "edge_cnn": lambda: EdgeCNN(6, 8, 2, 3),
    "pna": lambda: PNA(6, 8, 2, 3, aggregators=["mean", "max"], scalers=["identity"], deg=DEGREES, edge_dim=1),
    "rgcn": lambda: RGCN(6, 8, 3, 3, num_layers=3),
    "own": OwnNetwork,
    "sage, residual": lambda: sage(**SIZED, residual=True),
    "gin, ego": lambda: gin(**SIZED, ego=True, jk="last"),
    "gat, ego and residual": lambda: gat(**SIZED, heads=2, ego=True, residual=True),
}


def both(classifier: NodeClassifier, make: Any, fan_out: list[int]) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """Scores and gradients with and without trimming, and the rows that convolutions saw with it."""
    results, seen = [], rows_seen(classifier)
    for trim in (False, True):
        seen.clear()
        classifier.zero_grad()
        scores = classifier.seed_scores(make(fan_out, trim=trim))
        (scores * torch.arange(1.0, scores.size(1) + 1)).square().sum().backward()
        results.append([scores, *[p.grad for p in classifier.parameters() if p.grad is not None]])
    return results[0], results[1], seen


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("fan_out", [[3, 2, 2], [-1, -1, -1], [2, 0, 3], [2, 2, 2, 2]])
def test_the_seeds_scores_and_gradients_are_the_same(name: str, fan_out: list[int]) -> None:
    torch.manual_seed(0)
    plain, trimmed, seen = both(NodeClassifier(NETWORKS[name](), 3), batch_of, fan_out)
    assert len(plain) == len(trimmed)
    for a, b in zip(plain, trimmed, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    batch = batch_of(fan_out)
    hops = np.cumsum(batch.num_sampled_nodes)
    apart = name.partition(",")[0] in ("sage", "gin", "gat") and name != "gat"
    sources, targets = hops[::-1], hops[::-1][1:]
    assert seen == [(sources[n], targets[n]) if apart else sources[n] for n in range(len(seen))]
    assert fan_out == [2, 0, 3] or seen[0] > seen[1]


HETERO = {
    "hetero_sage": lambda: HeteroSAGE(8, 3, list(TYPES), num_layers=3),
    "hgt": lambda: HGT(8, 3, list(SIZES), list(TYPES), num_layers=3, heads=2),
    "to_hetero": lambda: to_hetero(GraphSAGE(8, 8, 3, 3), (list(SIZES), list(TYPES))),
}


@pytest.mark.parametrize("name", HETERO)
@pytest.mark.parametrize("fan_out", [[3, 2, 2], [-1, -1, -1], [2, 2, 2, 2]])
@pytest.mark.filterwarnings("ignore:.*pre-trained.*", "ignore:.*deprecated.*")
def test_the_seeds_scores_and_gradients_are_the_same_by_type(name: str, fan_out: list[int]) -> None:
    torch.manual_seed(0)
    classifier = NodeClassifier(HETERO[name](), 3, encoder=NodeEncoder(8, SIZES, {"a": 5, "b": 7}))
    plain, trimmed, seen = both(classifier, hetero_batch_of, fan_out)
    assert len(plain) == len(trimmed) > 5
    for a, b in zip(plain, trimmed, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert name == "to_hetero" or (len(seen) == 3 and seen[0] > seen[1] > seen[2])


@pytest.mark.parametrize(
    ("network", "fan_out", "options"),
    [
        (lambda: GCN(6, 8, 3, 3, jk="cat"), [3, 2, 2], {}),
        (lambda: GCN(6, 8, 3, 3), [3, 2], {}),
        (lambda: GCN(6, 8, 3, 3), [3, 2, 2], {"trim": False}),
    ],
)
def test_networks_that_would_lose_something_are_not_trimmed(network: Any, fan_out: Any, options: Any) -> None:
    classifier = NodeClassifier(network(), 3)
    seen, batch = rows_seen(classifier), batch_of(fan_out, **options)
    classifier.seed_scores(batch)
    assert seen == [batch.num_nodes] * 3


def test_edge_data_that_a_network_does_not_read_is_left_out() -> None:
    """PyG trims weights or attributes, not both, and refuses to be given both."""
    batch = batch_of([3, 2])
    assert NodeClassifier(GraphSAGE(6, 8, 2, 3), 3).seed_scores(batch).shape == (4, 3)


def test_a_whole_graph_is_not_trimmed() -> None:
    batch = batch_of([3, 2])
    del batch.trim, batch.num_sampled_nodes, batch.num_sampled_edges
    network = GCN(6, 8, 2, 3)
    seen = rows_seen(network)
    NodeClassifier(network, 3).seed_scores(batch)
    assert seen == [batch.num_nodes] * 2


# -------------------------------------------------------------------------------------------------------- depth


class Twins(nn.Module):
    """Two convolutions side by side, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.shared = SAGEConv(6, 6), SGConv(6, 6, K=3), GCNConv(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.left(x, edge_index) + self.right(x, edge_index)
        return self.shared(self.shared(x, edge_index), edge_index)


@pytest.mark.parametrize(
    ("network", "least", "most", "really"),
    [
        (lambda: GCN(6, 8, 4, 3), 4, 4, 4),
        (lambda: GraphSAGE(6, 8, 2, 3), 2, 2, 2),
        (lambda: SGConv(6, 3, K=3), 3, 3, 3),
        (lambda: APPNP(K=5, alpha=0.1), 5, 5, 5),
        (lambda: TAGConv(6, 3, K=2), 2, 2, 2),
        (lambda: ARMAConv(6, 3, num_stacks=2, num_layers=3), 3, 3, 3),
        (lambda: MixHopConv(6, 3, powers=[0, 2, 4]), 4, 4, 4),
        (OwnNetwork, 1, 2, 2),
        (Twins, 3, 5, 5),
        (lambda: nn.ModuleDict({"a": SAGEConv(6, 3), "b": SGConv(6, 3, K=2)}), 2, 2, None),
        (lambda: HeteroSAGE(8, 3, list(TYPES), num_layers=3), 3, 3, None),
        (lambda: HGT(8, 3, list(SIZES), list(TYPES), num_layers=2), 2, 2, None),
        (lambda: RGCN(6, 8, 3, 3, num_layers=3), 3, 3, None),
        (lambda: nn.Linear(6, 3), 0, 0, None),
    ],
)
def test_how_many_hops_a_network_looks(network: Any, least: int, most: int, really: int | None) -> None:
    made, batch = network(), batch_of([2])
    assert hop_bounds(made) == (least, most)
    if really is not None:
        with HopMeter(made) as meter:
            out = made(batch.x, batch.edge_index)
        assert meter.hops(out.sum()) == really
        assert not any(conv._propagate_forward_hooks for conv in made.modules() if isinstance(conv, SAGEConv))


def test_a_result_without_gradient_tells_nothing() -> None:
    network, batch = GCN(6, 8, 2, 3), batch_of([2])
    with HopMeter(network) as meter, torch.no_grad():
        out = network(batch.x, batch.edge_index)
    assert meter.hops(out) == 0
