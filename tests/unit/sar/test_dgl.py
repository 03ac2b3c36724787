"""DGL's convolutions on one rank: what a shard gives them, what it refuses, and that DGL is left as it was found."""

from __future__ import annotations

import builtins
import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ok, run
from torch import nn

from gtrain.errors import ConfigError, DataError
from gtrain.graph.shard import GraphShard
from gtrain.model.kinds import kind
from gtrain.nn import DglGraph
from gtrain.nn.dgl_graph import load_dgl
from gtrain.strategy.group import Group

os.environ.setdefault("DGLBACKEND", "pytorch")
dgl = pytest.importorskip(
    "dgl", reason="DGL is not installed: pip install 'gtrain[dgl]' (Python 3.11)", exc_type=Exception
)
from dgl import function as fn  # noqa: E402
from dgl import nn as dglnn  # noqa: E402

from gtrain.engine.halo import HaloExchange  # noqa: E402
from gtrain.engine.schedule import Schedule  # noqa: E402
from gtrain.model.dgl_networks import DglGAT, DglRGCN, DglSAGE  # noqa: E402
from gtrain_sar.dgl.edge_values import LazyEdgeValues  # noqa: E402
from gtrain_sar.dgl.graph import ShardGraph  # noqa: E402
from gtrain_sar.patching import Patcher  # noqa: E402
from gtrain_sar.strategy import SarStrategy  # noqa: E402

NODES, EDGES = 30, 120
EDGE_INDEX = torch.randint(0, NODES - 1, (2, EDGES), generator=torch.Generator().manual_seed(3))
X = torch.randn(NODES, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def patcher(mode: int = 1) -> Patcher:
    empty = torch.empty(0, dtype=torch.int64)
    whole = torch.tensor([0, NODES])
    shard = GraphShard(
        part=0,
        num_parts=1,
        offsets=whole,
        edge_index=EDGE_INDEX,
        blocks=(0,),
        block_ptr=whole.clone(),
        halo=(empty,),
        node_data={},
        edge_data={},
    )
    return Patcher(HaloExchange(Group(), shard), Schedule(mode=mode))


@pytest.fixture
def graph() -> Iterator[ShardGraph]:
    engine, layer = patcher(), DglGraph()
    engine.install(layer)
    yield layer(EDGE_INDEX, NODES)
    engine.uninstall()


# ------------------------------------------------------------------------------------------------- DGL's own graph


def test_one_process_has_dgls_own_graph_made_once() -> None:
    layer, index = DglGraph(), EDGE_INDEX.clone()
    made = layer(index, NODES)
    assert type(made) is dgl.DGLGraph and made is DglGraph()(index, NODES)
    assert torch.equal(torch.stack(made.edges(order="eid")), index) and made.num_nodes() == NODES
    assert made.formats()["created"] == ["coo", "csr", "csc"]
    assert layer(index.clone(), NODES) is not made


def test_self_loops_are_there_once() -> None:
    loops = DglGraph(self_loops=True)(EDGE_INDEX, NODES)
    same = dgl.add_self_loop(dgl.remove_self_loop(dgl.graph(tuple(EDGE_INDEX), num_nodes=NODES)))
    assert torch.equal(torch.stack(loops.edges(order="eid")), torch.stack(same.edges(order="eid")))


@pytest.mark.slow
def test_dgl_is_loaded_by_its_models_only_and_writes_no_settings(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path / "home")}
    program = """
import sys
import gtrain.model.networks, gtrain.model.dgl_networks, gtrain_sar.strategy
assert "dgl" not in sys.modules
gtrain.model.dgl_networks.DglSAGE(4, 8, 2)
assert "dgl" in sys.modules
"""
    environment = {**home, "DGLBACKEND": "", "PATH": os.environ["PATH"]}
    del environment["DGLBACKEND"]
    said = ok(
        run(
            [sys.executable, "-c", f"import os; os.environ.pop('DGLBACKEND', None)\n{program}"],
            cwd=tmp_path,
            env=environment,
        )
    )
    assert "backend" not in said.stdout + said.stderr
    assert not (tmp_path / "home" / ".dgl").exists()


