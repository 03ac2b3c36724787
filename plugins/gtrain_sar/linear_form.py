"""Finding out that a convolution's messages are source rows times a number for each edge."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gtrain_sar.edges import EdgeBlock
from gtrain_sar.linear import LinearCall
from gtrain_sar.propagate_call import PropagateCall, remembered, sample, sees_one_edge, trial, unwatched

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
"""Steps of autograd's graph that hand values on as they are."""


def linear_call(call: PropagateCall) -> LinearCall | None:
    """The call as a weighted sum or mean of source rows; None where it is not one.

    ``message`` is tried on a few made-up edges, the same on all ranks: it is linear if what it makes of random rows is
    what it makes of ones, times these rows.
    """
    form = _form(call) if call.reduce in ("sum", "mean") else None
    if form is None:
        return None
    return LinearCall(call.blocks, call.tensors[call.sources[0]], _weight(call, form), call.reduce == "mean")


def source_rows(call: PropagateCall) -> Tensor | None:
    """The source rows [num_local, C] that are the call's messages just as they are; None where they are not."""
    if _form(call) != "one" or call.tensors[call.sources[0]].dim() != 2:
        return None
    return call.tensors[call.sources[0]]


def _form(call: PropagateCall) -> str | None:
    """``one``, ``edge:<i>`` where the weight is a tensor of the call, ``computed``, or None: not linear."""
    if call.attention is not None or not sees_one_edge(call.conv):
        return None
    if call.pool.kinds.count("source") != 1 or "target" in call.pool.kinds:
        return None
    x = call.tensors[call.sources[0]]
    if x.dim() not in (2, 3) or not x.is_floating_point():
        return None
    form: str | None = remembered(call, "form", partial(_try, call, x))
    return form


def _try(call: PropagateCall, x: Tensor) -> str | None:
    before = torch.get_rng_state()
    try:
        with trial(), torch.enable_grad(), unwatched():
            block, leaves = sample(call, _EDGES)
            leaves = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves]
            collected = call.collect(block, leaves)
            of_rows = call.message_from(collected)
            of_ones = call.message_of(*sample(call, _EDGES, narrow=True, ones=True))
            drew = not torch.equal(before, torch.get_rng_state())
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return None
    if any(of_rows is value for name, value in collected.items() if name.endswith("_j")):
        return "one"
    if drew or of_ones.shape != (_EDGES, *x.shape[1:-1], 1) or of_rows.shape != leaves[call.sources[0]].shape:
        return None
    products = (of_ones * leaves[call.sources[0]]).detach()
    if not torch.allclose(of_rows, products, rtol=8 * torch.finfo(x.dtype).eps, atol=0.0):
        return None
    return _structure(of_rows, leaves, call.sources[0])


def _structure(messages: Tensor, leaves: list[Tensor], source: int) -> str | None:
    """``edge:<i>`` for a product of source rows and tensor i, ``computed`` for other products, None for anything else.

    Values alone would not show a limit that made-up rows do not reach, or a gradient that is cut off.
    """
    found: set[int] = set()
    products = 0
    waiting = [messages.grad_fn]
    while waiting:
        node = waiting.pop()
        name = type(node).__name__
        if node is None or name not in (*_VIEWS, "MulBackward0", "AccumulateGrad"):
            return None
        if name == "AccumulateGrad":
            found.add(next((i for i, leaf in enumerate(leaves) if leaf is node.variable), -1))  # type: ignore[attr-defined]
            continue
        products += name == "MulBackward0"
        waiting += [after for after, _ in node.next_functions if name != "MulBackward0" or after is not None]
    if source not in found:
        return None
    (other,) = found - {source} if len(found) == 2 else (-1,)
    return f"edge:{other}" if products == 1 and other >= 0 else "computed"


def _weight(call: PropagateCall, form: str) -> Tensor | None:
    if form == "one":
        return None
    if form.startswith("edge:"):
        found = call.tensors[int(form[5:])]
        return found if found.dim() == 1 else found.flatten(1)
    x = call.tensors[call.sources[0]]
    num_edges = call.blocks.num_edges
    ones = x.new_ones((1, *x.shape[1:-1], 1)).expand(num_edges, *x.shape[1:-1], 1)
    every = torch.arange(num_edges, device=x.device)
    tensors = [ones if kind == "source" else t for kind, t in zip(call.pool.kinds, call.tensors, strict=True)]
    weight = call.message_of(EdgeBlock(every, every, every, num_edges, num_edges), tensors)
    return weight.flatten(1) if x.dim() == 3 else weight.flatten()
