"""sar in one process: what it takes over, what it refuses, and that it leaves a module as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric
from torch import nn
from torch_geometric.nn import (
    APPNP,
    ChebConv,
    DynamicEdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphNorm,
    LayerNorm,
    MessagePassing,
    NNConv,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
    XConv,
)
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.nn.norm import BatchNorm

from gtrain.engine.constants import Constants
from gtrain.engine.halo import HaloExchange
from gtrain.engine.normalize import synchronised_batch_norm
from gtrain.engine.propagate_call import reduction, sees_one_edge
from gtrain.engine.schedule import Schedule
from gtrain.errors import ConfigError
from gtrain.graph.shard import GraphShard
from gtrain.nn.relational import IdRGCNConv
from gtrain.strategy.group import Group
from gtrain_sar import unsupported
from gtrain_sar.config import SarConfig
from gtrain_sar.patching import Patcher
from gtrain_sar.strategy import SarStrategy

NODES, EDGES = 30, 120


def graph() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(0, NODES, (2, EDGES), generator=generator)
    return torch.randn(NODES, 6, generator=generator, dtype=torch.float64), edge_index


def whole_shard(edge_index: torch.Tensor) -> GraphShard:
    return GraphShard(
        part=0,
        num_parts=1,
        offsets=torch.tensor([0, NODES]),
        edge_index=edge_index,
        blocks=(0,),
        block_ptr=torch.tensor([0, NODES]),
        halo=(torch.empty(0, dtype=torch.int64),),
        node_data={},
        edge_data={},
    )


def mlp(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, size), nn.ReLU(), nn.Linear(size, size))


CONVS = {
    "gcn": lambda: GCNConv(6, 4),
    "sage-mean": lambda: SAGEConv(6, 4),
    "sage-max": lambda: SAGEConv(6, 4, aggr="max"),
    "sage-min": lambda: SAGEConv(6, 4, aggr="min"),
    "gin": lambda: GINConv(mlp(4)),
    "gat": lambda: GATConv(6, 2, heads=2),
    "graph": lambda: GraphConv(6, 4),
    "appnp": lambda: APPNP(3, 0.1),
    "transformer": lambda: TransformerConv(6, 2, heads=2),
    "gated": lambda: ResGatedGraphConv(6, 4),
    "pna": lambda: PNAConv(6, 4, ["mean", "max"], ["identity"], torch.ones(20, dtype=torch.int64)),
}


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("name", CONVS)
def test_outputs_and_gradients_are_pygs(name: str, mode: int) -> None:
    x, edge_index = graph()
    x = x.relu()  # exact zeros: a maximum of 0 is where ties are counted differently
    torch.manual_seed(0)
    conv = CONVS[name]().double()
    results = []
    for taken_over in (False, True):
        patcher = Patcher(HaloExchange(Group(), whole_shard(edge_index)), Schedule(mode=mode))
        if taken_over:
            patcher.install(conv)
        leaf = x.clone().requires_grad_()
        out = conv(leaf, edge_index)
        parameters = [leaf, *(p for p in conv.parameters() if p.requires_grad)]
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad((out * weights).sum(), parameters, allow_unused=True)])
        patcher.uninstall()
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_module_is_left_as_it_was_found() -> None:
    module = nn.ModuleList([GCNConv(6, 4), SAGEConv(6, 4), nn.BatchNorm1d(4)])
    before = [set(layer.__dict__) for layer in module.modules()]
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in module.modules()]
    original = gcn_conv.gcn_norm
    patcher = Patcher(HaloExchange(Group(), whole_shard(graph()[1])), Schedule())
    patcher.install(module)
    assert gcn_conv.gcn_norm is not original and "propagate" in module[0].__dict__
    patcher.uninstall()
    assert gcn_conv.gcn_norm is original
    assert [set(layer.__dict__) for layer in module.modules()] == before
    assert [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in module.modules()] == hooks


def test_gcn_norm_elsewhere_in_the_process_stays_pygs() -> None:
    _, edge_index = graph()
    taken = GCNConv(6, 4)
    patcher = Patcher(HaloExchange(Group(), whole_shard(edge_index)), Schedule())
    patcher.install(taken)
    other = torch.tensor([[0, 1], [1, 0]])
    try:
        assert GCNConv(6, 4)(torch.ones(2, 6), other).shape == (2, 4)
    finally:
        patcher.uninstall()


def test_blocks_are_used_where_messages_are_per_edge_and_not_elsewhere() -> None:
    expected = {
        "gcn": "sum",
        "sage-mean": "mean",
        "sage-max": "max",
        "sage-min": "min",
        "gin": "sum",
        "graph": "sum",
        "gat": "sum",  # its softmax is in edge_update
        "transformer": "sum",  # its softmax is in message
        "pna": None,  # several aggregations
    }
    assert {name: reduction(CONVS[name]()) for name in expected} == expected
    assert reduction(NNConv(6, 4, nn.Linear(3, 24))) == "sum"
    assert sees_one_edge(CONVS["gcn"]()) and not sees_one_edge(CONVS["transformer"]())


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_batch_norm_agrees_with_torch_forward_backward_and_running(offset: float) -> None:
    torch.manual_seed(0)
    ours, reference = nn.BatchNorm1d(5), nn.BatchNorm1d(5).double()
    x = torch.randn(60, 5) + offset
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    weights = torch.randn(60, 5)
    out, expected = synchronised_batch_norm(ours, Group(), a), reference(b)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    tolerance = 1e-5 if offset == 0 else 2e-3
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=0, atol=tolerance)
    torch.testing.assert_close(ours.running_var.double(), reference.running_var, rtol=1e-4, atol=0)
    ours.eval()
    torch.testing.assert_close(out.std(0, unbiased=False), torch.ones(5), rtol=0, atol=1e-3)
    torch.testing.assert_close(
        synchronised_batch_norm(ours, Group(), x).double(), reference.eval()(x.double()), rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_rows_with_positions(training: bool) -> None:
    """[n, C, L], as torch takes it: n * L values of each column."""
    ours, reference = nn.BatchNorm1d(5).double(), nn.BatchNorm1d(5).double()
    a = torch.randn(12, 5, 3, dtype=torch.float64).requires_grad_()
    b = a.detach().clone().requires_grad_()
    weights = torch.randn(12, 5, 3, dtype=torch.float64)
    out, expected = synchronised_batch_norm(ours.train(training), Group(), a), reference.train(training)(b)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for found, wanted in ((out, expected), (a.grad, b.grad), (ours.running_var, reference.running_var)):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


class Peers(Group):
    """Ranks of which the others have the rows of a part."""

    def __init__(self, *others: torch.Tensor) -> None:
        super().__init__()
        self._others = others

    def all_gather(self, packed: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.cat([x.new_tensor([len(x)]), x.mean(0), (x - x.mean(0)).square().sum(0)]) for x in self._others]
        return [packed, *parts]


@pytest.mark.parametrize("rows", [0, 1])
def test_a_rank_with_one_row_takes_part_in_a_batch_norm_that_allows_it(rows: int) -> None:
    """It would leave the others waiting."""
    x = torch.randn(9, 5, dtype=torch.float64)
    norm, reference = BatchNorm(5, allow_single_element=True).double(), nn.BatchNorm1d(5).double()
    exchange = HaloExchange(Group(), whole_shard(graph()[1]))
    patcher = Patcher(exchange, Schedule())
    exchange.group = Peers(x[rows:])
    patcher.install(norm)
    with patcher.patches.suspended(norm):
        out = norm(x[:rows])
    torch.testing.assert_close(out, reference(x)[:rows], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm.module.running_mean, reference.running_mean)
    patcher.uninstall()
    assert "forward" not in norm.__dict__ and "forward" not in norm.module.__dict__


def test_a_batch_norm_that_allows_it_has_running_statistics_for_one_row_in_all() -> None:
    norm, x = BatchNorm(5, allow_single_element=True), torch.randn(1, 5)
    expected = norm(x)
    patcher = Patcher(HaloExchange(Group(), whole_shard(graph()[1])), Schedule())
    patcher.install(norm)
    torch.testing.assert_close(norm(x), expected)
    assert norm.module.num_batches_tracked == 0 and norm.module.running_mean.eq(0).all()
    patcher.uninstall()


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("conv", [GATConv(6, 4, dropout=0.5), TransformerConv(6, 4, dropout=0.5)])
def test_dropout_of_attention_changes_no_mean(conv: nn.Module, mode: int) -> None:
    """Coefficients are dropped after they were normalised, and the kept ones scaled up."""
    x, edge_index = graph()
    conv, passes = conv.double(), 200
    patcher = Patcher(HaloExchange(Group(), whole_shard(edge_index)), Schedule(mode=mode))
    patcher.install(conv)
    with torch.no_grad():
        drawn = torch.stack([conv.train()(x, edge_index) for _ in range(passes)])
        expected = conv.eval()(x, edge_index)
    patcher.uninstall()
    deviation = drawn.std(0) / passes**0.5
    assert deviation.max() > 0
    assert ((drawn.mean(0) - expected).abs() <= 5 * deviation + 1e-12).all()


def test_an_attribute_of_the_instance_comes_back() -> None:
    conv = GCNConv(6, 4, decomposed_layers=2)  # PyG sets ``propagate`` on the instance itself
    own = conv.__dict__["propagate"]
    patcher = Patcher(HaloExchange(Group(), whole_shard(graph()[1])), Schedule())
    patcher.install(conv)
    patcher.uninstall()
    assert conv.__dict__["propagate"] == own


def test_edges_that_point_elsewhere_are_refused() -> None:
    """As ``DirGNNConv`` turns them around; a kernel would write beyond its rows."""
    _, edge_index = graph()
    conv = SAGEConv(6, 4).double()
    patcher = Patcher(HaloExchange(Group(), whole_shard(edge_index)), Schedule())
    patcher.install(conv)
    with pytest.raises(ConfigError, match="point"):
        conv(torch.ones(NODES, 6, dtype=torch.float64), torch.tensor([[0, 1], [1, NODES]]))
    patcher.uninstall()


SHORT: dict[str, Any] = {
    **CONVS,
    "gin": lambda: GINConv(mlp(4)),
    "sage-wide": lambda: SAGEConv(6, 8),
    "rgcn": lambda: RGCNConv(6, 4, 2),
    "edge features": lambda: NNConv(6, 4, nn.Linear(2, 24)),
    "gatv2": lambda: GATv2Conv(6, 2, heads=2),
    "ids": lambda: IdRGCNConv(NODES, 4, 2),
}


@pytest.mark.parametrize("rows", [NODES - 10, NODES + 1])
@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize("name", SHORT)
def test_other_rows_than_the_parts_nodes_are_refused(name: str, mode: int, rows: int) -> None:
    """Kernels would read and write beyond them."""
    conv, edge_index, x = SHORT[name](), graph()[1] % (NODES - 10), torch.ones(rows, 6)
    extra = {"rgcn": torch.zeros(EDGES, dtype=torch.int64), "edge features": torch.ones(EDGES, 2)}
    args = {"ids": (extra["rgcn"],), **{key: (value,) for key, value in extra.items()}}.get(name, ())
    patcher = Patcher(HaloExchange(Group(), whole_shard(edge_index)), Schedule(mode=mode))
    patcher.install(conv)
    with pytest.raises((ConfigError, RuntimeError)) as raised:
        conv(torch.arange(rows).clamp(max=NODES - 1) if name == "ids" else x, edge_index, *args)
    # PyG's normalisation sizes its tensors by the part's nodes, and may fail first.
    assert name in ("gcn", "appnp") or f"{rows} rows" in str(raised.value)
    patcher.uninstall()


@pytest.mark.parametrize("name", ["sage-mean", "sage-max", "gat", "transformer", "gated"])
def test_the_rows_at_targets_are_counted_too(name: str) -> None:
    conv, (x, edge_index) = CONVS[name]().double(), graph()
    patcher = Patcher(HaloExchange(Group(), whole_shard(edge_index)), Schedule())
    patcher.install(conv)
    conv((x, x), edge_index)
    with pytest.raises(ConfigError, match=f"{NODES - 1} rows .* this rank has {NODES} nodes"):
        conv((x, x[:-1].clone()), edge_index)
    with pytest.raises(ConfigError, match=f"{NODES - 1} rows .* this rank has {NODES} nodes"):
        conv((x, x[:-1]), edge_index)
    patcher.uninstall()


class Doubled(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class OwnPropagate(MessagePassing):
    def propagate(self, edge_index, size=None, **kwargs):  # noqa: ANN001, ANN003, ANN201
        return super().propagate(edge_index, size=size, **kwargs)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: GraphNorm(4), "statistics over all nodes"),
        (lambda: LayerNorm(4), "mode='node' works"),
        (lambda: nn.BatchNorm2d(4), "only BatchNorm1d"),
        (lambda: ChebConv(4, 4, 2), "Laplacian"),
        (lambda: GCNConv(4, 4, flow="target_to_source"), "flow='target_to_source'"),
        (lambda: OwnPropagate(), "overrides propagate"),
        (lambda: Doubled(4), "it overrides forward"),
        (lambda: DynamicEdgeConv(mlp(4), 3), "searches neighbours among the input nodes"),
        (lambda: XConv(4, 4, 3, 5), "searches neighbours among the input nodes"),
    ],
)
def test_what_would_not_be_exact_is_refused_with_the_reason(  # noqa: ANN201
    layer,  # noqa: ANN001
    why: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch_geometric.typing, "WITH_KNN", True)
    module = nn.ModuleList([GCNConv(4, 4), layer()])
    with pytest.raises(ConfigError, match=f"strategy=sar does not serve {type(module[1]).__name__} \\(1\\): .*{why}"):
        SarStrategy().check_module(module)


def test_a_model_without_message_passing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no message-passing layer, so there is nothing to aggregate"):
        SarStrategy().check_module(nn.Linear(2, 2))


def test_the_built_in_networks_are_all_served() -> None:
    for conv in CONVS.values():
        assert unsupported.reason(conv()) is None
    assert unsupported.reason(LayerNorm(4, mode="node")) is None
    assert unsupported.reason(nn.BatchNorm1d(4)) is None


@pytest.mark.parametrize("mode", [0, 4, -1])
def test_other_modes_are_refused_by_config_and_strategy_alike(mode: int) -> None:
    for make in (lambda: SarStrategy(mode=mode), lambda: SarConfig(name="sar", mode=mode)):
        with pytest.raises(ConfigError, match=f"mode={mode} was set"):
            make()


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("make", [lambda: GCNConv(6, 4), lambda: GATConv(6, 4, heads=2), lambda: SAGEConv(6, 4)])
def test_what_evaluation_computes_first_does_not_reach_training(make: Any, mode: int) -> None:
    """Autograd cannot use tensors of inference mode, and kept results would be such tensors."""
    x, edge_index = graph()
    conv = make().double()
    patcher = Patcher(HaloExchange(Group(), whole_shard(edge_index)), Schedule(mode=mode, cache_inputs="true"))
    patcher.constants.add([x, edge_index])
    patcher.install(conv)
    with torch.inference_mode():
        before = conv(x, edge_index).clone()
    out = conv(x, edge_index)
    out.sum().backward()
    patcher.uninstall()
    assert torch.equal(before, out.detach())
    assert all(parameter.grad is not None for parameter in conv.parameters())


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("name", ["gcn", "gin", "appnp", "sage-max"])
def test_evaluation_makes_no_messages_either(name: str, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may take many times the memory of a part. A test or prediction has no training before it."""
    x, edge_index = graph()
    conv = CONVS[name]().double().eval()
    expected = conv(x, edge_index)
    lengths = []
    message = conv.message

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        messages = message(*args, **kwargs)
        lengths.append(len(messages))
        return messages

    monkeypatch.setattr(conv, "message", counted)
    patcher = Patcher(HaloExchange(Group(), whole_shard(edge_index)), Schedule(mode=mode))
    patcher.install(conv)
    with torch.inference_mode():
        out = conv(x, edge_index)
    patcher.uninstall()
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert max(lengths) < 10  # of made-up edges


