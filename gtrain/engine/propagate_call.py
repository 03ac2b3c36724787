"""One call of a convolution's ``propagate``, split into parts that run block by block.

A *probe* answers questions about a convolution's methods: it runs them on a few synthetic edges, the same on all
ranks. One of the questions is whether messages are source rows times a number for each edge (and head).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import Aggregation, MaxAggregation, MeanAggregation, MinAggregation, SumAggregation
from torch_geometric.nn.conv import MessagePassing

from gtrain.engine.edges import EdgeBlock, EdgeBlocks
from gtrain.engine.halo import OwnedRows
from gtrain.engine.linear import LinearCall
from gtrain.engine.precision import AutocastState
from gtrain.nn.dropout import DropoutRows, current_position, resumed_at, torch_dropout

REDUCTIONS: dict[type[Aggregation], str] = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
}

_MOST_CONFIGURATIONS = 64
_probed: weakref.WeakKeyDictionary[MessagePassing, dict[Any, Any]] = weakref.WeakKeyDictionary()

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


def reduction(conv: MessagePassing) -> str | None:
    """Return how messages of several blocks combine: sum, mean, max or min; None where they cannot be combined.

    They can if the aggregation is one of these, and ``update`` has no argument but the aggregate.
    """
    if type(conv).aggregate is not MessagePassing.aggregate or conv.decomposed_layers > 1 or conv.explain:
        return None
    if conv.inspector.get_param_names("update", exclude=[0]):
        return None
    return REDUCTIONS.get(type(conv.aggr_module))


def sees_one_edge(conv: MessagePassing) -> bool:
    """Whether ``message`` computes each edge alone: it has no parameter that a softmax or a norm is computed over."""
    return not set(conv.inspector.get_param_names("message")) & MessagePassing.special_args


@dataclass
class TensorPool:
    """The distinct tensors of a call that autograd must know.

    Attributes:
        roles: ``source`` (rows fetched from their owners), ``target`` (local rows) or ``edge`` (one row per edge).
        tensors: in the order of ``roles``.
    """

    roles: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, role: str, tensor: Tensor) -> int:
        """Return the position of a tensor, which is appended unless the pool has it in this role."""
        for i, known in enumerate(self.tensors):
            if known is tensor and self.roles[i] == role:
                return i
        self.roles.append(role)
        self.tensors.append(tensor)
        return len(self.roles) - 1


class EdgeArguments:
    """The keyword arguments of ``propagate`` or ``edge_updater``, by the role that they have for a block.

    Args:
        names: of the parameters of the methods that are called for each edge.
        kwargs: the arguments.
        num_edges: edges of the whole call.
        pool: the tensors are added to it.
    """

    def __init__(self, names: Any, kwargs: dict[str, Any], num_edges: int, pool: TensorPool) -> None:
        self.constants: dict[str, Any] = {}
        self.entries: list[tuple[str, str, int]] = []
        for name, value in kwargs.items():
            at_sources, at_targets = f"{name}_j" in names, f"{name}_i" in names
            if at_sources or at_targets:
                source, target = value if isinstance(value, (tuple, list)) else (value, value)
                self._add(name, "source", source if at_sources else None, pool)
                self._add(name, "target", target if at_targets else None, pool)
            elif isinstance(value, Tensor) and value.dim() and value.size(0) == num_edges:
                self._add(name, "edge", value, pool)
            elif name in names:
                self.constants[name] = value

    def _add(self, name: str, role: str, tensor: Tensor | None, pool: TensorPool) -> None:
        if tensor is None:
            self.constants.setdefault(name, None)
        else:
            self.entries.append((name, role, pool.add(role, tensor)))

    def collect(self, conv: MessagePassing, names: Any, block: EdgeBlock, tensors: list[Tensor]) -> dict[str, Any]:
        """Return what PyG passes to the per-edge methods for one block.

        Args:
            conv: the convolution.
            names: as in the constructor.
            block: the edges.
            tensors: the pool's, with the block's rows in place of the sources.
        """
        pairs: dict[str, list[Tensor | None]] = {}
        arguments: dict[str, Any] = dict(self.constants)
        for name, role, i in self.entries:
            if role == "edge":
                arguments[name] = tensors[i].index_select(0, block.ids)
            else:
                pairs.setdefault(name, [None, None])[role == "target"] = tensors[i]
        arguments.update({name: tuple(pair) for name, pair in pairs.items()})
        edge_index = torch.stack([block.sources, block.targets])
        return conv._collect(names, edge_index, [block.num_sources, block.num_targets], arguments)


class PropagateCall:
    """One call of ``propagate``.

    Args:
        conv: the convolution.
        blocks: its edges.
        reduce: sum, mean, max or min.
        kwargs: of ``propagate``.
        attention: the name of the argument that is the result of ``edge_updater``, and the arguments of that call.

    Attributes:
        pool: the tensors that autograd must know.
    """

    def __init__(
        self,
        conv: MessagePassing,
        blocks: EdgeBlocks,
        reduce: str,
        kwargs: dict[str, Any],
        attention: tuple[str, dict[str, Any]] | None = None,
    ) -> None:
        self.conv, self.blocks, self.reduce = conv, blocks, reduce
        self.position, self.autocast = current_position(), AutocastState(blocks.in_degree.device.type)
        self.pool = TensorPool()
        self.arguments = EdgeArguments(conv._user_args, kwargs, blocks.num_edges, self.pool)
        self.attention: tuple[str, EdgeArguments] | None = None
        if attention is not None:
            name, update_kwargs = attention
            self.attention = name, EdgeArguments(conv._edge_user_args, update_kwargs, blocks.num_edges, self.pool)

    @property
    def tensors(self) -> list[Tensor]:
        """The pool's tensors."""
        return self.pool.tensors

    @property
    def sources(self) -> list[int]:
        """Positions of the tensors whose rows are sent."""
        return [i for i, role in enumerate(self.pool.roles) if role == "source"]

    @property
    def rows(self) -> list[OwnedRows]:
        """The tensors whose rows are sent."""
        return [(self.blocks.exchange, self.tensors[i]) for i in self.sources]

    def with_block(self, tensors: list[Tensor], block: list[Tensor]) -> list[Tensor]:
        """Return the pool's tensors with a block's rows in place of the sources."""
        rows = dict(zip(self.sources, block, strict=True))
        return [rows.get(i, tensor) for i, tensor in enumerate(tensors)]

    def message(self, r: int, tensors: list[Tensor]) -> Tensor:
        """Return the messages of block r [E_r, ...]; ``tensors`` are the pool's, with the block's rows as sources."""
        block = self.blocks.blocks[r]
        if not len(block):
            return self.depending_on_sources(self.no_messages, tensors)
        rows = None
        if self.position is not None:
            # Dropout masks are computed for these edges.
            rows = DropoutRows("edge", len(block), lambda: self.blocks.hashed[r].ids)
        # A backward pass that runs the method again is outside of autocast.
        with resumed_at(self.position, rows), self.autocast.restored():
            return self.message_of(block, tensors)

    def depending_on_sources(self, messages: Tensor, tensors: list[Tensor]) -> Tensor:
        """Return empty messages as a function of the sources' rows.

        Their backward pass then reaches the exchange, in which the readers' gradients arrive.
        """
        rows = [tensors[i].sum() for i in self.sources if tensors[i].requires_grad]
        # Adding to an empty tensor changes no value; it only links the autograd graph.
        return messages + torch.stack(rows).sum() if rows and self._has_source_gradient else messages

    @cached_property
    def _has_source_gradient(self) -> bool:
        """Whether messages have a gradient with respect to the sources' rows."""
        block, tensors = probe_inputs(self)
        rows = [tensors[i].requires_grad_() for i in self.sources if tensors[i].is_floating_point()]
        with probing(), torch.enable_grad(), without_saved_tensor_hooks():
            messages = self.message_of(block, tensors)
            if not messages.requires_grad:
                return False
            gradients = torch.autograd.grad(messages.sum(), rows, allow_unused=True)
        return any(gradient is not None for gradient in gradients)

    @cached_property
    def no_messages(self) -> Tensor:
        """The messages of a block without edges, [0, ...]; a convolution's methods may fail on such a block."""
        with probing(), torch.no_grad():
            return self.message_of(*probe_inputs(self))[:0]

    def message_of(self, block: EdgeBlock, tensors: list[Tensor]) -> Tensor:
        """Return the messages of any edges."""
        return self.message_from(self.collect(block, tensors))

    def collect(self, block: EdgeBlock, tensors: list[Tensor]) -> dict[str, Any]:
        """Return the arguments of ``message``, one row per edge, and PyG's special arguments."""
        conv, inspector = self.conv, self.conv.inspector
        collected = self.arguments.collect(conv, conv._user_args, block, tensors)
        if self.attention is not None:
            name, arguments = self.attention
            update = arguments.collect(conv, conv._edge_user_args, block, tensors)
            collected[name] = conv.edge_update(**inspector.collect_param_data("edge_update", update))
        return collected

    def message_from(self, collected: dict[str, Any]) -> Tensor:
        """Return the messages of collected arguments."""
        return self.conv.message(**self.conv.inspector.collect_param_data("message", collected))


