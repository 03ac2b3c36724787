"""Attention of any convolution that calls PyG's ``softmax`` once: blocks are merged by a running maximum and sum.

A convolution's methods run unchanged, with a replacement of ``softmax``. In mode 1 it returns coefficients that are not
normalised, and the sum is normalised after the last block; the messages must be linear in the coefficients. In mode 2
the logits of all blocks are kept, and PyG's softmax is computed over them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import softmax as pyg_softmax

from gtrain.engine.blocks import Replay, kept_blocks, mean_or_sum
from gtrain.engine.edges import EdgeBlock
from gtrain.engine.halo import add_rows, count_needed, stream
from gtrain.engine.precision import sum_dtype
from gtrain.engine.propagate_call import (
    PropagateCall,
    message_parameters,
    probe_inputs,
    probing,
    random_state,
    replayed_random,
    set_random_state,
)
from gtrain.engine.schedule import Schedule


def calls_softmax(conv: MessagePassing, method: str) -> bool:
    """Whether a method of ``conv`` calls PyG's ``softmax`` by its name in the convolution's module."""
    function = getattr(type(conv), method)
    namespace = sys.modules[type(conv).__module__].__dict__
    return "softmax" in function.__code__.co_names and namespace.get("softmax") is pyg_softmax


SoftmaxReplacement = Callable[[Tensor, Tensor], Tensor]
"""Computes coefficients from logits [E, ...] and the targets of edges [E]."""


@contextmanager
def softmax_replaced(conv: MessagePassing, replacement: SoftmaxReplacement) -> Iterator[None]:
    """Let the convolution's module call ``replacement`` as ``softmax``."""

    def softmax(src: Tensor, index: Tensor, ptr: Any = None, num_nodes: Any = None) -> Tensor:
        return replacement(src, index)

    namespace: dict[str, Any] = sys.modules[type(conv).__module__].__dict__
    original, namespace["softmax"] = namespace["softmax"], softmax
    try:
        yield
    finally:
        namespace["softmax"] = original


def is_linear_in_coefficients(call: PropagateCall) -> bool:
    """Whether the messages are linear in the coefficients, each head in its coefficient, as a probe shows."""
    if call.reduce != "sum":
        return False
    with probing(), torch.no_grad():
        try:
            return _is_linear(call)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            return False


def _is_linear(call: PropagateCall) -> bool:
    block, tensors = probe_inputs(call)
    coefficients: list[Tensor] = []
    state = random_state(block.ids.device)

    def run(factor: Callable[[Tensor], Tensor], edges: EdgeBlock = block) -> Tensor:
        def replacement(logits: Tensor, index: Tensor) -> Tensor:
            coefficients.append(factor(torch.ones_like(logits)))
            return coefficients[-1]

        with softmax_replaced(call.conv, replacement), replayed_random(state):
            return call.message_of(edges, tensors)

    # Linear in the coefficients, head by head: doubling them doubles the messages, and a zero for one head (or one
    # edge) zeroes that head's message and no other. Random masks are replayed, so that all runs see the same ones.
    once, twice, masked = run(lambda a: a), run(lambda a: 2 * a), run(_without_first)
    if len(coefficients) != 3 or coefficients[0].dim() > once.dim() or coefficients[0].dim() > 2:
        return False
    close = partial(torch.allclose, rtol=8 * torch.finfo(once.dtype).eps, atol=0.0)
    linear = close(twice, 2 * once) and close(masked, once * _expand_heads(coefficients[2], once))
    return bool(linear) and _is_independent_of_other_edges(call, block, lambda edges: run(lambda a: a, edges))


def _is_independent_of_other_edges(call: PropagateCall, block: EdgeBlock, run: Callable[[EdgeBlock], Tensor]) -> bool:
    """Whether an edge's message, softmax and dropout aside, does not depend on the target's other edges."""
    training, call.conv.training = call.conv.training, False
    try:
        whole = run(block)
        # A target's two edges are in different parts.
        for part in (slice(0, None, 2), slice(1, None, 2)):
            if not torch.allclose(run(block.select(part)), whole[part], rtol=1e-6, atol=0.0):
                return False
    finally:
        call.conv.training = training
    return True


