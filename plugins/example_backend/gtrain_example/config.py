"""Settings of the two strategies. Light: imports no torch, for the command reads it before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass

from gtrain.config import StrategyConfig
from gtrain.errors import ConfigError

SHARES = ("strided", "contiguous")


@dataclass
class ReplicatedConfig(StrategyConfig):
    """``strategy`` group of ``strategy=replicated``.

    Attributes:
        share: how the seeds are dealt out; ``strided``: rank r of w takes seeds r, r+w, ...; ``contiguous``: a range.
    """

    share: str = "strided"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share not in SHARES:
            raise ConfigError(
                f"strategy.share={self.share} was set; the ways to share are {', '.join(SHARES)}.",
                hint=f"set strategy.share={SHARES[0]}.",
            )


@dataclass
class SarAutoConfig(StrategyConfig):
    """``strategy`` group of ``strategy=sar_auto``.

    Attributes:
        halo_limit: the largest halo, in units of the part's own nodes, that is held at once (mode 3).
        prefetch: remote blocks in flight where mode 1 was chosen.
    """

    halo_limit: float = 1.0
    prefetch: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.halo_limit < 0:
            raise ConfigError(f"strategy.halo_limit={self.halo_limit} was set; it must be 0 or more.")
