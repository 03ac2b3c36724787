"""Dropout whose masks are the same on any number of processes and for any partitioning.

Whether an element is dropped is a function of (seed, epoch, batch, layer, row, column). The *layer* is the number of
the call of dropout within the step. The *row* is an id that no partitioning changes: of a graph node its id in the
source data, of an edge a hash of both its ends' ids. No mask is kept: the backward pass computes it again.

While an :class:`ExactDropout` is installed, ``F.dropout`` and ``torch.dropout`` compute such masks during a step, so
that ``nn.Dropout`` and users' modules do. The rows of a tensor are recognised by their number, among those that the
batch has (:class:`DropoutRows`). If several have the same number, autograd's graph decides which of them it has.

The random numbers are SplitMix64 (Steele, Lea & Flood, OOPSLA 2014): word ``row * words + w`` of a stream, a hash of
all the rest, serves the columns ``2 w`` and ``2 w + 1`` with 32 bits each. So p is rounded to a multiple of 2**-32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.conv import MessagePassing

from gtrain.kernels.splitmix import GOLDEN, MIX_1, MIX_2, key
from gtrain.protocols import entry

_WORD = 1 << 64
_CHUNK = 1 << 20  # elements whose masks plain torch code holds at once
_COMPILED: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
_log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------------------- masks


class Mask(NamedTuple):
    """The masks of one call of dropout, for any rows.

    Attributes:
        p: probability that an element is dropped, 0 .. 1.
        stream: start of the stream of random numbers, 0 .. 2**62-1.
    """

    p: float
    stream: int

    @staticmethod
    def next(p: float, space: str = "edge") -> Mask:
        """The mask of the next call of dropout, for a strategy that applies it itself. ``p`` = 0 draws nothing."""
        if p <= 0:
            return NO_DROPOUT
        dropout = active_dropout()
        return Mask(p, int(torch.randint(1 << 62, ())) if dropout is None else dropout._stream(space))

    @property
    def threshold(self) -> int:
        """Elements whose 32-bit random number is below are dropped."""
        return round(self.p * (1 << 32))

    @property
    def scale(self) -> float:
        """The factor of what is kept."""
        return 1.0 / (1.0 - self.p) if self.p < 1 else 0.0

    def kept(self, ids: Tensor, columns: int) -> Tensor:
        """Return which elements are kept, bool ``[len(ids), columns]``, in plain torch code for any device."""
        words = (columns + 1) // 2
        count = ids.long().view(-1, 1) * words + torch.arange(words, device=ids.device)
        x = _mixed(count * _signed(GOLDEN) + _signed(self.stream))  # int64 wraps around as uint64 does
        bits = torch.stack([x & 0xFFFFFFFF, (x >> 32) & 0xFFFFFFFF], -1).flatten(1)
        return bits[:, :columns] >= self.threshold

    def drop(self, x: Tensor, ids: Tensor, *, inplace: bool = False) -> Tensor:
        """Return ``x`` ``[n, ...]`` times its mask over ``1 - p``, without a gradient.

        Args:
            x: floating-point, dense.
            ids: int64 ``[n]``, the id of each row.
            inplace: write into ``x``.
        """
        rows = x.detach()
        if not rows.is_contiguous():
            rows = rows.contiguous()
        copied = rows.data_ptr() != x.data_ptr()
        out = rows if inplace or copied else torch.empty_like(rows)
        if rows.device.type == "cpu" and rows.dtype in _COMPILED:
            from gtrain.nn.dropout_kernels import drop

            count, threshold = ids.size(0), np.uint32(min(self.threshold, (1 << 32) - 1))
            read = rows.numpy() if rows.dim() == 2 else rows.numpy().reshape(count, -1)
            drop(
                read,
                read if out is rows else out.numpy().reshape(count, -1),
                ids.numpy(),
                np.uint64(self.stream),
                threshold,
                _COMPILED[rows.dtype](self.scale),
            )
        else:
            self._plainly(rows.view(len(ids), -1), out.view(len(ids), -1), ids)
        return x.detach().copy_(out) if inplace and copied else out

    def _plainly(self, x: Tensor, out: Tensor, ids: Tensor) -> None:
        """As the compiled loop, in chunks of rows."""
        chunk = max(_CHUNK // max(x.size(1), 1), 1)
        for low in range(0, len(ids), chunk):
            some = slice(low, low + chunk)
            out[some] = x[some] * (self.kept(ids[some], x.size(1)) * self.scale).to(x.dtype)


NO_DROPOUT = Mask(0.0, 0)


class _Drop(torch.autograd.Function):
    """Dropout is linear: its gradient is the same function of the result's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Mask, ids: Tensor, inplace: bool) -> Tensor:  # type: ignore[override]
        ctx.mask, ctx.ids = mask, ids
        if inplace:
            ctx.mark_dirty(x)
            mask.drop(x, ids, inplace=True)
            return x
        return mask.drop(x, ids)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            gradient: Tensor = _Drop.apply(gradients[0], ctx.mask, ctx.ids, False)
        else:
            gradient = ctx.mask.drop(gradients[0], ctx.ids)
        return gradient, None, None, None


