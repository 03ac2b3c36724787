"""Convolutions of features in CSR form equal those of dense features, and the first layers leave them in that form."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    GAT,
    GCN,
    GIN,
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphSAGE,
    HeteroConv,
    SAGEConv,
    SGConv,
)

from gtrain.engine.local import LocalEngine
from gtrain.nn import Csr
from gtrain.nn.compressed import CompressedMatrix, as_dense, is_compressed
from gtrain.nn.dropout import ExactDropout, rows_of

NODES, EDGES, IN = 50, 300, 12


def compressed(dense: Tensor) -> CompressedMatrix:
    """The CSR form of a matrix."""
    rows, ids = dense.nonzero(as_tuple=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (dense != 0).sum(1).cumsum(0)])
    return CompressedMatrix(Csr(ids.int(), dense[rows, ids], offsets), dense.size(1), dense.dtype)


def features(rows: int = NODES, columns: int = IN) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64) * (torch.rand(rows, columns) < 0.2)


def graph() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": features(), "edge_index": torch.randint(0, NODES, (2, EDGES))}


@pytest.fixture(params=[False, True], ids=["batches", "constant"])
def engine(request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    engine = LocalEngine(constant=request.param)
    yield engine
    engine.uninstall()


def result(module: nn.Module, x: Any, *args: Any) -> list[Tensor]:
    """The module's result, and the gradients of its parameters."""
    module.zero_grad()
    out = module(x, *args)
    out.square().sum().backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in module.parameters()]
    return [out.detach(), *gradients]


CASES = {
    "sage": (lambda: SAGEConv(IN, 5), True),
    "sage, wider": (lambda: SAGEConv(IN, 16), True),
    "sage of sums": (lambda: SAGEConv(IN, 5, aggr="sum"), True),
    "sage of maxima": (lambda: SAGEConv(IN, 5, aggr="max"), False),
    "sage, normalised": (lambda: SAGEConv(IN, 5, normalize=True), True),
    "sage without root": (lambda: SAGEConv(IN, 5, root_weight=False), True),
    "graph": (lambda: GraphConv(IN, 5), True),
    "gat": (lambda: GATConv(IN, 4, heads=3), True),
    "gat, residual": (lambda: GATConv(IN, 4, heads=2, residual=True), True),
    "gcn": (lambda: GCNConv(IN, 5), True),
    "gcn, wider": (lambda: GCNConv(IN, 16), True),
    "sgc": (lambda: SGConv(IN, 5, K=2), True),
    "graphsage of three layers": (lambda: GraphSAGE(IN, 16, 3, 4), True),
    "gcn of two layers": (lambda: GCN(IN, 16, 2, 4), True),
    "two layers of gat": (lambda: GAT(IN, 16, 2, 4, heads=2), True),
    "gin of two layers": (lambda: GIN(IN, 16, 2, 4), True),
    "gin": (lambda: GINConv(nn.Sequential(nn.Linear(IN, 9), nn.ReLU(), nn.Linear(9, 5)), 0.3, train_eps=True), True),
    "gin, linear": (lambda: GINConv(nn.Linear(IN, 9, bias=False)), True),
    "gin of something else": (lambda: GINConv(nn.Sequential(nn.Tanh(), nn.Linear(IN, 9))), False),
}
"""The layers, and whether they multiply before they sum, so that the features stay in CSR form."""
ONE = ("sage", "graph", "gat", "gin")


@pytest.mark.parametrize("name", CASES)
def test_a_layer_equals_that_of_dense_features(name: str, engine: LocalEngine) -> None:
    make, stays = CASES[name]
    data = graph()
    module = make().double()
    expected = result(module, data["x"], data["edge_index"])
    x = compressed(data["x"])
    engine.add_constants([x, data["edge_index"]])
    engine.install(module)
    for _ in range(2):
        torch.testing.assert_close(result(module, x, data["edge_index"]), expected, rtol=1e-10, atol=1e-10)
    assert is_compressed(x) == stays


@pytest.mark.parametrize("name", [name for name in CASES if name.split()[0].strip(",") in ONE and "layers" not in name])
def test_the_first_rows_are_the_targets_of_a_batch(name: str, engine: LocalEngine) -> None:
    make, stays = CASES[name]
    module = make().double()
    data, targets = graph(), 20
    edges = data["edge_index"][:, data["edge_index"][1] < targets]
    expected = result(module, (data["x"], data["x"][:targets]), edges)
    x = compressed(data["x"])
    engine.install(module)
    torch.testing.assert_close(result(module, (x, x[:targets]), edges), expected, rtol=1e-10, atol=1e-10)
    assert is_compressed(x) == stays


@pytest.mark.parametrize("name", ["sage", "graph", "gcn", "gat", "gin"])
def test_autocast_rounds_products_alone(name: str, engine: LocalEngine) -> None:
    data, conv = graph(), CASES[name][0]().float()
    dense = data["x"].float()
    expected, x = conv(dense, data["edge_index"]), compressed(dense)
    engine.install(conv)
    with torch.autocast("cpu", torch.bfloat16):
        reference, out = conv(dense, data["edge_index"]), conv(x, data["edge_index"])
    assert out.dtype == reference.dtype and is_compressed(x)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


