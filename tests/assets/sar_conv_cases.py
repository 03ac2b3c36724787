"""Convolutions as they come from PyG, each with the call that runs it; see sar_conv_program.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sar_own_convs as own
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

WIDTH, EDGE_WIDTH, KINDS = 6, 3, 4


@dataclass
class View:
    """What a convolution is given: the whole graph, or a rank's shard of it.

    Attributes:
        x: float64 [n, WIDTH], the own nodes.
        index: int64 [2, E].
        weight: float64 [E], positive.
        attr: float64 [E, EDGE_WIDTH].
        kind: int64 [E], 0 .. KINDS-1.
        node_kind: int64 [n], 0 or 1.
        place: float64 [n, 3].
    """

    x: Tensor
    index: Tensor
    weight: Tensor
    attr: Tensor
    kind: Tensor
    node_kind: Tensor
    place: Tensor


Call = Callable[[Any, View], Any]


@dataclass
class Case:
    """One convolution.

    Attributes:
        make: makes it; called after the seed was set.
        call: runs it and returns node rows, or node rows and edge rows.
        leaves: fields of the view whose gradient is compared.
    """

    make: Callable[[], nn.Module]
    call: Call
    leaves: tuple[str, ...] = ("x",)


def plain(conv: Any, g: View) -> Any:
    return conv(g.x, g.index)


def weighted(conv: Any, g: View) -> Any:
    return conv(g.x, g.index, g.weight)


def attributed(conv: Any, g: View) -> Any:
    return conv(g.x, g.index, g.attr)


def related(conv: Any, g: View) -> Any:
    return conv(g.x, g.index, g.kind)


def in_steps(call: Call) -> Call:
    """Two steps with other parameters; what is kept of the first one's inputs must not show in the second."""

    def twice(conv: Any, g: View) -> Any:
        call(conv, g)
        with torch.no_grad():
            for parameter in conv.parameters():
                parameter.mul_(1.25)
        return call(conv, g)

    return twice


def attention(conv: Any, g: View) -> Any:
    out, (_, alpha) = conv(g.x, g.index, return_attention_weights=True)
    return out, alpha


def edge_attention(conv: Any, g: View) -> Any:
    out, (_, alpha) = conv(g.x, g.index, g.attr, return_attention_weights=True)
    return out, alpha


class Similarity(pyg.MessagePassing):
    """Weighs messages by the similarity of their ends; the result of its LSTM depends on the order of edges."""

    def __init__(self) -> None:
        super().__init__(aggr=pyg.LSTMAggregation(6, 6))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, similarity=self.edge_updater(edge_index, x=x))

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.tanh((x_i * x_j).sum(1, keepdim=True))

    def message(self, x_j: Tensor, similarity: Tensor) -> Tensor:
        return similarity * x_j


def mlp(d_in: int, d_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_in, 5), nn.ReLU(), nn.Linear(5, d_out))


