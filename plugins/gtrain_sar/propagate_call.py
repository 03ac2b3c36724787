"""One call of a convolution's ``propagate``, taken apart so that it can be run block by block."""

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

from gtrain.nn.dropout import Rows as DropoutRows
from gtrain.nn.dropout import again, here, made_up
from gtrain_sar.edges import EdgeBlock, EdgeBlocks, hashed
from gtrain_sar.halo import Rows

REDUCTIONS: dict[type[Aggregation], str] = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
}

_MOST_WAYS = 64
_found: weakref.WeakKeyDictionary[MessagePassing, dict[Any, Any]] = weakref.WeakKeyDictionary()


def reduction(conv: MessagePassing) -> str | None:
    """How blocks of messages combine, or None where they cannot be combined block by block.

    They can when the aggregation is a plain sum, mean, maximum or minimum, and ``update`` sees nothing but the
    aggregate.
    """
    if type(conv).aggregate is not MessagePassing.aggregate or conv.decomposed_layers > 1 or conv.explain:
        return None
    if conv.inspector.get_param_names("update", exclude=[0]):
        return None
    return REDUCTIONS.get(type(conv.aggr_module))


def sees_one_edge(conv: MessagePassing) -> bool:
    """Whether ``message`` sees one edge at a time: it asks for nothing that a softmax or a norm is taken over."""
    return not set(conv.inspector.get_param_names("message")) & MessagePassing.special_args


@dataclass
class Pool:
    """The tensors that autograd must know, each once.

    Attributes:
        kinds: ``source`` rows (fetched from their owners), ``target`` rows (local), ``edge`` values (one row an edge).
        tensors: in the order of ``kinds``.
    """

    kinds: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, kind: str, tensor: Tensor) -> int:
        """Position of a tensor, which may be there already."""
        for i, known in enumerate(self.tensors):
            if known is tensor and self.kinds[i] == kind:
                return i
        self.kinds.append(kind)
        self.tensors.append(tensor)
        return len(self.kinds) - 1

    @property
    def sources(self) -> list[int]:
        """Positions of the tensors whose rows cross the wire."""
        return [i for i, kind in enumerate(self.kinds) if kind == "source"]


class Arguments:
    """The keyword arguments of ``propagate`` or ``edge_updater``, by what a block needs of them.

    Args:
        wanted: parameters of the methods that are called for each edge.
        kwargs: the arguments.
        num_edges: edges of the whole call.
        pool: takes the tensors.
    """

    def __init__(self, wanted: Any, kwargs: dict[str, Any], num_edges: int, pool: Pool) -> None:
        self.constants: dict[str, Any] = {}
        self.entries: list[tuple[str, str, int]] = []
        for name, value in kwargs.items():
            as_source, as_target = f"{name}_j" in wanted, f"{name}_i" in wanted
            if as_source or as_target:
                source, target = value if isinstance(value, (tuple, list)) else (value, value)
                self._add(name, "source", source if as_source else None, pool)
                self._add(name, "target", target if as_target else None, pool)
            elif isinstance(value, Tensor) and value.dim() and value.size(0) == num_edges:
                self._add(name, "edge", value, pool)
            elif name in wanted:
                self.constants[name] = value

    def _add(self, name: str, kind: str, tensor: Tensor | None, pool: Pool) -> None:
        if tensor is None:
            self.constants.setdefault(name, None)
        else:
            self.entries.append((name, kind, pool.add(kind, tensor)))

    def collect(self, conv: MessagePassing, wanted: Any, block: EdgeBlock, tensors: list[Tensor]) -> dict[str, Any]:
        """What PyG hands to the methods, for one block; ``tensors`` are the pool's, sources replaced by the block's."""
        pairs: dict[str, list[Tensor | None]] = {}
        arguments: dict[str, Any] = dict(self.constants)
        for name, kind, i in self.entries:
            if kind == "edge":
                arguments[name] = tensors[i].index_select(0, block.ids)
            else:
                pairs.setdefault(name, [None, None])[kind == "target"] = tensors[i]
        arguments.update({name: tuple(pair) for name, pair in pairs.items()})
        edge_index = torch.stack([block.sources, block.targets])
        found: dict[str, Any] = conv._collect(wanted, edge_index, [block.num_sources, block.num_targets], arguments)
        return found


