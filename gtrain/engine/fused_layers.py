"""Convolutions that run as a single autograd function instead of their ``forward``.

Dense products then overlap with the exchange of rows and gradients, and fewer matrices are alive at once than between
the operations of PyG's ``forward``. Only calls of the common form run so; any other call runs PyG's ``forward``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parameter import is_lazy
from torch_geometric.nn import Linear
from torch_geometric.nn.conv import GATConv, GINConv, GraphConv, MessagePassing, SAGEConv

from gtrain.engine.attention.fused import AttentionBackward, AttentionSettings, attention_blocks
from gtrain.engine.bipartite import SortedEdges, bipartite_layer
from gtrain.engine.constants import Constants
from gtrain.engine.edges import EdgeBlocks
from gtrain.engine.few_edges import DTYPES, FEW, FewEdges
from gtrain.engine.gin import first_linear, gin_layer
from gtrain.engine.halo import incremental
from gtrain.engine.kernels import row_dots
from gtrain.engine.linear import LinearCall, PackedSums, aggregate
from gtrain.engine.patching import ReplacedMethod
from gtrain.engine.precision import (
    add_product,
    column_sums,
    product,
    product_dtype,
    rows_at_once,
    sum_dtype,
    without_autocast,
)
from gtrain.engine.propagate_call import reduction
from gtrain.engine.schedule import Schedule
from gtrain.memory.reuse import empty
from gtrain.nn.compressed import CompressedMatrix, is_compressed, with_gradient
from gtrain.nn.depth import meters
from gtrain.nn.dropout import Mask, TypeTag

Layers = tuple[Tensor, Tensor | None, Tensor]
"""W_l [out, in], b [out] or None, W_r [out, in]."""

_SUM_COST = 8  # of adding one number of a row, in multiplications of a dense product
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""x [num_sources, in], W [H * C, in], attention vectors [1, H, C] of sources and targets, bias [H * C] or None."""
_HOOKS = tuple(
    f"_{method}_forward_{hooks}"
    for method in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for hooks in ("pre_hooks", "hooks")
)
_SAGE = {SAGEConv: ("lin_l", "lin_r"), GraphConv: ("lin_rel", "lin_root")}


class SavedOnce:
    """A saved tensor that the backward pass frees before it ends; ``save_for_backward`` would keep it to the end.

    Args:
        tensor: must not be changed in place before the backward pass.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor.detach()
        self._saved_at = None if tensor.is_inference() else tensor._version

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place."""
        return self._tensor is not None and self._saved_at is not None and self._tensor._version != self._saved_at

    def take(self) -> Tensor:
        """Return the tensor and drop the reference to it.

        Raises:
            RuntimeError: it was changed in place, or taken before.
        """
        changed, tensor, self._tensor = self.is_changed, self._tensor, None
        if tensor is None:
            raise RuntimeError(
                "the backward pass has freed a layer's result, so it cannot run twice; the strategy's setting "
                "layers=plain keeps it."
            )
        if changed:
            raise RuntimeError("a layer's result, needed for its gradient, was modified by an inplace operation.")
        return tensor


def sage_layer(
    blocks: EdgeBlocks,
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    mean: bool,
    layers: Layers,
    schedule: Schedule,
    constants: Constants,
) -> Tensor:
    """Return the layer's result, [num_targets, out], in the dtype of its products: autocast's, or that of ``x``.

    Args:
        blocks: edges among the nodes of ``x``; targets are the first of them.
        x: the rank's rows, [num_sources, in].
        edge_index: the edges of ``blocks``.
        weight: [E], without a gradient; None: 1.
        mean: whether ``agg`` is the mean, else the sum.
        layers: the dense part.
        schedule: when blocks are fetched.
        constants: the cache of the aggregate of constant rows.
    """
    left, bias, right = layers
    if is_compressed(x):
        # A sum of rows has more entries than they have.
        sums = aggregate([LinearCall(blocks, F.linear(x, left), weight, mean)], schedule)[0]
        roots = F.linear(x if blocks.num_targets == len(x) else x[: blocks.num_targets], right, bias)
        return (sums + roots).to(product_dtype(x))
    dtype = product_dtype(x)
    # Products of constant rows read a copy of their dtype, which is made once.
    rows = constants.cast(x, dtype)
    if _transforms_first(blocks, x, left):
        scale = blocks.inverse_degree(sum_dtype(dtype)) if mean else None
        # One factor per edge instead of one per edge and one per target.
        if scale is not None and weight is not None:
            weight, scale = weight * scale[edge_index[1]], None
        with without_autocast(x):
            return _TransformThenSum.apply(blocks, (weight, scale), schedule, rows, left, bias, right, dtype)
    call, cached = LinearCall(blocks, x, weight, mean), None
    with without_autocast(x):
        if constants.caches(x, edge_index, weight):
            key = "linear", mean, dtype
            compute = partial(_aggregate, call, schedule, dtype)
            cached = constants.result((x, edge_index, weight), key, compute)
        return _SumThenTransform.apply(call, schedule, cached, rows, left, bias, right, dtype)


