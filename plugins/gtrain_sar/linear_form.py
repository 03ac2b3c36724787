"""Detects convolutions whose messages are source rows times a number for each edge (and head)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gtrain_sar.edges import EdgeBlock
from gtrain_sar.linear import LinearCall
from gtrain_sar.propagate_call import (
    PropagateCall,
    cached_probe,
    probe_inputs,
    probing,
    sees_one_edge,
    without_saved_tensor_hooks,
)

_EDGES = 4
_VIEWS = (
    "IndexSelectBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "UnsqueezeBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "ExpandBackward0",
    "AliasBackward0",
)
"""Nodes of autograd's graph that do not change values."""


def linear_call(call: PropagateCall) -> LinearCall | None:
    """Return the call as a weighted sum or mean of source rows; None if it is not one.

    A probe decides: ``message`` is linear if its result for random rows is its result for ones, times these rows.
    """
    form = _form(call) if call.reduce in ("sum", "mean") else None
    if form is None:
        return None
    return LinearCall(call.blocks, call.tensors[call.sources[0]], _weight(call, form), call.reduce == "mean")


def source_rows(call: PropagateCall) -> Tensor | None:
    """Return the source rows [num_local, C] if the messages are these rows, unchanged; else None."""
    if _form(call) != "one" or call.tensors[call.sources[0]].dim() != 2:
        return None
    return call.tensors[call.sources[0]]


def _form(call: PropagateCall) -> str | None:
    """Return the weight's form: ``one``, ``edge:<i>`` for tensor i of the call, ``computed``, or None: not linear."""
    if call.attention is not None or not sees_one_edge(call.conv):
        return None
    if call.pool.roles.count("source") != 1 or "target" in call.pool.roles:
        return None
    x = call.tensors[call.sources[0]]
    if x.dim() not in (2, 3) or not x.is_floating_point():
        return None
    return cached_probe(call, "form", partial(_probe, call, x))


def _probe(call: PropagateCall, x: Tensor) -> str | None:
    before = torch.get_rng_state()
    try:
        with probing(), torch.enable_grad(), without_saved_tensor_hooks():
            block, leaves = probe_inputs(call, _EDGES)
            leaves = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves]
            collected = call.collect(block, leaves)
            messages = call.message_from(collected)
            weights = call.message_of(*probe_inputs(call, _EDGES, narrow=True, ones=True))
            is_random = not torch.equal(before, torch.get_rng_state())
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return None
    if any(messages is value for name, value in collected.items() if name.endswith("_j")):
        return "one"
    if is_random or weights.shape != (_EDGES, *x.shape[1:-1], 1) or messages.shape != leaves[call.sources[0]].shape:
        return None
    products = (weights * leaves[call.sources[0]]).detach()
    if not torch.allclose(messages, products, rtol=8 * torch.finfo(x.dtype).eps, atol=0.0):
        return None
    return _structure(messages, leaves, call.sources[0])


def _structure(messages: Tensor, leaves: list[Tensor], source: int) -> str | None:
    """Return ``edge:<i>`` for a product of source rows and tensor i, ``computed`` for other products, else None.

    Values alone would not show a clamp that the probe's rows do not reach, or a gradient that is detached.
    """
    factors: set[int] = set()
    products = 0
    stack = [messages.grad_fn]
    while stack:
        node = stack.pop()
        name = type(node).__name__
        if node is None or name not in (*_VIEWS, "MulBackward0", "AccumulateGrad"):
            return None
        if name == "AccumulateGrad":
            factors.add(next((i for i, leaf in enumerate(leaves) if leaf is node.variable), -1))  # type: ignore[attr-defined]
            continue
        products += name == "MulBackward0"
        stack += [operand for operand, _ in node.next_functions if name != "MulBackward0" or operand is not None]
    if source not in factors:
        return None
    (other,) = factors - {source} if len(factors) == 2 else (-1,)
    return f"edge:{other}" if products == 1 and other >= 0 else "computed"


def _weight(call: PropagateCall, form: str) -> Tensor | None:
    if form == "one":
        return None
    if form.startswith("edge:"):
        weight = call.tensors[int(form[5:])]
        return weight if weight.dim() == 1 else weight.flatten(1)
    x = call.tensors[call.sources[0]]
    num_edges = call.blocks.num_edges
    ones = x.new_ones((1, *x.shape[1:-1], 1)).expand(num_edges, *x.shape[1:-1], 1)
    every = torch.arange(num_edges, device=x.device)
    tensors = [ones if role == "source" else t for role, t in zip(call.pool.roles, call.tensors, strict=True)]
    weight = call.message_of(EdgeBlock(every, every, every, num_edges, num_edges), tensors)
    return weight.flatten(1) if x.dim() == 3 else weight.flatten()
