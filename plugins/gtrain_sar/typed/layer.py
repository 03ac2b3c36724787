"""One layer of convolutions over a graph with types: each source row is sent once for all relations.

Linear convolutions share one packed aggregation. The others run over local and halo rows at once, after one exchange of
their inputs, with PyG's own methods. In mode 1 nothing that they compute outlives the forward pass: the backward pass
fetches the halo again and runs the layer again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch_geometric.nn.conv import MessagePassing

from gtrain.nn.dropout import current_position, resumed_at
from gtrain_sar.autograd import random_state, replayed_random
from gtrain_sar.config import Schedule
from gtrain_sar.constants import Constants
from gtrain_sar.halo import HaloExchange, OwnedRows, concatenated_blocks, halo_rows
from gtrain_sar.linear import LinearCall, aggregate
from gtrain_sar.linear_form import linear_call
from gtrain_sar.patching import MethodPatches
from gtrain_sar.propagate_call import PropagateCall, reduction
from gtrain_sar.typed.relations import Relation, Relations


@dataclass(eq=False)
class NodeArgument:
    """A convolution's argument with one row per node, of the types at which its edges start and end.

    Attributes:
        exchange: of the nodes at which edges start.
        source: local rows ``[num_local, ...]`` of that type, or None.
        target: local rows of the other type; None: none, or the same tensor.
        pair: whether the convolution takes both as a pair, or ``source`` alone.
    """

    exchange: HaloExchange
    source: Tensor | None
    target: Tensor | None = None
    pair: bool = True

    def value(self, source: Tensor | None, target: Tensor | None) -> Any:
        """Return the argument with other tensors."""
        return (source, target) if self.pair else source


@dataclass(eq=False)
class LayerCall:
    """One call of a convolution.

    Attributes:
        conv: the convolution.
        relation: the relation that it works on; None: several.
        num_targets: local rows of the result, by node type if that is a dictionary.
        args: its arguments; those with one row per node as :class:`NodeArgument`.
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
    def node_arguments(self) -> list[NodeArgument]:
        """The arguments with one row per node."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, NodeArgument)]

    @property
    def tensors(self) -> list[Tensor]:
        """The other tensors among the arguments."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, Tensor)]

    def run(self, replace: Callable[[Any], Any]) -> Any:
        """Call the convolution with each leaf of its arguments replaced."""
        args, kwargs = tree_map(replace, (self.args, self.kwargs), is_leaf=_is_node_argument)
        return (self.function or self.conv)(*args, **kwargs)

    def run_locally(self) -> Any:
        """Call the convolution with local rows."""
        return self.run(lambda leaf: leaf.value(leaf.source, leaf.target) if _is_node_argument(leaf) else leaf)

    def without_halo(self, result: Any) -> Any:
        """Return the rows of local nodes.

        Raises:
            MultipleHopsError: the result does not have one row per node.
        """
        if isinstance(result, dict) and isinstance(self.num_targets, dict):
            counts = self.num_targets
            return {key: value if value is None else _first(value, counts[key]) for key, value in result.items()}
        if not isinstance(result, Tensor) or not isinstance(self.num_targets, int):
            raise MultipleHopsError(self.conv)
        return _first(result, self.num_targets)

    def _leaves(self) -> list[Any]:
        return tree_leaves((self.args, self.kwargs), is_leaf=_is_node_argument)


class MultipleHopsError(Exception):
    """Raised when a convolution passes messages more than once in a call, or returns other than one row per node.

    Args:
        conv: the convolution.
    """

    def __init__(self, conv: nn.Module) -> None:
        super().__init__(type(conv).__name__)
        self.conv = conv


