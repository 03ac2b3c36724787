"""Settings of the two strategies. Light: imports no torch, for the command reads it before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass

from gtrain.config import StrategyConfig
from gtrain.settings import setting


@dataclass
class ReplicatedConfig(StrategyConfig):
    """Settings of ``strategy=replicated``."""

    share: str = setting(
        "strided",
        "how the seeds are dealt out",
        words={"strided": "rank r of w takes seeds r, r+w, ...", "contiguous": "each rank takes a range"},
    )


@dataclass
class SarAutoConfig(StrategyConfig):
    """Settings of ``strategy=sar_auto``."""

    halo_limit: float = setting(
        1.0, "the largest halo that is held at once (mode 3)", least=0, unit="times the part's own nodes"
    )
    prefetch: int = setting(1, "remote blocks in flight where mode 1 was chosen", least=0, unit="blocks")