def message_parameters(call: PropagateCall, replaced: str = "") -> list[Tensor]:
    """Return the convolution's parameters if ``message`` itself uses any of them (most use none), as a probe shows.

    Args:
        call: the call.
        replaced: names a function that the caller has replaced, for the cache's key.
    """
    parameters = [p for p in call.conv.parameters() if p.requires_grad]
    uses = parameters and cached_probe(call, f"uses parameters{replaced}", partial(_uses_parameters, call))
    return parameters if uses else []


def _uses_parameters(call: PropagateCall) -> bool:
    block, tensors = probe_inputs(call)
    with probing(), torch.enable_grad(), without_saved_tensor_hooks():
        return call.message_of(block, tensors).requires_grad


def cached_probe(call: PropagateCall, question: str, probe: Callable[[], Any]) -> Any:
    """Return what ``probe`` returned for a call of the same convolution in the same configuration.

    The answer must not depend on values of tensors, which training changes.
    """
    if not isinstance(call.conv, MessagePassing):  # created for this call
        return probe()
    key = (question, *_configuration(call))
    answers = _probed.setdefault(call.conv, {})
    if key not in answers:
        if len(answers) >= _MOST_CONFIGURATIONS:  # an attribute changes in every call
            answers.clear()
        answers[key] = probe()
    return answers[key]


