"""The layer engine in one process: convolutions equal PyG's own, results and gradients, in fp64."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn import GCN, HeteroConv, Sequential
from torch_geometric.nn.conv import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    MessagePassing,
    RGCNConv,
    SAGEConv,
    SGConv,
    TAGConv,
    TransformerConv,
)
from torch_geometric.utils import softmax

from gtrain.engine import edges, fused_layers
from gtrain.engine.attention.fused import attend
from gtrain.engine.attention.softmax import _Normalised, _RunningSoftmax
from gtrain.engine.local import LocalEdges, LocalEngine, LocalNodes
from gtrain.engine.relations import LearnedRows, RelationPairs
from gtrain.engine.schedule import Schedule
from gtrain.errors import ConfigError
from gtrain.nn.depth import HopMeter
from gtrain.nn.dropout import ExactDropout, rows_of
from gtrain.nn.relational import IdRGCNConv

NODES, EDGES, IN = 50, 300, 8

Case = tuple[Callable[[], MessagePassing], tuple[str, ...]]
CASES: dict[str, Case] = {
    "sage": (lambda: SAGEConv(IN, 5), ()),
    "sage of equal width": (lambda: SAGEConv(IN, IN), ()),
    "sage, wider": (lambda: SAGEConv(IN, 16), ()),
    "sage of sums": (lambda: SAGEConv(IN, 5, aggr="sum"), ()),
    "sage of maxima": (lambda: SAGEConv(IN, 5, aggr="max"), ()),
    "sage, normalised": (lambda: SAGEConv(IN, 5, normalize=True), ()),
    "sage without root": (lambda: SAGEConv(IN, 5, root_weight=False), ()),
    "sage, projected": (lambda: SAGEConv(IN, 5, project=True), ()),
    "graph": (lambda: GraphConv(IN, 5), ("weight",)),
    "graph of means": (lambda: GraphConv(IN, 12, aggr="mean"), ("weight",)),
    "graph of maxima": (lambda: GraphConv(IN, 5, aggr="max"), ()),
    "gin": (lambda: GINConv(nn.Linear(IN, 5), train_eps=True), ()),
    "gat": (lambda: GATConv(IN, 4, heads=3), ()),
    "gat, mean of heads": (lambda: GATConv(IN, 4, heads=3, concat=False), ()),
    "gat without loops": (lambda: GATConv(IN, 4, heads=2, add_self_loops=False), ()),
    "gat, residual": (lambda: GATConv(IN, 4, heads=2, residual=True, bias=False), ()),
    "gatv2": (lambda: GATv2Conv(IN, 4, heads=3), ()),
    "gatv2, shared": (lambda: GATv2Conv(IN, 4, heads=2, share_weights=True, add_self_loops=False, bias=False), ()),
    "gatv2, averaged": (lambda: GATv2Conv(IN, 5, heads=2, concat=False, negative_slope=-0.3), ()),
    "transformer": (lambda: TransformerConv(IN, 4, heads=3), ()),
    "transformer, gated": (lambda: TransformerConv(IN, 5, heads=2, concat=False, beta=True), ()),
    "gatv2 with edges": (lambda: GATv2Conv(IN, 4, heads=2, edge_dim=3), ("attr",)),
    "transformer with edges": (lambda: TransformerConv(IN, 4, heads=2, edge_dim=3), ("attr",)),
    "gat with edges": (lambda: GATConv(IN, 4, heads=2, edge_dim=3), ("attr",)),
}
SQUARE: dict[str, Case] = {
    "gcn": (lambda: GCNConv(IN, 5), ("weight",)),
    "gcn, wider": (lambda: GCNConv(IN, 16), ()),
    "gcn without loops": (lambda: GCNConv(IN, 5, add_self_loops=False), ()),
    "gcn, cached": (lambda: GCNConv(IN, 5, cached=True), ()),
    "sgc": (lambda: SGConv(IN, 5, K=2), ()),
    "lightgcn": (lambda: LGConv(), ()),
    "rgcn": (lambda: RGCNConv(IN, 5, 4), ("type",)),
    "rgcn with bases": (lambda: RGCNConv(IN, 5, 4, num_bases=2, aggr="sum"), ("type",)),
    "rgcn of blocks": (lambda: RGCNConv(IN, 4, 4, num_blocks=2), ("type",)),
    "rgcn without root": (lambda: RGCNConv(IN, 5, 6, bias=False, root_weight=False), ("type",)),
}
OF_IDS: dict[str, Callable[[], MessagePassing]] = {
    "rgcn": lambda: RGCNConv(NODES + 10, 5, 4),
    "rgcn of sums": lambda: RGCNConv(NODES + 10, 5, 4, aggr="sum", bias=False),
    "rgcn with bases": lambda: RGCNConv(NODES + 10, 5, 4, num_bases=2, root_weight=False),
    "ids": lambda: IdRGCNConv(NODES + 10, 5, 4),
    "ids with bases": lambda: IdRGCNConv(NODES + 10, 5, 4, num_bases=2, root_weight=False),
}


def graph() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(NODES, IN, dtype=torch.float64),
        "edge_index": torch.randint(0, NODES, (2, EDGES)),
        "weight": torch.rand(EDGES, dtype=torch.float64),
        "attr": torch.randn(EDGES, 3, dtype=torch.float64),
        "type": torch.randint(0, 4, (EDGES,)),
    }


def result(conv: nn.Module, x: Any, *args: Any, **kwargs: Any) -> list[Tensor | None]:
    """The convolution's result, and the gradients of its parameters and of x."""
    conv.zero_grad()
    leaf = (x[0] if isinstance(x, tuple) else x).clone().requires_grad_()
    out = conv((leaf, leaf[: len(x[1])]) if isinstance(x, tuple) else leaf, *args, **kwargs)
    out.square().sum().backward()
    return [out.detach(), leaf.grad, *(None if p.grad is None else p.grad.clone() for p in conv.parameters())]