@pytest.mark.parametrize("error", [ImportError("No module named 'dgl'"), FileNotFoundError("libgraphbolt.so\nmore")])
def test_dgl_missing_is_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def fail(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "dgl":
            raise error
        return original(name, *args, **kwargs)

    monkeypatch.setattr("importlib.import_module", fail)
    text = str(error).splitlines()[0]
    with pytest.raises(ConfigError, match=rf"model=dgl_gat needs DGL 1.1.3, .*: {text}\.\nHINT: .*gtrain\[dgl\]"):
        DglGAT(4, 8, 2)


# ------------------------------------------------------------------------------------------------- networks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DglSAGE(4, 8, 2, aggr="max"),
            "model.aggr=max was set.\nHINT: dgl.nn.SAGEConv supports mean, gcn, pool, lstm",
        ),
        (lambda: DglSAGE(4, 8, 2, norm="graph"), "model.norm=graph was set.\nHINT: the norms are batch, layer, none"),
        (lambda: DglGAT(4, 10, 2, heads=4), "10 / 4 = 2.5"),
    ],
)
def test_settings_that_do_not_fit(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_relations_are_averaged_and_ids_have_rows() -> None:
    """Against a loop over relations and nodes."""
    net = DglRGCN(None, 5, 3, 2, NODES, num_layers=1).double()
    kinds = torch.arange(EDGES) % 2
    out = net(torch.arange(NODES), EDGE_INDEX, kinds)
    conv, rows = net.convs[0], net.rows.weight
    for node in (0, 7, 29):
        expected = rows[node] @ conv.loop_weight + conv.h_bias
        for relation in (0, 1):
            sources = EDGE_INDEX[0, (EDGE_INDEX[1] == node) & (kinds == relation)]
            if len(sources):
                expected = expected + rows[sources].mean(0) @ conv.linear_r.W[relation]
        torch.testing.assert_close(out[node], expected)


def test_they_pass_messages() -> None:
    assert kind(DglSAGE(4, 8, 2)) == "message-passing"
    SarStrategy().check_module(DglGAT(4, 8, 2))


# ------------------------------------------------------------------------------------------------- the shard


def test_structure(graph: ShardGraph) -> None:
    whole = dgl.graph(tuple(EDGE_INDEX), num_nodes=NODES)
    assert torch.equal(graph.in_degrees(), whole.in_degrees()) and torch.equal(graph.out_degrees(), whole.out_degrees())
    assert torch.equal(graph.in_degrees([3, 4]), whole.in_degrees([3, 4]))
    assert torch.equal(graph.nodes(), whole.nodes()) and graph.num_edges() == EDGES
    for form in ("uv", "all"):
        assert all(map(torch.equal, graph.edges(form), whole.edges(form)))
    assert graph.edges("eid").tolist() == list(range(EDGES))
    assert (graph.ntypes, graph.canonical_etypes) == (whole.ntypes, whole.canonical_etypes)
    assert graph.device == whole.device and graph.to("cpu") is graph and not graph.is_block


def test_data_of_a_scope_are_gone_after_it(graph: ShardGraph) -> None:
    graph.ndata["a"] = X
    with graph.local_scope():
        graph.srcdata["b"], graph.ndata["a"] = X, X * 2
        assert graph.dstdata["b"] is X
    assert list(graph.ndata) == ["a"] and graph.ndata["a"] is X
    other = graph.local_var()
    other.edata["c"] = torch.zeros(EDGES)
    assert list(graph.edata) == []


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda g: g.adj_tensors("csr"), "it reads graph.adj_tensors"),
        (lambda g: dgl.reverse(g), "it reads graph."),
        (lambda g: g.edges(order="srcdst"), "order='srcdst'"),
        (lambda g: dglnn.functional.edge_softmax(g, torch.ones(EDGES, 1), norm_by="src"), "out-edges are on several"),
        (lambda g: g.apply_edges(lambda edges: {}, torch.tensor([1])), "some edges of the graph"),
        (
            lambda g: g.ndata.update(a=torch.zeros(NODES + 1)),
            "sets 'a' with 31 rows; the part has 30 nodes",
        ),
    ],
)
def test_what_a_shard_has_not_is_one_sentence(use: Any, message: str, graph: ShardGraph) -> None:
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        use(graph)
    assert caught.value.hint