class PropagateCall:
    """One call of ``propagate``.

    Args:
        conv: the convolution.
        blocks: its edges.
        reduce: sum, mean, max or min.
        kwargs: of ``propagate``.
        attention: of the call of ``edge_updater`` whose result is one of them: its name, and the arguments.

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
        self.layer = here()
        self.pool = Pool()
        self.given = Arguments(conv._user_args, kwargs, blocks.num_edges, self.pool)
        self.attention: tuple[str, Arguments] | None = None
        if attention is not None:
            name, of_update = attention
            self.attention = name, Arguments(conv._edge_user_args, of_update, blocks.num_edges, self.pool)

    @property
    def tensors(self) -> list[Tensor]:
        """The pool's."""
        return self.pool.tensors

    @property
    def sources(self) -> list[int]:
        """Positions of the tensors whose rows cross the wire."""
        return self.pool.sources

    @property
    def rows(self) -> list[Rows]:
        """The tensors whose rows cross the wire."""
        return [(self.blocks.exchange, self.tensors[i]) for i in self.sources]

    def with_block(self, tensors: list[Tensor], block: list[Tensor]) -> list[Tensor]:
        """The pool's tensors with a block's rows in place of the sources."""
        found = list(tensors)
        for i, rows in zip(self.sources, block, strict=True):
            found[i] = rows
        return found

    def message(self, r: int, tensors: list[Tensor]) -> Tensor:
        """Messages of block r [E_r, ...]; ``tensors`` are the pool's, sources replaced by the block's rows."""
        block = self.blocks.blocks[r]
        if not len(block):
            return self.hung(self.no_messages, tensors)
        with again(self.layer, self._edges(r)):
            return self.message_of(block, tensors)

    def _edges(self, r: int) -> DropoutRows | None:
        """Block r's edges, where masks of dropout are made for them."""
        if self.layer is None:
            return None
        return DropoutRows("edge", len(self.blocks.blocks[r]), lambda: hashed(self.blocks)[r].ids)

    def hung(self, nothing: Tensor, tensors: list[Tensor]) -> Tensor:
        """``nothing`` [0, ...] as a function of the sources' rows: with their gradient that of the readers arrives."""
        rows = [tensors[i].sum() for i in self.sources if tensors[i].requires_grad]
        return nothing + torch.stack(rows).sum() if rows and self._read_sources else nothing

    @cached_property
    def _read_sources(self) -> bool:
        """Whether messages have a gradient by the sources' rows."""
        block, tensors = sample(self)
        rows = [tensors[i].requires_grad_() for i in self.sources if tensors[i].is_floating_point()]
        with trial(), torch.enable_grad(), unwatched():
            messages = self.message_of(block, tensors)
            if not messages.requires_grad:
                return False
            found = torch.autograd.grad(messages.sum(), rows, allow_unused=True)
        return any(gradient is not None for gradient in found)

    @cached_property
    def no_messages(self) -> Tensor:
        """What a block without edges has, [0, ...]; a convolution's methods need not be able to deal with it."""
        with trial(), torch.no_grad():
            return self.message_of(*sample(self))[:0]

    def message_of(self, block: EdgeBlock, tensors: list[Tensor]) -> Tensor:
        """Messages of any edges."""
        return self.message_from(self.collect(block, tensors))

    def collect(self, block: EdgeBlock, tensors: list[Tensor]) -> dict[str, Any]:
        """The arguments of ``message``, one row an edge, and what PyG knows besides."""
        conv, inspector = self.conv, self.conv.inspector
        collected = self.given.collect(conv, conv._user_args, block, tensors)
        if self.attention is not None:
            name, arguments = self.attention
            of_edges = arguments.collect(conv, conv._edge_user_args, block, tensors)
            collected[name] = conv.edge_update(**inspector.collect_param_data("edge_update", of_edges))
        return collected

    def message_from(self, collected: dict[str, Any]) -> Tensor:
        """Messages of collected arguments."""
        messages: Tensor = self.conv.message(**self.conv.inspector.collect_param_data("message", collected))
        return messages