def _aggregate(call: LinearCall, schedule: Schedule, dtype: torch.dtype) -> Tensor:
    """Return the aggregate of constant rows in the dtype of products."""
    return aggregate([call], schedule)[0].to(dtype)


def _transforms_first(blocks: EdgeBlocks, x: Tensor, left: Tensor) -> bool:
    """Whether rows are multiplied by W_l before they are summed, and not after."""
    outputs, inputs = left.shape
    if blocks.num_targets == len(x):
        # As many products either way: the narrower side is summed, and sent. At equal width, transforming first saves
        # the aggregate if x has a gradient.
        return outputs < inputs or (outputs == inputs and x.requires_grad and torch.is_grad_enabled())
    return costs_less_first(len(x), blocks.num_targets, blocks.num_edges, inputs, outputs)


def costs_less_first(sources: float, targets: float, edges: float, inputs: int, outputs: int) -> bool:
    """Whether it costs less to multiply the sources' rows, from ``inputs`` to ``outputs`` columns, and then to sum them
    along the edges, than to sum them and then to multiply the targets' sums.
    """
    before = sources * inputs * outputs + _SUM_COST * edges * outputs
    return before < targets * inputs * outputs + _SUM_COST * edges * inputs


class _TransformThenSum(torch.autograd.Function):
    """``agg(x W_l) + x W_r + b``.

    A mean is a sum with a scale for each target, so that kernels add it in place to the product ``x W_r``. Products are
    of one dtype, also in the backward pass; sums of several blocks or chunks are at least float32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        blocks: EdgeBlocks,
        factors: tuple[Tensor | None, Tensor | None],
        schedule: Schedule,
        x: Tensor,
        left: Tensor,
        bias: Tensor | None,
        right: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        rows, (weight, scale) = x.detach().to(dtype), factors
        sent = empty((len(rows), len(left)), dtype, rows.device)
        needed = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        ctx.packed = PackedSums([LinearCall(blocks, sent, weight, scale=scale)], schedule, needed)
        ctx.packed.post(incremental(partial(_multiply, rows, left.to(dtype), sent)))
        del sent  # finish() frees it
        out = product(rows[: blocks.num_targets], right.to(dtype).t())
        if blocks.exchange.rounds > 1:
            out = out.to(sum_dtype(dtype))
        ctx.packed.add_local_block([out])
        ctx.packed.finish([out])
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(x if x.dtype == dtype else rows, left, right)
        return _with_bias(out, bias).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, left, right = ctx.saved_tensors
        gradient, packed = gradient.contiguous(), ctx.packed
        dx = dleft = None
        if packed.needed:
            packed.send([gradient])
        dright, dbias = _root_gradients(ctx, gradient, x, right)
        if packed.needed:
            packed.add_local_gradients([gradient])
            dleft, dsent = torch.zeros_like(left, dtype=sum_dtype(left.dtype)), packed.gradient(0)
            low_left, low_right = left.to(x.dtype), right.to(x.dtype)
            if ctx.needs_input_grad[3]:
                # Of equal width, it overwrites the gradient that it is computed from.
                same = left.size(0) == left.size(1) and dsent.dtype == ctx.x_dtype
                dx = dsent if same else empty(x.shape, ctx.x_dtype, x.device)
            first, count = 0, rows_at_once(x)
            for until in packed.receive_by_rows():
                for low in range(first, until, count):
                    part = slice(low, min(low + count, until))
                    drows = dsent[part].to(x.dtype)
                    add_product(dleft, drows.t(), x[part])
                    if dx is not None:
                        total = drows @ low_left
                        roots = gradient[part]  # fewer rows, or none, where sources are no targets
                        total[: len(roots)].addmm_(roots, low_right)
                        dx[part] = total
                first = until
            packed.take_gradients()
            dleft = dleft.to(left.dtype) if ctx.needs_input_grad[4] else None
        return None, None, None, dx, dleft, dbias, dright, None


def _with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias in place, after all sums: earlier releases rounded in this order."""
    return out if bias is None else out.add_(bias.to(out.dtype))