def stack(*layers: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(layers)


def in_turn(net: Any, g: View) -> Tensor:
    """Layers one after the other, an ELU in front of each convolution but the first."""
    x = g.x
    for i, layer in enumerate(net):
        x = layer(x if i == 0 else nn.functional.elu(x), g.index) if isinstance(layer, pyg.MessagePassing) else layer(x)
    return x


def checkpointed(net: Any, g: View) -> Tensor:
    x = g.x
    for layer in net:
        x = torch.utils.checkpoint.checkpoint(layer, x, g.index, use_reentrant=False)
    return x


def _gcn() -> dict[str, Case]:
    return {
        "gcn": Case(lambda: pyg.GCNConv(6, 4), plain),
        "gcn widening": Case(lambda: pyg.GCNConv(6, 9), plain),
        "gcn constant x": Case(lambda: pyg.GCNConv(6, 4), in_steps(plain), ()),
        "gcn weights": Case(lambda: pyg.GCNConv(6, 4), weighted),
        "gcn learned weights": Case(lambda: pyg.GCNConv(6, 4), weighted, ("x", "weight")),
        "gcn normalize=False": Case(lambda: pyg.GCNConv(6, 4, normalize=False), plain),
        "gcn normalize=False learned weights": Case(
            lambda: pyg.GCNConv(6, 4, normalize=False), weighted, ("x", "weight")
        ),
        "gcn cached": Case(lambda: pyg.GCNConv(6, 4, cached=True), weighted),
        "gcn improved": Case(lambda: pyg.GCNConv(6, 4, improved=True), plain),
        "gcn no loops": Case(lambda: pyg.GCNConv(6, 4, add_self_loops=False), weighted),
        "gcn max": Case(lambda: pyg.GCNConv(6, 4, aggr="max"), plain),
    }


def _sage() -> dict[str, Case]:
    cases = {f"sage {a}": Case(lambda a=a: pyg.SAGEConv(6, 4, aggr=a), plain) for a in ("mean", "sum", "max", "min")}
    cases |= {f"sage {a} widening": Case(lambda a=a: pyg.SAGEConv(6, 9, aggr=a), plain) for a in ("mean", "add", "max")}
    lstm = {"in_channels": 6, "out_channels": 6}
    cases["sage lstm, mean"] = Case(
        lambda: pyg.SAGEConv(6, 4, aggr=["mean", "lstm"], aggr_kwargs={"aggrs_kwargs": [{}, lstm]}), plain
    )
    for aggr in ("lstm", "std", "mul", "softmax", "powermean"):
        cases[f"sage {aggr}"] = Case(lambda a=aggr: pyg.SAGEConv(6, 4, aggr=a), plain)
    return cases | {
        "sage of equal width": Case(lambda: pyg.SAGEConv(6, 6), plain),
        "sage constant x": Case(lambda: pyg.SAGEConv(6, 4), in_steps(plain), ()),
        "sage several": Case(lambda: pyg.SAGEConv(6, 4, aggr=["mean", "max", "std"]), plain),
        "sage normalize": Case(lambda: pyg.SAGEConv(6, 4, normalize=True), plain),
        "sage project": Case(lambda: pyg.SAGEConv(6, 4, project=True), plain),
        "sage max project": Case(lambda: pyg.SAGEConv(6, 4, "max", project=True), plain),
        "sage no root": Case(lambda: pyg.SAGEConv(6, 4, root_weight=False), plain),
        "sage no bias": Case(lambda: pyg.SAGEConv(6, 4, bias=False), plain),
        "sage two inputs": Case(
            lambda: pyg.SAGEConv((6, 3), 4), lambda c, g: c((g.x, g.place), g.index), ("x", "place")
        ),
    }


def _gat() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, conv in (("gat", pyg.GATConv), ("gatv2", pyg.GATv2Conv)):
        cases |= {
            name: Case(lambda c=conv: c(6, 3, heads=2), plain),
            f"{name} constant x": Case(lambda c=conv: c(6, 3, heads=2), in_steps(plain), ()),
            f"{name} one head": Case(lambda c=conv: c(6, 4), plain),
            f"{name} mean of heads": Case(lambda c=conv: c(6, 3, heads=2, concat=False), plain),
            f"{name} no loops": Case(lambda c=conv: c(6, 3, heads=2, add_self_loops=False), plain),
            f"{name} edges": Case(lambda c=conv: c(6, 3, heads=2, edge_dim=3), attributed, ("x", "attr")),
            f"{name} edges no loops": Case(
                lambda c=conv: c(6, 3, heads=2, edge_dim=3, add_self_loops=False), attributed, ("x", "attr")
            ),
            f"{name} edges fill": Case(lambda c=conv: c(6, 3, heads=2, edge_dim=3, fill_value="max"), attributed),
            f"{name} residual": Case(lambda c=conv: c(6, 3, heads=2, residual=True), plain),
            f"{name} no bias": Case(lambda c=conv: c(6, 3, heads=2, bias=False), plain),
            f"{name} alpha": Case(lambda c=conv: c(6, 3, heads=2, add_self_loops=False), attention),
            f"{name} max": Case(lambda c=conv: c(6, 3, heads=2, aggr="max"), plain),
        }
    return cases | {
        "gat two inputs": Case(
            lambda: pyg.GATConv((6, 3), 4, heads=2, add_self_loops=False),
            lambda c, g: c((g.x, g.place), g.index),
            ("x", "place"),
        ),
        "gat edges alpha": Case(
            lambda: pyg.GATConv(6, 3, heads=2, edge_dim=3, add_self_loops=False), edge_attention, ("x", "attr")
        ),
        "gatv2 shared": Case(lambda: pyg.GATv2Conv(6, 3, heads=2, share_weights=True), plain),
        "transformer": Case(lambda: pyg.TransformerConv(6, 3, heads=2), plain),
        "transformer constant x": Case(lambda: pyg.TransformerConv(6, 3, heads=2), in_steps(plain), ()),
        "transformer edges": Case(lambda: pyg.TransformerConv(6, 3, heads=2, edge_dim=3), attributed, ("x", "attr")),
        "transformer beta": Case(lambda: pyg.TransformerConv(6, 3, heads=2, beta=True), plain),
        "transformer mean of heads": Case(
            lambda: pyg.TransformerConv(6, 3, heads=2, concat=False, edge_dim=3), attributed
        ),
        "transformer no root": Case(lambda: pyg.TransformerConv(6, 3, root_weight=False), plain),
        "transformer alpha": Case(
            lambda: pyg.TransformerConv(6, 3, heads=2, edge_dim=3), edge_attention, ("x", "attr")
        ),
    }


def _others_of_the_list() -> dict[str, Case]:
    table = {
        "gin": Case(lambda: pyg.GINConv(mlp(6, 4)), plain),
        "gin eps": Case(lambda: pyg.GINConv(mlp(6, 4), train_eps=True), plain),
        "gin max": Case(lambda: pyg.GINConv(mlp(6, 4), aggr="max"), plain),
        "gin constant x": Case(lambda: pyg.GINConv(mlp(6, 4)), in_steps(plain), ()),
        "gine": Case(lambda: pyg.GINEConv(mlp(6, 4), edge_dim=3, train_eps=True), attributed, ("x", "attr")),
        "gated": Case(lambda: pyg.ResGatedGraphConv(6, 4), plain),
        "gated edges": Case(lambda: pyg.ResGatedGraphConv(6, 4, edge_dim=3), attributed, ("x", "attr")),
        "gated no root": Case(lambda: pyg.ResGatedGraphConv(6, 4, root_weight=False), plain),
        "appnp": Case(lambda: pyg.APPNP(3, 0.1), plain),
        "appnp weights": Case(lambda: pyg.APPNP(3, 0.1, cached=True), weighted),
        "appnp no normalize": Case(lambda: pyg.APPNP(2, 0.1, normalize=False), weighted, ("x", "weight")),
        "sgc": Case(lambda: pyg.SGConv(6, 4, K=2), weighted),
        "sgc cached": Case(lambda: pyg.SGConv(6, 4, K=2, cached=True), in_steps(plain), ()),
    }
    for aggr in ("add", "mean", "max"):
        table[f"graph {aggr}"] = Case(lambda a=aggr: pyg.GraphConv(6, 4, aggr=a), weighted, ("x", "weight"))
        table[f"graph {aggr} plain"] = Case(lambda a=aggr: pyg.GraphConv(6, 9, aggr=a), plain)
        table[f"nn {aggr}"] = Case(lambda a=aggr: pyg.NNConv(6, 4, mlp(3, 24), aggr=a), attributed, ("x", "attr"))
    table["nn constant edges"] = Case(lambda: pyg.NNConv(6, 4, mlp(3, 24)), attributed, ())
    return table | _relational() | _several_aggregations()


def _relational() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, conv in (("rgcn", pyg.RGCNConv), ("fast rgcn", pyg.FastRGCNConv)):
        cases |= {
            name: Case(lambda c=conv: c(6, 4, KINDS), related),
            f"{name} bases": Case(lambda c=conv: c(6, 4, KINDS, num_bases=2), related),
            f"{name} blocks": Case(lambda c=conv: c(6, 4, KINDS, num_blocks=2), related),
            f"{name} sum": Case(lambda c=conv: c(6, 4, KINDS, aggr="add"), related),
            f"{name} no root": Case(lambda c=conv: c(6, 4, KINDS, root_weight=False), related),
        }
    return cases | {"rgcn max": Case(lambda: pyg.RGCNConv(6, 4, KINDS, aggr="max"), related)}


def _several_aggregations() -> dict[str, Case]:
    def pna(**kwargs: Any) -> nn.Module:
        scalers = ["identity", "amplification", "attenuation", "linear"]
        return pyg.PNAConv(6, 4, ["mean", "max", "min", "std", "sum"], scalers, torch.arange(1, 20), **kwargs)

    return {
        "pna": Case(pna, plain),
        "pna edges": Case(lambda: pna(edge_dim=3, towers=2, divide_input=True), attributed, ("x", "attr")),
        "pna train_norm": Case(lambda: pna(train_norm=True), plain),
        "gen softmax": Case(lambda: pyg.GENConv(6, 4, norm="layer"), plain),
        "gen softmax learned": Case(lambda: pyg.GENConv(6, 4, learn_t=True, norm="layer"), plain),
        "gen batch norm": Case(lambda: pyg.GENConv(6, 4), plain),
        "gen power": Case(lambda: pyg.GENConv(6, 4, "power", p=2.0, learn_p=True, norm="layer"), plain),
        "gen add": Case(lambda: pyg.GENConv(6, 4, "add", norm="layer"), plain),
        "gen edges": Case(
            lambda: pyg.GENConv(6, 4, edge_dim=3, msg_norm=True, learn_msg_scale=True), attributed, ("x", "attr")
        ),
    }


def _models() -> dict[str, Case]:
    def of(conv: Callable[[int, int], nn.Module], norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: stack(conv(6, 8), norm(8), conv(8, 4))

    convs: dict[str, Callable[[int, int], nn.Module]] = {
        "gcn": pyg.GCNConv,
        "sage": pyg.SAGEConv,
        "gat": lambda a, b: pyg.GATConv(a, b // 2, heads=2),
    }
    cases = {f"2 x {n}, batch norm": Case(of(c, nn.BatchNorm1d), in_turn) for n, c in convs.items()}
    cases |= {f"2 x {n}, PyG's batch norm": Case(of(c, pyg.BatchNorm), in_turn) for n, c in convs.items()}
    cases |= {f"2 x {n}, layer norm": Case(of(c, nn.LayerNorm), in_turn) for n, c in convs.items()}
    cases["3 x sage, one conv thrice"] = Case(lambda: stack(*[pyg.SAGEConv(6, 6)] * 3), in_turn)
    cases["2 x gat, checkpointed"] = Case(lambda: stack(pyg.GATConv(6, 6), pyg.GATConv(6, 4)), checkpointed)
    cases["2 x max, checkpointed"] = Case(lambda: stack(pyg.SAGEConv(6, 6, "max"), pyg.SAGEConv(6, 4)), checkpointed)
    cases["PyG's model GAT"] = Case(lambda: pyg.GAT(6, 8, 2, 4, norm="batch", jk="cat"), plain)
    return cases


def _convs_beyond() -> dict[str, Case]:
    """Convolutions that nobody promised: exact or refused."""
    return {
        "agnn": Case(lambda: pyg.AGNNConv(), plain),
        "arma": Case(lambda: pyg.ARMAConv(6, 4), plain),
        "arma stacks": Case(lambda: pyg.ARMAConv(6, 4, num_stacks=2, num_layers=2), weighted),
        "tag": Case(lambda: pyg.TAGConv(6, 4, K=2), weighted),
        "cheb": Case(lambda: pyg.ChebConv(6, 4, 2), plain),
        "le": Case(lambda: pyg.LEConv(6, 4), weighted, ("x", "weight")),
        "film": Case(lambda: pyg.FiLMConv(6, 4, num_relations=KINDS), related),
        "film one": Case(lambda: pyg.FiLMConv(6, 4), plain),
        "gated graph": Case(lambda: pyg.GatedGraphConv(7, 2), weighted, ("x", "weight")),
        "edge": Case(lambda: pyg.EdgeConv(mlp(12, 4)), plain),
        "edge sum": Case(lambda: pyg.EdgeConv(mlp(12, 4), aggr="sum"), plain),
        "edge batch norm": Case(
            lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)), aggr="sum"), plain
        ),
        "general": Case(lambda: pyg.GeneralConv(6, 4, in_edge_channels=3, heads=2), attributed, ("x", "attr")),
        "general attention": Case(lambda: pyg.GeneralConv(6, 4, heads=2, attention=True), plain),
        "general dot": Case(
            lambda: pyg.GeneralConv(6, 4, 3, heads=2, attention=True, attention_type="dot_product", directed_msg=False),
            attributed,
            ("x", "attr"),
        ),
        "mf": Case(lambda: pyg.MFConv(6, 4, max_degree=4), plain),
        "cg": Case(lambda: pyg.CGConv(6, 3), attributed, ("x", "attr")),
        "cg batch norm": Case(lambda: pyg.CGConv(6, 3, batch_norm=True, aggr="mean"), attributed),
        "feast": Case(lambda: pyg.FeaStConv(6, 4, heads=2), plain),
        "ssg": Case(lambda: pyg.SSGConv(6, 4, 0.1, K=2), weighted),
        "ssg cached": Case(lambda: pyg.SSGConv(6, 4, 0.1, K=2, cached=True), weighted, ()),
        "lg": Case(lambda: pyg.LGConv(), weighted),
        "dna": Case(
            lambda: pyg.DNAConv(6, heads=2, groups=2), lambda c, g: c(g.x.view(-1, 1, 6).repeat(1, 2, 1), g.index)
        ),
        "pdn": Case(lambda: pyg.PDNConv(6, 4, 3, 5), attributed, ("x", "attr")),
        "hypergraph": Case(lambda: pyg.HypergraphConv(6, 4), plain),
        "cluster gcn": Case(lambda: pyg.ClusterGCNConv(6, 4, diag_lambda=0.3), plain),
        "wl": Case(lambda: pyg.WLConv(), lambda c, g: (g.x, c(g.node_kind, g.index).double())[0] * 1.0),
        "wl continuous": Case(lambda: pyg.WLConvContinuous(), weighted, ("x", "weight")),
        "gcn2": Case(lambda: pyg.GCN2Conv(6, 0.1, 0.5, 1), lambda c, g: c(g.x, g.x.sin(), g.index, g.weight)),
        "fa": Case(lambda: pyg.FAConv(6), lambda c, g: c(g.x, g.x.sin(), g.index)),
        "fa no normalize": Case(
            lambda: pyg.FAConv(6, normalize=False), lambda c, g: c(g.x, g.x.sin(), g.index, g.weight)
        ),
        "fa alpha": Case(
            lambda: pyg.FAConv(6, add_self_loops=False),
            lambda c, g: (lambda o: (o[0], o[1][1]))(c(g.x, g.x.sin(), g.index, return_attention_weights=True)),
        ),
        "eg": Case(lambda: pyg.EGConv(6, 4, ["sum", "mean", "symnorm", "max", "std"], num_heads=2), plain),
        "mixhop": Case(lambda: pyg.MixHopConv(6, 4), weighted),
        "simple": Case(lambda: pyg.SimpleConv("mean", combine_root="self_loop"), weighted, ("x", "weight")),
        "simple cat": Case(lambda: pyg.SimpleConv(["sum", "max"], combine_root="cat"), plain),
        "signed": Case(
            lambda: pyg.SignedConv(6, 4, first_aggr=True),
            lambda c, g: c(g.x, g.index[:, g.kind < 2], g.index[:, g.kind >= 2]),
        ),
        "gmm": Case(lambda: pyg.GMMConv(6, 4, 3, 2), attributed, ("x", "attr")),
        "gmm separate": Case(lambda: pyg.GMMConv(6, 4, 3, 2, separate_gaussians=True), attributed, ("x", "attr")),
        "heat": Case(
            lambda: pyg.HEATConv(6, 4, 2, KINDS, 2, 3, 2, heads=2),
            lambda c, g: c(g.x, g.index, g.node_kind, g.kind, g.attr),
            ("x", "attr"),
        ),
        "rgat": Case(
            lambda: pyg.RGATConv(6, 4, KINDS, edge_dim=3, heads=2),
            lambda c, g: c(g.x, g.index, g.kind, g.attr),
            ("x", "attr"),
        ),
        "rgat within relation": Case(
            lambda: pyg.RGATConv(6, 4, KINDS, mod="f-additive", attention_mechanism="within-relation"), related
        ),
        "rgat f-scaled blocks": Case(lambda: pyg.RGATConv(6, 4, KINDS, mod="f-scaled", num_blocks=2), related),
        "rgat alpha": Case(
            lambda: pyg.RGATConv(6, 4, KINDS, heads=2),
            lambda c, g: (lambda o: (o[0], o[1][1]))(c(g.x, g.index, g.kind, return_attention_weights=True)),
        ),
        "supergat": Case(lambda: pyg.SuperGATConv(6, 3, heads=2), plain),
        "supergat eval": Case(lambda: pyg.SuperGATConv(6, 3, heads=2).eval(), plain),
        "point net": Case(
            lambda: pyg.PointNetConv(mlp(9, 4), mlp(4, 4)), lambda c, g: c(g.x, g.place, g.index), ("x", "place")
        ),
        "point transformer": Case(
            lambda: pyg.PointTransformerConv(6, 4), lambda c, g: c(g.x, g.place, g.index), ("x", "place")
        ),
        "point gnn": Case(
            lambda: pyg.PointGNNConv(mlp(6, 3), mlp(9, 4), mlp(4, 6)),
            lambda c, g: c(g.x, g.place, g.index),
            ("x", "place"),
        ),
        "ppf": Case(
            lambda: pyg.PPFConv(mlp(10, 4), mlp(4, 4), add_self_loops=False),
            lambda c, g: c(g.x, g.place, g.place.cos(), g.index),
        ),
        "anti-symmetric": Case(lambda: pyg.AntiSymmetricConv(6, num_iters=2), plain),
        "dir gnn": Case(lambda: pyg.DirGNNConv(pyg.SAGEConv(6, 4)), plain),
        "gps": Case(lambda: pyg.GPSConv(6, pyg.GINConv(mlp(6, 6)), norm=None), plain),
        "gps batch norm": Case(lambda: pyg.GPSConv(6, None), plain),
        "linkx": Case(lambda: pyg.LINKX(70, 6, 8, 4, 1), plain),
        "label propagation": Case(
            lambda: stack(pyg.LabelPropagation(2, 0.5), nn.Linear(6, 4)),
            lambda c, g: c[1](c[0](g.x.abs().detach(), g.index, edge_weight=g.weight)),
        ),
        "pmlp": Case(lambda: pyg.PMLP(6, 8, 4, 2, norm=False).eval(), plain),
        "pmlp norm": Case(lambda: pyg.PMLP(6, 8, 4, 2).eval(), plain),
        "attentive fp": Case(
            lambda: pyg.AttentiveFP(6, 8, 4, 3, 2, 2),
            lambda c, g: c(g.x, g.index, g.attr, torch.arange(len(g.x))),
            ("x", "attr"),
        ),
        "deep gcn layer": Case(
            lambda: stack(
                pyg.DeepGCNLayer(pyg.GENConv(6, 6, norm="layer"), nn.LayerNorm(6), nn.ReLU(), ckpt_grad=True)
            ),
            lambda c, g: c[0](g.x, g.index),
        ),
        "hetero batch norm": Case(
            lambda: stack(pyg.GCNConv(6, 4), pyg.HeteroBatchNorm(4, 2)),
            lambda c, g: c[1](c[0](g.x, g.index), g.node_kind),
        ),
        "hetero layer norm": Case(
            lambda: stack(pyg.GCNConv(6, 4), pyg.HeteroLayerNorm(4, 2)),
            lambda c, g: c[1](c[0](g.x, g.index), g.node_kind),
        ),
        "diff group norm": Case(lambda: stack(pyg.GCNConv(6, 4), pyg.DiffGroupNorm(4, 2)), in_turn),
        "instance norm": Case(lambda: stack(pyg.GCNConv(6, 4), pyg.InstanceNorm(4)), in_turn),
        "torch's instance norm": Case(lambda: stack(pyg.GCNConv(6, 4), nn.InstanceNorm1d(4)), in_turn),
        "gcn over stacked x": Case(
            lambda: pyg.GCNConv(6, 4), lambda c, g: c(torch.stack([g.x, g.x.sin()]), g.index).transpose(0, 1)
        ),
        "sage over stacked x": Case(
            lambda: pyg.SAGEConv(6, 4), lambda c, g: c(torch.stack([g.x, g.x.sin()]), g.index).transpose(0, 1)
        ),
        "sage set transformer": Case(lambda: pyg.SAGEConv(6, 4, aggr=pyg.SetTransformerAggregation(6)), plain),
        "similarity lstm": Case(Similarity, plain),
        "sage gru": Case(lambda: pyg.SAGEConv(6, 6, aggr=pyg.GRUAggregation(6, 6)), plain),
        "sage quantile": Case(lambda: pyg.SAGEConv(6, 4, aggr=pyg.QuantileAggregation(0.4)), plain),
        "sage attentional": Case(lambda: pyg.SAGEConv(6, 4, aggr=pyg.AttentionalAggregation(nn.Linear(6, 1))), plain),
        "sage mlp aggr": Case(lambda: pyg.SAGEConv(6, 6, aggr=pyg.MLPAggregation(6, 6, 40, num_layers=1)), plain),
        "sage softmax learned": Case(lambda: pyg.SAGEConv(6, 4, aggr=pyg.SoftmaxAggregation(1.0, learn=True)), plain),
        "sage variance preserving": Case(lambda: pyg.SAGEConv(6, 4, aggr=pyg.VariancePreservingAggregation()), plain),
        "sage lcm": Case(lambda: pyg.SAGEConv(6, 6, aggr=pyg.LCMAggregation(6, 6)), plain),
        "graph decomposed": Case(lambda: pyg.GCNConv(6, 4, decomposed_layers=2), plain),
        "performer": Case(lambda: pyg.GPSConv(6, None, norm=None, attn_type="performer"), plain),
        "polynormer": Case(
            lambda: pyg.Polynormer(
                6, 8, 4, local_layers=1, global_layers=1, in_dropout=0.0, dropout=0.0, global_dropout=0.0
            ),
            lambda c, g: c(g.x, g.index, g.node_kind * 0),
        ),
        "deep graph infomax": Case(
            lambda: pyg.DeepGraphInfomax(
                4, pyg.GCNConv(6, 4), lambda z, *a, **k: z.mean(0), lambda x, e: (x.flip(0), e)
            ),
            lambda c, g: c(g.x, g.index)[0] * c(g.x, g.index)[2],
        ),
    }