def assert_equal(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.fixture(params=[False, True], ids=["batches", "constant"])
def engine(request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    engine = LocalEngine(constant=request.param)
    yield engine
    engine.uninstall()


def arguments(
    data: dict[str, Tensor], names: tuple[str, ...], edges: Tensor | slice = slice(None)
) -> dict[str, Tensor]:
    return {f"edge_{name}": data[name][edges] for name in names}


@pytest.mark.parametrize("name", [*CASES, *SQUARE])
def test_a_convolution_equals_its_own(name: str, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    make, names = {**CASES, **SQUARE}[name]
    conv, data = make().double(), graph()
    kwargs = arguments(data, names)
    expected = result(conv, data["x"], data["edge_index"], **kwargs)
    if "cached" in name:
        conv.reset_parameters, conv._cached_edge_index = None, None  # type: ignore[assignment]
    ran: list[str] = []
    monkeypatch.setattr(type(conv), "message", _noted(type(conv).message, ran))
    engine.add_constants(data.values())
    engine.install(conv)
    assert engine.runs(conv)
    for _ in range(2):  # the second time from what was cached
        assert_equal(result(conv, data["x"], data["edge_index"], **kwargs), expected)
    # probes run a message on a few edges; whole messages are made by what the engine leaves to PyG alone
    assert (max([0, *map(int, ran)]) >= EDGES // 8) == name.endswith("with edges")
    engine.uninstall()
    assert not {"forward", "propagate", "edge_updater"} & vars(conv).keys()


@pytest.mark.parametrize("kind", [GATConv, GATv2Conv, TransformerConv])
def test_a_convolution_returns_its_coefficients(kind: Any, engine: LocalEngine) -> None:
    conv, data = kind(IN, 4, heads=2).double(), graph()

    def run() -> tuple[Tensor, Tensor]:
        out, (_, alpha) = conv(data["x"], data["edge_index"], return_attention_weights=True)
        return out, alpha

    expected = run()
    engine.install(conv)
    for actual, of_pyg in zip(run(), expected, strict=True):
        torch.testing.assert_close(actual, of_pyg, rtol=1e-10, atol=1e-10)
    copy.deepcopy(conv)


@pytest.mark.parametrize("name", OF_IDS)
def test_a_convolution_over_ids_equals_its_own(name: str, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    conv, data = OF_IDS[name]().double(), graph()
    ids = torch.randperm(NODES + 10)[:NODES]

    def run(ids: Tensor, edge_type: Tensor) -> list[Tensor | None]:
        conv.zero_grad()
        out: Tensor = conv(ids, data["edge_index"], edge_type)
        out.square().sum().backward()
        return [out.detach(), *(None if p.grad is None else p.grad.clone() for p in conv.parameters())]

    inputs = [(ids, data["type"]), (ids, data["type"]), (ids.flip(0), data["type"]), (ids, data["type"].flip(0))]
    expected = [run(*each) for each in inputs]
    ran: list[str] = []
    monkeypatch.setattr(type(conv), "message", _noted(type(conv).message, ran))
    engine.add_constants([ids, *data.values()])
    engine.install(conv)
    for each, wanted in zip(inputs, expected, strict=True):
        assert_equal(run(*each), wanted)
    assert max([0, *map(int, ran)]) < EDGES // 8


@pytest.mark.parametrize("name", [name for name in SQUARE if "rgcn" in name])
def test_relations_with_fewer_targets_than_sources(name: str, engine: LocalEngine) -> None:
    conv, data = SQUARE[name][0]().double(), graph()
    chosen = data["edge_index"][1] < 20
    pair, edges, types = (data["x"], data["x"][:20]), data["edge_index"][:, chosen], data["type"][chosen]
    expected = result(conv, pair, edges, types)
    engine.install(conv)
    assert_equal(result(conv, pair, edges, types), expected)
    # no edges
    assert_equal(result(conv, pair, edges[:, :0], types[:0]), _written(engine, conv, pair, edges[:, :0], types[:0]))


def _written(engine: LocalEngine, conv: nn.Module, *args: Any) -> list[Tensor | None]:
    engine.uninstall()
    return result(conv, *args)


def _noted(message: Any, ran: list[str]) -> Any:
    """Note the number of messages; with the signature that PyG inspects."""

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        out = message(*args, **kwargs)
        ran.append(str(len(out)))
        return out

    noted.__signature__ = inspect.signature(message)  # type: ignore[attr-defined]
    return noted


@pytest.mark.parametrize("name", CASES)
def test_targets_may_be_the_first_sources(name: str, engine: LocalEngine) -> None:
    """As in trimmed layers: the convolution gets the pair of all rows and of the first ones."""
    make, names = CASES[name]
    conv, data = make().double(), graph()
    chosen = data["edge_index"][1] < 20
    edge_index, kwargs = data["edge_index"][:, chosen], arguments(data, names, chosen)
    pair = data["x"], data["x"][:20]
    expected = result(conv, pair, edge_index, **kwargs)
    engine.install(conv)
    assert_equal(result(conv, pair, edge_index, **kwargs), expected)


@pytest.mark.parametrize("targets", [lambda x: x[:20].detach(), lambda x: x[:20] * 2, lambda x: x.view_as(x)[:20]])
def test_targets_that_share_memory_alone_keep_their_gradient(targets: Any, engine: LocalEngine) -> None:
    conv, data = SAGEConv(IN, 5).double(), graph()
    edge_index = data["edge_index"][:, data["edge_index"][1] < 20]

    def gradient() -> Tensor:
        x = data["x"].clone().requires_grad_()
        conv((x, targets(x)), edge_index).square().sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient()
    engine.install(conv)
    torch.testing.assert_close(gradient(), expected, rtol=1e-10, atol=1e-10)


def test_a_sliced_pair_runs_as_one_function(engine: LocalEngine) -> None:
    conv, data = SAGEConv(IN, 5).double(), graph()
    edge_index = data["edge_index"][:, data["edge_index"][1] < 20]
    engine.install(conv)
    for x in (data["x"], data["x"].clone().requires_grad_(), nn.Linear(IN, IN).double()(data["x"])):
        out = conv((x, x[:20]), edge_index)
        assert type(out.grad_fn).__name__ in ("_SumThenTransformBackward", "_TransformThenSumBackward")


IN_TYPES: dict[str, Callable[[], MessagePassing]] = {
    "sage": lambda: SAGEConv((IN, IN), 6),
    "graph": lambda: GraphConv((IN, IN), 6),
    "gin": lambda: GINConv(nn.Linear(IN, 6)),
    "gat": lambda: GATConv((IN, IN), 3, heads=2, add_self_loops=False),
    "gatv2": lambda: GATv2Conv((IN, IN), 3, heads=2, add_self_loops=False),
    "transformer": lambda: TransformerConv((IN, IN), 3, heads=2, beta=True),
}


@pytest.mark.parametrize("aggr", ["sum", "cat"])
@pytest.mark.parametrize("name", IN_TYPES)
def test_convolutions_of_a_network_over_types(
    name: str, aggr: str, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    within = SAGEConv(IN, 6)
    conv, data = HeteroConv({("a", "to", "b"): IN_TYPES[name](), ("b", "to", "b"): within}, aggr=aggr).double(), graph()
    b = torch.randn(20, IN, dtype=torch.float64)
    edges = {
        ("a", "to", "b"): torch.stack([data["edge_index"][0], data["edge_index"][1] % 20]),
        ("b", "to", "b"): data["edge_index"] % 20,
    }

    def run() -> list[Tensor | None]:
        conv.zero_grad()
        x = {"a": data["x"].clone().requires_grad_(), "b": b.clone().requires_grad_()}
        out: Tensor = conv(x, edges)["b"]
        out.square().sum().backward()
        return [out.detach(), *(p.grad for p in (*x.values(), *conv.parameters()))]

    expected = [None if each is None else each.clone() for each in run()]
    ran: list[str] = []
    for kind in {type(each) for each in (within, *conv.modules()) if isinstance(each, MessagePassing)}:
        monkeypatch.setattr(kind, "message", _noted(kind.message, ran))
    engine.install(conv)
    assert_equal(run(), expected)
    assert max([0, *map(int, ran)]) < EDGES // 8  # a probe's messages are few


BETWEEN: dict[str, Callable[[], MessagePassing]] = {
    "sage": lambda: SAGEConv((IN, 6), 5),
    "sage, wider": lambda: SAGEConv((IN, 6), 40),
    "sage of sums, normalised": lambda: SAGEConv((IN, 6), 5, aggr="sum", normalize=True, bias=False),
    "graph": lambda: GraphConv((IN, 6), 5),
    "graph of means": lambda: GraphConv((IN, 6), 12, aggr="mean"),
}


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("targets", [20, 3000])
@pytest.mark.parametrize("name", BETWEEN)
def test_a_layer_between_two_sets_of_nodes_is_one_function(
    name: str, targets: int, is_sorted: bool, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many targets, rows are multiplied before they are summed. Few edges are not sorted."""
    monkeypatch.setattr(fused_layers, "FEW", 0 if is_sorted else EDGES + 1)
    conv, data = BETWEEN[name]().double(), graph()
    edges = torch.stack([data["edge_index"][0], torch.randint(0, targets, (EDGES,))])
    other = torch.randn(targets, 6, dtype=torch.float64)

    def run() -> tuple[str, list[Tensor | None]]:
        conv.zero_grad()
        ends = data["x"].clone().requires_grad_(), other.clone().requires_grad_()
        out: Tensor = conv(ends, edges)
        out.square().sum().backward()
        return type(out.grad_fn).__name__, [out.detach(), *(p.grad for p in (*ends, *conv.parameters()))]

    _, expected = run()
    expected = [None if each is None else each.clone() for each in expected]
    engine.install(conv)
    function, actual = run()
    assert_equal(actual, expected)
    assert function == "_BipartiteBackward" or "normalised" in name


@pytest.mark.parametrize("few", [0, 10])
@pytest.mark.parametrize("edge", [(6, 0), (0, 3), (-1, 0), (0, -1)])
def test_edges_that_name_no_node_are_refused(
    edge: tuple[int, int], few: int, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_layers, "FEW", few)
    conv = SAGEConv((4, 4), 5)
    engine.install(conv)
    with pytest.raises(IndexError, match="of 6 (and|sources and) 3"):
        conv((torch.randn(6, 4), torch.randn(3, 4)), torch.tensor([[0, edge[0]], [0, edge[1]]]))


def test_a_subclass_and_a_class_that_it_does_not_know_stay_as_they_are(engine: LocalEngine) -> None:
    class Mine(SAGEConv):
        """May compute anything."""

    convs = nn.ModuleList([Mine(IN, 5), TAGConv(IN, 5), GCNConv(IN, 5, flow="target_to_source")])
    engine.install(convs)
    assert not any(engine.runs(conv) for conv in convs)


def test_float16_runs_as_written(engine: LocalEngine) -> None:
    conv, data = GraphConv(IN, 5).half(), graph()
    x = data["x"].half()
    expected = conv(x, data["edge_index"])
    engine.install(conv)
    assert torch.equal(conv(x, data["edge_index"]), expected)
    wide = SAGEConv(IN, 5)
    with torch.autocast("cpu", torch.float16):
        expected = wide(data["x"].float(), data["edge_index"])
        engine.install(wide)
        assert torch.equal(wide(data["x"].float(), data["edge_index"]), expected)


@pytest.mark.parametrize("precision", ["mixed", "true"])
@pytest.mark.parametrize("name", [*CASES, *SQUARE])
def test_in_bfloat16_a_convolution_equals_its_own_to_rounding(name: str, precision: str, engine: LocalEngine) -> None:
    """As near to fp64 as PyG's methods in the same precision, and of the same dtypes."""
    make, names = {**CASES, **SQUARE}[name]
    conv, data = make(), graph()
    dtype = torch.float32 if precision == "mixed" else torch.bfloat16
    low = copy.deepcopy(conv).to(dtype)
    rounded = {key: value.to(dtype) if value.is_floating_point() else value for key, value in data.items()}

    def run(conv: nn.Module, data: dict[str, Tensor]) -> list[Tensor | None]:
        conv.zero_grad()
        leaf = data["x"].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=conv is low and precision == "mixed"):
            out = conv(leaf, data["edge_index"], **arguments(data, names))
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(data["x"])
        (out.to(weight) * weight).sum().backward()
        return [out.detach(), leaf.grad, *(None if p.grad is None else p.grad.clone() for p in conv.parameters())]

    exact, plain = run(conv.double(), data), run(low, rounded)
    engine.install(low)
    engine.add_constants(rounded.values())
    ours = run(low, rounded)
    for actual, written, wanted in zip(ours, plain, exact, strict=True):
        assert (actual is None) == (written is None) == (wanted is None)
        if actual is None or written is None or wanted is None:
            continue
        assert actual.dtype == written.dtype
        scale = float(wanted.norm())
        assert float((actual - wanted).norm()) <= 2 * float((written - wanted).norm()) + 0.01 * scale
        # The gradient of a bias of all keys is 0: a constant does not change a softmax.
        assert float((actual - wanted).norm()) <= 0.2 * scale + 0.05


def test_sums_of_bfloat16_do_not_stop_at_256(engine: LocalEngine) -> None:
    """A target of 1000 edges, and a degree of 1001."""
    count = 1000
    edges = torch.stack([torch.arange(count), torch.zeros(count, dtype=torch.int64)])
    x = torch.ones(count, IN, dtype=torch.bfloat16)
    conv, norm = GINConv(nn.Identity(), eps=-1.0), GCNConv(IN, 5, bias=False).bfloat16()
    engine.install(nn.ModuleList([conv, norm]))
    assert conv(x, edges)[0, 0] == count
    if engine._constant:
        engine.add_constants([edges])
        weight = norm.lin.weight.double().sum(1)
        # One term of weight 1 / 1001, and 999 of 1 / sqrt(1001).
        expected = weight * (1 / (count + 1) + (count - 1) / (count + 1) ** 0.5)
        torch.testing.assert_close(norm(x, edges)[0].double(), expected, rtol=0.02, atol=1e-3)


def test_an_edge_to_no_node_is_an_error(engine: LocalEngine) -> None:
    conv, data = SAGEConv(IN, 5).double(), graph()
    engine.install(conv)
    for wrong in (NODES, -1):
        data["edge_index"][0, 3] = wrong
        with pytest.raises(IndexError, match="edge_index"):
            conv(data["x"], data["edge_index"].clone())


@pytest.mark.parametrize("out_channels", [5, 16])  # rows are summed after the product, or before it
def test_a_weight_for_each_edge_or_what_pyg_makes_of_it(out_channels: int, engine: LocalEngine) -> None:
    conv, data = GraphConv(IN, out_channels).double(), graph()
    one = data["weight"][:1]
    expected = conv(data["x"], data["edge_index"], one)
    engine.install(conv)
    torch.testing.assert_close(conv(data["x"], data["edge_index"], one), expected)
    for length in (200, 350):
        with pytest.raises(RuntimeError, match="must match the size"):
            conv(data["x"], data["edge_index"], torch.ones(length, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"concat": False}])
def test_no_nodes(options: dict[str, bool], engine: LocalEngine) -> None:
    conv, x = GATConv(IN, 4, heads=2, **options), torch.ones(0, IN)
    engine.install(conv)
    out = conv(x, torch.empty(2, 0, dtype=torch.int64))
    assert out.shape == (0, 4 if options else 8)
    out.sum().backward()


@pytest.mark.parametrize("wrong", [NODES + 10, -1])
@pytest.mark.parametrize("name", OF_IDS)
def test_an_id_without_a_row_is_an_error(name: str, wrong: int, engine: LocalEngine) -> None:
    """Not the row of another relation."""
    conv, data, ids = OF_IDS[name](), graph(), torch.arange(NODES)
    ids[3] = wrong
    if isinstance(conv, IdRGCNConv):
        with pytest.raises(IndexError, match="rows of the ids 0 to 59"):
            conv(ids, data["edge_index"], data["type"])
    engine.install(conv)
    with pytest.raises(IndexError, match="rows of the ids 0 to 59"):
        conv(ids, data["edge_index"], data["type"])


@pytest.mark.parametrize("edge", [(NODES, 0), (0, 20), (0, 10**7), (-1, 0), (0, -1)])
@pytest.mark.parametrize("name", OF_IDS)
def test_an_edge_of_ids_to_no_node_is_an_error(name: str, edge: tuple[int, int], engine: LocalEngine) -> None:
    conv, ids = OF_IDS[name](), torch.arange(NODES)
    engine.install(conv)
    x = ids if isinstance(conv, IdRGCNConv) else (ids, ids[:20])
    wrong = (edge[0], NODES) if isinstance(conv, IdRGCNConv) and edge[1] == 20 else edge
    with pytest.raises(IndexError, match="edge_index"):
        conv(x, torch.tensor([[0, wrong[0]], [0, wrong[1]]]), torch.tensor([0, 1]))


def test_attention_takes_a_row_for_each_node() -> None:
    blocks = LocalEdges(4, 3, {})(torch.tensor([[0, 3], [0, 2]]))
    for sources, logits, targets in ((3, 4, 3), (4, 3, 3), (4, 4, 2)):
        shapes = (sources, 1, 2), (logits, 1), (targets, 1)
        with pytest.raises(ConfigError, match="its edges are from 4 nodes to 3"):
            attend(blocks, *(torch.ones(shape) for shape in shapes), 0.2, 0.0, Schedule())


def test_a_block_of_logits_of_minus_infinity_counts_nothing() -> None:
    """In any order of the blocks, the running softmax is that of all edges at once, with its gradient."""
    index = torch.tensor([0, 0, 1, 0, 0, 2])
    logits = torch.tensor([-torch.inf, -torch.inf, 0.5, 0.0, 1.0, -torch.inf], dtype=torch.float64).unsqueeze(1)
    values, gradient = torch.arange(1.0, 7, dtype=torch.float64).unsqueeze(1), torch.ones(3, 1, dtype=torch.float64)
    finite = [2, 3, 4]  # of target 2, PyG's softmax is NaN
    leaf = logits[finite].clone().requires_grad_()
    messages = softmax(leaf, index[finite], num_nodes=3) * values[finite]
    expected = torch.zeros(3, 1, dtype=torch.float64).index_add(0, index[finite], messages)
    (expected.square() * gradient).sum().backward()
    for parts in ([slice(0, 3), slice(3, 6)], [slice(3, 6), slice(0, 3)]):
        running = _RunningSoftmax(SimpleNamespace(blocks=SimpleNamespace(num_targets=3)))  # type: ignore[arg-type]
        for part in parts:
            coefficients = running._coefficients(logits[part], index[part])
            if running.out is None:
                running.out = torch.zeros(3, 1, dtype=torch.float64)
            running.out.index_add_(0, index[part], coefficients * values[part])
        out, lse = running.finish()
        torch.testing.assert_close(out, expected.detach())
        own = logits.clone().requires_grad_()
        delta = 2 * out * out
        weights = _Normalised.apply(own, lse[index], delta[index])
        (weights * values * (2 * out)[index]).sum().backward()
        assert own.grad is not None and not own.grad.isnan().any()
        torch.testing.assert_close(own.grad[finite], leaf.grad)


def test_negative_ends_of_edges_are_refused() -> None:
    for ends in ([[-1, 2], [0, 1]], [[1, 2], [0, -1]]):
        with pytest.raises(ConfigError, match="edges that name the node -1"):
            edges.sort_edges(torch.tensor(ends), LocalNodes(5, 0), 5)


def test_edges_that_change_in_place_replace_the_former_ones() -> None:
    edge_index, known = torch.tensor([[0, 1], [1, 2]]), WeakIdKeyDictionary()
    cache, local = edges.EdgeBlockCache(LocalNodes(5, 0), 5), LocalEdges(5, 5, known)
    for of in (cache, local):
        assert of(edge_index) is of(edge_index)
    for source in (3, 4, 2):
        edge_index[0, 0] = source
        for of in (cache, local):
            blocks = of(edge_index)
            assert blocks.blocks[0].sources.tolist() == [source, 1] and of(edge_index) is blocks
    assert len(known[edge_index][1]) == len(cache._blocks) == 1


def test_hooks_observe_what_pyg_computes(engine: LocalEngine) -> None:
    conv, data = SAGEConv(IN, 5).double(), graph()
    expected, seen = result(conv, data["x"], data["edge_index"]), []
    engine.install(conv)
    hook = conv.register_message_forward_hook(lambda conv, inputs, out: seen.append(len(out)))
    assert_equal(result(conv, data["x"], data["edge_index"]), expected)
    hook.remove()
    assert seen == [EDGES]
    assert_equal(result(conv, data["x"], data["edge_index"]), expected)
    assert seen == [EDGES]


def test_an_activation_may_change_the_result_in_place(engine: LocalEngine) -> None:
    """The backward pass of GAT reads the result, and computes it again."""
    for make in (lambda: GATConv(IN, 4, heads=2), lambda: GATv2Conv(IN, 4), lambda: SAGEConv(IN, 4)):
        conv, data = make().double(), graph()
        network = Sequential("x, e", [(conv, "x, e -> x"), nn.ELU(inplace=True)])
        expected = result(network, data["x"], data["edge_index"])
        engine.install(network)
        assert engine.runs(conv)
        assert_equal(result(network, data["x"], data["edge_index"]), expected)
        engine.uninstall()


class Half(nn.Linear):
    """Computes with half of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, self.weight / 2, self.bias)


@pytest.mark.parametrize("replaced", ["class", "instance"])
def test_a_linear_layer_that_computes_otherwise_does_so(replaced: str, engine: LocalEngine) -> None:
    data = graph()
    for make, name in (
        (lambda: SAGEConv(IN, 4), "lin_l"),
        (lambda: GATConv(IN, 4), "lin"),
        (lambda: SGConv(IN, 4), "lin"),
    ):
        conv = make().double()
        plain = getattr(conv, name)
        half = Half(IN, 4, bias=plain.bias is not None).double()
        if replaced == "class":
            setattr(conv, name, half)
        else:
            plain.forward = half.forward
        expected = result(conv, data["x"], data["edge_index"])
        engine.install(conv)
        assert_equal(result(conv, data["x"], data["edge_index"]), expected)
        engine.uninstall()


def test_a_layer_that_ran_backward_says_how_to_run_it_again(engine: LocalEngine) -> None:
    conv, data = SAGEConv(IN, 16), graph()
    engine.install(conv)
    loss = conv(data["x"].float(), data["edge_index"]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="layers=plain"):
        loss.backward()


@pytest.mark.parametrize("name", ["sage", "gat", "gcn", "rgcn"])
def test_a_copy_of_a_module_is_an_ordinary_one(name: str, engine: LocalEngine) -> None:
    """Callbacks copy a module during a run, to average its weights or to keep the best."""
    make, names = {**CASES, **SQUARE}[name]
    network, data = nn.Sequential(make().double()), graph()
    kwargs = arguments(data, tuple(n for n in names if n == "type"))
    expected = network[0](data["x"], data["edge_index"], **kwargs)
    engine.add_constants(data.values())
    engine.install(network)
    network[0](data["x"], data["edge_index"], **kwargs)
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    copies = copy.deepcopy(network), torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    engine.uninstall()
    for each in copies:
        torch.testing.assert_close(each[0](data["x"], data["edge_index"], **kwargs), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GATConv(IN, 4, heads=3, dropout=0.5),
        lambda: GATConv(IN, 4, heads=3, dropout=0.5, add_self_loops=False),
        lambda: GATv2Conv(IN, 4, heads=3, dropout=0.5),
        lambda: TransformerConv(IN, 4, heads=3, dropout=0.5),
    ],
    ids=["gat", "gat without loops", "gatv2", "transformer"],
)
def test_dropout_of_coefficients_is_that_of_pyg(make: Callable[[], MessagePassing], engine: LocalEngine) -> None:
    from torch_geometric.data import Data

    data = graph()
    conv = make().double()
    batch = Data(x=data["x"], edge_index=data["edge_index"], orig_id=torch.arange(NODES).flip(0), seeds=torch.arange(3))

    def step(follows: Callable[[nn.Module], bool]) -> list[Tensor | None]:
        dropout = ExactDropout(conv, 7, follows)
        dropout.start_step(0, 0, rows_of(batch))
        try:
            return result(conv, batch.x, batch.edge_index)
        finally:
            dropout.remove()

    expected = step(lambda _: True)
    engine.install(conv)
    actual = step(lambda layer: not engine.runs(layer))
    assert_equal(actual, expected)
    assert not torch.equal(actual[0], result(conv.eval(), batch.x, batch.edge_index)[0])  # type: ignore[arg-type]


def test_tensors_that_a_module_changes_in_place_are_read_again(engine: LocalEngine) -> None:
    network, data = GCN(IN, 6, 2, 3).double(), graph()
    engine.add_constants(data.values())
    engine.install(network)
    network(data["x"], data["edge_index"])
    data["x"].mul_(2)
    data["edge_index"][0, :50] = 7
    actual = network(data["x"], data["edge_index"])
    engine.uninstall()
    torch.testing.assert_close(actual, network(data["x"], data["edge_index"]), rtol=1e-10, atol=1e-10)


def test_a_network_of_another_graph_runs_in_the_same_run(engine: LocalEngine) -> None:
    """A module may pool nodes, or call a layer with several graphs; only the batch's tensors are constant."""
    network, data = GCN(IN, 6, 2, 3).double(), graph()
    few = data["edge_index"][:, :40] % 10
    expected = network(data["x"], data["edge_index"]), network(data["x"][:10], few)
    engine.add_constants(data.values())
    engine.install(network)
    for _ in range(2):
        actual = network(data["x"], data["edge_index"]), network(data["x"][:10], few)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["sage", "gat", "sgc", "rgcn", "gcn"])
def test_hops_are_counted_without_messages(name: str, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    make, names = {**CASES, **SQUARE}[name]
    conv, data = make().double(), graph()
    kwargs = arguments(data, tuple(n for n in names if n == "type"))
    engine.install(conv)
    ran: list[str] = []
    monkeypatch.setattr(type(conv), "message", _noted(type(conv).message, ran))
    with HopMeter(conv) as meter:
        out = conv(data["x"], data["edge_index"], **kwargs)
    assert meter.hops(out.sum()) == (2 if name == "sgc" else 1)
    assert max([0, *map(int, ran)]) < EDGES // 8


def test_more_edges_than_can_be_numbered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "MOST_EDGES", EDGES - 1)
    monkeypatch.setattr(fused_layers, "FEW", 0)
    conv, engine = SAGEConv(IN, 5), LocalEngine()
    engine.install(conv)
    with pytest.raises(ConfigError, match="a rank has 300 edges; its layers may have at most 299"):
        conv(torch.ones(NODES, IN), torch.randint(NODES, (2, EDGES)))
    engine.uninstall()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_types_of_edges_may_be_narrow_numbers(dtype: torch.dtype) -> None:
    """Pairs of type and node have more numbers than types."""
    nodes, types = (30_000, 100_000) if dtype == torch.int32 else (60, 100)
    edges, edge_index = LocalEdges(nodes, nodes, {}), torch.randint(nodes, (2, EDGES))
    edge_type, ids = torch.randint(types, (EDGES,)), torch.arange(nodes, dtype=torch.int32)
    edge_type[0] = types - 1
    of_pairs = [RelationPairs.of(edge_index, kind, types, edges) for kind in (edge_type, edge_type.to(dtype))]
    assert of_pairs[0].sizes == of_pairs[1].sizes and torch.equal(of_pairs[0].targets, of_pairs[1].targets)
    of_rows = [LearnedRows.of(ids, edge_index, kind, nodes, edges) for kind in (edge_type, edge_type.to(dtype))]
    for name in ("ids", "types", "share"):
        assert torch.equal(getattr(of_rows[0], name), getattr(of_rows[1], name))
    assert of_rows[1].types.max() == types - 1
