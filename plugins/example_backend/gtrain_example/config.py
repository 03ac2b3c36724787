"""Settings of the two strategies. The command reads them before ranks start, so this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from gtrain.config import StrategyConfig
from gtrain.settings import setting


@dataclass
class ReplicatedConfig(StrategyConfig):
    """Settings of ``strategy=replicated``."""

    share: str = setting(
        "strided",
        "how seeds are assigned to ranks",
        words={"strided": "rank r of w takes seeds r, r+w, ...", "contiguous": "each rank takes a range"},
    )


@dataclass
class SarAutoConfig(StrategyConfig):
    """Settings of ``strategy=sar_auto``."""

    halo_limit: float = setting(
        1.0, "the largest halo for mode 3, which stores the halo at once", least=0, unit="times the part's own nodes"
    )
    prefetch: int = setting(1, "remote blocks in flight in mode 1", least=0, unit="blocks")