def test_asking_whether_it_has_something_is_no_error(graph: ShardGraph) -> None:
    assert not hasattr(graph, "batch_size") and hasattr(graph, "is_homogeneous")


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: dglnn.ChebConv(4, 4, 2), "eigenvalue of the whole graph's Laplacian"),
        (lambda: dglnn.PNAConv(4, 4, ["mean"], ["identity"], 1.0), "number of nodes of the whole graph"),
        (lambda: dglnn.SumPooling(), "it pools all nodes"),
        (lambda: dglnn.HeteroGraphConv({}), "dgl.nn.RelGraphConv takes edge types"),
    ],
)
def test_layers_that_would_not_be_exact_are_refused(layer: Any, why: str) -> None:
    module = nn.ModuleList([DglGraph(), layer()])
    with pytest.raises(ConfigError, match=why):
        SarStrategy().check_module(module)


def test_a_model_that_makes_its_own_graph_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"creates the graph .* itself\.\nHINT: .*gtrain.nn.DglGraph"):
        SarStrategy().check_module(nn.ModuleList([dglnn.SAGEConv(4, 4, "mean")]))


def test_dgl_is_left_as_it_was_found() -> None:
    places = [("dgl.ops.spmm", "gspmm_internal"), ("dgl.ops.sddmm", "gsddmm_internal")]
    places.append(("dgl.ops.edge_softmax", "edge_softmax_internal"))
    before = [getattr(sys.modules[module], name) for module, name in places]
    nets = [DglGAT(6, 8, 2, heads=2).double() for _ in range(2)]
    state, engines = set(nets[0].__dict__), [patcher(), patcher(2)]
    for engine, net in zip(engines, nets, strict=True):
        engine.install(net)
    assert all(getattr(sys.modules[m], name) is not kept for (m, name), kept in zip(places, before, strict=True))
    engines[0].uninstall()
    nets[1](X, EDGE_INDEX)  # the other is still served
    assert isinstance(nets[1].graph(EDGE_INDEX, NODES), ShardGraph)
    engines[1].uninstall()
    assert all(getattr(sys.modules[m], name) is kept for (m, name), kept in zip(places, before, strict=True))
    assert "forward" not in nets[0].graph.__dict__ and set(nets[0].__dict__) == state
    assert isinstance(nets[0].graph(EDGE_INDEX, NODES), dgl.DGLGraph)


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: dglnn.SAGEConv(6, 4, "mean"),
        lambda: dglnn.SAGEConv(6, 4, "pool"),
        lambda: dglnn.GATConv(6, 2, 2, allow_zero_in_degree=True),
        lambda: dglnn.GATv2Conv(6, 2, 2, allow_zero_in_degree=True),
        lambda: dglnn.EdgeConv(6, 4, allow_zero_in_degree=True),
        lambda: dglnn.GraphConv(6, 4, allow_zero_in_degree=True),
    ],
    ids=["mean", "pool", "gat", "gatv2", "edge", "graph"],
)
def test_a_part_without_edges(make: Any, mode: int) -> None:
    net = nn.ModuleDict({"graph": DglGraph(), "conv": make().double()})
    index, engine, x = EDGE_INDEX[:, :0].clone(), patcher(mode), X.clone().requires_grad_()
    expected = net["conv"](net["graph"](index, NODES), X)
    engine.install(net)
    out = net["conv"](net["graph"](index, NODES), x)
    out.sum().backward()
    engine.uninstall()
    torch.testing.assert_close(out, expected)


def test_a_mailbox_without_messages() -> None:
    """The result still hangs on the messages: the peers wait for their gradient."""
    engine, layer, x = patcher(), DglGraph(), X.clone().requires_grad_()
    engine.install(layer)
    empty = layer(EDGE_INDEX[:, :0].clone(), NODES)
    empty.ndata["x"] = x
    empty.update_all(fn.copy_u("x", "m"), lambda nodes: {"y": nodes.mailbox["m"].prod(1)[:, :2]})
    out = empty.ndata["y"]
    out.sum().backward()
    engine.uninstall()
    assert out.shape == (NODES, 2) and not out.any() and x.grad is not None and not x.grad.any()


# ------------------------------------------------------------------------------------------------- lazy values


def logits(graph: ShardGraph) -> torch.Tensor:
    graph.ndata["l"] = X[:, :2].unsqueeze(-1)
    graph.apply_edges(fn.u_add_v("l", "l", "e"))
    found: torch.Tensor = graph.edata["e"]
    return found


