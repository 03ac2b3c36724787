"""Dropout whose masks depend on seed, step, layer and row alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as imported
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import APPNP, GATConv, HeteroConv, SAGEConv, TransformerConv

from gtrain.kernels.splitmix import key
from gtrain.nn.dropout import ExactDropout, Mask, StepRows, _plain_edge_ids, edge_ids, rows_of

N = 60


def graph(order: Tensor | None = None) -> Data:
    """A graph whose nodes are numbered in another order."""
    generator = torch.Generator().manual_seed(0)
    x, edges = torch.randn(N, 6, generator=generator), torch.randint(N, (2, 300), generator=generator)
    order = torch.arange(N) if order is None else order
    batch = Data(x=x[order], edge_index=order.argsort()[edges], orig_id=order, num_nodes=N)
    batch.seeds = torch.arange(N)[order % 3 == 0]
    return batch


SHUFFLED = torch.randperm(N, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def exact() -> Iterator[Any]:
    """Makes :class:`ExactDropout`, which is removed at the end."""
    made: list[ExactDropout] = []

    def make(module: nn.Module, rows: Any = None, seed: int = 1, step: int = 0) -> ExactDropout:
        for other in made:
            other.remove()
        made[:] = [ExactDropout(module, seed)]
        made[0].start_step(0, step, rows if isinstance(rows, StepRows) else rows_of(rows))
        return made[0]

    yield make
    for dropout in made:
        dropout.remove()


def test_torch_is_left_as_it_was(exact: Any) -> None:
    before = torch.dropout, torch._VF.dropout, torch._VF.dropout_
    exact(nn.Identity(), graph()).remove()
    assert before == (torch.dropout, torch._VF.dropout, torch._VF.dropout_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (5, 1), (9, 4), (3, 2, 5)])
def test_compiled_masks_are_those_of_plain_code(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, ids, mask = torch.randn(shape, dtype=dtype), torch.randperm(1000)[: shape[0]], Mask(0.3, key(5))
    kept = mask.not_dropped(ids, x[0].numel()).view(shape)
    torch.testing.assert_close(mask.drop(x, ids), x * kept / 0.7)
    torch.testing.assert_close(mask.drop(x.half(), ids), (x.half() * (kept / 0.7).half()))
    strided = torch.randn(*shape, 2, dtype=dtype)[..., 0]
    torch.testing.assert_close(mask.drop(strided, ids, inplace=True), strided)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_bfloat16_compute_what_plain_code_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids, mask = torch.randn(200, 33).to(dtype), torch.randperm(1000)[:200], Mask(0.3, key(5))
    x[3, 4], x[5, 6], x[7, 8] = math.nan, math.inf, 3e38
    plain = x * (mask.not_dropped(ids, 33).to(dtype) * mask.scale)
    expected = mask.drop(x, ids)
    torch.testing.assert_close(expected, plain, rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr("gtrain.nn.dropout.num_threads", lambda: 4)
    monkeypatch.setattr("gtrain.nn.dropout._THREAD_ELEMENTS", 7)
    torch.testing.assert_close(mask.drop(x, ids), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept_and_independence_of_columns_rows_and_streams(p: float) -> None:
    masks = [Mask(p, key(seed)).not_dropped(torch.arange(20_000), 5).double() for seed in (1, 2)]
    values = torch.cat([masks[0], masks[1], masks[0].roll(1, 0)], 1) - (1 - p)
    assert values.mean(0).abs().max() < 5 * (p * (1 - p) / 20_000) ** 0.5
    correlation = values.T @ values / (20_000 * p * (1 - p))
    assert correlation.fill_diagonal_(0).abs().max() < 5 / 20_000**0.5


def test_every_way_to_call_it_is_reached_and_evaluation_is_not(exact: Any) -> None:
    batch = graph()

    def once(call: Any) -> Tensor:
        exact(nn.Identity(), batch)
        result: Tensor = call(batch.x.clone())
        return result

    wanted = once(nn.Dropout(0.4))
    ways = [
        lambda x: F.dropout(x, 0.4),
        lambda x: imported(x, 0.4),
        lambda x: torch.dropout(x, 0.4, True),
        lambda x: F.dropout(x, 0.4, inplace=True),
        nn.Dropout(0.4, inplace=True),
        lambda x: torch.dropout_(x, 0.4, True),
    ]
    assert (wanted == 0).any()
    assert all(torch.equal(once(way), wanted) for way in ways)
    assert torch.equal(once(nn.Dropout(0.4).eval()), batch.x)
    assert torch.equal(once(lambda x: F.dropout(x, 0.0)), batch.x)
    assert torch.equal(once(lambda x: F.dropout(x, 1.0)), torch.zeros_like(batch.x))


def test_masks_differ_between_layers_steps_and_seeds_and_repeat(exact: Any) -> None:
    batch, results = graph(), []
    for seed, step in ((1, 0), (1, 1), (2, 0), (1, 0)):
        exact(nn.Identity(), batch, seed, step)
        results += [F.dropout(torch.ones(N, 6), 0.5) for _ in range(2)]
    assert torch.equal(results[0], results[6]) and torch.equal(results[1], results[7])
    assert all(not torch.equal(a, b) for i, a in enumerate(results[:6]) for b in results[:i])


def test_empty_tensors_count_as_layers(exact: Any) -> None:
    batch, results = graph(), []
    for seeds in (torch.arange(N)[:3], torch.arange(0)):
        batch.seeds = seeds
        exact(nn.Identity(), batch)
        assert F.dropout(batch.x[seeds], 0.5).shape == (len(seeds), 6)
        results.append(F.dropout(batch.x, 0.5))
    assert torch.equal(*results)


def test_gradients_are_those_of_the_mask(exact: Any) -> None:
    x = torch.randn(N, 3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        exact(nn.Identity(), graph())
        return F.dropout(x, 0.5) ** 3

    assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)


def test_a_layer_that_is_computed_again_has_the_mask_that_it_had(exact: Any) -> None:
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    gradients = []
    for again in (False, True):
        exact(layer, graph())
        layer.zero_grad()
        x = F.dropout(graph().x, 0.3)
        x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        F.dropout(x, 0.5).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class Network(nn.Module):
    """Dropout of inputs, in convolutions, in the head and after the seeds."""

    def __init__(self, conv: nn.Module, width: int) -> None:
        super().__init__()
        self.conv, self.head = conv, nn.Sequential(nn.Dropout(0.4), nn.Linear(width, 4), nn.ReLU(), nn.Dropout(0.4))

    def forward(self, batch: Data) -> Tensor:
        hidden = self.conv(F.dropout(batch.x, 0.4), batch.edge_index).relu()
        result: Tensor = F.dropout(self.head(hidden)[batch.seeds], 0.4)
        return result


CONVS = {
    "gat": (lambda: GATConv(6, 3, heads=3, dropout=0.5), 9),
    "transformer": (lambda: TransformerConv(6, 3, heads=2, dropout=0.5), 6),
    "appnp": (lambda: APPNP(3, 0.1, dropout=0.5), 6),
    "sage": (lambda: SAGEConv(6, 5), 5),
}


@pytest.mark.parametrize("name", CONVS)
def test_masks_follow_nodes_and_edges_through_another_numbering(name: str, exact: Any) -> None:
    make, width = CONVS[name]
    torch.manual_seed(3)
    network = Network(make(), width).double()
    results = []
    for order in (None, SHUFFLED):
        batch = graph(order)
        batch.x = batch.x.double()
        exact(network, batch)
        out = network(batch)
        results.append(out[batch.orig_id[batch.seeds].argsort()])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    exact(network, batch, seed=2)
    assert not torch.allclose(network(batch), out)


def test_as_many_seeds_as_nodes_are_told_apart_by_the_index(exact: Any) -> None:
    layer, results = nn.Linear(6, 4), []
    for order in (None, SHUFFLED):
        batch = graph(order)
        batch.seeds = batch.orig_id.argsort()
        exact(layer, batch)
        hidden = F.dropout(layer(batch.x), 0.5)
        results.append(F.dropout(hidden.relu()[batch.seeds] * 2, 0.5))
    torch.testing.assert_close(*results)


def test_a_weight_is_dropped_by_its_own_rows_though_there_are_as_many_nodes(exact: Any) -> None:
    weight, results = nn.Parameter(torch.ones(N, 4)), []
    for order in (None, SHUFFLED):
        exact(nn.Identity(), graph(order))
        results += [F.dropout(weight, 0.5), F.dropout(weight * 2, 0.5)]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


class Projection(nn.Module):
    """A linear layer that takes sparse features too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr, torch.sparse_coo])