def _twice(net: Any, g: View) -> Tensor:
    """The second of two steps, between which a buffer changes."""
    net.factor = torch.ones_like(net.factor)
    net(g.x, g.index)
    net.factor = net.factor * 3
    return net(g.x, g.index)


def _in_place(call: Call) -> Call:
    """The second of two steps, between which the rows change in place."""

    def twice(net: Any, g: View) -> Any:
        call(net, g)
        g.x.mul_(1.5)
        return call(net, g)

    return twice


def _thawed(net: Any, g: View) -> Tensor:
    """The second of two steps; the parameters are frozen in the first."""
    net.requires_grad_(False)
    net(g.x, g.index, g.attr)
    net.requires_grad_(True)
    return net(g.x, g.index, g.attr)


def _without_edges_first(net: Any, g: View) -> Tensor:
    net(g.x, g.index)
    return net(g.x, g.index, g.attr)


def _bare(net: Any, g: View) -> Tensor:
    return net[0](g.x, g.index)


def _outside() -> nn.Module:
    net = stack(nn.Identity(), nn.Linear(6, 6))
    net[0] = own.Outside(lambda x: net[1](x))
    return net


def _users() -> dict[str, Case]:
    """Convolutions as users write them."""
    return {
        "own scaled": Case(lambda: own.Scaled(), plain),
        "own scaled weights": Case(lambda: own.Scaled(), weighted),
        "own scaled mean": Case(lambda: own.Scaled(aggr="mean"), weighted, ("x", "weight")),
        "own clamped": Case(lambda: own.Clamped(), plain),
        "own detached": Case(lambda: own.Detached(), plain),
        "own reversed": Case(lambda: own.Reversed(), plain),
        "own given": Case(lambda: own.Given(), plain),
        "own remembering": Case(lambda: own.Remembering(), plain),
        "own outside": Case(_outside, _bare),
        "own annealed": Case(lambda: own.Annealed(), _twice),
        "own updating": Case(lambda: own.Updating(), plain),
        "own two heads": Case(lambda: own.TwoHeads(), weighted, ("x", "weight")),
        "own two softmaxes": Case(lambda: own.TwoSoftmaxes(), plain),
        "own softmax squared": Case(lambda: own.SoftmaxSquared(), plain),
        "own softmax parameters": Case(lambda: own.SoftmaxOfScaledSource(), plain),
        "own softmax parameters, mean": Case(lambda: own.SoftmaxOfScaledSource(aggr="mean"), plain),
        "own softmax parameters, max": Case(lambda: own.SoftmaxOfScaledSource(aggr="max"), plain),
        "own aggregating": Case(lambda: own.Aggregating(), plain),
        "own counting": Case(lambda: own.Counting(), plain),
        "own of edges": Case(lambda: own.OfEdges(), attributed, ("x", "attr")),
        "own of edges, max": Case(lambda: own.OfEdges(aggr="max"), attributed, ("x", "attr")),
        "own of targets": Case(lambda: own.OfTargets(aggr="mean"), attributed, ("x", "attr")),
        "own of targets, max": Case(lambda: own.OfTargets(aggr="max"), attributed, ("x", "attr")),
        "own of nothing": Case(lambda: own.OfNothing(), plain),
        "gine in place": Case(lambda: pyg.GINEConv(mlp(6, 4), edge_dim=3), _in_place(attributed), ()),
        "sage in place": Case(lambda: pyg.SAGEConv(6, 4), _in_place(plain), ()),
        "nn thawed": Case(lambda: pyg.NNConv(6, 4, mlp(3, 24)), _thawed),
        "gen thawed": Case(lambda: pyg.GENConv(6, 4, "add", edge_dim=3, norm="layer"), _thawed),
        "gen edges second": Case(lambda: pyg.GENConv(6, 4, "add", edge_dim=3, norm="layer"), _without_edges_first),
        "gat edges second": Case(lambda: pyg.GATConv(6, 4, edge_dim=3), _without_edges_first),
    }


