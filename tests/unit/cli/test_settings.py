"""gtrain.settings: a dataclass field is the only declaration; strategies take it as a keyword."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

from gtrain import backends
from gtrain.config import StrategyConfig
from gtrain.errors import ConfigError
from gtrain.settings import Settings, changed, schema, setting
from gtrain_ps.strategy import PsStrategy
from gtrain_sar.strategy import SarStrategy


@dataclass
class Tank(Settings):
    group: ClassVar[str] = "tank"
    volume: float = setting(2.0, "how much it holds", above=0, unit="litres")
    share: float = setting(0.5, "how full it is", least=0, below=1)
    taps: int = setting(1, "taps", least=1, unit="taps")
    fluid: str | None = setting("water", "what is in it", words={"water": "drinkable", "oil": "not"})
    level: Any = setting(1, "floor", words=(1, 2, "roof"))
    seed: int = setting(0, "random numbers", follows="${seed}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"volume": 0.0}, r"tank.volume=0.0 was set; it must be above 0 litres.\nHINT: 2.0 is the default."),
        ({"volume": float("inf")}, "above 0 litres"),
        ({"volume": float("nan")}, "above 0 litres"),
        ({"share": 1.0}, "it must be at least 0 and below 1"),
        ({"share": -0.1}, "it must be at least 0 and below 1"),
        ({"taps": 0}, "tank.taps=0 was set; it must be 1 or more taps"),
        ({"fluid": "milk"}, r"tank.fluid=milk was set.\nHINT: choose water: drinkable; oil: not."),
        ({"level": 3}, r"tank.level=3 was set.\nHINT: choose one of 1, 2, roof."),
        ({"level": True}, "tank.level=True was set"),
    ],
)
def test_values_that_are_not_allowed_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tank(**values)


def test_null_and_words_as_text_pass() -> None:
    assert Tank(fluid=None, level="2").fluid is None


def test_a_composed_default_may_follow_another_setting() -> None:
    job = OmegaConf.create({"seed": 7})
    job.tank = schema(Tank)
    assert (Tank().seed, job.tank.seed, OmegaConf.get_type(job.tank)) == (0, 7, Tank)


def test_a_changed_default_keeps_the_declaration() -> None:
    @dataclass
    class Barrel(Tank):
        taps: int = changed(Tank, "taps", 3)

    assert Barrel().taps == 3
    with pytest.raises(ConfigError, match="it must be 1 or more taps"):
        Barrel(taps=0)


@pytest.mark.parametrize("name", ["single", "sar", "pyg", "ps", "pbg"])
def test_a_strategy_shows_its_settings_as_parameters(name: str) -> None:
    backend = backends.get(name)
    shown = dict(inspect.signature(backend.load_strategy()).parameters)
    assert shown.pop("lightning").kind is inspect.Parameter.VAR_KEYWORD
    fields = dataclasses.fields(backend.load_config())
    declared = {field.name: field.default for field in fields if field.name != "name"}
    assert {key: parameter.default for key, parameter in shown.items()} == declared


def test_every_setting_of_a_strategy_has_a_meaning() -> None:
    for name, backend in backends.usable().items():
        lacking = [f.name for f in dataclasses.fields(backend.load_config()) if not f.metadata.get("help")]
        assert lacking == [], name


def test_settings_come_by_position_or_by_name() -> None:
    assert SarStrategy(3, 2).schedule == SarStrategy(mode=3, prefetch=2).schedule
    assert PsStrategy(4, split="grid", timeout_seconds=9.0).settings.servers == 4


def test_unknown_keywords_are_answered_with_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"(?s)PsStrategy\(server=3\).*did you mean servers\?.*staleness"):
        PsStrategy(server=3)


def test_a_strategy_with_a_constructor_of_its_own_works_as_before() -> None:
    class Mine(SarStrategy):
        def __init__(self, limit: float = 1.0, **kwargs: Any) -> None:
            super().__init__(mode=2, **kwargs)
            self.limit = limit

    strategy = Mine(0.5, prefetch=4, dropout="torch")
    assert (strategy.limit, strategy.schedule.mode, strategy.schedule.prefetch, strategy.dropout) == (
        0.5,
        2,
        4,
        "torch",
    )
    assert list(inspect.signature(Mine).parameters) == ["limit", "kwargs"]
    assert isinstance(strategy.settings, StrategyConfig)
