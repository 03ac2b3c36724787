"""Convolutions over own nodes and the halo at once: one exchange of their inputs, and PyG's own methods.

In mode 1 nothing that a layer computes outlives its forward pass: the backward pass fetches the halo again and runs the
layer once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch_geometric.nn.conv import MessagePassing

from gtrain.nn.dropout import again, here
from gtrain_sar.blocks import random_state, replayed_random
from gtrain_sar.halo import Rows, halo_rows, stream
from gtrain_sar.typed.calls import Ends, LayerCall, SeveralHops

if TYPE_CHECKING:
    from gtrain_sar.typed.takeover import TypedTakeover


class ExtendedRun:
    """Calls of one layer, each of which passes messages once.

    Args:
        calls: the calls.
        takeover: runs the network.

    Attributes:
        rows: the distinct tensors whose halo rows the calls read.
        others: tensors that need gradients besides.
    """

    def __init__(self, calls: Sequence[LayerCall], takeover: TypedTakeover) -> None:
        self.calls, self._takeover = calls, takeover
        self.rows: list[Rows] = _distinct_rows(calls)
        sources = {id(tensor) for _, tensor in self.rows}
        plain = [t for call in calls for t in [*call.tensors, *(e.target for e in call.ends if e.target is not None)]]
        self.others = _distinct(t for t in plain if t.requires_grad and id(t) not in sources)
        self.parameters = _distinct(p for call in calls for p in call.conv.parameters() if p.requires_grad)
        self._spec: TreeSpec | None = None
        self._layer = here()

    def results(self) -> list[Any]:
        """What each call returns, cut to own nodes.

        Raises:
            SeveralHops: a call passes messages more than once.
        """
        sources = [tensor for _, tensor in self.rows]
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in [*sources, *self.others, *self.parameters])
        if self._takeover.schedule.mode != 1 or not wanted:
            return self._compute(halo_rows(self.rows), self.others)
        flat = _Rematerialised.apply(self, len(sources), *sources, *self.others, *self.parameters)
        assert self._spec is not None
        found: list[Any] = tree_unflatten(flat, self._spec)
        return found

    def fetch(self) -> list[Tensor]:
        """Own and halo rows, without a way back for gradients."""
        blocks = [block for _, block in stream(self.rows, None)]
        return [torch.cat(pieces) for pieces in zip(*blocks, strict=True)]

    def flat(self, whole: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Any, ...]:
        """The results' tensors in a row."""
        leaves, self._spec = tree_flatten(self._compute(whole, others))
        return tuple(leaves)

    def _compute(self, whole: Sequence[Tensor], others: Sequence[Tensor]) -> list[Any]:
        fetched = {(id(e), id(t)): rows for (e, t), rows in zip(self.rows, whole, strict=True)}
        own = {id(t): rows[: len(t)] for (_, t), rows in zip(self.rows, whole, strict=True)}
        own |= {id(t): now for t, now in zip(self.others, others, strict=True)}

        def replace(leaf: Any) -> Any:
            if not isinstance(leaf, Ends):
                return own.get(id(leaf), leaf)
            source = None if leaf.source is None else fetched[id(leaf.exchange), id(leaf.source)]
            return leaf.given(source, None if leaf.target is None else own.get(id(leaf.target), leaf.target))

        return [call.cut(self._once(call, replace)) for call in self.calls]

    def _once(self, call: LayerCall, replace: Any) -> Any:
        hops: list[None] = []

        def propagate(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
            hops.append(None)
            if len(hops) > 1:
                raise SeveralHops(call.conv)
            return type(conv).propagate(conv, *args, **kwargs)

        inside = self._takeover.relations.inside(call.relation)
        with again(self._layer), self._takeover.plain(call.conv, propagate=propagate), inside:
            return call.run(replace)


class _Rematerialised(torch.autograd.Function):
    """A layer whose inputs alone are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: ExtendedRun, count: int, *tensors: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.run, ctx.count, ctx.random = run, count, random_state(tensors[0].device)
        ctx.save_for_backward(*tensors)
        flat = run.flat(run.fetch(), run.others)
        # a view would keep the halo's rows alive
        return tuple(t.clone() if isinstance(t, Tensor) and t._base is not None else t for t in flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        run, count, needed = ctx.run, ctx.count, ctx.needs_input_grad[2:]
        parameters = count + len(run.others)
        with torch.enable_grad(), replayed_random(ctx.random):
            leaves = [
                t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors[:parameters], needed, strict=False)
            ]
            inputs = [*leaves, *ctx.saved_tensors[parameters:]]
            whole = halo_rows([(e, leaf) for (e, _), leaf in zip(run.rows, leaves, strict=False)])
            flat = run.flat(whole, leaves[count:])
        pairs = [(t, g) for t, g in zip(flat, gradients, strict=True) if isinstance(t, Tensor) and t.requires_grad]
        wanted = [i for i, need in enumerate(needed) if need]
        outs, of_outs = zip(*pairs, strict=True)
        found = torch.autograd.grad(outs, [inputs[i] for i in wanted], of_outs, allow_unused=True)
        by_place = dict(zip(wanted, found, strict=True))
        return None, None, *(by_place.get(i) for i in range(len(inputs)))


def _distinct_rows(calls: Sequence[LayerCall]) -> list[Rows]:
    rows = {(id(e.exchange), id(e.source)): (e.exchange, e.source) for call in calls for e in call.ends}
    return [(exchange, tensor) for exchange, tensor in rows.values() if tensor is not None]


def _distinct(tensors: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
