"""One layer of convolutions over a graph with types: each source row crosses the wire once for all relations.

Linear convolutions share one packed aggregation. The others run over own nodes and the halo at once, after one exchange
of their inputs, with PyG's own methods; in mode 1 nothing that they compute outlives the forward pass: the backward
pass fetches the halo again and runs the layer once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch_geometric.nn.conv import MessagePassing

from gtrain.nn.dropout import again, here
from gtrain_sar.autograd import random_state, replayed_random
from gtrain_sar.config import Schedule
from gtrain_sar.constants import Constants
from gtrain_sar.halo import HaloExchange, Rows, halo_rows, stream
from gtrain_sar.linear import LinearCall, aggregate
from gtrain_sar.linear_form import linear_call
from gtrain_sar.patching import MethodPatches
from gtrain_sar.propagate_call import PropagateCall, reduction
from gtrain_sar.typed.relations import Relation, Relations


@dataclass(eq=False)
class Ends:
    """A convolution's argument with a row for each node: of the types that its edges start and end at.

    Attributes:
        exchange: of the nodes that edges start at.
        source: own rows ``[num_local, ...]`` of that type; None where there are none.
        target: own rows of the other type; None where there are none, or where it is the same tensor.
        pair: whether the convolution takes both as a pair, or ``source`` alone.
    """

    exchange: HaloExchange
    source: Tensor | None
    target: Tensor | None = None
    pair: bool = True

    def given(self, source: Tensor | None, target: Tensor | None) -> Any:
        """The argument, with other tensors in the place of its own."""
        return (source, target) if self.pair else source

    def own(self) -> Any:
        """The argument as the network gave it."""
        return self.given(self.source, self.target)


@dataclass(eq=False)
class LayerCall:
    """One call of a convolution.

    Attributes:
        conv: the convolution.
        relation: what it works on; None where it works on several at once.
        num_targets: own rows of the result, by node type where that is a dictionary.
        args: its arguments; those with a row for each node as :class:`Ends`.
        kwargs: likewise.
        function: called with them; None: the convolution.
    """

    conv: nn.Module
    relation: Relation | None
    num_targets: int | dict[str, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None

    @property
    def ends(self) -> list[Ends]:
        """The arguments with a row for each node."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, Ends)]

    @property
    def tensors(self) -> list[Tensor]:
        """The other tensors among the arguments."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, Tensor)]

    @property
    def convs(self) -> list[MessagePassing]:
        """Every convolution that the call may reach."""
        return [layer for layer in self.conv.modules() if isinstance(layer, MessagePassing)]

    def run(self, replace: Callable[[Any], Any]) -> Any:
        """Call the convolution with each leaf of its arguments replaced."""
        args, kwargs = tree_map(replace, (self.args, self.kwargs), is_leaf=_is_ends)
        return (self.function or self.conv)(*args, **kwargs)

    def run_as_given(self) -> Any:
        """Call the convolution with own rows."""
        return self.run(lambda leaf: leaf.own() if isinstance(leaf, Ends) else leaf)

    def cut(self, result: Any) -> Any:
        """The rows of own nodes."""
        if isinstance(result, dict) and isinstance(self.num_targets, dict):
            counts = self.num_targets
            return {key: value if value is None else _first(value, counts[key]) for key, value in result.items()}
        if not isinstance(result, Tensor) or not isinstance(self.num_targets, int):
            raise SeveralHops(self.conv)
        return _first(result, self.num_targets)

    def _leaves(self) -> list[Any]:
        return tree_leaves((self.args, self.kwargs), is_leaf=_is_ends)


class SeveralHops(Exception):
    """A convolution passes messages more than once in a call, or returns more than a row for each node.

    Args:
        conv: the convolution.
    """

    def __init__(self, conv: nn.Module) -> None:
        super().__init__(type(conv).__name__)
        self.conv = conv


def _first(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else rows[:count]


def _is_ends(value: Any) -> bool:
    return isinstance(value, Ends)


@dataclass(frozen=True)
class LayerContext:
    """What the layers of a network share.

    Attributes:
        relations: the shard's.
        patches: of the network's methods.
        constants: inputs that never change.
        schedule: how blocks are worked off.
    """

    relations: Relations
    patches: MethodPatches
    constants: Constants
    schedule: Schedule

    @contextmanager
    def unpatched(self, call: LayerCall, **methods: Callable[..., Any]) -> Iterator[None]:
        """Run a call with PyG's own methods but ``methods``, see :meth:`.MethodPatches.suspended`, on its relation."""
        with self.patches.suspended(call.conv, **methods), self.relations.inside(call.relation):
            yield


