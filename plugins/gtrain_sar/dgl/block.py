"""DGL's own graph from a part's nodes and their halo to the part's nodes."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import dgl
from torch import Tensor

from gtrain_sar.edges import EdgeBlocks
from gtrain_sar.halo import halo_rows


class DglBlocks:
    """What DGL's kernels run on where a convolution is not worked off block by block.

    Args:
        ends: int64 [2, E], in the shard's local ids.
        blocks: the same by the blocks of their sources.
    """

    def __init__(self, ends: Tensor, blocks: EdgeBlocks) -> None:
        self._ends, self._blocks = ends, blocks

    @cached_property
    def plain(self) -> Any:
        """The graph, its edges in the order of ``ends``."""
        return self._make(*self._ends)

    @cached_property
    def ordered(self) -> tuple[Any, Tensor]:
        """The graph, a target's edges ordered by the sources' ids in the source data, and each one's place in ``ends``.

        That is the order of one process. Functions of a mailbox depend on it (an LSTM), and so does the choice among
        messages that are the same maximum.
        """
        exchange, (source, target) = self._blocks.exchange, self._ends
        (ids,) = halo_rows([(exchange, exchange.orig_id.to(source.device))])
        order = ids[source].argsort(stable=True)
        order = order[target[order].argsort(stable=True)]
        return self._make(source[order], target[order]), order

    def _make(self, source: Tensor, target: Tensor) -> Any:
        shard = self._blocks.exchange.shard
        sizes = {"num_src_nodes": shard.num_local + shard.num_halo, "num_dst_nodes": self._blocks.num_targets}
        return dgl.create_block((source, target), **sizes)
