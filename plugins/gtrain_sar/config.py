"""Settings of the sar strategy. Light: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from gtrain.config import StrategyConfig
from gtrain.errors import ConfigError

MODES = {
    1: "sequential aggregation, blocks fetched and computed again in the backward pass: least memory",
    2: "sequential aggregation, blocks kept for the backward pass",
    3: "one exchange of the whole halo, one aggregation",
}


def check(mode: int, prefetch: int) -> None:
    """Refuse values that mean nothing.

    Raises:
        ConfigError: lists what there is.
    """
    if mode not in MODES:
        options = "; ".join(f"{number}: {text}" for number, text in MODES.items())
        raise ConfigError(f"mode={mode} was set; strategy=sar has the modes 1, 2 and 3.", hint=options)
    if prefetch < 0:
        raise ConfigError(
            f"strategy.prefetch={prefetch} was set; it must be 0 or more blocks.",
            hint="1 overlaps best at least memory.",
        )


@dataclass
class SarConfig(StrategyConfig):
    """``strategy`` group of ``strategy=sar``.

    Attributes:
        mode: see :data:`MODES`.
        prefetch: remote blocks that may be in flight beside the one being computed, in modes 1 and 2.
    """

    mode: int = 1
    prefetch: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.mode, self.prefetch)