def edge_ids(edge_index: Tensor, source_ids: Tensor, target_ids: Tensor | None = None) -> Tensor:
    """Return an id of each edge that no partitioning changes: a hash of its ends' ids; parallel edges share one.

    Args:
        edge_index: int64 ``[2, E]``, rows of the other two.
        source_ids: int64 ``[n]``, ids of the nodes that edges start at.
        target_ids: likewise of those that they end at; None: the same.

    Returns:
        int64 ``[E]``, 0 .. 2**31-1.
    """
    target_ids = source_ids if target_ids is None else target_ids
    if edge_index.device.type == "cpu":
        from gtrain.nn import dropout_kernels

        out = torch.empty(edge_index.size(1), dtype=torch.int64)
        ends = edge_index.detach().numpy()
        dropout_kernels.edge_ids(ends[0], ends[1], source_ids.numpy(), target_ids.numpy(), out.numpy())
        return out
    return _plain_edge_ids(edge_index, source_ids, target_ids)


def _plain_edge_ids(edge_index: Tensor, source_ids: Tensor, target_ids: Tensor) -> Tensor:
    source, target = source_ids[edge_index[0]], target_ids[edge_index[1]]
    mixed = _mixed(_mixed(source + _signed(GOLDEN)) + target * _signed(GOLDEN))
    return (mixed >> 33) & ((1 << 31) - 1)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser of int64."""
    x = (x ^ _shifted(x, 30)) * _signed(MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(MIX_2)
    return x ^ _shifted(x, 31)


def _signed(word: int | np.uint64) -> int:
    word = int(word)
    return word - _WORD if word >= _WORD >> 1 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# -------------------------------------------------------------------------------------------------------------- rows


@dataclass(eq=False)
class DropoutRows:
    """DropoutRows that tensors of a step may have.

    Attributes:
        space: what the ids number: a node type (``node`` where there is one), ``edge`` or ``pair`` (scored edges).
            Calls of dropout are counted for each space.
        count: how many.
        make_ids: returns their ids, int64 ``[count]``.
        prefixes: numbers of first rows that tensors may have instead, as where layers leave out hops.
        index: the tensor by which they were selected from the nodes' rows; None: they are all of them.
    """

    space: str
    count: int
    make_ids: Callable[[], Tensor]
    prefixes: frozenset[int] = frozenset()
    index: Tensor | None = None

    @cached_property
    def ids(self) -> Tensor:
        """int64 ``[count]``."""
        return self.make_ids()

    def fit(self, count: int) -> bool:
        """Whether a tensor with ``count`` rows may have these."""
        return count == self.count or count in self.prefixes


@dataclass
class StepRows:
    """The rows of one step.

    Attributes:
        rows: of all kinds; the first that fit are taken where nothing tells which they are.
        node_ids: of each node type the ids of all nodes that edges may name, int64 ``[n]``: own nodes, then the halo.
        types: which node type a tensor of the batch has rows of, by the address of its memory; empty where there is
            one type.
        ends: the node types of a tensor of edges, likewise.
    """

    rows: list[DropoutRows] = field(default_factory=list)
    node_ids: dict[str, Tensor] = field(default_factory=dict)
    types: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[str, str]] = field(default_factory=dict)

    def ids_of(self, edge_index: Tensor) -> tuple[Tensor, Tensor] | None:
        """Ids of the nodes that edges start and end at; None where the edges are not the batch's."""
        if not self.types:
            ids = self.node_ids.get("node")
            return None if ids is None else (ids, ids)
        ends = self.ends.get(edge_index.data_ptr())
        return None if ends is None else (self.node_ids[ends[0]], self.node_ids[ends[1]])


