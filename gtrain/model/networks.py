"""The built-in networks: PyG's models with common names of settings, and connections around their convolutions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.models import GAT, GCN, GIN, MLP, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN

from gtrain.errors import ConfigError
from gtrain.model.skip import add_connections

_NORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "batch": ("BatchNorm", {}),
    # PyG's default mode normalises over all nodes of the graph at once.
    "layer": ("LayerNorm", {"mode": "node"}),
}
_JK = ("last", "cat", "max", "lstm")
_WITHOUT_SELF: dict[type[nn.Module], dict[str, Any]] = {
    GCN: {"add_self_loops": False},
    GAT: {"add_self_loops": False},
    GIN: {"eps": -1.0},  # GIN adds (1 + eps) x to the sum of the neighbours.
}
"""Settings by which convolutions that mix a node's own row with its neighbours' read the neighbours only."""


class NodeMLP(nn.Module):
    """A multi-layer perceptron over node features; edges are ignored (``torch_geometric.nn.MLP``)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.mlp = MLP(**kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores [N, out_channels] of features [N, in_channels]."""
        scores: Tensor = self.mlp(x)
        return scores


def _build(
    model: type[BasicGNN],
    input_dropout: float,
    norm: str | None,
    residual: bool = False,
    ego: bool = False,
    jk: str | None = None,
    **settings: Any,
) -> nn.Module:
    heads, hidden = settings.get("heads", 1), settings["hidden_channels"]
    settings["dropout"] = float(settings.get("dropout", 0.0))
    if model is GAT and settings.get("concat", True) and hidden % heads:
        raise indivisible(hidden, heads)
    name, norm_kwargs = norm_settings(norm)
    if jk is not None and jk not in _JK:
        raise ConfigError(
            f"model.jk={jk} was set.", hint=f"the kinds of jumping knowledge are {', '.join(_JK)}; or null."
        )
    for key, value in (("residual", residual), ("ego", ego)):
        if not isinstance(value, bool):
            raise ConfigError(f"model.{key}={value} was set.", hint="choose true or false.")
    if ego and model not in _WITHOUT_SELF:
        raise ConfigError(
            f"model.ego=true was set, and {model.__name__} always keeps a node and its neighbours apart.",
            hint="remove model.ego.",
        )
    if ego:
        settings = {**_WITHOUT_SELF[model], **settings}
    network = model(norm=name, norm_kwargs=norm_kwargs, jk=jk, **settings)
    if residual or ego:
        add_connections(network, residual=residual, ego=ego)
    if input_dropout:
        network.register_forward_pre_hook(partial(_drop_inputs, p=input_dropout), with_kwargs=True)
    return network


def indivisible(hidden_channels: int, heads: int) -> ConfigError:
    """Return the error for a width that is not a multiple of the number of heads."""
    return ConfigError(
        f"model.hidden_channels={hidden_channels} cannot be divided among model.heads={heads}: "
        f"{hidden_channels} / {heads} = {hidden_channels / heads:g}.",
        hint="choose hidden_channels as a multiple of heads.",
    )


def _drop_inputs(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], p: float) -> tuple[Any, Any]:
    """Apply dropout to input features, as the GCN and GAT papers do; a hook leaves PyG's class unmodified."""
    return args, {**kwargs, "x": F.dropout(kwargs["x"], p, network.training)}


def norm_settings(norm: str | None) -> tuple[str | None, dict[str, Any]]:
    """Return PyG's ``norm`` and ``norm_kwargs`` for batch, layer or none.

    Raises:
        ConfigError: the norm is unknown.
    """
    if norm is None or norm == "none":
        return None, {}
    if norm not in _NORMS:
        raise ConfigError(f"model.norm={norm} was set.", hint=f"the norms are {', '.join([*_NORMS, 'none'])}.")
    return _NORMS[norm]


def gcn(*, input_dropout: float = 0.0, norm: str | None = None, **settings: Any) -> nn.Module:
    """Graph convolutional network (Kipf and Welling 2017): ``torch_geometric.nn.GCN``."""
    return _build(GCN, input_dropout, norm, **settings)


def sage(*, input_dropout: float = 0.0, norm: str | None = None, **settings: Any) -> nn.Module:
    """GraphSAGE (Hamilton et al. 2017): ``torch_geometric.nn.GraphSAGE``; ``aggr`` is mean, max or sum."""
    return _build(GraphSAGE, input_dropout, norm, **settings)


def gat(*, input_dropout: float = 0.0, norm: str | None = None, **settings: Any) -> nn.Module:
    """Graph attention network (Velickovic et al. 2018): ``torch_geometric.nn.GAT``."""
    return _build(GAT, input_dropout, norm, **settings)


def gin(*, input_dropout: float = 0.0, norm: str | None = None, **settings: Any) -> nn.Module:
    """Graph isomorphism network (Xu et al. 2019): ``torch_geometric.nn.GIN``."""
    return _build(GIN, input_dropout, norm, **settings)


def mlp(*, norm: str | None = None, **settings: Any) -> nn.Module:
    """Multi-layer perceptron without edges: the baseline for the gain of using the graph."""
    name, norm_kwargs = norm_settings(norm)
    # PyG's MLP reads an integer as a list.
    settings["dropout"] = float(settings.get("dropout", 0.0))
    return NodeMLP(norm=name, norm_kwargs=norm_kwargs, **settings)
