"""R-GCN (Schlichtkrull et al. 2018) by pairs of relation and target, of which a graph has at most as many as edges.

PyG's ``RGCNConv`` passes messages once per relation, with a row for every target each time. Here one sparse sum makes
the aggregates of all pairs that have an edge, each relation multiplies its consecutive pairs, and a second sparse sum
adds the products up by target. Over ids instead of features, the layer sums learned rows, one for each pair of relation
and source, and reads each of them once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.conv import RGCNConv

from gtrain.engine.constants import Constants, version_of
from gtrain.engine.edges import BlockSource, EdgeBlock, EdgeBlocks
from gtrain.engine.fused_layers import count_hop, has_hooks
from gtrain.engine.kernels import spmm
from gtrain.engine.linear import LinearCall, aggregate
from gtrain.engine.precision import product_dtype, sum_dtype, without_autocast
from gtrain.engine.propagate_call import reduction
from gtrain.engine.schedule import Schedule
from gtrain.memory.pages import zeros
from gtrain.nn.relational import IdRGCNConv, check_ids


def are_known(edge_type: Tensor, num_relations: int) -> bool:
    """Whether all types of edges [E] are below the number of relations, and none is negative."""
    return not len(edge_type) or (int(edge_type.min()) >= 0 and int(edge_type.max()) < num_relations)


@dataclass
class RelationPairs:
    """The P distinct pairs of relation and target that have an edge, by relation and then by target.

    Attributes:
        edges: the edges, from their sources to the pairs.
        sizes: pairs of each relation, R numbers.
        targets: int64 ``[P]``.
        counts: int64 ``[P]``, edges of each pair.
        by_target: from each pair to its target.
    """

    edges: EdgeBlocks
    sizes: list[int]
    targets: Tensor
    counts: Tensor
    by_target: EdgeBlock

    @classmethod
    def of(cls, edge_index: Tensor, edge_type: Tensor, relations: int, edges: BlockSource) -> RelationPairs:
        """Sort edges [2, E] of the types 0 .. relations-1, [E]."""
        key = edge_type.long() * edges.num_targets + edge_index[1]
        pairs, pair_of_edge, counts = torch.unique(key, return_inverse=True, return_counts=True)
        relation, targets = pairs // edges.num_targets, pairs % edges.num_targets
        every = torch.arange(len(pairs), device=pairs.device)
        return cls(
            edges.into_rows(edge_index, pair_of_edge, len(pairs)),
            torch.bincount(relation, minlength=relations).tolist(),
            targets,
            counts,
            EdgeBlock(every, every, targets, len(pairs), edges.num_targets),
        )


class RelationalConv:
    """Replaces the ``forward`` of one ``RGCNConv`` or ``IdRGCNConv``.

    Args:
        conv: the convolution.
        edges: returns the blocks of edges between the same nodes, for the convolution's ``x``.
        schedule: when blocks are fetched.
        constants: the cache of aggregates of constant rows.
        whole: whether all sources are nodes of this process, so that their ids are known to it. Of shards, the types
            of all edges must be those of relations: a rank alone must not run the layer as PyG wrote it.
    """

    def __init__(
        self,
        conv: RGCNConv | IdRGCNConv,
        edges: Callable[[Any], BlockSource],
        schedule: Schedule,
        constants: Constants,
        *,
        whole: bool,
    ) -> None:
        self._conv, self._edges, self._schedule, self._constants = conv, edges, schedule, constants
        self._whole = whole
        self._derived: Any = WeakIdKeyDictionary()  # edge_index -> (what it was derived with, the result)

    def forward(self, x: Any, edge_index: Any, edge_type: Any = None) -> Tensor:
        """Return the layer's result, [num_targets, out_channels]; calls of other forms run as PyG wrote them."""
        conv = self._conv
        sources, targets = x if isinstance(x, tuple) else (x, x)
        tensors = all(type(value) is Tensor for value in (sources, targets, edge_index, edge_type))
        if not tensors or has_hooks(conv) or reduction(conv) not in ("sum", "mean"):
            return type(conv).forward(conv, x, edge_index, edge_type)
        if self._whole and not are_known(edge_type, conv.num_relations):
            # PyG reports them.
            return type(conv).forward(conv, x, edge_index, edge_type)
        if sources.is_floating_point() and isinstance(conv, RGCNConv):
            out = self._of_features(sources, targets, edge_index, edge_type)
        elif self._whole and not sources.is_floating_point() and getattr(conv, "num_blocks", None) is None:
            out = self._of_ids(sources, targets, edge_index, edge_type)
        else:
            return type(conv).forward(conv, x, edge_index, edge_type)
        return count_hop(conv, out if conv.bias is None else out + conv.bias)

    def _of_features(self, x: Tensor, targets: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        conv: Any = self._conv
        edges, weight = self._edges((x, targets)), conv.weight
        make = partial(RelationPairs.of, edge_index, edge_type, conv.num_relations, edges)
        pairs: RelationPairs = self._once(edge_index, (edge_type,), (edges.num_targets,), make)
        if conv.num_bases is not None:
            weight = (conv.comp @ weight.flatten(1)).view(-1, *weight.shape[1:])

        def sums() -> Tensor:
            return aggregate([LinearCall(pairs.edges, x)], self._schedule)[0]

        dtype = product_dtype(x)
        with without_autocast(x):
            rows = self._constants.result((x, edge_index, edge_type), ("relations",), sums)
            out: Tensor = _ProductsByTarget.apply(rows, weight, pairs, reduction(conv) == "mean", dtype)
        # PyG adds to zeros of torch's default dtype.
        out = out.to(torch.promote_types(dtype, torch.get_default_dtype()))
        return out if conv.root is None else out + targets @ conv.root

    def _of_ids(self, ids: Tensor, targets: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        conv: Any = self._conv
        mean = isinstance(conv, IdRGCNConv) or reduction(conv) == "mean"
        edges, nodes = self._edges((ids, targets)), conv.weight.size(1)
        make = partial(LearnedRows.of, ids, edge_index, edge_type, nodes, edges)
        rows: LearnedRows = self._once(edge_index, (edge_type, ids), (edges.num_targets,), make)
        learned = self._learned(rows.ids, rows.types, nodes)
        weight = rows.share.to(sum_dtype(learned.dtype)) if mean else None
        (out,) = aggregate([LinearCall(rows.edges, learned, weight)], self._schedule)
        # RGCNConv adds to zeros of torch's default dtype.
        widest = learned.dtype if isinstance(conv, IdRGCNConv) else torch.get_default_dtype()
        out = out.to(torch.promote_types(learned.dtype, widest))
        return out if conv.root is None else out + conv.root[targets]

    def _learned(self, ids: Tensor, types: Tensor, nodes: int) -> Tensor:
        """Return the learned rows of pairs of an id below ``nodes`` and a relation, [P, out_channels]."""
        conv, table = self._conv, self._conv.weight
        if conv.comp is not None and isinstance(conv, IdRGCNConv):
            return conv.rows(ids, types)
        if conv.comp is not None:
            table = (conv.comp @ table.flatten(1)).view(-1, *table.shape[1:])
        return _Rows.apply(table, types * nodes + ids)  # type: ignore[no-any-return]

    def _once(self, edge_index: Tensor, tensors: tuple[Tensor, ...], settings: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` derives from edges and tensors, from the cache if these are the same and unchanged."""
        versions = [version_of(tensor) for tensor in (edge_index, *tensors)]
        known = self._derived.get(edge_index)
        if known is not None:
            others, *key, result = known
            if key == [settings, versions] and all(a is b for a, b in zip(others, tensors, strict=True)):
                return result
        # Autograd cannot use inference tensors later.
        with torch.inference_mode(False):
            result = make()
        self._derived[edge_index] = tensors, settings, versions, result
        return result


@dataclass
class LearnedRows:
    """The distinct pairs of relation and source id that edges read, each a learned row.

    Attributes:
        ids, types: int64 ``[P]``, the id and the relation of each row.
        edges: the edges, from these rows to their targets.
        share: float64 ``[E]``, 1 over the number of edges that have an edge's relation and target.
    """

    ids: Tensor
    types: Tensor
    edges: EdgeBlocks
    share: Tensor

    @classmethod
    def of(cls, ids: Tensor, edge_index: Tensor, edge_type: Tensor, nodes: int, edges: Any) -> LearnedRows:
        """Sort edges [2, E] of the types [E], whose sources have the ids [n], below ``nodes``.

        Raises:
            IndexError: an id is out of range, or an edge names a node that does not exist.
        """
        check_ids(ids, nodes)
        edges.check(edge_index)
        edge_type = edge_type.long()
        rows, row_of_edge = torch.unique(edge_type * nodes + ids[edge_index[0]], return_inverse=True)
        pair = edge_type * edges.num_targets + edge_index[1]
        _, pair_of_edge, counts = torch.unique(pair, return_inverse=True, return_counts=True)
        between = edges.from_rows(edge_index, row_of_edge, len(rows))
        return cls(rows % nodes, rows // nodes, between, 1 / counts[pair_of_edge].double())


class _ProductsByTarget(torch.autograd.Function):
    """``out[i] = sum over pairs (r, i) of share * rows[pair] W_r``, the share 1 or, of a mean, 1 over its edges.

    Shapes:
        rows [P, in], weight [R, in, out], or of blocks [R, B, in / B, out / B]; result [num_targets, out], summed at
        least in float32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, weight: Tensor, pairs: RelationPairs, mean: bool, dtype: torch.dtype
    ) -> Tensor:
        exact = sum_dtype(dtype)
        share = 1 / pairs.counts.to(exact).unsqueeze(1) if mean else None
        low, matrices = rows.detach().to(dtype), weight.detach().to(dtype)
        # Of blocks, the widths of all together.
        width = matrices.size(-1) * (matrices.size(1) if matrices.dim() == 4 else 1)
        products = low.new_empty((len(low), width))
        for part, matrix, out in zip(low.split(pairs.sizes), matrices, products.split(pairs.sizes), strict=True):
            if len(part):
                _multiply(part, matrix, out)
        total = low.new_zeros((pairs.by_target.num_targets, products.size(1)), dtype=exact)
        if len(low):
            spmm(pairs.by_target.by_target, products.unsqueeze(1), total.unsqueeze(1), share)
        ctx.save_for_backward(rows if rows.dtype == dtype else low, weight, share)
        ctx.pairs, ctx.dtype, ctx.of_rows = pairs, dtype, rows.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, weight, share = ctx.saved_tensors
        sizes = ctx.pairs.sizes
        of_products = gradient.index_select(0, ctx.pairs.targets)
        of_products = (of_products if share is None else of_products.mul_(share)).to(ctx.dtype)
        drows = dweight = None
        if ctx.needs_input_grad[0]:
            drows = torch.empty_like(rows)
            matrices = weight.to(ctx.dtype).transpose(-1, -2)
            for part, matrix, out in zip(of_products.split(sizes), matrices, drows.split(sizes), strict=True):
                if len(part):
                    _multiply(part, matrix, out)
            drows = drows.to(ctx.of_rows)
        if ctx.needs_input_grad[1]:
            dweight = torch.zeros_like(weight, dtype=ctx.dtype)
            for part, of_part, out in zip(rows.split(sizes), of_products.split(sizes), dweight, strict=True):
                if len(part):
                    _multiply_transposed(part, of_part, out)
            dweight = dweight.to(weight.dtype)
        return drows, dweight, None, None, None


def _multiply(rows: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Set ``out = rows @ matrix``; with blocks [B, c, d], block by block of the columns."""
    if matrix.dim() == 2:
        torch.mm(rows, matrix, out=out)
        return
    blocks, columns, _ = matrix.shape
    out.view(len(out), blocks, -1).copy_(torch.einsum("abc,bcd->abd", rows.view(-1, blocks, columns), matrix))


def _multiply_transposed(rows: Tensor, others: Tensor, out: Tensor) -> None:
    """Set ``out = rows.t() @ others``; with blocks [B, c, d], block by block of the columns."""
    if out.dim() == 2:
        torch.mm(rows.t(), others, out=out)
        return
    blocks, columns, width = out.shape
    out.copy_(torch.einsum("abc,abd->bcd", rows.view(-1, blocks, columns), others.view(-1, blocks, width)))


class _Rows(torch.autograd.Function):
    """Distinct rows of a table ``[R, N, d]`` by their number ``[P]`` among all R * N."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(numbers)
        ctx.shape = table.shape
        return table.detach().flatten(0, 1).index_select(0, numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (numbers,) = ctx.saved_tensors
        total = _zeros(ctx.shape, gradient)
        total.flatten(0, 1).index_copy_(0, numbers, gradient)
        return total, None


def _zeros(shape: torch.Size, like: Tensor) -> Tensor:
    """Return zeros; on the CPU in huge pages: most of the time of a large gradient is the faults of its pages."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return zeros(shape.numel() * like.element_size()).view(like.dtype).view(shape)
