"""gtrain_pyg.config: mistakes are answered, and defaults follow the model."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import REPO
from omegaconf import OmegaConf

from gtrain import config as gtrain_config
from gtrain.errors import ConfigError
from gtrain_pyg.config import PygConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"halo_hops": 3}, "strategy.halo_hops=3 was set.*choose 0: .*; 1: .*; 2: .*; all: "),
        ({"halo_hops": "every"}, "strategy.halo_hops=every was set"),
        ({"halo_hops": True}, "strategy.halo_hops=True was set"),
        ({"seeds": "own"}, "strategy.seeds=own was set.*choose local: .*; global: "),
        ({"transport": "udp"}, "strategy.transport=udp was set.*choose auto: .*; shm: .*; tcp: "),
        ({"wire_dtype": "float64"}, "strategy.wire_dtype=float64 was set"),
        ({"evaluation": "none"}, "strategy.evaluation=none was set"),
        ({"cache_bytes": -1}, "strategy.cache_bytes=-1 was set; it must be 0 or more bytes"),
        ({"prefetch": -1}, "strategy.prefetch=-1 was set; it must be 0 or more batches"),
        ({"lookahead": 0}, "strategy.lookahead=0 was set; it must be 1 or more batches"),
        ({"threads": 0}, "strategy.threads=0 was set; it must be 1 or more threads"),
        ({"request_seconds": 0.0}, "strategy.request_seconds=0.0 was set; it must be above 0"),
        ({"request_seconds": float("nan")}, "strategy.request_seconds=nan was set"),
        ({"timeout_seconds": 0.0}, "strategy.timeout_seconds=0.0 was set"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message):
        PygConfig(name="pyg", **settings)


def test_halo_hops_as_a_number() -> None:
    assert [PygConfig(name="pyg", halo_hops=value).hops for value in (0, "1", 2, "all")] == [0, 1, 2, None]


def test_as_many_fan_outs_as_layers_by_default() -> None:
    gtrain_config.register()
    lists = []
    for layers in (1, 2, 4, "many"):
        cfg = OmegaConf.create({"n": layers, "fan_out": "${gtrain.fan_out:${n}}"})
        lists.append(OmegaConf.to_container(cfg, resolve=True)["fan_out"])
    assert lists == [[15], [15, 10], [15, 10, 5, 5], [15, 10]]
    assert "${gtrain.fan_out:" in (REPO / "plugins/gtrain_pyg/conf/strategy/pyg.yaml").read_text()
