"""Edges by the block of their source, in the orders in which kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gtrain.engine.constants import version_of
from gtrain.engine.halo import HaloExchange
from gtrain.engine.precision import sum_dtype
from gtrain.errors import ConfigError
from gtrain.kernels import ordering
from gtrain.nn.dropout import Mask, edge_ids

MOST_EDGES = 2**31 - 1
"""Edges that the layers of a rank may have: they are numbered in int32."""


class CompressedEdges(NamedTuple):
    """Edges of one block, compressed by one of their ends (CSR or CSC); rows without edges are left out on the CPU.

    Attributes:
        rows: int64 ``[m]``, distinct ids of that end, ascending.
        ptr: int64 ``[m + 1]``; row i has the edges ``ptr[i] .. ptr[i+1]-1``.
        columns: int32 ``[E_b]``, the other end.
        edges: int32 ``[E_b]``, positions in ``edge_index``, and so in tensors of one row per edge.
    """

    rows: Tensor
    ptr: Tensor
    columns: Tensor
    edges: Tensor

    def between(self, low: int, high: int) -> CompressedEdges:
        """Return the edges of the rows ``low .. high-1``."""
        i, j = torch.searchsorted(self.rows, self.rows.new_tensor([low, high])).tolist()
        first, last = self.ptr[i].item(), self.ptr[j].item()
        ptr = self.ptr[i : j + 1] - first
        return CompressedEdges(self.rows[i:j], ptr, self.columns[first:last], self.edges[first:last])


class EdgeBlock:
    """The edges whose sources one rank owns.

    Args:
        ids: ``[E_b]``, positions in ``edge_index``, ascending.
        sources: ``[E_b]``, rows of the block's source tensor.
        targets: ``[E_b]``, local ids.
        num_sources: rows of the block's source tensor.
        num_targets: nodes that the rank owns.
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
    def by_target(self) -> CompressedEdges:
        """Rows are targets, columns sources."""
        return compress(self._targets, self._sources, self._ids, self.num_targets)

    @cached_property
    def by_source(self) -> CompressedEdges:
        """Rows are sources, columns targets."""
        return compress(self._sources, self._targets, self._ids, self.num_sources)

    @cached_property
    def targets_by_source(self) -> CompressedEdges:
        """:attr:`by_source` for kernels that read nothing per edge: ``edges`` are the columns, which saves memory."""
        # Computed already: share its arrays instead of sorting again.
        if "by_source" in self.__dict__:
            return self.by_source._replace(edges=self.by_source.columns)
        return compress(self._sources, self._targets, None, self.num_sources)

    @cached_property
    def target_of(self) -> Tensor:
        """int32 ``[E_b]``, the target of each edge in the order of :attr:`by_target`."""
        rows, ptr, columns, _ = self.by_target
        if columns is self._sources:
            return self._targets
        return torch.repeat_interleave(rows.int(), ptr.diff(), output_size=len(columns))

    def select(self, positions: slice, ids: Tensor | None = None) -> EdgeBlock:
        """Return some of the edges, with other ids than their positions if ``ids`` are passed."""
        ends = self._sources[positions], self._targets[positions]
        return EdgeBlock(self._ids[positions] if ids is None else ids, *ends, self.num_sources, self.num_targets)


