"""A strategy that extends another backend's: ``sar``, with a mode that depends on the graph."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, ClassVar

from gtrain.graph.shard import GraphShard
from gtrain.graph.shard.graph import HeteroShard
from gtrain.graph.store import Store
from gtrain_sar.strategy import SarStrategy

log = logging.getLogger("gtrain")


class SarAutoStrategy(SarStrategy):
    """Mode 3 (one exchange, fastest) if the halo fits into memory at once, otherwise mode 1 (least memory).

    Args:
        halo_limit: the largest halo, in units of the part's own nodes, for mode 3.
        prefetch: remote blocks in flight in mode 1.
        kwargs: passed on to :class:`gtrain_sar.strategy.SarStrategy`.
    """

    strategy_name: ClassVar[str] = "sar_auto"

    def __init__(self, halo_limit: float = 1.0, prefetch: int = 1, **kwargs: Any) -> None:
        super().__init__(mode=1, prefetch=prefetch, **kwargs)
        self.halo_limit = halo_limit

    def open_shard(self, store: Store) -> GraphShard | HeteroShard:
        # all ranks read the same manifest, so that they choose the same mode without communication
        report = store.manifest.partition
        ratio = max(halo / nodes for halo, nodes in zip(report.halo, report.nodes, strict=True))
        self.schedule = replace(self.schedule, mode=3 if ratio <= self.halo_limit else 1)
        if self.is_global_zero:
            log.info("sar_auto: the largest halo is %.2f of its part; using mode %d", ratio, self.schedule.mode)
        return super().open_shard(store)