def _without_first(ones: Tensor) -> Tensor:
    """Return ones with 0 for the first head, or for the first edge if there is one head."""
    changed = ones.clone()
    changed.view(len(ones), -1)[:, 0] = 0
    if changed[0].numel() == 1:
        changed = ones.clone()
        changed[0] = 0
    return changed


def _expand_heads(coefficients: Tensor, messages: Tensor) -> Tensor:
    """Shape [n], [n, 1] or [n, H] to multiply messages [n, F] or [n, H, C]."""
    return coefficients.view(*coefficients.shape, *[1] * (messages.dim() - coefficients.dim()))


def _per_head(values: Tensor, like: Tensor) -> Tensor:
    """Sum values [n, H, C] to the shape of the coefficients ``like``."""
    values = values.flatten(like.dim()).sum(-1) if values.dim() > like.dim() else values
    return values.sum(-1, keepdim=True) if values.shape[1:] != like.shape[1:] else values


def attend_by_blocks(call: PropagateCall, schedule: Schedule) -> Tensor:
    """Return the attention, [num_targets, ...]; in mode 1 nothing of a block outlives the forward pass."""
    if schedule.mode != 1:
        return _kept(call, schedule)
    with softmax_replaced(call.conv, lambda logits, index: torch.ones_like(logits) * logits.sigmoid()):
        parameters = message_parameters(call, " without softmax")
    return _Attention.apply(call, schedule, *call.tensors, *parameters)


def _kept(call: PropagateCall, schedule: Schedule) -> Tensor:
    """Mode 2: logits, coefficients and messages stay in the autograd graph."""
    data, logits, indices, messages = [], [], [], []
    state = random_state(call.blocks.in_degree.device)
    for r, tensors in kept_blocks(call, schedule):
        block = call.blocks.blocks[r]
        messages.append(call.depending_on_sources(_no_messages(call), tensors))
        if len(block):
            data.append((r, tensors))
            logits.append(_logits(call, r, tensors))
            indices.append(block.targets)
    if data:
        joined = torch.cat(logits)
        exact = joined.to(sum_dtype(joined.dtype))
        weights = pyg_softmax(exact, torch.cat(indices), num_nodes=call.blocks.num_targets).to(joined.dtype)
        # The first pass, for the logits, must not consume random numbers.
        set_random_state(state)
        for (r, tensors), piece in zip(data, weights.split([len(block) for block in logits]), strict=True):
            messages[r] = _messages(call, r, tensors, lambda logits, index, piece=piece: piece)  # type: ignore[misc]
    return mean_or_sum(call, messages)


def _no_messages(call: PropagateCall) -> Tensor:
    """Return [0, ...]; the value of the coefficients does not matter."""
    with softmax_replaced(call.conv, lambda logits, index: torch.ones_like(logits)):
        return call.no_messages


def _messages(call: PropagateCall, r: int, tensors: list[Tensor], replacement: SoftmaxReplacement) -> Tensor:
    with softmax_replaced(call.conv, replacement):
        return call.message(r, tensors)


class _LogitsError(Exception):
    """Leaves a method at its call of softmax, with the logits."""


def _logits(call: PropagateCall, r: int, tensors: list[Tensor]) -> Tensor:
    def replacement(logits: Tensor, index: Tensor) -> Tensor:
        raise _LogitsError(logits)

    try:
        _messages(call, r, tensors, replacement)
    except _LogitsError as error:
        return error.args[0]
    raise AssertionError("a method that calls softmax did not")


