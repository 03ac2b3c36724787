"""Settings. Light: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from gtrain.config import StrategyConfig


@dataclass
class CountingConfig(StrategyConfig):
    """``strategy`` group of ``strategy=counting``.

    Attributes:
        servers: counters in the job.
        max_restarts: how often each of them is started again.
        worker_restarts: how often each worker is.
        steps: training batches of rank 0, 1, ... in each epoch; repeated from the front.
        die_at: rank, epoch and batch at which a worker kills itself in its first life; empty: none does.
    """

    servers: int = 1
    max_restarts: int = 0
    worker_restarts: int = 0
    steps: list[int] = field(default_factory=lambda: [2])
    die_at: list[int] = field(default_factory=list)
