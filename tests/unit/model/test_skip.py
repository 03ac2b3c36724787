"""Connections around convolutions, written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.model.networks import gat, gcn, gin, sage
from gtrain.nn.depth import hop_bounds

SIZES: dict[str, Any] = {"in_channels": 5, "hidden_channels": 8, "num_layers": 3, "out_channels": 3}
MAKERS = {"gcn": gcn, "sage": sage, "gat": gat, "gin": gin}


@pytest.fixture
def graph() -> tuple[Tensor, Tensor]:
    """Features [20, 5] and edges [2, 60] in both directions without self-loops."""
    torch.manual_seed(0)  # of the networks' weights
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(0, 20, (30,), generator=generator)
    target = (source + torch.randint(1, 20, (30,), generator=generator)) % 20
    edges = torch.stack([source, target])
    return torch.randn(20, 5, generator=generator), torch.cat([edges, edges.flip(0)], 1)


@pytest.mark.parametrize("name", MAKERS)
def test_a_residual_layer_adds_its_input_or_a_projection_of_it(name: str, graph: tuple[Tensor, Tensor]) -> None:
    x, edges = graph
    network = MAKERS[name](**SIZES, residual=True, act="relu").eval()
    first, second, third = network.convs
    h = (first.conv(x, edges) + x @ first.shortcut.weight.T).relu()
    h = (second.conv(h, edges) + h).relu()
    expected = third.conv(h, edges) + h @ third.shortcut.weight.T
    torch.testing.assert_close(network(x, edges), expected)
    assert hop_bounds(network) == (3, 3)


@pytest.mark.parametrize("name", ["gcn", "gat", "gin"])
def test_with_ego_only_own_weights_read_a_node_itself(name: str, graph: tuple[Tensor, Tensor]) -> None:
    x, edges = graph
    settings = SIZES | {"num_layers": 1, "act": "elu"}  # a ReLU may have no gradient at all
    network = MAKERS[name](**settings, ego=True).eval()
    (layer,) = network.convs
    x.requires_grad_()
    (own,) = torch.autograd.grad(network(x, edges)[7].sum(), x)
    torch.testing.assert_close(own[7], layer.ego.weight.sum(0))
    (mixed,) = torch.autograd.grad(MAKERS[name](**settings)(x, edges)[7].sum(), x)
    assert mixed[7].abs().max() > 1e-3
    neighbours = edges[0][edges[1] == 7].unique()
    assert own.abs().sum(1).nonzero().flatten().tolist() == sorted({7, *neighbours.tolist()})


@pytest.mark.parametrize(
    ("maker", "settings", "message"),
    [
        (sage, {"ego": True}, "ego=true was set, and GraphSAGE always keeps a node and its neighbours apart"),
        (gcn, {"ego": "yes"}, "ego=yes was set"),
        (gin, {"jk": "sum"}, "jk=sum was set.\nHINT: the kinds of jumping knowledge are last, cat, max, lstm; or null"),
    ],
)
def test_settings_that_a_network_cannot_take_are_refused(maker: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        maker(**SIZES, **settings)
