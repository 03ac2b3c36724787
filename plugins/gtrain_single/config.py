"""Settings of the single strategy. Light: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from gtrain.config import LAYERS, StrategyConfig
from gtrain.settings import setting


@dataclass
class SingleConfig(StrategyConfig):
    """Settings of ``strategy=single``."""

    layers: str = setting("auto", "how convolutions of PyG run", words=LAYERS)