def test_features_that_need_a_gradient_get_it(engine: LocalEngine) -> None:
    data, conv = graph(), SAGEConv(IN, 5).double()
    dense, x = data["x"].clone().requires_grad_(), compressed(data["x"])
    result(conv, dense, data["edge_index"])
    engine.install(conv)
    x.requires_grad_()
    result(conv, x, data["edge_index"])
    torch.testing.assert_close(x.grad, dense.grad, rtol=1e-10, atol=1e-10)


def test_types_of_nodes_stay_compressed(engine: LocalEngine) -> None:
    torch.manual_seed(0)
    kinds = [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a")]
    x = {"a": features(NODES, IN), "b": features(30, 9)}
    edges = {
        (s, r, t): torch.stack([torch.randint(0, len(x[s]), (EDGES,)), torch.randint(0, len(x[t]), (EDGES,))])
        for s, r, t in kinds
    }
    module = HeteroConv({(s, r, t): SAGEConv((x[s].size(1), x[t].size(1)), 7) for s, r, t in kinds}).double()

    def run(inputs: dict[str, Tensor]) -> list[Tensor]:
        module.zero_grad()
        out = module(inputs, edges)
        sum(value.square().sum() for value in out.values()).backward()
        return [*out.values(), *(p.grad for p in module.parameters())]

    expected = run(x)
    engine.install(module)
    inputs = {name: compressed(value) for name, value in x.items()}
    torch.testing.assert_close(run(inputs), expected, rtol=1e-10, atol=1e-10)
    assert all(map(is_compressed, inputs.values()))


class Dropping(nn.Module):
    """Drops features, then the rows of the first layer, and of the layer itself where ``f`` is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(IN, 8), SAGEConv(8, 3)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, 0.4, self.training)
        x = F.dropout(self.convs[0](x, edge_index), 0.5, self.training)
        return self.convs[1](x, edge_index)


@pytest.mark.parametrize("ones", [False, True])
def test_dropout_has_the_masks_of_dense_features(engine: LocalEngine, ones: bool) -> None:
    data, module = graph(), Dropping().double()
    dense = (data["x"] != 0).double() if ones else data["x"]
    x = compressed(dense)
    x = CompressedMatrix(x.rows._replace(values=None), IN, x.dtype) if ones else x
    other = copy.deepcopy(module)
    results = []
    for net, values in ((other, dense), (module, x)):
        batch = Data(x=values, edge_index=data["edge_index"], orig_id=torch.randperm(NODES, generator=_seed()))
        exact = ExactDropout(net, seed=3, follows=lambda conv: not engine.runs(conv))
        if values is x:
            engine.install(net)
        try:
            exact.start_step(1, 2, rows_of(batch))
            torch.manual_seed(0)
            results.append(result(net, values, data["edge_index"]))
            dropped = F.dropout(values, 0.3, True)
        finally:
            exact.remove()
        assert is_compressed(dropped) == (values is x)
        results[-1].append(as_dense(dropped))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)
    assert 0 < int((results[0][-1] != 0).sum()) < int((dense != 0).sum())
    assert is_compressed(x)


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_dropout_of_no_rows_leaves_no_rows() -> None:
    x, module = compressed(features(0)), Dropping()
    exact = ExactDropout(module, seed=3)
    try:
        exact.start_step(0, 0, rows_of(Data(x=x, edge_index=torch.zeros(2, 0).long(), orig_id=torch.arange(0))))
        assert is_compressed(F.dropout(x, 0.5, True))
    finally:
        exact.remove()


def test_plain_dropout_draws_the_numbers_of_dense_features() -> None:
    data = graph()
    torch.manual_seed(5)
    expected = F.dropout(data["x"], 0.5, True)
    torch.manual_seed(5)
    assert torch.equal(F.dropout(compressed(data["x"]), 0.5, True), expected)


def test_masks_of_other_dtypes_are_those_of_dense_rows() -> None:
    torch.manual_seed(0)
    dense = features().bfloat16()
    module, ids = nn.Linear(1, 1), torch.arange(NODES) * 7
    batch = Data(x=dense, edge_index=torch.zeros(2, 0).long(), orig_id=ids)
    exact = ExactDropout(module, seed=3)
    try:
        results = []
        for x in (dense, compressed(dense)):
            exact.start_step(0, 0, rows_of(batch))
            results.append(as_dense(F.dropout(x, 0.25, True)))
    finally:
        exact.remove()
    assert torch.equal(*results)


@pytest.mark.parametrize("expands", [False, True])
def test_types_of_equally_many_nodes_have_their_own_masks(expands: bool) -> None:
    """The rows of a product are those of the features that it multiplies."""
    torch.manual_seed(0)
    dense = {"a": features(), "b": features()}
    weight = torch.randn(4, IN, dtype=torch.float64)
    results: list[list[Tensor]] = []
    for x in (dense, {name: compressed(value) for name, value in dense.items()}):
        batch = HeteroData()
        for number, (name, value) in enumerate(x.items()):
            batch[name].x, batch[name].orig_id = value, torch.arange(NODES) + 1000 * number
        exact = ExactDropout(nn.Linear(1, 1), seed=3)
        try:
            exact.start_step(0, 0, rows_of(batch))
            weight.requires_grad_()
            products = [F.linear(x[name], weight) for name in ("b", "a")]
            rows = [F.dropout(value, 0.5, True) for value in (*products, x["b"])]
            results.append([as_dense(value).detach() for value in rows])
        finally:
            exact.remove()
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