DROPPING: dict[str, Case] = {
    "gat": Case(lambda: pyg.GATConv(6, 3, heads=2, dropout=0.5), plain),
    "gat edges": Case(lambda: pyg.GATConv(6, 3, heads=2, dropout=0.5, edge_dim=3), attributed, ("x", "attr")),
    "gatv2": Case(lambda: pyg.GATv2Conv(6, 3, heads=2, dropout=0.5), plain),
    "transformer": Case(lambda: pyg.TransformerConv(6, 3, heads=2, dropout=0.5, edge_dim=3), attributed),
    "fa": Case(lambda: pyg.FAConv(6, dropout=0.5), lambda c, g: c(g.x, g.x.sin(), g.index)),
    "appnp": Case(lambda: pyg.APPNP(2, 0.1, dropout=0.5), plain),
    "own": Case(lambda: own.Dropped(0.5), plain),
    "own, rarely": Case(lambda: own.Dropped(0.01), plain),
    "own max": Case(lambda: own.Dropped(0.5, aggr="max"), lambda c, g: c(g.place.exp(), g.index), ("place",)),
    "nn": Case(
        lambda: pyg.NNConv(6, 4, nn.Sequential(nn.Linear(3, 24), nn.Dropout(0.5)), aggr="mean"),
        attributed,
        ("x", "attr"),
    ),
}

