"""Networks over graphs with types: their relations, and the layers of convolutions over all of them.

A layer is a ``HeteroConv``, a convolution over all types, or the calls that a ``to_hetero`` graph makes per edge type.
It sends each source row once for all relations. Linear convolutions share one packed aggregation. The others run over
local and halo rows at once, after one exchange of their inputs, with PyG's own methods. In mode 1 nothing that they
compute outlives the forward pass: the backward pass fetches the halo again and runs the layer again.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn import HeteroConv
from torch_geometric.nn.conv import HGTConv, MessagePassing
from torch_geometric.nn.conv.hetero_conv import group

from gtrain.engine.constants import Constants
from gtrain.engine.edges import EdgeBlockCache
from gtrain.engine.halo import HaloExchange, OwnedRows, concatenated_blocks, halo_rows
from gtrain.engine.linear import LinearCall, aggregate
from gtrain.engine.patching import MethodPatches, RunHook
from gtrain.engine.precision import AutocastState
from gtrain.engine.propagate_call import PropagateCall, linear_call, random_state, reduction, replayed_random
from gtrain.engine.schedule import Schedule
from gtrain.errors import ConfigError
from gtrain.graph.shard.graph import HeteroShard
from gtrain.graph.store.manifest import EdgeType
from gtrain.nn.dropout import current_position, resumed_at
from gtrain.strategy.group import Group
from gtrain_sar.patching import Patcher, check_arguments, check_count_of_rows
from gtrain_sar.whole_halo import is_order_independent

OVER_ALL_TYPES: tuple[type[nn.Module], ...] = (HGTConv,)
"""Convolutions that take dictionaries by type and pass messages once for all types."""


@dataclass(eq=False)
class Relation:
    """An edge type of a shard.

    Attributes:
        source: the exchange of the nodes at which its edges start.
        target: the exchange of the nodes at which they end.
        num_targets: local nodes at which they end.
        edges: their blocks.
    """

    source: HaloExchange
    target: HaloExchange
    num_targets: int
    edges: EdgeBlockCache = field(init=False)

    def __post_init__(self) -> None:
        self.edges = EdgeBlockCache(self.source, self.num_targets, self.target)


class Relations:
    """The relations of a typed shard, and the relation that the running convolution works on.

    A layer that calls a convolution for an edge type declares it by :meth:`inside`. Otherwise the ``edge_index`` of the
    call decides, if it is one of the batch's, or else the last part of the convolution's name in the model, if that is
    ``source__relation__target``, the name that ``to_hetero`` gives.

    Args:
        group: the ranks.
        shard: this rank's part.
        create_exchange: creates the exchange of a node type's rows.

    Attributes:
        group: the ranks.
        exchanges: by node type.
        by_type: the relations by edge type.
        by_name: the edge types by name.
    """

    def __init__(
        self, group: Group, shard: HeteroShard, create_exchange: Callable[..., HaloExchange] = HaloExchange
    ) -> None:
        self.group = group
        self.exchanges = {
            node_type: create_exchange(group, nodes, orig_id=shard.node_data[node_type].get("orig_id"))
            for node_type, nodes in shard.nodes.items()
        }
        self.by_type: dict[EdgeType, Relation] = {
            edge_type: Relation(
                self.exchanges[edge_type[0]], self.exchanges[edge_type[2]], shard.nodes[edge_type[2]].num_local
            )
            for edge_type in shard.edge_index
        }
        self.by_name = {name_of(edge_type): edge_type for edge_type in shard.edge_index}
        self._of_edges: Any = WeakIdKeyDictionary()
        self._of_conv: dict[nn.Module, Relation] = {}
        self._current: list[Relation | None] = []
        self._running = ""

    def register(self, edge_index: Mapping[EdgeType, Tensor]) -> None:
        """Register the batch's edges of each type."""
        for edge_type, tensor in edge_index.items():
            self._of_edges[tensor] = self.by_type[edge_type]

    def install(self, module: nn.Module) -> list[Callable[[], Any]]:
        """Watch the calls of every convolution in ``module``; return the actions that undo it."""
        undo: list[Callable[[], Any]] = [self._of_conv.clear]
        for name, layer in module.named_modules():
            if isinstance(layer, MessagePassing):
                edge_type = self.by_name.get(name.rpartition(".")[2])
                if edge_type is not None:
                    self._of_conv[layer] = self.by_type[edge_type]
                undo.append(layer.register_forward_pre_hook(RunHook(self._enter), with_kwargs=True).remove)
                undo.append(layer.register_forward_hook(RunHook(self._leave), always_call=True).remove)
        return undo

    def current(self) -> Relation:
        """Return the relation that the running convolution works on.

        Raises:
            ConfigError: neither its edges nor its name identify it.
        """
        if self._current and self._current[-1] is not None:
            return self._current[-1]
        raise ConfigError(
            f"strategy=sar does not know the edge type of {self._running or 'a convolution'}: it was called with edges "
            "that are not the batch's.",
            hint="call it with batch.edge_index_dict[...] unchanged, or keep it in a ModuleDict under "
            "source__relation__target.",
        )

    def of_type(self, edge_type: EdgeType) -> Relation:
        """Return the relation of an edge type.

        Raises:
            ConfigError: the graph has no such edge type.
        """
        if edge_type in self.by_type:
            return self.by_type[edge_type]
        raise ConfigError(
            f"strategy=sar does not know the edge type {edge_type}: the graph has {', '.join(map(str, self.by_type))}.",
            hint="add edges that the model makes itself (reversed ones, perhaps) to the data, or set strategy=single.",
        )

    @contextmanager
    def inside(self, relation: Relation | None) -> Iterator[None]:
        """Convolutions called inside this context work on this relation, unless their edges identify another one."""
        self._current.append(relation)
        try:
            yield
        finally:
            self._current.pop()

    def _enter(self, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running = type(conv).__name__
        outer = self._current[-1] if self._current else None
        self._current.append(self._by_edges(args, kwargs) or outer or self._of_conv.get(conv))

    def _leave(self, *_: Any) -> None:
        self._current.pop()

    def _by_edges(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Relation | None:
        tensors = (leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor))
        return next((self._of_edges[t] for t in tensors if t in self._of_edges), None)


def name_of(edge_type: EdgeType) -> str:
    """Return the name of an edge type in a ``ModuleDict``, as ``to_hetero`` and common practice form it."""
    return "__".join(edge_type).replace(" ", "_").replace("-", "_").replace(":", "_")


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

    Raises:
        ConfigError: an argument lacks a row for each node of the part.
    """

    conv: nn.Module
    relation: Relation | None
    num_targets: int | dict[str, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        layer = type(self.conv).__name__
        for argument in self.node_arguments:
            if isinstance(argument.source, Tensor) and argument.source.dim():
                check_count_of_rows(layer, argument.source.size(0), argument.exchange.shard.num_local)
            if self.relation is not None and isinstance(argument.target, Tensor) and argument.target.dim():
                check_count_of_rows(layer, argument.target.size(0), self.relation.num_targets)

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
    layer runs over local and halo rows (:class:`HaloRun`). A convolution runs separately, with separate exchanges, if
    it passes messages several times, if it has a batch norm, which would count halo rows, or if its aggregation depends
    on the order of edges.

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
            except MultipleHopsError as error:
                # In the first pass only, and on all ranks.
                self._separate.add(error.conv)
                # Discards the random numbers of the failed attempt.
                torch.set_rng_state(state)

    def _run(self, calls: Sequence[LayerCall], state: Tensor) -> list[Any]:
        packed = [call for call in calls if call.conv not in self._separate]
        if self._context.relations.group.size == 1 or len(packed) == 1:
            packed = []
        results = self._linear(packed)
        if results is None:
            torch.set_rng_state(state)
            packed = [call for call in packed if _runs_over_halo(call.conv)]
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
        suspended = []
        for call in calls:
            conv = suspend_at_propagate(call, self._context)
            if conv is None:
                self._not_linear.add(key)
                return None
            suspended.append(conv)
        sums = self._aggregate([linear for linear, _, _ in suspended], [edge_index for _, edge_index, _ in suspended])
        return [resume(out) for (_, _, resume), out in zip(suspended, sums, strict=True)]

    def _aggregate(self, calls: Sequence[LinearCall], edges: Sequence[Tensor]) -> list[Tensor]:
        """Return all sums. Those of constant inputs are cached, and computed together; the others share an exchange.

        Args:
            calls: the sums.
            edges: the ``edge_index`` of each.
        """
        constants = self._context.constants
        cached = [i for i, call in enumerate(calls) if constants.caches(call.x, edges[i], call.weight)]
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
            results[i] = constants.result((call.x, edges[i], call.weight), settings, partial(compute, cached, i))
        return [results[i] if i in results else compute(rest, i) for i in range(len(calls))]


class _PropagateReached(Exception):
    """Leaves a convolution where it passes messages; without arguments where it computes values of edges before."""

    def __init__(self, edge_index: Tensor | None = None, arguments: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.edge_index, self.arguments = edge_index, arguments


def suspend_at_propagate(
    call: LayerCall, context: LayerContext
) -> tuple[LinearCall, Tensor, Callable[[Tensor], Tensor]] | None:
    """Run a convolution up to ``propagate``.

    Returns:
        The aggregation that it reached, its ``edge_index``, and the function that completes the call given the
        aggregate; None if the aggregation is not linear.
    """
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
    check_arguments(conv, conv._user_args, reached.arguments, relation.edges)
    linear = linear_call(PropagateCall(conv, relation.edges(reached.edge_index), reduce, reached.arguments))
    pairs = zip(before, random_state(device), strict=True)
    drew = any(a is not None and b is not None and not a.equal(b) for a, b in pairs)
    if linear is None:
        return None
    return linear, reached.edge_index, partial(_resume, call, context, before if drew else None)


def _resume(call: LayerCall, context: LayerContext, random: Any, aggregated: Tensor) -> Tensor:
    """Run a convolution again, with the aggregate as the result of ``propagate``.

    Args:
        call: the call of the convolution.
        context: shared by all layers.
        random: the state of the generators before the first run, if it drew from them; else None.
        aggregated: the aggregate.

    Raises:
        MultipleHopsError: it calls ``propagate`` again.
    """
    results = [aggregated]

    def propagate(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
        if not results:
            raise MultipleHopsError(call.conv)
        return conv.update(results.pop())

    replay = nullcontext() if random is None else replayed_random(random)
    with replay, context.unpatched(call, propagate=propagate):
        return call.without_halo(call.run_locally())


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


def _runs_over_halo(module: nn.Module) -> bool:
    """Whether PyG's own methods are exact over local and halo rows, whatever the order of edges."""
    layers = list(module.modules())
    has_norm = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers)
    return not has_norm and all(is_order_independent(layer) for layer in layers if isinstance(layer, MessagePassing))


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
        ctx.autocast = AutocastState(tensors[0].device.type)
        ctx.save_for_backward(*tensors)
        flat = run.compute_flat(concatenated_blocks(run.rows), run.others)
        # a view would keep the halo's rows alive
        return tuple(t.clone() if isinstance(t, Tensor) and t._base is not None else t for t in flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        run, count, needed = ctx.run, ctx.count, ctx.needs_input_grad[2:]
        inputs = list(ctx.saved_tensors)
        # A backward pass is outside of autocast.
        with torch.enable_grad(), replayed_random(ctx.random), ctx.autocast.restored():
            # The parameters behind them are leaves already.
            for i in range(count + len(run.others)):
                inputs[i] = inputs[i].detach().requires_grad_(needed[i])
            whole = halo_rows([(exchange, x) for (exchange, _), x in zip(run.rows, inputs, strict=False)])
            flat = run.compute_flat(whole, inputs[count : count + len(run.others)])
        pairs = [(t, g) for t, g in zip(flat, gradients, strict=True) if isinstance(t, Tensor) and t.requires_grad]
        if not pairs:
            return (None,) * len(ctx.needs_input_grad)
        positions = [i for i, need in enumerate(needed) if need]
        outs, out_gradients = zip(*pairs, strict=True)
        results = torch.autograd.grad(outs, [inputs[i] for i in positions], out_gradients, allow_unused=True)
        by_position = dict(zip(positions, results, strict=True))
        return None, None, *(by_position.get(i) for i in range(len(inputs)))


def _distinct(tensors: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


class TypedPatcher(Patcher):
    """Patches a module so that its convolutions run over the shards of a graph with types.

    Args:
        relations: of the shard.
        schedule: when blocks are fetched.
    """

    typed: ClassVar[bool] = True

    def __init__(self, relations: Relations, schedule: Schedule) -> None:
        self.relations = relations
        super().__init__(next(iter(relations.exchanges.values())), schedule)
        for exchange in self.exchanges.values():
            exchange.constants = self.constants
        self.context = LayerContext(relations, self.patches, self.constants, schedule)

    @property
    def exchanges(self) -> Mapping[str, HaloExchange]:
        return self.relations.exchanges

    def install(self, module: nn.Module) -> None:
        self.patches.undo_with(*self.relations.install(module))
        super().install(module)
        for layer in module.modules():
            if type(layer).forward is HeteroConv.forward:
                self.patches.add(layer, "forward", partial(self._hetero_conv, TypedLayer(self.context), layer))
            elif isinstance(layer, OVER_ALL_TYPES):
                self.patches.add(layer, "forward", partial(self._over_all_types, layer))
            elif isinstance(layer, GraphModule) and has_typed_convolutions(layer, self.relations):
                self.patches.add(layer, "forward", TypedGraph(layer, self.context).forward)

    def edges(self) -> EdgeBlockCache:
        return self.relations.current().edges

    # ------------------------------------------------------------------------ replacements of methods

    def _hetero_conv(self, runner: TypedLayer, layer: HeteroConv, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """``HeteroConv.forward`` over the shard."""
        pairs = [(edge_type, self._call_of(edge_type, conv, args, kwargs)) for edge_type, conv in layer.convs.items()]
        calls = [(edge_type, call) for edge_type, call in pairs if call is not None]
        by_target: dict[str, list[Tensor]] = defaultdict(list)
        for (edge_type, _), result in zip(calls, runner.run([call for _, call in calls]), strict=True):
            by_target[edge_type[2]].append(result)
        return {node_type: group(results, layer.aggr) for node_type, results in by_target.items()}

    def _call_of(
        self, edge_type: EdgeType, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LayerCall | None:
        """Return the call that ``HeteroConv`` makes for an edge type; None if its arguments do not name the type."""
        if not any(edge_type in by_type for by_type in (*args, *kwargs.values())):
            return None
        relation = self.relations.of_type(edge_type)
        positional = [value for by_type in args for value in self._argument(edge_type, by_type)]
        named = {
            name.removesuffix("_dict"): value
            for name, by_type in kwargs.items()
            for value in self._argument(edge_type, by_type)
        }
        return LayerCall(conv, relation, relation.num_targets, tuple(positional), named)

    def _argument(self, edge_type: EdgeType, by_type: dict[Any, Any]) -> list[Any]:
        """Return a dictionary's entry for an edge type as a list, empty if it has neither the type nor its ends."""
        if edge_type in by_type:
            return [by_type[edge_type]]
        source, _, target = edge_type
        if source not in by_type and target not in by_type:
            return []
        exchange = self.exchanges[source]
        if source == target:
            return [NodeArgument(exchange, by_type[source], pair=False)]
        return [NodeArgument(exchange, by_type.get(source), by_type.get(target))]

    def _over_all_types(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's ``forward`` over local and halo rows of all types at which edges start."""
        sources = {edge_type[0] for edge_type in self.relations.by_type}
        counts = {node_type: exchange.shard.num_local for node_type, exchange in self.exchanges.items()}

        def replace(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            for key, tensor in value.items():
                if isinstance(key, tuple):
                    self.relations.of_type(key)
                elif key in counts and isinstance(tensor, Tensor) and tensor.dim():
                    check_count_of_rows(type(layer).__name__, tensor.size(0), counts[key])
            return {
                key: NodeArgument(self.exchanges[key], tensor, pair=False) if key in sources else tensor
                for key, tensor in value.items()
            }

        named = {name: replace(value) for name, value in kwargs.items()}
        function = partial(type(layer).forward, layer)
        call = LayerCall(layer, None, counts, tuple(map(replace, args)), named, function)
        return HaloRun([call], self.context).results()[0]


def has_typed_convolutions(module: GraphModule, relations: Relations) -> bool:
    """Whether the graph calls convolutions that are named after edge types."""
    return any(_edge_type(module, node, relations) is not None for node in module.graph.nodes)


def _edge_type(module: nn.Module, node: Node, relations: Relations) -> EdgeType | None:
    if node.op != "call_module" or not isinstance(module.get_submodule(str(node.target)), MessagePassing):
        return None
    return relations.by_name.get(str(node.target).rpartition(".")[2])


class TypedGraph(Interpreter):
    """Interprets the graph of a ``to_hetero`` network, and runs the convolutions of a layer together at the first one.

    Args:
        module: the network.
        context: shared by all layers.
    """

    def __init__(self, module: GraphModule, context: LayerContext) -> None:
        super().__init__(module)
        self._signature = inspect.signature(module.forward)
        self._context = context
        self._layers: dict[str, TypedLayer] = {}
        self._results: dict[Node, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's ``forward``."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self._results.clear()
        try:
            return self.run(*bound.args, *bound.kwargs.values())
        finally:
            self.env.clear()

    def run_node(self, n: Node) -> Any:
        """Compute a value of the graph."""
        if n not in self._results and self._type_of(n) is not None:
            self._run_layer(str(n.target).rpartition(".")[0])
        return self._results.pop(n) if n in self._results else super().run_node(n)

    def _run_layer(self, name: str) -> None:
        nodes = [node for node in self.module.graph.nodes if self._is_ready(node, name)]  # type: ignore[union-attr]
        layer = self._layers.setdefault(name, TypedLayer(self._context))
        results = layer.run([self._call(node) for node in nodes])
        self._results.update(zip(nodes, results, strict=True))

    def _is_ready(self, node: Node, name: str) -> bool:
        """Whether a node is a convolution of the layer whose inputs are known and that did not run yet."""
        of_layer = self._type_of(node) is not None and str(node.target).rpartition(".")[0] == name
        ready = all(value in self.env for value in node.all_input_nodes)
        return of_layer and ready and node not in self.env and node not in self._results

    def _type_of(self, node: Node) -> EdgeType | None:
        return _edge_type(self.module, node, self._context.relations)

    def _call(self, node: Node) -> LayerCall:
        edge_type = self._type_of(node)
        assert edge_type is not None
        relation = self._context.relations.by_type[edge_type]
        conv, exchange = self.module.get_submodule(str(node.target)), relation.source
        names = [name for name in inspect.signature(type(conv).forward).parameters if name != "self"]
        args, kwargs = map_arg((node.args, node.kwargs), lambda value: self.env[value])
        positional = tuple(_argument(name, value, exchange) for name, value in zip(names, args, strict=False))
        named = {name: _argument(name, value, exchange) for name, value in kwargs.items()}
        return LayerCall(conv, relation, relation.num_targets, positional, named)


def _argument(name: str, value: Any, exchange: HaloExchange) -> Any:
    """Wrap node data: pairs of tensors, and tensors whose name does not denote edge data by ``to_hetero``'s rule."""
    if isinstance(value, tuple) and len(value) == 2 and any(isinstance(v, Tensor) for v in value):
        return NodeArgument(exchange, *value)
    of_edges = "edge" in name or "adj" in name
    return NodeArgument(exchange, value, pair=False) if isinstance(value, Tensor) and not of_edges else value