class OfEdges(MessagePassing):
    """Reads nothing at sources."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, attr: torch.Tensor) -> torch.Tensor:
        return x + self.propagate(edge_index, attr=attr)

    def message(self, attr: torch.Tensor) -> torch.Tensor:
        return attr.sin()


class OfTargets(OfEdges):
    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, attr: torch.Tensor) -> torch.Tensor:
        return self.propagate(edge_index, x=x, attr=attr)

    def message(self, x_i: torch.Tensor, attr: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x_i * attr


class OfNothing(OfEdges):
    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, attr: torch.Tensor) -> torch.Tensor:
        return x * self.propagate(edge_index)

    def message(self, index: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.ones(len(index), 1, dtype=torch.float64)


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("make", [OfEdges, OfTargets, OfNothing])
def test_messages_may_read_nothing_at_sources(make: type[OfEdges], aggr: str, mode: int) -> None:
    x, edge_index = graph()
    attr, conv = torch.randn(EDGES, 6, dtype=torch.float64), make(aggr=aggr)
    results = []
    for taken_over in (False, True):
        patcher = Patcher(HaloExchange(Group(), whole_shard(edge_index)), Schedule(mode=mode))
        if taken_over:
            patcher.install(conv)
        leaves = x.clone().requires_grad_(), attr.clone().requires_grad_()
        out = conv(leaves[0], edge_index, leaves[1])
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)])
        patcher.uninstall()
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_is_kept_of_constants_goes_when_they_change_in_place() -> None:
    constants, x, weight = Constants(Schedule(cache_inputs="true")), torch.ones(4, 2), torch.ones(3)
    constants.add([x, weight])
    for step in range(4):
        blocks = constants.blocks(x)
        assert blocks == {}
        blocks[1] = x + 1
        for _ in range(2):
            assert constants.blocks(x) is blocks
            assert constants.result((x, weight), ("sum",), lambda: x.sum() + weight.sum()) == 8 * 2**step + 3
            assert constants.result((x, None), ("sum",), x.sum) == 8 * 2**step
        assert len(constants._results[x]) == 2
        x.mul_(2)


@pytest.mark.parametrize("make", [lambda: GraphConv(6, 9), lambda: GCNConv(6, 9)])
def test_a_model_that_writes_into_its_input_leaves_nothing_behind(make: Any) -> None:
    x, edge_index = graph()
    weight, conv = torch.rand(EDGES, dtype=torch.float64), make().double()
    patcher = Patcher(HaloExchange(Group(), whole_shard(edge_index)), Schedule(cache_inputs="true"))
    patcher.constants.add([x, edge_index, weight])
    patcher.install(conv)
    kept = []
    for _ in range(4):
        x.mul_(1.5)
        weight.mul_(0.5)
        out = conv(x, edge_index, weight)
        results = patcher.constants._results
        kept.append((len(results), sum(map(len, results.values()))))
    patcher.uninstall()
    assert kept[0][1] == 1 and len(set(kept)) == 1
    torch.testing.assert_close(out, conv(x, edge_index, weight), rtol=1e-10, atol=1e-10)