TRAFFIC: dict[str, tuple[Callable[[], nn.Module], Call, int, int]] = {
    "gcn 6 to 4": (lambda: pyg.GCNConv(6, 4), plain, 4, 4),
    "gcn 6 to 9": (lambda: pyg.GCNConv(6, 9), plain, 6, 6),
    "gcn weights": (lambda: pyg.GCNConv(6, 4), weighted, 4, 4),
    "sage 6 to 4": (lambda: pyg.SAGEConv(6, 4), plain, 4, 4),
    "sage 6 to 9": (lambda: pyg.SAGEConv(6, 9), plain, 6, 6),
    "gin": (lambda: pyg.GINConv(mlp(6, 4)), plain, 6, 6),
    "graph 6 to 4": (lambda: pyg.GraphConv(6, 4), weighted, 4, 4),
    "graph 6 to 9": (lambda: pyg.GraphConv(6, 9, aggr="mean"), plain, 6, 6),
    "gat": (lambda: pyg.GATConv(6, 3, heads=2), plain, 8, 8),
}
"""Numbers of a halo row that must cross the wire forward and back (GAT in mode 1 sends other rows back)."""

LISTED: dict[str, Case] = _gcn() | _sage() | _gat() | _others_of_the_list() | _models()
BEYOND: dict[str, Case] = _convs_beyond() | _users()