def rows_of(batch: Any, node_ids: Mapping[str, Tensor] | None = None) -> StepRows:
    """Return the rows of a batch: its nodes, seeds, edges and scored edges.

    Args:
        batch: a ``Data`` or ``HeteroData`` with ``orig_id``.
        node_ids: of each node type the ids of nodes and halo; None: the batch's ``orig_id``.
    """
    step = StepRows()
    if not isinstance(batch, (Data, HeteroData)):
        return step
    typed = isinstance(batch, HeteroData)
    # looking up what a Data does not have is slow; its one store has all that there is
    flat: Any = batch.stores[0] if type(batch) is Data else batch
    target = entry(batch, "target") if typed else None
    for node_type in batch.node_types if isinstance(batch, HeteroData) else ("node",):
        nodes = batch[node_type] if typed else flat
        own = nodes.get("orig_id") if hasattr(nodes, "get") else getattr(nodes, "orig_id", None)
        ids = own if node_ids is None else node_ids.get(node_type, own)
        if not isinstance(ids, Tensor):
            continue
        step.node_ids[node_type] = ids
        count = int(nodes.num_nodes or 0) if own is None else len(own)
        hops = nodes.get("num_sampled_nodes") if hasattr(nodes, "get") else getattr(nodes, "num_sampled_nodes", None)
        prefixes = frozenset(np.cumsum(list(hops))[:-1].tolist()) if hops is not None else frozenset()
        step.rows.append(DropoutRows(node_type, count, partial(_first, ids, count), prefixes))
        if len(ids) > count:
            step.rows.append(DropoutRows(node_type, len(ids), partial(_first, ids, len(ids))))
        if typed:
            step.types.update((_address(t), node_type) for t in nodes.values() if isinstance(t, Tensor) and t.numel())
    seeds = entry(batch, "seeds")
    seed_type = "node" if not typed else target  # in a link task the target is an edge type: its seeds are edges
    scored = [place for place in ((batch, *batch.stores) if typed else batch.stores) if "edge_label_id" in place]
    if not scored and isinstance(seeds, Tensor) and isinstance(seed_type, str) and seed_type in step.node_ids:
        chosen = step.node_ids[seed_type]
        step.rows.append(DropoutRows(seed_type, len(seeds), partial(torch.index_select, chosen, 0, seeds), index=seeds))
    if scored:
        step.rows += _scored(scored[0])
    for edge_type in batch.edge_types if isinstance(batch, HeteroData) else (("node", "to", "node"),):
        edges = batch[edge_type] if typed else flat
        index = edges.get("edge_index") if hasattr(edges, "get") else getattr(edges, "edge_index", None)
        if isinstance(index, Tensor) and edge_type[0] in step.node_ids and edge_type[2] in step.node_ids:
            step.ends[index.data_ptr()] = edge_type[0], edge_type[2]
            ends = step.node_ids[edge_type[0]], step.node_ids[edge_type[2]]
            step.rows.append(DropoutRows("edge", index.size(1), partial(edge_ids, index, *ends)))
    return step


def _address(x: Tensor) -> int:
    """Where a tensor's numbers are in memory; of a sparse one, where its values are."""
    if x.layout == torch.strided:
        return x.data_ptr()
    return (x._values() if x.layout == torch.sparse_coo else x.values()).data_ptr()


def _scored(place: Any) -> list[DropoutRows]:
    """DropoutRows of a batch's true edges, and of true and false ones where the batch lists both."""
    ids, label = place.edge_label_id, getattr(place, "edge_label", None)
    count = len(ids) if label is None else int((label == 1).sum())
    rows = [DropoutRows("pair", count, lambda: ids[:count])]
    if count < len(ids):  # the false ones follow, the first of each true edge first
        draw = torch.arange(len(ids), device=ids.device) // max(count, 1)
        rows.append(DropoutRows("pair", len(ids), lambda: ids + (draw << 40)))
    return rows


def _first(ids: Tensor, count: int) -> Tensor:
    return (ids if ids.size(0) == count else ids[:count]).contiguous()


# ------------------------------------------------------------------------------------------------------------- layers