@dataclass
class EdgeBlocks:
    """All edges that point at a rank's nodes.

    Attributes:
        exchange: of the sources.
        blocks: one for each round, block 0 with local sources.
        num_targets: nodes that the rank owns.
        num_edges: edges of ``edge_index``.
        in_degree: int64 ``[num_targets]``.
        targets: the exchange of the targets' node type.
    """

    exchange: HaloExchange
    blocks: list[EdgeBlock]
    num_targets: int
    num_edges: int
    in_degree: Tensor
    targets: HaloExchange
    _derived: dict[Any, Any] = field(default_factory=dict)

    def derived(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return what ``compute`` derives from the edges; it is called once for each key."""
        if key not in self._derived:
            self._derived[key] = compute()
        return self._derived[key]

    def divisor(self, like: Tensor) -> Tensor:
        """Return the in-degrees, at least 1, shaped to divide ``like`` ``[num_targets, ...]``; at least float32."""
        return self.in_degree.clamp(min=1).to(sum_dtype(like.dtype)).view(-1, *[1] * (like.dim() - 1))

    def inverse_degree(self, dtype: torch.dtype) -> Tensor:
        """Return 1 over the in-degree, or 1 where that is 0, ``[num_targets]``."""
        # Autograd cannot use inference tensors later.
        with torch.inference_mode(False):
            return self.derived(dtype, lambda: 1 / self.in_degree.clamp(min=1).to(dtype))

    def for_dropout(self, mask: Mask) -> list[EdgeBlock]:
        """Return the blocks whose ids a mask of dropout is computed from."""
        # Once they exist, they serve calls without dropout as well: two orders of the same edges would take memory.
        return self.hashed if mask.p > 0 or "hashed" in self.__dict__ else self.blocks

    @cached_property
    def hashed(self) -> list[EdgeBlock]:
        """The same blocks with a hash of its ends as the id of each edge, from which dropout masks are computed."""
        device, starts = self.in_degree.device, self.exchange.shard.block_ptr.tolist()
        ids = self.exchange.all_ids.to(device), self.targets.all_ids.to(device)
        return [
            block.select(slice(None), edge_ids(torch.stack([block.sources + start, block.targets]), *ids))
            for start, block in zip(starts, self.blocks, strict=False)
        ]


class BlockSource(Protocol):
    """Gives a convolution's edges by blocks.

    Attributes:
        exchange: of the sources.
        num_targets: nodes that edges point at.
    """

    num_targets: int

    @property
    def exchange(self) -> HaloExchange: ...

    def __call__(self, edge_index: Tensor) -> EdgeBlocks:
        """Return the blocks of ``edge_index`` [2, E]."""

    def into_rows(self, edge_index: Tensor, rows: Tensor, num_rows: int) -> EdgeBlocks:
        """Return the blocks of edges that end at the rows [E], below ``num_rows``, in place of their targets."""


class EdgeBlockCache:
    """:class:`EdgeBlocks` by ``edge_index``, kept as long as that tensor lives and does not change in place.

    Args:
        exchange: the halo of the sources.
        num_targets: nodes of this rank that edges point at.
        targets: the exchange of these nodes; None: ``exchange``.
    """

    def __init__(self, exchange: HaloExchange, num_targets: int, targets: HaloExchange | None = None) -> None:
        self._exchange, self.num_targets, self.targets = exchange, num_targets, targets or exchange
        self._blocks: Any = WeakIdKeyDictionary()  # edge_index -> (its version, its blocks)

    @property
    def exchange(self) -> HaloExchange:
        """The halo of the sources."""
        return self._exchange

    @property
    def num_sources(self) -> int:
        """Nodes of this rank that edges start at: the rows that it passes to a convolution."""
        return self._exchange.shard.num_local

    def __call__(self, edge_index: Tensor) -> EdgeBlocks:
        """Return the blocks of ``edge_index`` [2, E], in local ids; convolutions may have added or removed edges."""
        # Blocks may derive results by an exchange, so ranks must replace them in the same call. They do: ranks run the
        # same operations, and one in place counts as a change even of a rank without edges.
        version, known = version_of(edge_index), self._blocks.get(edge_index)
        if known is None or known[0] != version:
            known = version, sort_edges(edge_index, self._exchange, self.num_targets, self.targets)
            self._blocks[edge_index] = known
        blocks: EdgeBlocks = known[1]
        return blocks

    def into_rows(self, edge_index: Tensor, rows: Tensor, num_rows: int) -> EdgeBlocks:
        """Return the blocks of edges that end at the rows [E], below ``num_rows``, in place of their targets."""
        check_ends(edge_index, self._exchange, self.num_targets)
        return sort_edges(torch.stack([edge_index[0], rows]), self._exchange, num_rows)


def check_count(edge_index: Tensor) -> None:
    """Refuse ``edge_index`` [2, E] with more than :data:`MOST_EDGES`.

    Raises:
        ConfigError: says how many there are.
    """
    if edge_index.size(1) > MOST_EDGES:
        raise ConfigError(
            f"a rank has {edge_index.size(1):,} edges; its layers may have at most {MOST_EDGES:,}.",
            hint="share the graph among more ranks, or sample neighbours; gtrain plan says which strategies can.",
        )


def sort_edges(
    edge_index: Tensor, exchange: HaloExchange, num_targets: int, targets: HaloExchange | None = None
) -> EdgeBlocks:
    """Group ``edge_index`` [2, E] by the blocks of its sources.

    Raises:
        ConfigError: an edge names a node that this rank does not have as its source or target, or there are too many.
    """
    check_ends(edge_index, exchange, num_targets)
    check_count(edge_index)
    starts = exchange.shard.block_ptr.tolist()
    source, target = edge_index.contiguous()
    # an empty block repeats a boundary; right=True skips it
    block = torch.bucketize(source, exchange.shard.block_ptr[1:-1].to(source.device), right=True)
    blocks = []
    for r, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        ids = (block == r).nonzero().view(-1)
        blocks.append(EdgeBlock(ids, source[ids] - start, target[ids], stop - start, num_targets))
    in_degree = count_of(target, num_targets)
    return EdgeBlocks(exchange, blocks, num_targets, edge_index.size(1), in_degree, targets or exchange)


def check_ends(edge_index: Tensor, exchange: HaloExchange, num_targets: int) -> None:
    """Raise ConfigError if an edge points at a node that another rank owns, or has a negative end."""
    source, target = edge_index
    # Compiled loops do not check what they read.
    if len(source) and int(edge_index.min()) < 0:
        raise ConfigError(
            f"a convolution was called with edges that name the node {int(edge_index.min())}.",
            hint="number the nodes of edge_index from 0, as the batch's edge_index does.",
        )
    if len(source) and (int(source.max()) >= int(exchange.shard.block_ptr[-1]) or int(target.max()) >= num_targets):
        raise ConfigError(
            "a convolution was called with edges that point at nodes of other parts (reversed edges, perhaps); "
            "a rank has only the edges that point at its part's nodes.",
            hint="add the reverse edges to the data, or set strategy=single.",
        )


def count_of(ids: Tensor, count: int) -> Tensor:
    """Return how often each of the numbers 0 .. count-1 occurs in ``ids``, int64 ``[count]``."""
    if ids.device.type == "cpu":
        return torch.bincount(ids, minlength=count)
    # bincount makes the host wait for a GPU.
    return torch.zeros(count, dtype=torch.int64, device=ids.device).index_add_(
        0, ids.long(), torch.ones_like(ids).long()
    )


def compress(rows: Tensor, columns: Tensor, edges: Tensor | None, num_rows: int) -> CompressedEdges:
    """Group edges by row, in their order within a row; without ``edges``, the result's ``edges`` are its columns.

    Args:
        rows: int32 or int64 ``[E]``, 0 .. num_rows-1, in any order.
        columns: int32 or int64 ``[E]``.
        edges: int32 ``[E]`` or None.
        num_rows: number of rows.
    """
    if rows.device.type == "cpu":
        return _compress_compiled(rows, columns, edges, num_rows)
    # On a GPU, all rows are listed: to leave out some, the host would have to wait for their number.
    rows, order = rows.sort(stable=True)
    columns, edges = columns[order].to(torch.int32), None if edges is None else edges[order].to(torch.int32)
    every = torch.arange(num_rows + 1, device=rows.device, dtype=rows.dtype)
    return CompressedEdges(
        every[:-1].long(), torch.searchsorted(rows, every), columns, columns if edges is None else edges
    )


def _compress_compiled(rows: Tensor, columns: Tensor, edges: Tensor | None, num_rows: int) -> CompressedEdges:
    """Counting sort: one pass counts the edges of each row, another puts each edge in its position."""
    counts = torch.zeros(num_rows + 1, dtype=torch.int64)
    ascending, present = ordering.count(rows.numpy(), counts.numpy())
    used, ptr = torch.empty(present, dtype=torch.int64), torch.empty(present + 1, dtype=torch.int64)
    ordering.lay_out(counts.numpy(), used.numpy(), ptr.numpy())
    columns = columns.to(torch.int32)
    if ascending:
        # Stores and samplers sort edges by target, so that this order usually moves nothing.
        return CompressedEdges(used, ptr, columns, columns if edges is None else edges.to(torch.int32))
    moved = torch.empty_like(columns)
    if edges is None:
        ordering.order(rows.numpy(), columns.numpy(), counts.numpy(), moved.numpy())
        return CompressedEdges(used, ptr, moved, moved)
    moved_edges = torch.empty(len(columns), dtype=torch.int32)
    ordering.order_both(
        rows.numpy(), columns.numpy(), edges.to(torch.int32).numpy(), counts.numpy(), moved.numpy(), moved_edges.numpy()
    )
    return CompressedEdges(used, ptr, moved, moved_edges)
