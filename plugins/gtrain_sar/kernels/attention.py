"""Fused attention over blocks of edges: an online softmax, so that blocks may come in any order.

Forward, blocks are walked by target; each block's maximum, sum and weighted rows are merged into the running ones
(Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018; flash attention does the same). Backward, they
are walked by source, from the logarithm of the sum: a block needs no other one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gtrain.nn.dropout import NO_DROPOUT, Mask
from gtrain_sar.kernels import compiled_attention, plain
from gtrain_sar.kernels.plain import AttentionState
from gtrain_sar.kernels.threads import array, arrays, compiled, over_rows, spans, threads, together

if TYPE_CHECKING:
    from gtrain_sar.edges import Compressed


def attention_state(num_targets: int, x: Tensor) -> AttentionState:
    """The state before the first block, for sources like ``x`` ``[S, H, C]``."""
    heads = (num_targets, x.size(1))
    return AttentionState(
        x.new_zeros((num_targets, *x.shape[1:])), x.new_full(heads, float("-inf")), x.new_zeros(heads)
    )


def attention_forward(
    block: Compressed,
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    state: AttentionState,
    keep: Mask,
) -> None:
    """Merge a block into ``state``; the logit of edge j -> i is ``leaky_relu(source[j] + target[i], slope)``.

    Args:
        block: edges by target.
        x: ``[S, H, C]``, source rows.
        source: ``[S, H]``, the sources' part of the logit.
        target: ``[T, H]``, the targets' part.
        slope: of the leaky ReLU below 0.
        state: changed in place.
        keep: dropout of the coefficients in ``out``; ``total`` has none.
    """
    if not compiled([x, source, target], [*state]):
        return plain.attention_forward(block, x, source, target, slope, state, keep)
    inputs = (*arrays(block), *_arrays(x, source, target), _number(slope, x))
    arguments: tuple[Any, ...] = (*inputs, *_arrays(*state), *_hash(keep, x))

    def work(first: int, last: int) -> None:
        scratch = _scratch(2 * compiled_attention.EDGES + 1, x)
        compiled_attention.forward(*(*arguments, scratch, first, last))

    return over_rows(block, work)


def attention_finish(state: AttentionState) -> Tensor:
    """Divide ``state.out`` by the total, in place, and return the logarithm of the sum of exponentials ``[T, H]``.

    Targets without edges get 0 and -inf.
    """
    if compiled([], [*state]):
        lse = torch.empty_like(state.top)
        compiled_attention.finish(*_arrays(*state, lse))
        return lse
    return plain.attention_finish(state)


def attention_backward(
    block: Compressed,
    x: Tensor,
    source: Tensor,
    target: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad: Tensor,
    slope: float,
    keep: Mask,
    dx: Tensor,
    dsource: Tensor,
    dtarget: Tensor,
) -> None:
    """Add the gradients of a block.

    Args:
        block: edges by source.
        x: ``[S, H, C]``, source rows.
        source: ``[S, H]``, as in the forward pass.
        target: ``[T, H]``, as in the forward pass.
        lse: ``[T, H]``, of :func:`attention_finish`.
        delta: ``[T, H]``, inner product of ``grad`` and the finished output.
        grad: ``[T, H, C]``, gradient of the finished output.
        slope: as in the forward pass.
        keep: as in the forward pass.
        dx: ``[S, H, C]``, added to in place.
        dsource: ``[S, H]``, added to in place.
        dtarget: ``[T, H]``, added to in place.
    """
    if not compiled([x, source, target, lse, delta, grad], [dx, dsource, dtarget]):
        saved = lse, delta, grad
        return plain.attention_backward(block, (x, source, target), saved, slope, keep, (dx, dsource, dtarget))
    inputs: tuple[Any, ...] = (*arrays(block), *_arrays(x, source, grad))
    arguments = (_number(slope, x), *_arrays(dx, dsource), *_hash(keep, x))
    pieces = spans(block, threads())
    packed = torch.stack([target, lse, delta, torch.zeros_like(delta)], dim=1)  # of a target, on one cache line
    copies = {low: packed.clone() if i else packed for i, (low, _) in enumerate(pieces)}

    def work(first: int, last: int) -> None:
        scratch = _scratch(3 * compiled_attention.EDGES, x)
        compiled_attention.backward(*(*inputs, array(copies[first]), *arguments, scratch, first, last))

    together(pieces, work)
    for copy in copies.values():
        dtarget += copy[:, 3]
    return None


def load_attention(edge: Compressed, dtype: torch.dtype) -> None:
    """Load both passes of attention for one type; see :func:`.linear.load_sums`."""
    rows, logits = torch.zeros(1, 1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    state = attention_state(1, rows)
    attention_forward(edge, rows, logits, logits, 0.2, state, NO_DROPOUT)
    lse, delta, grad = attention_finish(state), torch.zeros_like(logits), torch.zeros_like(rows)
    found = torch.zeros_like(rows), torch.zeros_like(logits), torch.zeros_like(logits)
    attention_backward(edge, rows, logits, logits, lse, delta, grad, 0.2, NO_DROPOUT, *found)


def _arrays(*tensors: Tensor) -> list[Any]:
    return [array(tensor) for tensor in tensors]


def _scratch(rows: int, x: Tensor) -> np.ndarray:
    """Room for a compiled loop, a row of one number a head."""
    return array(x.new_empty((rows, x.size(1))))


def _number(value: float, x: Tensor) -> Any:
    """A number of the type of ``x``."""
    return array(x.new_tensor(value))[()]


def _hash(keep: Mask, x: Tensor) -> tuple[np.uint64, int, Any]:
    """What compiled loops need to know of dropout; a threshold of 0 is none."""
    return np.uint64(keep.stream), keep.threshold, _number(keep.scale, x)
