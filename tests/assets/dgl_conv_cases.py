"""Convolutions as they come from DGL, each with the call that runs it; see dgl_conv_program.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import dgl.nn as dglnn
import torch
from dgl import function as fn
from sar_conv_cases import EDGE_WIDTH, KINDS, WIDTH, Case, View
from torch import Tensor, nn

from gtrain.model import dgl_networks
from gtrain.nn import DglGraph


class Around(nn.Module):
    """A convolution and what makes its graph.

    Args:
        conv: the convolution.
        run: calls it with a graph and what is left of the view.
        self_loops: see DglGraph.
    """

    def __init__(self, conv: nn.Module, run: Callable[[Any, Any, View], Any], self_loops: bool = False) -> None:
        super().__init__()
        self.conv, self.run, self.graph = conv, run, DglGraph(self_loops)

    def forward(self, view: View) -> Any:
        out = self.run(self.conv, self.graph(view.index, len(view.x)), view)
        return tuple(part.flatten(1) for part in out) if isinstance(out, tuple) else out.flatten(1)


def case(make: Callable[[], nn.Module], run: Any = None, leaves: tuple[str, ...] = ("x",), loops: bool = False) -> Case:
    run = run or (lambda conv, graph, view: conv(graph, view.x))
    return Case(lambda: Around(make(), run, loops), lambda net, view: net(view), leaves)


def weighted(conv: Any, graph: Any, view: View) -> Tensor:
    return conv(graph, view.x, edge_weight=view.weight)


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def typed(conv: Any, graph: Any, view: View) -> Tensor:
    return conv(graph, view.x, view.kind, view.weight.unsqueeze(1))


def of_edges(conv: Any, graph: Any, view: View) -> Any:
    return conv(graph, view.x, view.attr)


def of_all_ones(conv: Any, graph: Any, view: View) -> Tensor:
    return conv(graph, view.x, view.x.new_ones(graph.num_edges(), EDGE_WIDTH))[0]


def in_double_precision(conv: Any, graph: Any, view: View) -> Tensor:
    """For a convolution that makes tensors of the default type."""
    torch.set_default_dtype(torch.float64)
    try:
        return conv(graph, view.x)
    finally:
        torch.set_default_dtype(torch.float32)


class Own(nn.Module):
    """Functions in Python, builtin functions that no convolution uses, operators called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2 * WIDTH, 4)

    def message(self, edges: Any) -> dict[str, Tensor]:
        source, target, ids = edges.edges()
        assert len(source) == len(target) == len(ids) == len(edges)
        return {"m": self.lin(torch.cat([edges.src["h"], edges.dst["h"]], 1)) * edges.data["w"]}

    def forward(self, graph: Any, x: Tensor, weight: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"], graph.edata["w"] = x, weight.unsqueeze(1)
            graph.update_all(self.message, fn.mean("m", "a"))
            graph.update_all(fn.u_sub_v("h", "h", "m"), lambda nodes: {"b": nodes.mailbox["m"].square().mean(1)})
            graph.update_all(fn.u_add_e("h", "w", "m"), fn.min("m", "c"))
            graph.update_all(fn.u_div_e("h", "w", "m"), fn.sum("m", "d"), lambda nodes: {"d": nodes.data["d"] * 2})
            graph.apply_edges(lambda edges: {"z": edges.src["h"].sin() * edges.dst["h"]})
            e = dgl.ops.copy_e_sum(graph, graph.edata["z"]) + dgl.ops.copy_u_mean(graph, x)
            graph.ndata["o"] = graph.out_degrees().to(x).unsqueeze(1) * x
            f = dgl.ops.u_mul_e_sum(graph, x, dgl.nn.functional.edge_softmax(graph, weight.unsqueeze(1)))
            return torch.cat([*(graph.ndata[name] for name in "abcdo"), e, f], 1)


class LogitsUsedOtherwise(nn.Module):
    """The first steps of GAT, and then something else: what was put off has to be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 3)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["l"], graph.ndata["x"] = self.lin(x).unsqueeze(-1), x.view(-1, 3, 2)
            graph.apply_edges(fn.u_add_v("l", "l", "e"))
            logits = nn.functional.leaky_relu(graph.edata.pop("e"), 0.3)
            assert logits.shape == (graph.num_edges(), 3, 1) and logits.dtype == x.dtype
            graph.edata["a"] = dgl.nn.functional.edge_softmax(graph, logits) * 2 + logits.exp()
            graph.update_all(fn.u_mul_e("x", "a", "m"), fn.sum("m", "y"))
            return graph.ndata["y"]


def gat(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: dglnn.GATConv(WIDTH, 3, 2, allow_zero_in_degree=True, **settings)


def gatv2(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: dglnn.GATv2Conv(WIDTH, 3, 2, allow_zero_in_degree=True, **settings)


def rel(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: dglnn.RelGraphConv(WIDTH, settings.pop("out", 4), KINDS, **settings)


def attention(conv: Any, graph: Any, view: View) -> Any:
    return conv(graph, view.x, get_attention=True)


SAGE = {
    f"sage {aggr} {out}": case(lambda aggr=aggr, out=out: dglnn.SAGEConv(WIDTH, out, aggr))
    for aggr in ("mean", "gcn", "pool", "lstm")
    for out in (4, 9)
}
GRAPH = {
    f"graph {norm} {out}": case(lambda norm=norm, out=out: dglnn.GraphConv(WIDTH, out, norm, allow_zero_in_degree=True))
    for norm in ("both", "right", "left", "none")
    for out in (4, 9)
}
CASES: dict[str, Case] = {
    **SAGE,
    **GRAPH,
    "sage weighted": case(lambda: dglnn.SAGEConv(WIDTH, 4, "mean"), weighted, ("x", "weight")),
    "graph weighted": case(lambda: dglnn.GraphConv(WIDTH, 4, allow_zero_in_degree=True), weighted, ("x", "weight")),
    "gat": case(gat()),
    "gat residual": case(gat(residual=True)),
    "gat loops": case(lambda: dglnn.GATConv(WIDTH, 3, 2), loops=True),
    "gat weighted": case(gat(), weighted, ("x", "weight")),
    "gat attention": case(gat(), attention),
    "gatv2": case(gatv2()),
    "gatv2 shared": case(gatv2(share_weights=True)),
    "gatv2 attention": case(gatv2(), attention),
    "relations": case(rel(), typed, ("x", "weight")),
    "relations wide": case(rel(out=12), typed),
    "relations basis": case(rel(regularizer="basis", num_bases=2), typed),
    "relations blocks": case(rel(regularizer="bdd", num_bases=2, layer_norm=True), typed),
    "gin": case(lambda: dglnn.GINConv(mlp(WIDTH, 4), "sum", learn_eps=True)),
    "gin max": case(lambda: dglnn.GINConv(mlp(WIDTH, 4), "max")),
    "gin mean weighted": case(lambda: dglnn.GINConv(mlp(WIDTH, 4), "mean"), weighted, ("x", "weight")),
    "gine": case(lambda: dglnn.GINEConv(mlp(EDGE_WIDTH, 4)), lambda c, g, v: c(g, v.x[:, :3], v.attr), ("x", "attr")),
    "edge": case(lambda: dglnn.EdgeConv(WIDTH, 4, allow_zero_in_degree=True)),
    "edge batch norm": case(lambda: dglnn.EdgeConv(WIDTH, 4, batch_norm=True, allow_zero_in_degree=True)),
    "edge gat": case(
        lambda: dglnn.EdgeGATConv(WIDTH, EDGE_WIDTH, 4, 2, allow_zero_in_degree=True), of_edges, ("x", "attr")
    ),
    "egat": case(lambda: dglnn.EGATConv(WIDTH, EDGE_WIDTH, 3, 2, 2), of_all_ones, loops=True),
    "dot gat": case(lambda: dglnn.DotGatConv(WIDTH, 3, 2, allow_zero_in_degree=True)),
    "agnn": case(lambda: dglnn.AGNNConv(0.5, allow_zero_in_degree=True)),
    "nn mean": case(lambda: dglnn.NNConv(WIDTH, 4, mlp(EDGE_WIDTH, WIDTH * 4), "mean"), of_edges, ("x", "attr")),
    "gmm": case(lambda: dglnn.GMMConv(WIDTH, 4, EDGE_WIDTH, 2, allow_zero_in_degree=True), of_edges, ("x", "attr")),
    "gated": case(lambda: dglnn.GatedGraphConv(WIDTH, 8, 2, 1)),
    "tag": case(lambda: dglnn.TAGConv(WIDTH, 4, 2)),
    "sg": case(lambda: dglnn.SGConv(WIDTH, 4, 2, allow_zero_in_degree=True)),
    "appnp": case(lambda: dglnn.APPNPConv(3, 0.1), in_double_precision),
    "gcn2": case(lambda: dglnn.GCN2Conv(WIDTH, 1, allow_zero_in_degree=True), lambda c, g, v: c(g, v.x, v.x.sin())),
    "cf": case(lambda: dglnn.CFConv(WIDTH, EDGE_WIDTH, 5, 4), of_edges, ("x", "attr")),
    "egnn": case(lambda: dglnn.EGNNConv(WIDTH, 5, 4, EDGE_WIDTH), lambda c, g, v: c(g, v.x, v.place, v.attr)[0]),
    "hgt": case(
        lambda: dglnn.HGTConv(WIDTH, 3, 2, 2, KINDS, dropout=0), lambda c, g, v: c(g, v.x, v.node_kind, v.kind)
    ),
    "own functions": case(Own, lambda c, g, v: c(g, v.x, v.weight), ("x", "weight")),
    "logits used otherwise": case(LogitsUsedOtherwise),
}


def network(make: Callable[[], nn.Module], *names: str) -> Case:
    return Case(make, lambda net, view: net(view.x, view.index, *(getattr(view, name) for name in names)))


CASES |= {
    "dgl_sage": network(lambda: dgl_networks.DglSAGE(WIDTH, 8, 3, norm="batch"), "weight"),
    "dgl_gat": network(lambda: dgl_networks.DglGAT(WIDTH, 8, 3, heads=2, act="elu")),
    "dgl_gatv2": network(lambda: dgl_networks.DglGATv2(WIDTH, 8, 3, heads=2, norm="layer")),
    "dgl_rgcn": network(lambda: dgl_networks.DglRGCN(WIDTH, 8, 3, KINDS, num_bases=2), "kind"),
}