@dataclass
class Position:
    """Where a step is: the running call of a convolution, if any, and how many calls of dropout it made by space.

    Attributes:
        key: tells calls of convolutions apart; 0 outside of any.
        counts: calls of dropout so far by space, and of convolutions by their number in the module.
        edge_index: the edges that messages pass along now, or those that the convolution was called with.
        ids: of the nodes that these edges start and end at.
        passing: whether messages are made of them now.
        edges: rows of a strategy's own blocks of edges, instead.
        origin: the position that this is a copy of.
    """

    key: int = 0
    counts: dict[str | int, int] = field(default_factory=dict)
    edge_index: Tensor | None = None
    ids: tuple[Tensor, Tensor] | None = None
    passing: bool = False
    edges: DropoutRows | None = None
    origin: Position | None = None

    def copy(self) -> Position:
        """A copy with separate counts."""
        return replace(self, counts=dict(self.counts))


class ExactDropout:
    """Dropout with masks that no rank or partitioning changes, for the steps of one module.

    A *token* of torch's generator is drawn for each call of dropout and of a convolution, and compared with the earlier
    ones of the step: whoever computes a part of the step again (activation checkpointing, sequential aggregation) sets
    the generator back, so an equal token is the same layer again.

    Args:
        module: what is trained.
        seed: of all masks.
        watch_edges: follow ``MessagePassing.propagate``; False where a strategy tells itself which edges it works on.
    """

    def __init__(self, module: nn.Module, seed: int, *, watch_edges: bool = True) -> None:
        self.seed = seed
        self._step, self._key = StepRows(), 0
        self._position = self._root = Position()
        self._stack: list[Position] = []
        self._tokens: dict[str | int, dict[int, int]] = {}
        self._warned = False
        self._running = False
        self._undo: list[Callable[[], Any]] = []
        self._typed: list[Callable[[], Any]] = []
        self._module = module
        for number, layer in enumerate(module.modules(), start=1):
            if isinstance(layer, MessagePassing):
                enter = partial(self._enter, number)
                self._undo.append(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
                self._undo.append(layer.register_forward_hook(self._leave, always_call=True).remove)
                if watch_edges:
                    self._undo += [
                        layer.register_propagate_forward_pre_hook(self._passes).remove,
                        layer.register_propagate_forward_hook(self._passed).remove,
                        layer.register_edge_update_forward_pre_hook(self._passes).remove,
                        layer.register_edge_update_forward_hook(self._passed).remove,
                    ]
        _install(self)

    def remove(self) -> None:
        """Leave module and torch as they were."""
        self.end()
        for undo in (*self._undo, *self._typed):
            undo()
        self._undo, self._typed = [], []
        _uninstall(self)

    def begin(self, epoch: int, batch: int, rows: StepRows) -> None:
        """Begin a step.

        Args:
            epoch: its number.
            batch: number of the batch in the epoch.
            rows: of the batch.
        """
        self._key, self._step, self._running = key(self.seed, epoch, batch), rows, True
        self._position = self._root = Position()
        self._stack = []
        self._tokens.clear()
        if rows.types and not self._typed:
            self._typed = [
                layer.register_forward_hook(self._tag, with_kwargs=True).remove for layer in self._module.modules()
            ]

    def add(self, edge_index: Tensor) -> None:
        """Say that tensors of this step may have rows of these edges."""
        ids = self._step.ids_of(edge_index)
        if self._running and ids is not None:
            self._step.rows.append(DropoutRows("edge", edge_index.size(1), partial(edge_ids, edge_index, *ids)))

    def end(self) -> None:
        """Have torch compute dropout until the next step; the last one's backward pass is over."""
        self._running, self._step = False, StepRows()
        self._tokens.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Have torch compute dropout meanwhile: of values that are made up."""
        running, self._running = self._running, False
        try:
            yield
        finally:
            self._running = running

    @contextmanager
    def at(self, position: Position, edges: DropoutRows | None = None) -> Iterator[None]:
        """Go on from a position: calls of dropout from there on are the same layers whenever it is gone on from.

        Args:
            position: from :meth:`position`.
            edges: those that messages are made of meanwhile.
        """
        before, origin = self._position, position.origin
        self._position = replace(position.copy(), edges=edges or position.edges)
        try:
            yield
        finally:
            if origin is not None:
                for space, count in self._position.counts.items():
                    origin.counts[space] = max(count, origin.counts.get(space, 0))
            self._position = before

    def position(self) -> Position:
        """The position now."""
        return replace(self._position.copy(), origin=self._position)

    # ------------------------------------------------------------------------ calls

    def dropout(self, x: Tensor, p: float, inplace: bool) -> Tensor | None:
        """``F.dropout`` in training; None where torch is to compute it."""
        if not self._running or not 0 < p < 1 or not x.dim() or not _plain(x):
            return None
        rows = self._rows(x)
        if rows is _NOBODY:
            return None
        mask = Mask(p, self._stream("other" if rows is None else rows.space))
        if not x.numel():  # nothing to drop, but the layer counts
            return None
        ids = torch.arange(x.size(0), device=x.device) if rows is None else self._ids(rows, x.size(0), x.device)
        if torch.is_grad_enabled() and x.requires_grad:
            out: Tensor = _Drop.apply(x, mask, ids, inplace)
            return out
        dropped = mask.drop(x, ids, inplace=inplace)
        return x if inplace else dropped

    def _ids(self, rows: DropoutRows, count: int, device: torch.device) -> Tensor:
        ids = rows.ids if rows.ids.size(0) == count else rows.ids[:count]
        return ids if ids.device == device else ids.to(device)

    def _stream(self, space: str) -> int:
        """Hash of all that a mask depends on but rows and columns."""
        position, token = self._position, int(torch.empty((), dtype=torch.int64).random_())
        if position is self._root:
            number = self._number(space, token)
        else:  # counts from where it was entered
            number = position.counts.get(space, 0)
            position.counts[space] = number + 1
        return key(self._key, position.key, number, *space.encode()) >> 2

    def _number(self, what: str | int, token: int) -> int:
        """Which call of this it is in the step; a token that was drawn before is an earlier call made again."""
        seen, counts = self._tokens.setdefault(what, {}), self._root.counts
        if token not in seen:
            seen[token] = counts.get(what, 0)
            counts[what] = seen[token] + 1
        return seen[token]

    # ------------------------------------------------------------------------ convolutions

    def _enter(self, layer: int, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stack.append(self._position)
        if not self._running or not conv.training:
            return
        given = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        edge_index = next((t for t in given if t.dim() == 2 and t.size(0) == 2 and t.dtype == torch.int64), None)
        ids = None if edge_index is None else self._step.ids_of(edge_index)
        token = int(torch.empty((), dtype=torch.int64).random_())
        self._position = Position(
            key(layer, self._number(layer, token), self._position.key), {}, edge_index, ids or self._position.ids
        )

    def _leave(self, *_: Any) -> None:
        self._position = self._stack.pop()

    def _passes(self, conv: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the edges that messages pass along."""
        if self._running and isinstance(inputs[0], Tensor):
            self._position.edge_index, self._position.passing = inputs[0], True

    def _passed(self, *_: Any) -> None:
        self._position.passing = False

    # ------------------------------------------------------------------------ whose rows

    def _rows(self, x: Tensor) -> DropoutRows | None:
        """The rows that a tensor has; None where they are not known."""
        count = len(x)
        if isinstance(x, nn.Parameter):
            return None
        edges = self._edges(count)
        if edges is not None:
            return edges
        fitting = [rows for rows in self._step.rows if rows.fit(count)]
        evidence = _evidence(x, self._step, fitting)
        if evidence is _WEIGHT:
            return None
        if isinstance(evidence, DropoutRows):
            return evidence
        if len(fitting) > 1:
            return self._choose(x, fitting) if len(x) else _NOBODY
        return fitting[0] if fitting else None

    def _edges(self, count: int) -> DropoutRows | None:
        """The edges that the running convolution works on, if their number is the tensor's."""
        position = self._position
        if position.edges is not None:
            return position.edges if position.edges.count == count else None
        index = position.edge_index
        ids = position.ids
        if index is None or ids is None:
            return None
        if not position.passing and any(rows.space != "edge" and rows.fit(count) for rows in self._step.rows):
            return None
        if index.size(1) == count:
            return DropoutRows("edge", count, partial(edge_ids, index, *ids))
        loops = index[0] == index[1]
        nodes = len(ids[1])
        if index.size(1) - int(loops.sum()) + nodes == count:  # with a loop for each node at the end, as PyG adds them
            every = torch.arange(nodes, device=index.device)
            whole = torch.cat([index[:, ~loops], every.expand(2, -1)], 1)
            return DropoutRows("edge", count, partial(edge_ids, whole, *ids))
        return None

    def _choose(self, x: Tensor, fitting: Sequence[DropoutRows]) -> DropoutRows:
        """Of rows that are equally many the first, unless they are the same."""
        first, *others = fitting
        spaces = {rows.space for rows in fitting}
        same = len(spaces) == 1 and all(torch.equal(first.ids[: len(x)], rows.ids[: len(x)]) for rows in others)
        if same:
            return first
        if len(spaces) > 1:  # types in turn, as a loop over a dictionary takes them
            first = min(fitting, key=lambda rows: self._root.counts.get(rows.space, 0))
        if not self._warned:
            self._warned = True
            kinds = ", ".join(sorted(spaces)) if len(spaces) > 1 else "all nodes and seeds"
            _log.warning(
                "dropout was called with %d rows, and there are as many of several kinds (%s); it takes them for %s. "
                "Its mask may differ from that of another number of processes.",
                len(x), kinds, first.space,
            )  # fmt: skip
        return first

    def _tag(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note in autograd's graph which node type the rows of a layer's result are of."""
        if not self._running:
            return
        if isinstance(out, dict):
            for node_type, rows in out.items():
                if node_type in self._step.node_ids and isinstance(rows, Tensor) and rows.grad_fn is not None:
                    _types(rows.grad_fn)[rows.output_nr] = node_type
        elif isinstance(out, Tensor) and out.dim() and out.grad_fn is not None and _type_of(out, self._step) is None:
            tensors = [t for t in _leaves((args, tuple(kwargs.values()))) if t.dim() and len(t) == len(out)]
            types = [name for t in reversed(tensors) if (name := _type_of(t, self._step)) is not None]
            if types:
                _types(out.grad_fn)[out.output_nr] = types[0]


_TAG = "gtrain: node type"
_WEIGHT = object()
_NOBODY = DropoutRows(
    "none", 0, lambda: torch.empty(0, dtype=torch.int64)
)  # an empty tensor: which layer it is of is unknown
_LONGEST = 64  # nodes of autograd's graph that are looked at
_FIRST = {"MmBackward0": 0, "AddmmBackward0": 1, "LinearBackward0": 0, "BmmBackward0": 0}
"""Which operand of a product has the rows of its result."""
_SAVED = {"MmBackward0": "_saved_self", "AddmmBackward0": "_saved_mat1"}
_ROWWISE = (
    "Add", "Sub", "Mul", "Div", "Neg", "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Sigmoid", "Tanh", "Prelu", "Selu",
    "Softplus", "Threshold", "Hardtanh", "NativeLayerNorm", "NativeBatchNorm", "NativeGroupNorm", "View", "UnsafeView",
    "ReshapeAlias", "Clone", "Alias", "ToCopy", "Pow", "Exp", "Log", "Sqrt", "Abs", "LogSoftmax", "Softmax", "Cat",
    "_Drop", "LinalgVectorNorm", "Expand", "Clamp", "ClampMin", "Where", "Unsqueeze", "Squeeze", "Stack", "Mish",
)  # fmt: skip
"""Steps of autograd's graph whose result has the rows of an operand."""


def _evidence(x: Tensor, step: StepRows, fitting: Sequence[DropoutRows]) -> Any:
    """What autograd's graph says of the rows of ``x``: some of ``fitting``, ``_WEIGHT``, or None for nothing.

    It is followed from ``x`` back as long as steps keep rows in place, to a tensor whose rows are known.
    """
    by_space = {rows.space: rows for rows in reversed(fitting)}
    if step.types and x.data_ptr() in step.types:
        return by_space.get(step.types[x.data_ptr()])
    waiting: list[Any] = [(x.grad_fn, x.output_nr)]
    weight = False
    for _ in range(_LONGEST):
        if not waiting:
            break
        node, output = waiting.pop(0)
        if node is None:
            continue
        node_type = _types(node).get(output) if step.types else None
        if node_type is not None:
            return by_space.get(node_type) or _of_type(node_type, len(x), step)
        name = type(node).__name__
        if name == "AccumulateGrad":
            variable = node.variable
            weight |= variable.dim() > 1 and len(variable) == len(x)
        elif name in ("IndexBackward0", "IndexSelectBackward0"):
            return _indexed(node, name, len(x), step, fitting)
        elif name in _FIRST:
            after = node.next_functions[_FIRST[name]]
            if after[0] is None and name in _SAVED:  # data without a gradient
                saved = getattr(node, _SAVED[name])
                return by_space.get(step.types.get(_address(saved) if saved is not None else 0, ""))
            waiting.append(after)
        elif name.removesuffix("0").removesuffix("1").removesuffix("Backward") in _ROWWISE:
            waiting += node.next_functions
        else:
            return None
    return _WEIGHT if weight else None


def _indexed(node: Any, name: str, count: int, step: StepRows, fitting: Sequence[DropoutRows]) -> DropoutRows | None:
    """The rows that were selected by an index: of seeds or edges, or any of the nodes'."""
    index = node._saved_index if name == "IndexSelectBackward0" else node._saved_indices[0]
    if not isinstance(index, Tensor) or index.dim() != 1:
        return None
    for rows in fitting:
        if rows.space in ("edge", "pair") or (rows.index is not None and rows.index.data_ptr() == index.data_ptr()):
            return rows
    size = int(node._saved_self_sym_sizes[0])
    nodes = [rows for rows in step.rows if rows.index is None and rows.space in step.node_ids and rows.fit(size)]
    if len(nodes) != 1 or step.types:
        return None
    return DropoutRows(nodes[0].space, count, lambda: nodes[0].ids[index.to(nodes[0].ids.device)], index=index)


def _type_of(x: Tensor, step: StepRows) -> str | None:
    node_type = step.types.get(_address(x))
    return node_type if node_type is not None or x.grad_fn is None else _types(x.grad_fn).get(x.output_nr)


def _of_type(node_type: str, count: int, step: StepRows) -> DropoutRows | None:
    ids = step.node_ids.get(node_type)
    return None if ids is None or len(ids) < count else DropoutRows(node_type, count, partial(_first, ids, count))


def _types(node: Any) -> dict[int, str]:
    """Node types of the results of a step of autograd's graph, by their number; kept as long as the step."""
    types: dict[int, str] = node.metadata.setdefault(_TAG, {})
    return types


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)


def _plain(x: Tensor) -> bool:
    """Whether a tensor is a dense one of numbers in memory."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.is_floating_point()
        and x.layout == torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # type: ignore[attr-defined]
        and not torch.compiler.is_compiling()
    )


# ------------------------------------------------------------------------------------------- in place of torch's own

_active: list[ExactDropout] = []
_own: dict[tuple[Any, str], Any] = {}


def active_dropout() -> ExactDropout | None:
    """What computes dropout now; None: torch does."""
    dropout = _active[-1] if _active else None
    return dropout if dropout is not None and dropout._running else None


@contextmanager
def torch_dropout() -> Iterator[None]:
    """Have torch compute dropout meanwhile, of values that are made up and whose layers do not count."""
    dropout = active_dropout()
    if dropout is None:
        yield
    else:
        with dropout.suspended():
            yield


def current_position() -> Position | None:
    """The position in the running step, for :func:`resumed_at`; None where torch computes dropout."""
    dropout = active_dropout()
    return None if dropout is None else dropout.position()


@contextmanager
def resumed_at(position: Position | None, edges: DropoutRows | None = None) -> Iterator[None]:
    """Compute from a position on, perhaps not for the first time; see :meth:`ExactDropout.at`."""
    dropout = active_dropout()
    if dropout is None or position is None:
        yield
    else:
        with dropout.at(position, edges):
            yield


def _install(dropout: ExactDropout) -> None:
    """Exchange what ``F.dropout`` and ``torch.dropout`` call, also for modules that have imported these by name."""
    if not _active:
        for home in (torch._VF, torch):
            for name, inplace in (("dropout", False), ("dropout_", True)):
                own = getattr(home, name)
                _own[home, name] = own
                setattr(home, name, partial(_call, own, inplace))
    _active.append(dropout)


def _uninstall(dropout: ExactDropout) -> None:
    if dropout in _active:
        _active.remove(dropout)
        if not _active:
            for (home, name), own in _own.items():
                setattr(home, name, own)
            _own.clear()


def _call(own: Callable[..., Tensor], inplace: bool, input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002
    dropout = _active[-1] if train and _active else None
    out = None if dropout is None else dropout.dropout(input, p, inplace)
    return own(input, p, train) if out is None else out
