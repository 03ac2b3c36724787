"""How the optimizers of built-in models are made."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn import Parameter

from gtrain.errors import ConfigError
from gtrain.model.module import optimizer_of
from gtrain.run.build import make, optional

CONFIGURED = optional({"_target_": "torch.optim.Adam", "lr": 0.02}, "model.optimizer")


def test_objects_do_not_travel_through_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra 1.4 refuses them there; it takes them as arguments."""
    given = []

    def instantiate(config: Any, *args: Any, **kwargs: Any) -> None:
        given.append((OmegaConf.to_container(OmegaConf.create(config)), args, kwargs.get("bags")))

    monkeypatch.setattr("hydra.utils.instantiate", instantiate)
    weight = Parameter(torch.ones(1))
    assert CONFIGURED is not None
    CONFIGURED([weight])
    make({"_target_": "a.b", "sizes": {"a": 1}, "bags": len}, "model")
    assert given == [
        ({"_target_": "torch.optim.Adam", "lr": 0.02}, ([weight],), None),
        ({"_target_": "a.b", "sizes": {"a": 1}}, (), len),
    ]


@pytest.mark.parametrize("chosen", [None, CONFIGURED, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)])
def test_adam_on_the_cpu_takes_its_step_in_one_kernel(chosen: Any) -> None:
    ways = [optimizer_of(chosen, [Parameter(torch.ones(3, dtype=torch.float64))]) for _ in range(2)]
    assert all(way.defaults["fused"] for way in ways)
    ways[1].param_groups[0]["fused"] = False
    for step in range(5):
        for way in ways:
            (parameter,) = way.param_groups[0]["params"]
            parameter.grad = torch.tensor([1.0, -2.0, 1e-3 * step], dtype=torch.float64)
            way.step()
    one, other = (way.param_groups[0]["params"][0] for way in ways)
    assert torch.allclose(one, other, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    "chosen",
    [
        partial(torch.optim.Adam, fused=False),
        partial(torch.optim.Adam, foreach=True),
        partial(torch.optim.RMSprop, lr=0.1),
        partial(torch.optim.Adam, foreach=False),
        partial(torch.optim.Adam, differentiable=True),
        optional({"_target_": "torch.optim.Adam", "fused": False}, "model.optimizer"),
    ],
)
def test_what_is_told_how_to_step_is_left_alone(chosen: Any) -> None:
    assert not optimizer_of(chosen, [Parameter(torch.ones(3))]).defaults.get("fused")


def test_parameters_that_the_kernel_does_not_take_are_left_alone() -> None:
    assert not optimizer_of(None, [Parameter(torch.ones(3, dtype=torch.bfloat16))]).defaults["fused"]


def test_a_model_that_is_too_large_says_how_large() -> None:
    with pytest.raises(ConfigError, match=r"not be created: one of its arrays has 1\.78 TiB, and this process may use"):
        make({"_target_": "torch.nn.Linear", "in_features": 700_000, "out_features": 700_000}, "model")