def _configuration(call: PropagateCall) -> Iterator[Any]:
    """Yield everything that may decide which branches the convolution's methods take."""
    yield from ((role, t.shape[1:], t.dtype) for role, t in zip(call.pool.roles, call.tensors, strict=True))
    yield from ((id(p), p.requires_grad) for p in call.conv.parameters())
    for layer in call.conv.modules():
        yield id(layer), layer.training
        yield from _plain_values(layer.__dict__)
    yield from _plain_values(call.arguments.constants)
    if call.attention is not None:
        yield from _plain_values(call.attention[1].constants)


def _plain_values(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield plain values as they are, and of other values whether they are None."""
    plain = (bool, int, float, str)
    return ((name, value if isinstance(value, plain) else value is None) for name, value in values.items())


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of the generators that a computation on ``device`` may draw from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    """Return the generators to the states of :func:`random_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


@contextmanager
def replayed_random(state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Replay the random numbers drawn since :func:`random_state`; afterwards the generators continue as before."""
    devices = [] if state[1] is None else [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        set_random_state(state)
        yield


@contextmanager
def probing() -> Iterator[None]:
    """Run a convolution's methods without an effect on random generators and on the count of dropout layers.

    Inference mode, in which Lightning validates and tests, is off: probes examine the autograd graph.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.inference_mode(False), torch.random.fork_rng(devices=devices), torch_dropout():
        yield


def without_saved_tensor_hooks() -> Any:
    """Hide probes from hooks on saved tensors, as checkpointing sets them."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def normalises_messages(call: PropagateCall) -> bool:
    """Whether a batch norm computes statistics over messages, of which a block has only some."""
    norms = [layer for layer in call.conv.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    return bool(norms) and bool(cached_probe(call, "calls norms", partial(_calls_any, norms, call)))


class _NormCalledError(Exception):
    """Ends a probe before a batch norm changes its running statistics."""


def _raise_norm_called(*_: Any) -> None:
    raise _NormCalledError


def _calls_any(norms: Sequence[nn.Module], call: PropagateCall) -> bool:
    hooks = [norm.register_forward_pre_hook(_raise_norm_called) for norm in norms]
    try:
        with probing(), torch.no_grad():
            call.message_of(*probe_inputs(call))
    except _NormCalledError:
        return True
    finally:
        for hook in hooks:
            hook.remove()
    return False


def probe_inputs(
    call: PropagateCall, num_edges: int = 4, *, narrow: bool = False, ones: bool = False
) -> tuple[EdgeBlock, list[Tensor]]:
    """Return synthetic edges and tensors, the same on all ranks: edge e points from source e to target e // 2.

    Args:
        call: the shapes and dtypes of its tensors are used.
        num_edges: number of edges.
        narrow: give sources a last dimension of 1.
        ones: fill sources with 1 instead of random numbers.
    """
    device = call.tensors[0].device if call.tensors else call.blocks.in_degree.device
    ids = torch.arange(num_edges, device=device)
    values = []
    for i, (role, tensor) in enumerate(zip(call.pool.roles, call.tensors, strict=True)):
        generator = torch.Generator("cpu").manual_seed(i)  # the same numbers on every device
        shape = [num_edges, *tensor.shape[1:]]
        if role == "source" and narrow:
            shape[-1] = 1
        if role == "source" and ones:
            values.append(tensor.new_ones(shape))
        elif tensor.is_floating_point():
            values.append(torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(tensor))
        else:
            values.append(tensor.new_zeros(shape))
    return EdgeBlock(ids, ids, ids // 2, num_edges, num_edges), values


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
    before = random_state(x.device)
    try:
        with probing(), torch.enable_grad(), without_saved_tensor_hooks():
            block, leaves = probe_inputs(call, _EDGES)
            leaves = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves]
            collected = call.collect(block, leaves)
            messages = call.message_from(collected)
            weights = call.message_of(*probe_inputs(call, _EDGES, narrow=True, ones=True))
            # A random factor differs from call to call, so values cannot be compared.
            is_random = not _equal(before, random_state(x.device))
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return None
    # The very tensor of the sources: no arithmetic at all.
    if any(messages is value for name, value in collected.items() if name.endswith("_j")):
        return "one"
    if is_random or weights.shape != (_EDGES, *x.shape[1:-1], 1) or messages.shape != leaves[call.sources[0]].shape:
        return None
    products = (weights * leaves[call.sources[0]]).detach()
    if not torch.allclose(messages, products, rtol=8 * torch.finfo(x.dtype).eps, atol=0.0):
        return None
    return _structure(messages, leaves, call.sources[0])


def _equal(one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True))


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
