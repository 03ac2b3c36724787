"""Settings of the sar strategy. Light: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gtrain.config import LAYERS, StrategyConfig
from gtrain.errors import ConfigError
from gtrain.settings import choices, setting

MODES = {
    1: "sequential aggregation; the backward pass fetches and computes blocks again: least memory",
    2: "sequential aggregation; blocks are kept for the backward pass",
    3: "one exchange of the whole halo, one aggregation",
}


@dataclass
class SarConfig(StrategyConfig):
    """Settings of ``strategy=sar``."""

    mode: int = setting(1, "how blocks are aggregated; on a command line set `mode`", words=MODES)
    prefetch: int = setting(
        1, "remote blocks in flight beside the one being computed, in mode 1", least=0, unit="blocks"
    )
    cache_inputs: Any = setting(
        "auto",
        "which results of inputs that never change are cached",
        type="str or bool",
        words={
            "auto": "aggregates of constant inputs, which take no more memory than the inputs",
            "true": "their halo rows as well",
            "false": "nothing",
        },
    )
    wire_dtype: str = setting(
        "float32",
        "dtype in which rows and their gradients travel",
        words={"float32": "exact", "bfloat16": "half the bytes, not exact"},
    )

    layers: str = setting(
        "auto",
        "how convolutions of PyG run over a rank's edges",
        words={**LAYERS, "plain": "all by PyG's own methods, block by block or after one exchange"},
    )

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode} was set; strategy=sar has the modes 1, 2 and 3.", hint=choices(MODES))
        super().__post_init__()