def test_values_of_edges_are_lazy_as_long_as_they_may_be_attention(graph: ShardGraph) -> None:
    e = logits(graph)
    steps = [
        nn.functional.leaky_relu(e, 0.2),
        e * torch.ones(2, 1, dtype=e.dtype),
        (2.0 * e).sum(dim=-1).unsqueeze(2),
        nn.functional.dropout(dglnn.functional.edge_softmax(graph, e), 0.5),
    ]
    for value in steps:
        assert isinstance(value, LazyEdgeValues) and value.shape == (EDGES, 2, 1) and value.value is None
    softmax = dglnn.functional.edge_softmax(graph, e)
    others = [
        e.exp(),
        e * torch.ones(EDGES, 1, 1, dtype=e.dtype),
        e.sum(0),
        softmax * 2,
        torch.cat([e, e]),
        e[3],
        e + e,
    ]
    assert not any(isinstance(value, LazyEdgeValues) for value in others)
    expected = X[EDGE_INDEX[0], :2] + X[EDGE_INDEX[1], :2]
    torch.testing.assert_close(e.exp().squeeze(-1), expected.exp())
    total = torch.zeros(NODES, 2, dtype=e.dtype).index_add(0, EDGE_INDEX[1], softmax.squeeze(-1) * 1)
    torch.testing.assert_close(total[EDGE_INDEX[1].unique()], total.new_ones(len(EDGE_INDEX[1].unique()), 2))
    with pytest.raises(NotImplementedError, match="lazy values of edges"), torch._C.DisableTorchFunctionSubclass():
        e.exp()


@pytest.mark.parametrize("conv", ["gat", "gatv2"])
def test_dropout_of_attention_keeps_what_it_should(conv: str) -> None:
    """Of equal rows the mean over many heads stays, and what is dropped is exactly 0: the rest has twice its weight."""
    heads = 400
    make = {"gat": dglnn.GATConv, "gatv2": dglnn.GATv2Conv}[conv]
    layer = make(6, 1, heads, attn_drop=0.5, allow_zero_in_degree=True).double()
    net = nn.ModuleDict({"graph": DglGraph(), "conv": layer})
    engine, same = patcher(), X[:1].expand(NODES, -1)
    engine.install(net)
    out = layer(net["graph"](EDGE_INDEX, NODES), same).squeeze(-1)
    plain = layer.eval()(net["graph"](EDGE_INDEX, NODES), same).squeeze(-1)
    engine.uninstall()
    degree = EDGE_INDEX[1].bincount(minlength=NODES)
    share = (out / plain)[degree == 2]  # of two edges with 1/2 each: 0, 1 or 2 times
    assert {round(float(value), 6) for value in share.flatten().detach()} == {0.0, 1.0, 2.0}
    assert abs(float(share.detach().mean()) - 1) < 0.1


class Caught(nn.Module):
    """Message functions that look like functions of one edge and are not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.graph, self.what, self.lin, self.norm = DglGraph(), what, nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, norm, lin = self.lin(x).mean(), self.norm, self.lin
        functions = {
            "all edges": lambda edges: {"m": edges.src["x"] - edges.src["x"].mean(0)},
            "batch norm": lambda edges: {"m": norm(edges.src["x"])},
            "computed before": lambda edges: {"m": edges.src["x"] * scale},
            "plain": lambda edges: {"m": lin(edges.src["x"] * edges.dst["x"])},
        }
        graph = self.graph(EDGE_INDEX, NODES)
        with graph.local_scope():
            graph.ndata["x"] = x
            graph.update_all(functions[self.what], fn.sum("m", "y"))
            out: torch.Tensor = graph.ndata["y"]
        return out


@pytest.mark.parametrize("what", ["all edges", "batch norm", "computed before", "plain"])
def test_functions_of_more_than_one_edge_are_run_at_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Caught(what).double()
    reference = copy.deepcopy(net)
    ran: list[str] = []
    monkeypatch.setattr("gtrain_sar.dgl.edge_values.aggregate_by_blocks", _noted(ran, "gtrain_sar.dgl.edge_values"))
    a, b, engine = X.clone().requires_grad_(), X.clone().requires_grad_(), patcher()
    engine.install(net)
    out, expected = net(a), reference(b)
    (out**2).sum().backward()
    engine.uninstall()
    (expected**2).sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(a.grad, b.grad)
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert ran == (["blocks"] if what == "plain" else [])


def _noted(ran: list[str], module: str) -> Any:
    original = sys.modules[module].__dict__["aggregate_by_blocks"]

    def noted(*args: Any) -> Any:
        ran.append("blocks")
        return original(*args)

    return noted


def test_the_name_of_the_missing_model_is_said() -> None:
    assert load_dgl("model=dgl_sage") is dgl
