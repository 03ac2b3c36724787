"""Edges by the block of their source, in the orders that kernels walk them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gtrain.errors import ConfigError
from gtrain.nn.dropout import edge_ids
from gtrain_sar.halo import HaloExchange


class Compressed(NamedTuple):
    """Edges of one block, compressed by one of their ends; rows without edges are left out.

    Attributes:
        rows: int64 ``[m]``, distinct ids of that end, ascending.
        ptr: int64 ``[m + 1]``; row i has the edges ``ptr[i] .. ptr[i+1]-1``.
        columns: int32 ``[E_b]``, the other end.
        edges: int32 ``[E_b]``, positions in ``edge_index``, and so in tensors of one row an edge.
    """

    rows: Tensor
    ptr: Tensor
    columns: Tensor
    edges: Tensor

    def between(self, low: int, high: int) -> Compressed:
        """The edges of the rows from ``low`` to before ``high``."""
        i, j = torch.searchsorted(self.rows, self.rows.new_tensor([low, high])).tolist()
        first, last = self.ptr[i].item(), self.ptr[j].item()
        return Compressed(self.rows[i:j], self.ptr[i : j + 1] - first, self.columns[first:last], self.edges[first:last])


class EdgeBlock:
    """The edges whose sources one rank owns.

    Args:
        ids: ``[E_b]``, positions in ``edge_index``, ascending.
        sources: ``[E_b]``, rows of the block's source tensor.
        targets: ``[E_b]``, local ids.
        num_sources: rows of the block's source tensor.
        num_targets: own nodes.
    """

    def __init__(self, ids: Tensor, sources: Tensor, targets: Tensor, num_sources: int, num_targets: int) -> None:
        self._ids, self._sources, self._targets = ids.int(), sources.int(), targets.int()
        self.num_sources, self.num_targets = num_sources, num_targets

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Tensor:
        """int64 ``[E_b]``, positions in ``edge_index``."""
        return self._ids.long()

    @property
    def sources(self) -> Tensor:
        """int64 ``[E_b]``, rows of the block's source tensor."""
        return self._sources.long()

    @property
    def targets(self) -> Tensor:
        """int64 ``[E_b]``, local ids."""
        return self._targets.long()

    @cached_property
    def by_target(self) -> Compressed:
        """Rows are targets, columns sources."""
        return compress(self._targets, self._sources, self._ids, self.num_targets)

    @cached_property
    def by_source(self) -> Compressed:
        """Rows are sources, columns targets."""
        return compress(self._sources, self._targets, self._ids, self.num_sources)

    @cached_property
    def targets_by_source(self) -> Compressed:
        """As :attr:`by_source`, for who asks nothing of single edges: ``edges`` are the columns once more."""
        if "by_source" in self.__dict__:
            return self.by_source._replace(edges=self.by_source.columns)
        return compress(self._sources, self._targets, None, self.num_sources)

    @cached_property
    def target_of(self) -> Tensor:
        """int32 ``[E_b]``, the target of each edge in the order of :attr:`by_target`."""
        rows, ptr, columns, _ = self.by_target
        return self._targets if columns is self._sources else torch.repeat_interleave(rows.int(), ptr.diff())

    def with_ids(self, ids: Tensor) -> EdgeBlock:
        """The same edges with other ids than their positions."""
        return EdgeBlock(ids, self._sources, self._targets, self.num_sources, self.num_targets)


@dataclass
class EdgeBlocks:
    """All edges that point at a rank's nodes.

    Attributes:
        exchange: who owns the sources.
        blocks: one for each round, block 0 with local sources.
        num_targets: own nodes.
        num_edges: edges of ``edge_index``.
        in_degree: int64 ``[num_targets]``.
        targets: who owns the targets.
        extra: what strategies of aggregation keep with the edges, by name.
    """

    exchange: HaloExchange
    blocks: list[EdgeBlock]
    num_targets: int
    num_edges: int
    in_degree: Tensor
    targets: HaloExchange
    extra: dict[str, Any] = field(default_factory=dict)

    def divisor(self, like: Tensor) -> Tensor:
        """In-degrees, at least 1, shaped to divide [num_targets, ...]."""
        return self.in_degree.clamp(min=1).to(like.dtype).view(-1, *[1] * (like.dim() - 1))

    def inverse_degree(self, dtype: torch.dtype) -> Tensor:
        """One over the in-degree, or 1 where that is 0, [num_targets]; made once."""
        kept: dict[torch.dtype, Tensor] = self.extra.setdefault("inverse_degree", {})
        if dtype not in kept:
            with torch.inference_mode(False):  # autograd could not use it later
                kept[dtype] = 1 / self.in_degree.clamp(min=1).to(dtype)
        return kept[dtype]