def test_types_of_equally_many_nodes_are_told_apart(exact: Any, layout: torch.layout) -> None:
    torch.manual_seed(0)
    conv = HeteroConv(
        {
            ("a", "to", "b"): SAGEConv((6, 6), 5),
            ("b", "to", "a"): GATConv((6, 6), 5, add_self_loops=False, dropout=0.5),
        }
    )
    linear = nn.ModuleDict({kind: Projection() for kind in "ab"})
    plain, results = {kind: graph() for kind in "ab"}, []
    for turned in (False, True):
        batch = HeteroData()
        for kind in ("b", "a") if turned else ("a", "b"):
            order = SHUFFLED if turned and kind == "a" else torch.arange(N)
            batch[kind].rows = torch.eye(N).to_sparse_csr()
            x = plain[kind].x[order]
            batch[kind].x = x if layout == torch.strided else x.to_sparse(layout=layout)
            batch[kind].orig_id, batch[kind].num_nodes = order, N
        for source, target in ("ab", "ba"):
            ends = [batch[kind].orig_id.argsort()[plain["a"].edge_index[i]] for i, kind in enumerate((source, target))]
            batch[source, "to", target].edge_index = torch.stack(ends)
        exact(nn.ModuleList([conv, linear]), batch)
        hidden = {kind: F.dropout(linear[kind](x).relu(), 0.5) for kind, x in batch.x_dict.items()}
        hidden = {kind: F.dropout(x.relu(), 0.5) for kind, x in conv(hidden, batch.edge_index_dict).items()}
        results.append(torch.cat([hidden[kind][batch[kind].orig_id.argsort()] for kind in "ab"]))
    torch.testing.assert_close(*results)


def test_ids_of_edges_are_the_same_in_plain_code() -> None:
    edges, ids = torch.randint(50, (2, 400)), torch.randperm(1 << 20)[:50]
    results = edge_ids(edges, ids)
    assert results.unique().numel() > 350 and int(results.min()) >= 0 and int(results.max()) < 1 << 31
    assert torch.equal(results, _plain_edge_ids(edges, ids, ids))


def test_streams_are_those_of_splitmix64() -> None:
    assert key(0) == 0xE220A8397B1DCDAF  # the first number of the stream that begins at 0