class TypedLayer:
    """Runs the convolutions of a layer together, whichever way is exact for them.

    Where every convolution sums or averages weighted source rows, their sums are one packed aggregation. Else the layer
    runs over own and halo rows (:class:`ExtendedRun`). A convolution that passes messages several times, or has a batch
    norm inside that would count halo rows among its own, makes exchanges of its own.

    Args:
        context: how layers are run.
    """

    def __init__(self, context: LayerContext) -> None:
        self._context = context
        self._alone: set[nn.Module] = set()
        self._not_linear: set[tuple[Any, ...]] = set()

    def run(self, calls: Sequence[LayerCall]) -> list[Any]:
        """What each call returns, for own nodes."""
        state = torch.get_rng_state()
        while True:
            try:
                return self._run(calls, state)
            except SeveralHops as error:  # in the first pass only, and on all ranks
                self._alone.add(error.conv)
                torch.set_rng_state(state)  # what was drawn does not count

    def _run(self, calls: Sequence[LayerCall], state: Tensor) -> list[Any]:
        packed = [call for call in calls if call.conv not in self._alone]
        if self._context.relations.group.size == 1 or len(packed) == 1:
            packed = []
        results = self._linear(packed)
        if results is None:
            torch.set_rng_state(state)
            packed = [call for call in packed if not _has_batch_norm(call.conv)]
            results = ExtendedRun(packed, self._context).results() if packed else []
        by_call = {id(call): result for call, result in zip(packed, results, strict=True)}
        return [by_call[id(call)] if id(call) in by_call else self._by_itself(call) for call in calls]

    def _by_itself(self, call: LayerCall) -> Any:
        with self._context.relations.inside(call.relation):
            return call.run_as_given()

    def _linear(self, calls: Sequence[LayerCall]) -> list[Any] | None:
        key = tuple((id(call.conv), call.conv.training) for call in calls)
        if not calls or key in self._not_linear:
            return None if calls else []
        works = []
        for call in calls:
            works.append(capture(call, self._context))
            if works[-1] is None:
                self._not_linear.add(key)
                return None
        sums = self._aggregate([work.linear for work in works if work is not None])
        return [work.finish(out) for work, out in zip(works, sums, strict=True) if work is not None]

    def _aggregate(self, calls: Sequence[LinearCall]) -> list[Tensor]:
        """Sums of constant inputs are looked up, or made together; all others share one exchange."""
        constants = self._context.constants
        kept = [i for i, call in enumerate(calls) if constants.keeps(call.x, call.weight)]
        rest = [i for i in range(len(calls)) if i not in kept]
        sums: dict[int, Tensor] = {}

        def make(wanted: Sequence[int], i: int) -> Tensor:
            if i not in sums:
                outs = aggregate([calls[k] for k in wanted], self._context.schedule)
                sums.update(zip(wanted, outs, strict=True))
            return sums[i]

        results = {}
        for i in kept:
            call = calls[i]
            settings = ("linear of a relation", call.mean, id(call.blocks))
            results[i] = constants.result((call.x, call.weight), settings, partial(make, kept, i))
        return [results[i] if i in results else make(rest, i) for i in range(len(calls))]


class LinearWork:
    """A convolution broken off at ``propagate``, whose aggregation is linear.

    Args:
        call: the call of the convolution.
        context: how layers are run.
        linear: what is to be aggregated.
        random: state of the generators before the call, if it drew from them; else None.
    """

    def __init__(self, call: LayerCall, context: LayerContext, linear: LinearCall, random: Any) -> None:
        self.linear = linear
        self._call, self._context, self._random = call, context, random

    def finish(self, out: Tensor) -> Tensor:
        """The convolution's result, given what was aggregated.

        Raises:
            SeveralHops: it passes messages again.
        """
        results = [out]

        def propagate(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
            if not results:
                raise SeveralHops(self._call.conv)
            return conv.update(results.pop())

        if self._random is None:
            return self._again(propagate)
        with replayed_random(self._random):
            return self._again(propagate)

    def _again(self, propagate: Any) -> Tensor:
        call = self._call
        with self._context.unpatched(call, propagate=propagate):
            result: Tensor = call.cut(call.run_as_given())
            return result


class _Captured(Exception):
    """Breaks a convolution off where it passes messages."""

    def __init__(self, edge_index: Tensor | None = None, arguments: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.edge_index, self.arguments = edge_index, arguments


def capture(call: LayerCall, context: LayerContext) -> LinearWork | None:
    """Run a convolution up to ``propagate``; None where its aggregation is not linear."""
    conv, relation = call.conv, call.relation
    if not isinstance(conv, MessagePassing) or relation is None or len(call.convs) > 1:
        return None
    reduce = reduction(conv)
    if reduce not in ("sum", "mean"):
        return None
    before = random_state(relation.edges.exchange.send_rows[0].device)
    captured = _captured(call, context)
    if captured is None or captured.edge_index is None or captured.arguments is None:
        return None
    linear = linear_call(PropagateCall(conv, relation.edges(captured.edge_index), reduce, captured.arguments))
    after = random_state(relation.edges.exchange.send_rows[0].device)
    drew = any(a is not None and b is not None and not a.equal(b) for a, b in zip(before, after, strict=True))
    return None if linear is None else LinearWork(call, context, linear, before if drew else None)


def _captured(call: LayerCall, context: LayerContext) -> _Captured | None:
    def propagate(conv: MessagePassing, edge_index: Tensor, size: Any = None, **arguments: Any) -> Any:
        raise _Captured(edge_index, arguments)

    def edge_updater(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        raise _Captured

    with context.unpatched(call, propagate=propagate, edge_updater=edge_updater):
        try:
            call.run_as_given()
        except _Captured as captured:
            return captured
    return None


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


class ExtendedRun:
    """Calls of one layer, each of which passes messages once.

    Args:
        calls: the calls.
        context: how layers are run.

    Attributes:
        rows: the distinct tensors whose halo rows the calls read.
        others: tensors that need gradients besides.
    """

    def __init__(self, calls: Sequence[LayerCall], context: LayerContext) -> None:
        self.calls, self._context = calls, context
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
        if self._context.schedule.mode != 1 or not wanted:
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

        with again(self._layer), self._context.unpatched(call, propagate=propagate):
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
        input_gradients = torch.autograd.grad(outs, [inputs[i] for i in wanted], of_outs, allow_unused=True)
        by_place = dict(zip(wanted, input_gradients, strict=True))
        return None, None, *(by_place.get(i) for i in range(len(inputs)))


def _distinct_rows(calls: Sequence[LayerCall]) -> list[Rows]:
    rows = {(id(e.exchange), id(e.source)): (e.exchange, e.source) for call in calls for e in call.ends}
    return [(exchange, tensor) for exchange, tensor in rows.values() if tensor is not None]


def _distinct(tensors: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
