"""The configuration of a single run is composed once, and is that of Hydra's second composition."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from gtrain.cli.hydra_changes import ComposedOnce


class Loader:
    """Counts compositions; those of a run fail if it ``misses`` a group that a sweep would choose."""

    def __init__(self, misses: bool = False) -> None:
        self.composed: list[tuple[list[str], RunMode]] = []
        self.checked = 0
        self._misses = misses
        self.once = ComposedOnce(Loader.load, self._check).method()

    def load(self, *, config_name: str, overrides: list[str], run_mode: RunMode, **_: Any) -> DictConfig:
        if self._misses and run_mode == RunMode.RUN:
            raise ConfigCompositionException("missing")
        self.composed.append(([*overrides], run_mode))
        return OmegaConf.create({"hydra": {"mode": None, "overrides": {"hydra": []}}, "name": config_name})

    def validate_sweep_overrides_legal(self, *, overrides: Any, run_mode: RunMode, from_shell: bool) -> None:
        if run_mode == RunMode.RUN and any(override.is_sweep_override() for override in overrides):
            raise ConfigCompositionException("a sweep needs --multirun")

    def _check(self, _: DictConfig) -> None:
        self.checked += 1

    def see_mode(self, *overrides: str) -> DictConfig:
        arguments: dict[str, Any] = {"run_mode": RunMode.MULTIRUN, "validate_sweep_overrides": False}
        return self.once(self, config_name="config", overrides=[*overrides], **arguments)

    def compose(self, *overrides: str, mode: RunMode = RunMode.RUN, name: str = "config") -> DictConfig:
        return self.once(self, config_name=name, overrides=[*overrides], run_mode=mode)


def test_a_run_takes_the_configuration_that_showed_its_mode() -> None:
    loader = Loader()
    first = loader.see_mode("a=1")
    cfg = loader.compose("a=1", "hydra.mode=RUN")
    assert cfg is first and loader.composed == [(["a=1"], RunMode.RUN)] and loader.checked == 2
    assert cfg.hydra.mode == RunMode.RUN and cfg.hydra.overrides.hydra == ["hydra.mode=RUN"]
    assert loader.compose("a=1", "hydra.mode=RUN") is not first, "it is handed out once"


def test_everything_else_is_composed_again() -> None:
    for overrides, more in ((["a=2"], {}), (["a=1"], {"mode": RunMode.MULTIRUN}), (["a=1"], {"name": "other"})):
        loader = Loader()
        first = loader.see_mode("a=1")
        assert loader.compose(*overrides, **more) is not first and len(loader.composed) == 2


def test_a_sweep_without_multirun_is_refused_as_by_hydra() -> None:
    loader = Loader()
    loader.see_mode("a=1,2")
    with pytest.raises(ConfigCompositionException, match="a sweep needs --multirun"):
        loader.compose("a=1,2", "hydra.mode=RUN")


def test_what_a_sweep_alone_can_compose_is_left_to_hydra() -> None:
    loader = Loader(misses=True)
    loader.see_mode("a=1")
    assert loader.composed == [(["a=1"], RunMode.MULTIRUN)]
    with pytest.raises(ConfigCompositionException, match="missing"):
        loader.compose("a=1", "hydra.mode=RUN")