def message_parameters(call: PropagateCall, stand_in: str = "") -> list[Tensor]:
    """Parameters of the convolution that ``message`` itself uses (most use none), found with made-up edges.

    Args:
        call: the call.
        stand_in: what is exchanged for a function that it calls, to be told from the function itself.
    """
    candidates = [p for p in call.conv.parameters() if p.requires_grad]
    found = candidates and remembered(call, f"uses parameters{stand_in}", partial(_uses_parameters, call))
    return candidates if found else []


def _uses_parameters(call: PropagateCall) -> bool:
    block, tensors = sample(call)
    with trial(), torch.enable_grad(), unwatched():
        return call.message_of(block, tensors).requires_grad


def remembered(call: PropagateCall, what: str, find: Callable[[], Any]) -> Any:
    """What ``find`` returned for a call of the same convolution that takes the same way through its methods.

    It must not depend on values of tensors, which training changes.
    """
    if not isinstance(call.conv, MessagePassing):  # made for this call
        return find()
    key = (what, *_way(call))
    known = _found.setdefault(call.conv, {})
    if key not in known:
        if len(known) >= _MOST_WAYS:  # an attribute changes all the time
            known.clear()
        known[key] = find()
    return known[key]


def _way(call: PropagateCall) -> Iterator[Any]:
    """What could change the way that the convolution's methods go."""
    yield from ((kind, t.shape[1:], t.dtype) for kind, t in zip(call.pool.kinds, call.tensors, strict=True))
    yield from ((id(p), p.requires_grad) for p in call.conv.parameters())
    for layer in call.conv.modules():
        yield id(layer), layer.training
        yield from _plain(layer.__dict__)
    yield from _plain(call.given.constants)
    if call.attention is not None:
        yield from _plain(call.attention[1].constants)


def _plain(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Plain values as they are, of others whether they are there."""
    kinds = (bool, int, float, str)
    return ((name, value if isinstance(value, kinds) else value is None) for name, value in values.items())


@contextmanager
def trial() -> Iterator[None]:
    """Run a convolution's methods on made-up values: no random number is drawn that counts.

    In inference mode, in which Lightning validates and tests, autograd would have no graph of them to look at.
    """
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]), made_up():
        yield


def unwatched() -> Any:
    """Keep trials from those who count saved tensors, as checkpointing does."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def normalises_messages(call: PropagateCall) -> bool:
    """Whether a batch norm takes statistics over messages, which are those of a block here."""
    norms = [layer for layer in call.conv.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    return bool(norms) and bool(remembered(call, "calls norms", partial(_calls, norms, call)))


def _calls(norms: Sequence[nn.Module], call: PropagateCall) -> bool:
    hooks = [norm.register_forward_pre_hook(_found_norm) for norm in norms]
    try:
        with trial(), torch.no_grad():
            call.message_of(*sample(call))
    except _NormFoundError:
        return True
    finally:
        for hook in hooks:
            hook.remove()
    return False


class _NormFoundError(Exception):
    """A batch norm was called."""


def _found_norm(*_: Any) -> None:
    raise _NormFoundError


def sample(
    call: PropagateCall, num_edges: int = 4, *, narrow: bool = False, ones: bool = False
) -> tuple[EdgeBlock, list[Tensor]]:
    """Made-up edges and values of the call's kinds, the same on all ranks: edge e runs from source e to target e // 2.

    Args:
        call: whose tensors' shapes and types are taken.
        num_edges: how many.
        narrow: give sources a last dimension of 1.
        ones: make sources 1 in place of random.
    """
    device = call.tensors[0].device if call.tensors else call.blocks.in_degree.device
    ids = torch.arange(num_edges, device=device)
    made = []
    for i, (kind, tensor) in enumerate(zip(call.pool.kinds, call.tensors, strict=True)):
        generator = torch.Generator().manual_seed(i)
        shape = [num_edges, *tensor.shape[1:]]
        if kind == "source" and narrow:
            shape[-1] = 1
        if kind == "source" and ones:
            made.append(tensor.new_ones(shape))
        elif tensor.is_floating_point():
            made.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(tensor))
        else:
            made.append(tensor.new_zeros(shape))
    return EdgeBlock(ids, ids, ids // 2, num_edges, num_edges), made