def hashed(blocks: EdgeBlocks) -> list[EdgeBlock]:
    """The same blocks with a hash of its ends for the id of each edge, which masks of dropout are made from."""
    if "hashed" not in blocks.extra:
        ends = blocks.exchange.all_ids, blocks.targets.all_ids
        starts = blocks.exchange.shard.block_ptr.tolist()
        blocks.extra["hashed"] = [
            block.with_ids(edge_ids(torch.stack([block.sources + start, block.targets]), *ends))
            for start, block in zip(starts, blocks.blocks, strict=False)
        ]
    found: list[EdgeBlock] = blocks.extra["hashed"]
    return found


class BlockIndex:
    """:class:`EdgeBlocks` by ``edge_index``, remembered as long as that tensor lives.

    Args:
        exchange: the halo of the sources.
        num_targets: own nodes that edges point at.
        targets: the exchange of these nodes; None: ``exchange``.
    """

    def __init__(self, exchange: HaloExchange, num_targets: int, targets: HaloExchange | None = None) -> None:
        self.exchange, self.num_targets, self.targets = exchange, num_targets, targets or exchange
        self._known: Any = WeakIdKeyDictionary()

    def __call__(self, edge_index: Tensor) -> EdgeBlocks:
        """The blocks of ``edge_index`` [2, E], in the shard's local ids; convs may have added or removed edges."""
        if edge_index not in self._known:
            self._known[edge_index] = sort_edges(edge_index, self.exchange, self.num_targets, self.targets)
        blocks: EdgeBlocks = self._known[edge_index]
        return blocks


def sort_edges(
    edge_index: Tensor, exchange: HaloExchange, num_targets: int, targets: HaloExchange | None = None
) -> EdgeBlocks:
    """Group ``edge_index`` [2, E] by the blocks of its sources.

    Raises:
        ConfigError: an edge points at a node that is not the rank's own.
    """
    starts = exchange.shard.block_ptr.tolist()
    source, target = edge_index.contiguous()
    if edge_index.numel() and (int(source.max()) >= starts[-1] or int(target.max()) >= num_targets):
        raise ConfigError(
            "a convolution was given edges that point at nodes of other parts (turned around, perhaps); strategy=sar "
            "has the edges that point at a part's own nodes.",
            hint="add the reverse edges to the data, or set strategy=single.",
        )
    block = torch.bucketize(source, exchange.shard.block_ptr[1:-1].to(source.device), right=True)
    # an empty block repeats a boundary; right=True then skips it, as it should
    blocks = []
    for r in range(len(starts) - 1):
        ids = (block == r).nonzero().view(-1)
        blocks.append(EdgeBlock(ids, source[ids] - starts[r], target[ids], starts[r + 1] - starts[r], num_targets))
    in_degree = torch.bincount(target, minlength=num_targets)
    return EdgeBlocks(exchange, blocks, num_targets, edge_index.size(1), in_degree, targets or exchange)


def compress(rows: Tensor, columns: Tensor, edges: Tensor | None, num_rows: int) -> Compressed:
    """Group edges by row, in their order within a row; without ``edges``, the columns are in their place."""
    if rows.numel() > 1 and not bool((rows[1:] >= rows[:-1]).all()):
        rows, order = rows.sort(stable=True)
        columns, edges = columns[order], None if edges is None else edges[order]
    counts = torch.bincount(rows, minlength=num_rows)
    present = counts.nonzero().view(-1)
    ptr = torch.cat([counts.new_zeros(1), counts[present].cumsum(0)])
    columns = columns.to(torch.int32)
    return Compressed(present, ptr, columns, columns if edges is None else edges.to(torch.int32))