class _RunningSoftmax:
    """Sum of messages with coefficients ``exp(logit - top)``, rescaled when a block has a larger logit.

    The online softmax (Milakov & Gimelshein 2018, algorithm 3) of :mod:`gtrain.engine.kernels.attention`, for the
    messages of any convolution.

    Shapes:
        top and total ``(targets, heads)``, out ``(targets, heads, channels)``.
    """

    def __init__(self, call: PropagateCall) -> None:
        self.call = call
        self.top: Tensor | None = None
        self.total: Tensor | None = None
        self.out: Tensor | None = None
        self.dtype: torch.dtype | None = None  # of messages; sums are at least float32

    def add(self, r: int, tensors: list[Tensor]) -> None:
        block = self.call.blocks.blocks[r]
        messages = _messages(self.call, r, tensors, self._coefficients) if len(block) else _no_messages(self.call)
        if self.out is None:
            shape, self.dtype = (self.call.blocks.num_targets, *messages.shape[1:]), messages.dtype
            self.out = messages.new_zeros(shape, dtype=sum_dtype(messages.dtype))
        if len(block):
            add_rows(self.out, block.targets, messages)

    def _coefficients(self, logits: Tensor, index: Tensor) -> Tensor:
        shape, dtype = (self.call.blocks.num_targets, *logits.shape[1:]), logits.dtype
        logits = logits.to(sum_dtype(dtype))
        if self.top is None or self.total is None:
            self.top, self.total = logits.new_full(shape, float("-inf")), logits.new_zeros(shape)
        expanded = index.view(-1, *[1] * (logits.dim() - 1)).expand_as(logits)
        # m' = max(m, max_j l_j);  s' = s * exp(m - m') + sum_j exp(l_j - m');  out' = out * exp(m - m') + ...
        top = self.top.scatter_reduce(0, expanded, logits, "amax")
        # -inf - -inf is NaN: targets without an edge so far have nothing to rescale.
        rescale = torch.where(top == float("-inf"), 0.0, (self.top - top).exp())
        # Likewise for a target whose logits are all -inf so far: its coefficients are exp(-inf - 0) = 0.
        base = top.masked_fill(top == float("-inf"), 0.0)
        coefficients = (logits - base.index_select(0, index)).exp()
        self.total = (self.total * rescale).scatter_add_(0, expanded, coefficients)
        self.top = top
        if self.out is not None:
            self.out *= _expand_heads(rescale, self.out)
        return coefficients.to(dtype)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the result, and the logarithm of each target's sum of exponentials (0 for a target without edges)."""
        assert self.out is not None
        if self.top is None or self.total is None:  # no block has an edge
            return self.out, self.out.new_zeros(0)
        empty = self.total == 0
        total = self.total.masked_fill(empty, 1.0)
        self.out /= _expand_heads(total, self.out)
        return self.out, self.top.masked_fill(empty, 0.0) + total.log()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: PropagateCall, schedule: Schedule, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.call, ctx.schedule, ctx.random = call, schedule, random_state(tensors[0].device)
        data = list(tensors[: len(call.tensors)])
        count_needed(call.rows)
        running = _RunningSoftmax(call)
        for r, block in stream(call.rows, schedule.window):
            running.add(r, call.with_block(data, block))
            del block
        out, lse = running.finish()
        out = out.to(running.dtype)
        ctx.save_for_backward(*tensors, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        *saved, out, lse = ctx.saved_tensors
        # out = sum_k a_k m_k, so the sum over a target's edges of a_k g_k, with g_k = gradient . m_k, is gradient .
        # out. It is known before any block is recomputed (as in FlashAttention, Dao et al. 2022, appendix B.2).
        delta = _per_head(gradient * out, lse) if lse.numel() else lse
        replay = Replay(ctx.call, saved, list(ctx.needs_input_grad[2:]))

        def normalised(logits: Tensor, index: Tensor) -> Tensor:
            return _Normalised.apply(logits, lse.index_select(0, index), delta.index_select(0, index))

        with replayed_random(ctx.random), softmax_replaced(ctx.call.conv, normalised):
            replay.run(ctx.schedule, lambda targets, messages: gradient.index_select(0, targets))
        return None, None, *replay.gradients


class _Normalised(torch.autograd.Function):
    """Coefficients ``a = exp(logit - lse)``; ``delta`` is the part of the gradient from the target's other edges.

    The softmax gradient ``a * (g - sum_k a_k g_k)``, with the sum as ``delta``, known before any block is recomputed.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, lse: Tensor, delta: Tensor) -> Tensor:  # type: ignore[override]
        out = (logits - lse).exp()
        ctx.save_for_backward(out, delta)
        return out.to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        out, delta = ctx.saved_tensors
        return (out * (gradient - delta)).to(gradient.dtype), None, None
