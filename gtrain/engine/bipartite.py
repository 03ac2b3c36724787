"""GraphSAGE and GraphConv layers between two sets of nodes of one process, each computed in one autograd function.

On small graphs with many edge types, ``HeteroConv`` spends its time in the number of operations, not in their size: a
layer here takes one sparse product and two dense ones forward, and one and four backward.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain.engine.edges import CompressedEdges, EdgeBlocks
from gtrain.engine.kernels import spmm
from gtrain.engine.precision import add_product, column_sums, product_dtype, sum_dtype, without_autocast

Layers = tuple[Tensor, Tensor | None, Tensor]
"""W_l [out, in], b [out] or None, W_r [out, in of targets]."""


class Edges(Protocol):
    """Edges between two sets of nodes; :class:`~gtrain.engine.few_edges.FewEdges` describes the methods."""

    def inverse_degree(self, dtype: torch.dtype) -> Tensor: ...

    def add_to_targets(self, rows: Tensor, total: Tensor, share: Tensor | None) -> None: ...

    def add_to_sources(self, rows: Tensor, total: Tensor, share: Tensor | None) -> None: ...


class SortedEdges:
    """Edges sorted by target and by source, which several threads may sum.

    Args:
        blocks: one block of edges.
    """

    def __init__(self, blocks: EdgeBlocks) -> None:
        (self._block,) = blocks.blocks
        self.inverse_degree = blocks.inverse_degree

    def add_to_targets(self, rows: Tensor, total: Tensor, share: Tensor | None) -> None:
        edges = self._block.by_target
        _add(edges if share is None else edges._replace(edges=self._block.target_of), rows, total, share)

    def add_to_sources(self, rows: Tensor, total: Tensor, share: Tensor | None) -> None:
        _add(self._block.targets_by_source, rows, total, share)


def bipartite_layer(
    edges: Edges, x: Tensor, targets: Tensor, mean: bool, layers: Layers, *, transforms_first: bool
) -> Tensor:
    """Return ``agg(x) W_l + targets W_r + b``, [num_targets, out], in the dtype of its products.

    Args:
        edges: the edges.
        x: rows of the sources, [num_sources, in].
        targets: rows of the targets, [num_targets, in of targets].
        mean: whether ``agg`` is the mean, else the sum.
        layers: the dense part.
        transforms_first: multiply rows by W_l before they are summed, not after.
    """
    left, bias, right = layers
    with without_autocast(x):
        settings = edges, mean, transforms_first, product_dtype(x)
        return _Bipartite.apply(settings, x, targets, left, bias, right)  # type: ignore[no-any-return]


class _Bipartite(torch.autograd.Function):
    """Products are of one dtype, sums at least float32. A mean is a sum with a factor for each target."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        settings: tuple[Edges, bool, bool, torch.dtype],
        x: Tensor,
        targets: Tensor,
        left: Tensor,
        bias: Tensor | None,
        right: Tensor,
    ) -> Tensor:
        edges, mean, first, dtype = settings
        exact = sum_dtype(dtype)
        share = edges.inverse_degree(exact) if mean else None
        rows, roots = x.to(dtype), targets.to(dtype)
        out = F.linear(roots, right.to(dtype)).to(exact)
        sums = None
        if first:
            edges.add_to_targets(F.linear(rows, left.to(dtype)), out, share)
        else:
            sums = rows.new_zeros((len(roots), rows.size(1)), dtype=exact)
            edges.add_to_targets(rows, sums, share)
            sums = sums.to(dtype)
            add_product(out, sums, left.to(dtype).t())
        if bias is not None:
            out.add_(bias.to(exact))
        ctx.save_for_backward(rows if first else None, roots, sums, left, right, share)
        ctx.edges, ctx.shape = edges, x.shape
        ctx.dtypes = x.dtype, targets.dtype, None if bias is None else bias.dtype
        return out.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, roots, sums, left, right, share = ctx.saved_tensors
        of_x, of_targets, of_bias = ctx.dtypes
        gradient, exact = gradient.contiguous(), sum_dtype(gradient.dtype)
        _, needs_x, needs_targets, needs_left, needs_bias, needs_right = ctx.needs_input_grad
        edges: Edges = ctx.edges
        dx = dleft = None
        if sums is not None:
            dleft = (gradient.t() @ sums).to(left.dtype) if needs_left else None
            if needs_x:
                dx = gradient.new_zeros(ctx.shape, dtype=exact)
                edges.add_to_sources(gradient @ left.to(gradient.dtype), dx, share)
                dx = dx.to(of_x)
        elif needs_x or needs_left:
            drows = gradient.new_zeros((len(rows), gradient.size(1)), dtype=exact)
            edges.add_to_sources(gradient, drows, share)
            drows = drows.to(gradient.dtype)
            dleft = (drows.t() @ rows).to(left.dtype) if needs_left else None
            dx = (drows @ left.to(gradient.dtype)).to(of_x) if needs_x else None
        dtargets = (gradient @ right.to(gradient.dtype)).to(of_targets) if needs_targets else None
        dbias = column_sums(gradient, of_bias) if needs_bias else None
        dright = (gradient.t() @ roots).to(right.dtype) if needs_right else None
        return None, dx, dtargets, dleft, dbias, dright


def _add(edges: CompressedEdges, rows: Tensor, total: Tensor, share: Tensor | None) -> None:
    """Add the rows that edges name to ``total``, in place."""
    if len(edges.columns):
        spmm(edges, rows.unsqueeze(1), total.unsqueeze(1), None if share is None else share.unsqueeze(1))