def _first(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else rows[:count]


def _is_node_argument(value: Any) -> bool:
    return isinstance(value, NodeArgument)


@dataclass(frozen=True)
class LayerContext:
    """What the layers of a network share.

    Attributes:
        relations: of the shard.
        patches: of the network's methods.
        constants: inputs that never change.
        schedule: when blocks are fetched.
    """

    relations: Relations
    patches: MethodPatches
    constants: Constants
    schedule: Schedule

    @contextmanager
    def unpatched(self, call: LayerCall, **methods: Callable[..., Any]) -> Iterator[None]:
        """Run a call on its relation with PyG's methods, except ``methods``; see :meth:`.MethodPatches.suspended`."""
        with self.patches.suspended(call.conv, **methods), self.relations.inside(call.relation):
            yield


class TypedLayer:
    """Runs the convolutions of a layer together, in the way that is exact for them.

    If every convolution sums or averages weighted source rows, their sums are one packed aggregation. Otherwise the
    layer runs over local and halo rows (:class:`HaloRun`). A convolution that passes messages several times, or has a
    batch norm, which would count halo rows, runs separately, with separate exchanges.

    Args:
        context: shared by all layers.
    """

    def __init__(self, context: LayerContext) -> None:
        self._context = context
        self._separate: set[nn.Module] = set()
        self._not_linear: set[tuple[Any, ...]] = set()

    def run(self, calls: Sequence[LayerCall]) -> list[Any]:
        """Return the result of each call, for local nodes."""
        state = torch.get_rng_state()
        while True:
            try:
                return self._run(calls, state)
            except MultipleHopsError as error:  # in the first pass only, and on all ranks
                self._separate.add(error.conv)
                torch.set_rng_state(state)  # discards the random numbers of the failed attempt

    def _run(self, calls: Sequence[LayerCall], state: Tensor) -> list[Any]:
        packed = [call for call in calls if call.conv not in self._separate]
        if self._context.relations.group.size == 1 or len(packed) == 1:
            packed = []
        results = self._linear(packed)
        if results is None:
            torch.set_rng_state(state)
            packed = [call for call in packed if not _has_batch_norm(call.conv)]
            results = HaloRun(packed, self._context).results() if packed else []
        by_call = {id(call): result for call, result in zip(packed, results, strict=True)}
        return [by_call[id(call)] if id(call) in by_call else self._separately(call) for call in calls]

    def _separately(self, call: LayerCall) -> Any:
        with self._context.relations.inside(call.relation):
            return call.run_locally()

    def _linear(self, calls: Sequence[LayerCall]) -> list[Any] | None:
        """Return the results of a packed aggregation; None if a convolution is not linear."""
        key = tuple((id(call.conv), call.conv.training) for call in calls)
        if key in self._not_linear:
            return None
        suspended: list[SuspendedConv] = []
        for call in calls:
            conv = suspend_at_propagate(call, self._context)
            if conv is None:
                self._not_linear.add(key)
                return None
            suspended.append(conv)
        sums = self._aggregate([conv.linear for conv in suspended])
        return [conv.resume(out) for conv, out in zip(suspended, sums, strict=True)]

    def _aggregate(self, calls: Sequence[LinearCall]) -> list[Tensor]:
        """Return all sums. Those of constant inputs are cached, and computed together; the others share an exchange."""
        constants = self._context.constants
        cached = [i for i, call in enumerate(calls) if constants.caches(call.x, call.weight)]
        rest = [i for i in range(len(calls)) if i not in cached]
        sums: dict[int, Tensor] = {}

        def compute(positions: Sequence[int], i: int) -> Tensor:
            if i not in sums:
                outs = aggregate([calls[k] for k in positions], self._context.schedule)
                sums.update(zip(positions, outs, strict=True))
            return sums[i]

        results = {}
        for i in cached:
            call = calls[i]
            settings = ("linear of a relation", call.mean, id(call.blocks))
            results[i] = constants.result((call.x, call.weight), settings, partial(compute, cached, i))
        return [results[i] if i in results else compute(rest, i) for i in range(len(calls))]


class SuspendedConv:
    """A convolution that was left at ``propagate``, and whose aggregation is linear.

    Args:
        call: the call of the convolution.
        context: shared by all layers.
        linear: the aggregation.
        random: the state of the generators before the call, if it drew from them; else None.
    """

    def __init__(self, call: LayerCall, context: LayerContext, linear: LinearCall, random: Any) -> None:
        self.linear = linear
        self._call, self._context, self._random = call, context, random

    def resume(self, aggregated: Tensor) -> Tensor:
        """Run the convolution again, with the aggregate as the result of ``propagate``.

        Raises:
            MultipleHopsError: it calls ``propagate`` again.
        """
        results = [aggregated]

        def propagate(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
            if not results:
                raise MultipleHopsError(self._call.conv)
            return conv.update(results.pop())

        replay = nullcontext() if self._random is None else replayed_random(self._random)
        with replay, self._context.unpatched(self._call, propagate=propagate):
            return self._call.without_halo(self._call.run_locally())


class _PropagateReached(Exception):
    """Leaves a convolution where it passes messages; without arguments where it computes values of edges before."""

    def __init__(self, edge_index: Tensor | None = None, arguments: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.edge_index, self.arguments = edge_index, arguments


def suspend_at_propagate(call: LayerCall, context: LayerContext) -> SuspendedConv | None:
    """Run a convolution up to ``propagate``; return None if its aggregation is not linear."""
    conv, relation = call.conv, call.relation
    convs = [layer for layer in conv.modules() if isinstance(layer, MessagePassing)]
    if not isinstance(conv, MessagePassing) or relation is None or len(convs) > 1:
        return None
    reduce = reduction(conv)
    if reduce not in ("sum", "mean"):
        return None
    device = relation.edges.exchange.send_rows[0].device
    before = random_state(device)
    reached = _propagate_reached(call, context)
    if reached is None or reached.edge_index is None or reached.arguments is None:
        return None
    linear = linear_call(PropagateCall(conv, relation.edges(reached.edge_index), reduce, reached.arguments))
    pairs = zip(before, random_state(device), strict=True)
    drew = any(a is not None and b is not None and not a.equal(b) for a, b in pairs)
    return None if linear is None else SuspendedConv(call, context, linear, before if drew else None)


def _propagate_reached(call: LayerCall, context: LayerContext) -> _PropagateReached | None:
    def propagate(conv: MessagePassing, edge_index: Tensor, size: Any = None, **arguments: Any) -> Any:
        raise _PropagateReached(edge_index, arguments)

    def edge_updater(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        raise _PropagateReached

    with context.unpatched(call, propagate=propagate, edge_updater=edge_updater):
        try:
            call.run_locally()
        except _PropagateReached as reached:
            return reached
    return None


def _has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


class HaloRun:
    """Calls of one layer over local and halo rows, each of which passes messages once.

    Args:
        calls: the calls.
        context: shared by all layers.

    Attributes:
        rows: the distinct tensors whose halo rows the calls read.
        others: the other tensors that need gradients.
        parameters: of the convolutions.
    """

    def __init__(self, calls: Sequence[LayerCall], context: LayerContext) -> None:
        self.calls, self._context = calls, context
        rows = {(id(e.exchange), id(e.source)): (e.exchange, e.source) for call in calls for e in call.node_arguments}
        self.rows: list[OwnedRows] = [(exchange, x) for exchange, x in rows.values() if x is not None]
        sources = {id(tensor) for _, tensor in self.rows}
        targets = [e.target for call in calls for e in call.node_arguments if e.target is not None]
        others = [*(tensor for call in calls for tensor in call.tensors), *targets]
        self.others = _distinct(t for t in others if t.requires_grad and id(t) not in sources)
        self.parameters = _distinct(p for call in calls for p in call.conv.parameters() if p.requires_grad)
        self._spec: TreeSpec | None = None
        self._position = current_position()

    def results(self) -> list[Any]:
        """Return the result of each call, for local nodes.

        Raises:
            MultipleHopsError: a call passes messages more than once.
        """
        sources = [tensor for _, tensor in self.rows]
        tensors = [*sources, *self.others, *self.parameters]
        needed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if self._context.schedule.mode != 1 or not needed:
            return self._compute(halo_rows(self.rows), self.others)
        flat = _Rematerialised.apply(self, len(sources), *tensors)
        assert self._spec is not None
        return tree_unflatten(flat, self._spec)

    def compute_flat(self, whole: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the tensors of the results.

        Args:
            whole: local and halo rows of :attr:`rows`.
            others: in place of :attr:`others`.
        """
        leaves, self._spec = tree_flatten(self._compute(whole, others))
        return tuple(leaves)

    def _compute(self, whole: Sequence[Tensor], others: Sequence[Tensor]) -> list[Any]:
        with_halo = {(id(e), id(t)): rows for (e, t), rows in zip(self.rows, whole, strict=True)}
        local = {id(t): rows[: len(t)] for (_, t), rows in zip(self.rows, whole, strict=True)}
        local |= {id(t): other for t, other in zip(self.others, others, strict=True)}

        def replace(leaf: Any) -> Any:
            if not isinstance(leaf, NodeArgument):
                return local.get(id(leaf), leaf)
            source = None if leaf.source is None else with_halo[id(leaf.exchange), id(leaf.source)]
            return leaf.value(source, None if leaf.target is None else local.get(id(leaf.target), leaf.target))

        return [call.without_halo(self._run_once(call, replace)) for call in self.calls]

    def _run_once(self, call: LayerCall, replace: Any) -> Any:
        passed: list[MessagePassing] = []

        def propagate(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
            if passed:
                raise MultipleHopsError(call.conv)
            passed.append(conv)
            return type(conv).propagate(conv, *args, **kwargs)

        with resumed_at(self._position), self._context.unpatched(call, propagate=propagate):
            return call.run(replace)


class _Rematerialised(torch.autograd.Function):
    """A layer of which only the inputs are saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: HaloRun, count: int, *tensors: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.run, ctx.count, ctx.random = run, count, random_state(tensors[0].device)
        ctx.save_for_backward(*tensors)
        flat = run.compute_flat(concatenated_blocks(run.rows), run.others)
        # a view would keep the halo's rows alive
        return tuple(t.clone() if isinstance(t, Tensor) and t._base is not None else t for t in flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        run, count, needed = ctx.run, ctx.count, ctx.needs_input_grad[2:]
        inputs = list(ctx.saved_tensors)
        with torch.enable_grad(), replayed_random(ctx.random):
            for i in range(count + len(run.others)):  # the parameters behind them are leaves already
                inputs[i] = inputs[i].detach().requires_grad_(needed[i])
            whole = halo_rows([(exchange, x) for (exchange, _), x in zip(run.rows, inputs, strict=False)])
            flat = run.compute_flat(whole, inputs[count : count + len(run.others)])
        pairs = [(t, g) for t, g in zip(flat, gradients, strict=True) if isinstance(t, Tensor) and t.requires_grad]
        positions = [i for i, need in enumerate(needed) if need]
        outs, out_gradients = zip(*pairs, strict=True)
        results = torch.autograd.grad(outs, [inputs[i] for i in positions], out_gradients, allow_unused=True)
        by_position = dict(zip(positions, results, strict=True))
        return None, None, *(by_position.get(i) for i in range(len(inputs)))


def _distinct(tensors: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