def _root_gradients(ctx: Any, gradient: Tensor, x: Tensor, right: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of W_r and b, which need no message: they are computed while messages are in flight."""
    return (
        (gradient.t() @ x[: len(gradient)]).to(right.dtype) if ctx.needs_input_grad[6] else None,
        column_sums(gradient, right.dtype) if ctx.needs_input_grad[5] else None,
    )


def _multiply(rows: Tensor, left: Tensor, out: Tensor, low: int, high: int) -> None:
    """Compute the rows ``low .. high-1`` of ``out = rows @ left.t()``."""
    torch.mm(rows[low:high], left.t(), out=out[low:high])


class _SumThenTransform(torch.autograd.Function):
    """``agg(x) W_l + x W_r + b``; the aggregate is saved for W_l's gradient, and freed in the backward pass.

    Products are of one dtype; rows are summed as they are, at least in float32, and only what is multiplied is cast.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: LinearCall,
        schedule: Schedule,
        aggregated: Tensor | None,
        x: Tensor,
        left: Tensor,
        bias: Tensor | None,
        right: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.packed = None
        if aggregated is None:
            ctx.packed = PackedSums([call], schedule, ctx.needs_input_grad[3])
            (aggregated,) = ctx.packed.start()
        roots = x.detach()[: call.blocks.num_targets].to(dtype)
        out = product(roots, right.to(dtype).t())
        if ctx.packed is not None:
            ctx.packed.finish([aggregated])
        aggregated = aggregated.to(dtype)
        ctx.aggregated = SavedOnce(aggregated)
        ctx.save_for_backward(x if x.dtype == dtype else roots, left, right)
        return _with_bias(out.addmm_(aggregated, left.to(dtype).t()), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, left, right = ctx.saved_tensors
        packed: PackedSums | None = ctx.packed
        dsums = dx = dleft = None
        aggregated = ctx.aggregated.take()
        if ctx.needs_input_grad[4]:
            dleft = (gradient.t() @ aggregated).to(left.dtype)
        # It is as large as x, and is not needed for the rest of the pass.
        del aggregated
        if packed is not None and packed.needed:
            dsums, (edges,) = product(gradient, left.to(gradient.dtype)), packed.sums
            if edges.mean:
                dsums.div_(edges.blocks.divisor(dsums))
            packed.send([dsums])
        dright, dbias = _root_gradients(ctx, gradient, x, right)
        if packed is not None and dsums is not None:
            dx = packed.gradient(0)
            add_product(dx[: len(gradient)], gradient, right.to(gradient.dtype))
            packed.add_local_gradients([dsums])
            packed.receive()
            dx = packed.take_gradients()[0]
        return None, None, None, dx, dleft, dbias, dright, None


def gat_layer(blocks: EdgeBlocks, tensors: Tensors, slope: float, dropout: float, schedule: Schedule) -> Tensor:
    """Return the layer's result, heads side by side, [num_targets, H * C], of the dtype of attention vectors or wider.

    The product ``x W`` is of autocast's dtype, or of that of ``x``; logits, softmax and sums are at least float32.

    Args:
        blocks: edges among the nodes of x; targets are the first of them.
        tensors: input and parameters of the layer.
        slope: of leaky_relu below zero.
        dropout: probability that a coefficient is dropped.
        schedule: when blocks are fetched; mode 1 transforms x again in the backward pass, others keep the result.
    """
    dtype = product_dtype(tensors[0])
    with without_autocast(tensors[0]):
        return _Layer.apply(AttentionSettings(blocks, schedule, slope, Mask.next(dropout)), dtype, *tensors)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        settings: AttentionSettings,
        dtype: torch.dtype,
        x: Tensor,
        weight: Tensor,
        att_source: Tensor,
        att_target: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        tensors = x, weight, att_source, att_target, bias
        out, rows, source, targets, lse, *rest = _attend(settings, dtype, tensors, any(ctx.needs_input_grad[2:6]))
        ctx.settings, ctx.dtype = settings, dtype
        ctx.kept = [] if settings.schedule.mode == 1 else [rows]
        ctx.out = SavedOnce(out)
        ctx.save_for_backward(x, weight, att_source, att_target, bias, source, targets, lse, *rest)
        # The backward pass subtracts inner products with the result from others: it reads them as they were summed.
        return out.to(torch.promote_types(dtype, att_source.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight, att_source, att_target, bias, source, target, lse, *rest = ctx.saved_tensors
        heads, channels = att_source.shape[-2:]
        gradient = gradient.contiguous()
        grad = gradient.view(-1, heads, channels)
        dtype = ctx.dtype
        if ctx.out.is_changed:  # by an activation in place
            ctx.out = SavedOnce(
                _attend(ctx.settings, dtype, (x, weight, att_source, att_target, bias), trains=False)[0]
            )
        kept = (
            ctx.kept.pop() if ctx.kept else lambda: product(x.to(dtype), weight.to(dtype).t()).view(-1, heads, channels)
        )
        dots = _Dots(grad, ctx.out.take().view_as(grad), bias)
        vectors = _vectors(att_source, att_target, sum_dtype(dtype))
        dense = DenseGradients(x, weight, vectors, dtype, needed=ctx.needs_input_grad[2])
        backward = AttentionBackward(ctx.settings, grad, kept, source, target, lse, dots, dense.add)
        del kept, dots
        backward.run(rest)
        dweight, dvectors = dense.result()
        dsource, dtarget = (_diagonal(part, att_source).to(att_source.dtype) for part in dvectors.split(heads, 1))
        dbias = None if bias is None else column_sums(gradient, bias.dtype)
        return None, None, dense.dx, dweight.to(weight.dtype), dsource, dtarget, dbias


def _attend(settings: AttentionSettings, dtype: torch.dtype, tensors: Tensors, trains: bool) -> tuple[Tensor, ...]:
    """Return a layer's result [T, H * C], transformed rows [n, H, C], and logits of sources [n, H] and targets [T, H].

    What :func:`attention_blocks` returns after the result follows.
    """
    x, weight, att_source, att_target, bias = tensors
    heads, channels = att_source.shape[-2:]
    rows, exact = empty((len(x), heads, channels), dtype, x.device), sum_dtype(dtype)
    source, target = (x.new_empty((len(x), heads), dtype=exact) for _ in range(2))
    vectors, transposed = _vectors(att_source, att_target, exact), weight.to(dtype).t()

    def transform(low: int, high: int) -> None:
        # Rows that are converted are still in the cache when they are read again.
        step = high - low if dtype == exact == x.dtype else rows_at_once(x)
        for first in range(low, high, max(step, 1)):
            piece = slice(first, min(first + step, high))
            part = rows[piece].flatten(1)
            torch.mm(x.detach()[piece].to(dtype), transposed, out=part)
            source[piece], target[piece] = (part.to(exact) @ vectors).split(heads, 1)

    targets, produce = target[: settings.blocks.num_targets], incremental(transform)
    out, *rest = attention_blocks(settings, rows, source, targets, trains=trains, produce=produce)
    # Not a view, which a custom function may not return to an activation in place.
    out = torch.ops.aten._unsafe_view(out, (len(out), heads * channels))
    if bias is not None:
        out.add_(bias)
    return out, rows, source, targets, *rest


class _Dots:
    """Inner products of gradients with the layer's result minus its bias, which is not weighted by coefficients.

    Args:
        grad, out: [n, H, C].
        bias: [H * C] or None; ``out`` includes it.
    """

    def __init__(self, grad: Tensor, out: Tensor, bias: Tensor | None) -> None:
        self._grad, self._out = grad, out
        self._bias = None if bias is None else _block_diagonal(bias.view(1, *grad.shape[1:]))

    def __call__(self, dots: Tensor, low: int, high: int) -> None:
        row_dots(self._grad, self._out, dots, low, high)
        if self._bias is not None:
            dots[low:high] -= self._grad[low:high].flatten(1) @ self._bias
        if high == len(self._grad):  # the last call: frees the result
            self._out = self._out.new_empty(0)


def _vectors(source: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the attention vectors of both ends, [1, H, C] each, as [H * C, 2 * H]."""
    return torch.cat([_block_diagonal(source), _block_diagonal(target)], 1).to(dtype)


def _block_diagonal(vectors: Tensor) -> Tensor:
    """Return [1, H, C] as [H * C, H], with vector h in column h."""
    return torch.block_diag(*vectors.detach().flatten(0, -2)).t()


def _diagonal(blocks: Tensor, like: Tensor) -> Tensor:
    """Return [H * C, H] in the shape of ``like``, [1, H, C]: the inverse of :func:`_block_diagonal`."""
    heads, channels = like.shape[-2:]
    return blocks.reshape(heads, channels, heads).diagonal(dim1=0, dim2=2).t().reshape(like.shape)


class DenseGradients:
    """Gradients of x, W and the attention vectors, from those of rows ``x W^T`` and of their logits at both ends.

    With A the attention vectors as a block diagonal matrix, D the gradients of rows and L those of logits ``x W^T A``,
    the rows' total gradient is ``D + L A^T``. So the weight's is ``D^T x + A L^T x`` and A's is ``W (L^T x)^T``: rows
    need not be computed again.

    Args:
        x: [n, in].
        weight: [H * C, in].
        vectors: A, [H * C, 2 * H].
        dtype: of products; sums over products are of the dtype of ``vectors``.
        needed: whether x needs a gradient.

    Attributes:
        dx: [n, in]; it overwrites D if that is of equal width. None: not needed.
    """

    def __init__(self, x: Tensor, weight: Tensor, vectors: Tensor, dtype: torch.dtype, *, needed: bool) -> None:
        self._x, self._weight, self._vectors, self._needed = x, weight.to(dtype), vectors, needed
        self._dweight = torch.zeros_like(weight, dtype=vectors.dtype)
        self._logits_x = vectors.new_zeros((vectors.size(1), x.size(1)))  # L^T x
        self._vectors_weight = (vectors.t() @ weight.to(vectors.dtype)).to(dtype)
        self.dx: Tensor | None = None

    def add(self, attention: AttentionBackward, rows: Tensor | None) -> None:
        """Add local rows whose gradients are complete, int64, or None for all; each row once."""
        drows = attention.dx.flatten(1)
        if self._needed and self.dx is None:
            same = drows.size(1) == self._x.size(1) and drows.dtype == self._x.dtype
            self.dx = drows if same else empty(self._x.shape, self._x.dtype, self._x.device)
        for part in _parts(rows, drows):
            x, of_part = (_take(tensor, part).to(self._weight.dtype) for tensor in (self._x, drows))
            dsource, dtarget = _take(attention.dsource, part), _take(attention.dtarget, part)
            if len(dtarget) < len(dsource):  # sources that are no targets
                dtarget = nn.functional.pad(dtarget, (0, 0, 0, len(dsource) - len(dtarget)))
            dlogits = torch.cat([dsource, dtarget], 1).to(x.dtype)
            add_product(self._dweight, of_part.t(), x)
            add_product(self._logits_x, dlogits.t(), x)
            if self.dx is not None:
                gradient = (of_part @ self._weight).addmm_(dlogits, self._vectors_weight)
                if isinstance(part, slice):
                    self.dx[part] = gradient
                else:
                    self.dx.index_copy_(0, part, gradient.to(self.dx.dtype))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the weight and of A; only the latter's diagonal blocks are meaningful."""
        weight = self._weight.to(self._vectors.dtype)
        return self._dweight.addmm_(self._vectors, self._logits_x), weight @ self._logits_x.t()


def _parts(rows: Tensor | None, of: Tensor) -> Iterator[slice | Tensor]:
    count = rows_at_once(of)
    if rows is None:
        yield from (slice(start, start + count) for start in range(0, len(of), count))
    else:
        yield from rows.split(count)


def _take(tensor: Tensor, part: slice | Tensor) -> Tensor:
    return tensor[part] if isinstance(part, slice) else tensor.index_select(0, part)


class FusedLayers:
    """Replaces the ``forward`` of convolutions of known classes.

    Args:
        schedule: when blocks are fetched.
        constants: inputs that never change.
        blocks: returns the blocks of edges for ``edge_index``, the number of sources and the number of targets.
        whole: whether all sources are nodes of this process; layers between two sets of nodes are then replaced too.
    """

    def __init__(
        self,
        schedule: Schedule,
        constants: Constants,
        blocks: Callable[[Tensor, int, int], EdgeBlocks],
        *,
        whole: bool = False,
    ) -> None:
        self._schedule, self._constants, self._blocks, self._whole = schedule, constants, blocks, whole

    def forward_of(self, conv: MessagePassing) -> Callable[..., Any] | None:
        """Return the replacement of ``conv.forward``; None if its class is not known."""
        if not self._schedule.compiled:
            return None
        if type(conv) in _SAGE:
            return partial(self._forward, conv, self._sage)
        layer = {GATConv: self._gat, GINConv: self._gin}.get(type(conv))
        return None if layer is None else partial(self._forward, conv, layer)

    def _forward(self, conv: MessagePassing, layer: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Any:
        original = type(conv).forward
        arguments = _signature(original).bind(conv, *args, **kwargs).arguments
        x, edge_index = with_gradient(arguments.pop("x")), arguments.pop("edge_index")
        del arguments["self"]
        options = {name: value for name, value in arguments.items() if value is not None}
        if type(edge_index) is Tensor and not has_hooks(conv):
            nodes, out = _sources_and_targets(x), None
            if nodes is not None:
                out = layer(conv, *nodes, edge_index, **options)
            elif self._whole and type(conv) in _SAGE and _is_dense_pair(x) and not options:
                out = self._between(conv, x[0], x[1], edge_index)
            if out is not None:
                return count_hop(conv, out)
        return original(conv, *args, **kwargs)

    def _sage(
        self,
        conv: MessagePassing,
        x: Tensor,
        num_targets: int,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        **options: Any,
    ) -> Tensor | None:
        layers, reduce = _sage_layers(conv), reduction(conv)
        if layers is None or reduce not in ("sum", "mean") or options:
            return None
        # Kernels read a weight of each edge, unchecked. PyG broadcasts other shapes, or refuses them.
        if edge_weight is not None and (edge_weight.requires_grad or edge_weight.shape != edge_index.shape[1:]):
            return None
        blocks = self._blocks(edge_index, len(x), num_targets)
        out = sage_layer(blocks, x, edge_index, edge_weight, reduce == "mean", layers, self._schedule, self._constants)
        return nn.functional.normalize(out, p=2.0, dim=-1) if getattr(conv, "normalize", False) else out

    def _between(self, conv: MessagePassing, x: Tensor, targets: Tensor, edge_index: Tensor) -> Tensor | None:
        """A layer of GraphSAGE or GraphConv whose targets are other nodes than its sources."""
        layers, reduce = _sage_layers(conv), reduction(conv)
        if layers is None or reduce not in ("sum", "mean") or self._constants.caches(x, edge_index):
            return None
        count, (outputs, inputs) = edge_index.size(1), layers[0].shape
        few = count < FEW and x.device.type == "cpu" and edge_index.dtype == torch.int64
        edges: FewEdges | SortedEdges
        if few and product_dtype(x) in DTYPES:
            edges = FewEdges(edge_index, len(x), len(targets))
        else:
            edges = SortedEdges(self._blocks(edge_index, len(x), len(targets)))
        first = costs_less_first(len(x), len(targets), count, inputs, outputs)
        out = bipartite_layer(edges, x, targets, reduce == "mean", layers, transforms_first=first)
        return nn.functional.normalize(out, p=2.0, dim=-1) if getattr(conv, "normalize", False) else out

    def _gin(self, conv: Any, x: Tensor, num_targets: int, edge_index: Tensor, **options: Any) -> Tensor | None:
        """A layer over features in CSR form."""
        first = first_linear(conv.nn) if is_compressed(x) else None
        if first is None or options or reduction(conv) != "sum":
            return None
        return gin_layer(conv, first, self._blocks(edge_index, len(x), num_targets), x, num_targets, self._schedule)

    def _gat(self, conv: Any, x: Tensor, num_targets: int, edge_index: Tensor, **options: Any) -> Tensor | None:
        lin = plain_linear(conv, "lin")
        if lin is None or lin.bias is not None or reduction(conv) != "sum" or options or is_compressed(x):
            return None
        residual = None if conv.res is None else conv.res(x[:num_targets])
        if conv.add_self_loops:
            # Looked up in PyG's module, where a Patcher may have replaced them.
            functions = inspect.getmodule(GATConv).__dict__
            edge_index, _ = functions["remove_self_loops"](edge_index, None)
            edge_index, _ = functions["add_self_loops"](
                edge_index, None, fill_value=conv.fill_value, num_nodes=num_targets
            )
        dropout = conv.dropout if conv.training else 0.0
        fused_bias = conv.bias if conv.concat and residual is None else None
        tensors = (x, lin.weight, conv.att_src, conv.att_dst, fused_bias)
        blocks = self._blocks(edge_index, len(x), num_targets)
        out = gat_layer(blocks, tensors, conv.negative_slope, dropout, self._schedule)
        if not conv.concat:
            out = out.view(len(out), conv.heads, conv.out_channels).mean(1)
        out = out if residual is None else out + residual
        return out if fused_bias is not None or conv.bias is None else out + conv.bias


def _sage_layers(conv: MessagePassing) -> Layers | None:
    """Return the dense part of a layer of GraphSAGE or GraphConv; None where it computes more."""
    left, root = (plain_linear(conv, name, may_be_tagged=True) for name in _SAGE[type(conv)])
    if left is None or root is None or not getattr(conv, "root_weight", True) or getattr(conv, "project", False):
        return None
    return left.weight, left.bias, root.weight


def _is_dense_pair(x: Any) -> bool:
    """Whether the input of a layer is a pair of dense matrices."""
    return (
        isinstance(x, tuple)
        and len(x) == 2
        and all(isinstance(end, Tensor) and not isinstance(end, CompressedMatrix) for end in x)
        and all(end.dim() == 2 and end.is_floating_point() and end.dtype == x[0].dtype for end in x)
    )


@functools.cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def _sources_and_targets(x: Any) -> tuple[Tensor, int] | None:
    """Return the sources' rows and the number of targets, the first of them; None for any other input of a layer."""
    targets = x
    if isinstance(x, tuple) and len(x) == 2:
        x, targets = x
    if not isinstance(x, Tensor) or not isinstance(targets, Tensor) or x.dim() != 2 or targets.dim() != 2:
        return None
    if not x.is_floating_point() or x.layout != torch.strided or targets.layout != torch.strided:
        return None
    return (x, len(targets)) if targets is x or _is_prefix(targets, x) else None


def _is_prefix(targets: Tensor, x: Tensor) -> bool:
    """Whether ``targets`` are the first rows of ``x``, with the gradient that a slice has."""
    if is_compressed(x) and isinstance(targets, CompressedMatrix):
        return targets.is_start_of(x)
    memory = (targets.data_ptr(), targets.stride(), targets.dtype) == (x.data_ptr(), x.stride(), x.dtype)
    if not memory or len(targets) > len(x) or targets.size(1) != x.size(1):
        return False
    if not (targets.requires_grad or x.requires_grad) or not torch.is_grad_enabled():
        return True
    # Memory alone does not tell a slice from a detached one.
    node = targets.grad_fn
    if node is None or type(node).__name__ not in ("SliceBackward0", "AliasBackward0"):
        return False
    source: Any = node.next_functions[0][0]
    return source is x.grad_fn if x.grad_fn is not None else getattr(source, "variable", None) is x


def has_hooks(conv: MessagePassing) -> bool:
    """Whether a user's hooks observe the steps of ``propagate``; a meter of hops needs no more than its result."""
    hooks = sum(len(getattr(conv, hooks, None) or ()) for hooks in _HOOKS)
    return hooks > len(meters(conv))


def count_hop(conv: MessagePassing, out: Tensor) -> Tensor:
    """Report the result of message passing that the engine computed to the meters of hops, and return it."""
    for meter in meters(conv):
        meter.note(conv, None, out)
    return out


def plain_linear(conv: nn.Module, name: str, *, may_be_tagged: bool = False) -> Any:
    """Return a linear layer of ``conv`` if its weight and bias are all that it computes with; else None.

    A caller that computes the whole layer accepts hooks that only note the node type of the linear layer's result.
    """
    layer = getattr(conv, name, None)
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Module) or not isinstance(weight, Tensor) or is_lazy(weight) or weight.dim() != 2:
        return None
    # Not a subclass, nor an instance, that computes otherwise; what a run has put in its place is known.
    replaced = layer.__dict__.get("forward")
    if type(layer).forward not in (nn.Linear.forward, Linear.forward):
        return None
    if replaced is not None and not isinstance(replaced, ReplacedMethod):
        return None
    observed = any(not (may_be_tagged and isinstance(hook, TypeTag)) for hook in layer._forward_hooks.values())
    return None if observed or layer._forward_pre_hooks or layer._backward_hooks else layer
