"""Settings of the sar strategy. Light: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gtrain.config import StrategyConfig
from gtrain.errors import ConfigError

MODES = {
    1: "sequential aggregation, blocks fetched and computed again in the backward pass: least memory",
    2: "sequential aggregation, blocks kept for the backward pass",
    3: "one exchange of the whole halo, one aggregation",
}
CACHE = {
    "auto": "what is made of constant inputs is kept where it takes no more room than the inputs themselves",
    "true": "halo rows of constant inputs are kept as well",
    "false": "nothing is kept between epochs",
}
WIRE_DTYPES = {"float32": "exact", "bfloat16": "half the bytes, not exact"}


@dataclass(frozen=True)
class Schedule:
    """How blocks are worked off.

    Attributes:
        mode: see :data:`MODES`.
        prefetch: remote blocks in flight beside the one being computed, in mode 1.
        cache_inputs: see :data:`CACHE`.
    """

    mode: int = 1
    prefetch: int = 1
    cache_inputs: str = "auto"

    @property
    def window(self) -> int | None:
        """Remote blocks that may be in flight beside the current one; None: all of them."""
        return self.prefetch if self.mode == 1 else None


def check(mode: int, prefetch: int, cache_inputs: Any = "auto", wire_dtype: str = "float32") -> None:
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
    _check_word("cache_inputs", cache_word(cache_inputs), CACHE)
    _check_word("wire_dtype", wire_dtype, WIRE_DTYPES)


def cache_word(value: Any) -> str:
    """``cache_inputs`` as a word: YAML reads true and false as booleans."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_word(name: str, value: str, options: dict[str, str]) -> None:
    if value not in options:
        listed = "; ".join(f"{word}: {text}" for word, text in options.items())
        raise ConfigError(f"strategy.{name}={value} was set.", hint=listed)


@dataclass
class SarConfig(StrategyConfig):
    """``strategy`` group of ``strategy=sar``.

    Attributes:
        mode: see :data:`MODES`.
        prefetch: remote blocks that may be in flight beside the one being computed, in mode 1.
        cache_inputs: what is kept of inputs that never change; see :data:`CACHE`.
        wire_dtype: type in which rows and their gradients travel; see :data:`WIRE_DTYPES`.
    """

    mode: int = 1
    prefetch: int = 1
    cache_inputs: Any = "auto"
    wire_dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.mode, self.prefetch, self.cache_inputs, self.wire_dtype)
