"""Dropout whose masks are the same on any number of processes and for any partitioning.

Whether an element is dropped is a function of (seed, epoch, batch, layer, row, column). The *layer* is the number of
the call of dropout within the step. The *row* is an id that no partitioning changes: of a graph node its original id,
of an edge a hash of the ids of its ends. Masks are not stored: the backward pass computes them again.

While an :class:`ExactDropout` is installed, ``F.dropout`` and ``torch.dropout`` compute such masks during a step, so
that ``nn.Dropout`` and users' modules do. The rows of a tensor are recognised by their number, among those that the
batch has (:class:`DropoutRows`). If several have the same number, autograd's graph decides which of them it has.

The random numbers are SplitMix64 (Steele, Lea & Flood, OOPSLA 2014): word ``row * words + w`` of a stream serves the
columns ``2 w`` and ``2 w + 1`` with 32 bits each. The stream is a hash of all but row and column. So p is rounded to
a multiple of 2**-32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.conv import MessagePassing

from gtrain.kernels.available import has_triton
from gtrain.kernels.splitmix import GOLDEN, MIX_1, MIX_2, key
from gtrain.kernels.threads import num_threads, run_in_threads
from gtrain.nn.compressed import CompressedMatrix, address_of, as_dense, is_compressed
from gtrain.protocols import batch_entry

_WORD = 1 << 64
_CHUNK = 1 << 20  # elements whose masks plain torch code computes at once
_THREAD_ELEMENTS = 1 << 16  # fewer are not worth another thread
_COMPILED: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.float32,
}
"""Dtypes that compiled loops take, and those of their factors."""
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
        """Return the mask of the next call of dropout, for a strategy that applies it itself; p = 0 draws no number."""
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
        """The factor of elements that are not dropped."""
        return 1.0 / (1.0 - self.p) if self.p < 1 else 0.0

    def not_dropped(self, ids: Tensor, columns: int) -> Tensor:
        """Return the mask, bool ``[len(ids), columns]``, in plain torch code for any device."""
        words = (columns + 1) // 2
        count = ids.long().view(-1, 1) * words + torch.arange(words, device=ids.device)
        x = _mix(count * _signed(GOLDEN) + _signed(self.stream))  # int64 wraps around as uint64 does
        bits = torch.stack([x & 0xFFFFFFFF, (x >> 32) & 0xFFFFFFFF], -1).flatten(1)
        return bits[:, :columns] >= self.threshold

    def drop_entries(self, x: CompressedMatrix, ids: Tensor) -> CompressedMatrix:
        """Return what :meth:`drop` returns, in CSR form."""
        rows, columns, dtype = x.rows, x.size(1), x.dtype
        values = torch.ones(len(rows.ids), dtype=dtype, device=rows.ids.device) if rows.values is None else rows.values
        words = (columns + 1) // 2
        if values.device.type == "cpu" and dtype in _COMPILED:
            from gtrain.nn.dropout_kernels import drop_entries

            # A product of two numbers of bfloat16 is exact in float32.
            values = values.float() if dtype == torch.bfloat16 else values
            out = torch.empty_like(values)
            arrays = (values.numpy(), out.numpy(), rows.offsets.numpy(), rows.ids.numpy(), ids.numpy())
            drop_entries(*arrays, words, *self._for_kernels(dtype))
            return x.with_values(out.to(dtype), dtype)
        column = rows.ids.long()
        count = ids.long()[rows.row_of_entry()] * words + column // 2
        bits = _mix(count * _signed(GOLDEN) + _signed(self.stream))
        bits = torch.where(column % 2 == 0, bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF)
        return x.with_values(values * ((bits >= self.threshold).to(dtype) * self.scale), dtype)

    def drop(self, x: Tensor, ids: Tensor, *, inplace: bool = False) -> Tensor:
        """Return ``x`` ``[n, ...]`` times its mask over ``1 - p``, without a gradient.

        Args:
            x: floating-point, dense.
            ids: int64 ``[n]``, the id of each row.
            inplace: write into ``x``.
        """
        rows = x.detach().contiguous()
        copied = rows.data_ptr() != x.data_ptr()
        out = rows if inplace or copied else torch.empty_like(rows)
        flat, flat_out = rows.view(len(ids), -1), out.view(len(ids), -1)
        if rows.device.type == "cpu" and rows.dtype in _COMPILED:
            self._drop_compiled(flat, flat_out, ids)
        elif rows.is_cuda and has_triton():
            from gtrain.nn import dropout_device

            dropout_device.drop(flat, flat_out, ids, self.stream, self.threshold, self.scale)
        else:
            chunk = max(_CHUNK // max(flat.size(1), 1), 1)
            for low in range(0, len(ids), chunk):
                part = slice(low, low + chunk)
                flat_out[part] = flat[part] * (self.not_dropped(ids[part], flat.size(1)).to(x.dtype) * self.scale)
        return x.detach().copy_(out) if inplace and copied else out

    def _drop_compiled(self, x: Tensor, out: Tensor, ids: Tensor) -> None:
        """Set ``out`` to ``x`` ``[n, columns]`` times its mask, in all threads."""
        from gtrain.nn import dropout_kernels as kernels

        loop, arguments = kernels.drop, self._for_kernels(x.dtype)
        if x.dtype == torch.bfloat16:
            loop, x, out = kernels.drop_rounded, x.view(torch.uint16), out.view(torch.uint16)
        arrays = x.numpy(), out.numpy(), ids.numpy()
        count = max(min(num_threads(), x.numel() // _THREAD_ELEMENTS), 1)
        bounds = [len(ids) * i // count for i in range(count + 1)]
        run_in_threads(
            [partial(loop, *(array[low:high] for array in arrays), *arguments) for low, high in pairwise(bounds)]
        )

    def _for_kernels(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return stream, threshold and factor as compiled loops over numbers of a dtype take them."""
        factor = _COMPILED[dtype](float(torch.tensor(self.scale, dtype=dtype)))
        return np.uint64(self.stream), np.uint32(min(self.threshold, (1 << 32) - 1)), factor


NO_DROPOUT = Mask(0.0, 0)


class _Drop(torch.autograd.Function):
    """Dropout is linear: its gradient is the same function of the result's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Mask, ids: Tensor, inplace: bool) -> Tensor:  # type: ignore[override]
        ctx.mask, ctx.ids = mask, ids
        if inplace:
            ctx.mark_dirty(x)
        dropped = mask.drop(x, ids, inplace=inplace)
        return x if inplace else dropped

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return _Drop.apply(gradients[0], ctx.mask, ctx.ids, False), None, None, None
        return ctx.mask.drop(gradients[0], ctx.ids), None, None, None


def edge_ids(edge_index: Tensor, source_ids: Tensor, target_ids: Tensor | None = None) -> Tensor:
    """Return an id of each edge that no partitioning changes: a hash of its ends' ids; parallel edges share one.

    Args:
        edge_index: int64 ``[2, E]``, rows of the other two.
        source_ids: int64 ``[n]``, ids of the nodes at which edges start.
        target_ids: likewise of those at which they end; None: the same.

    Returns:
        int64 ``[E]``, 0 .. 2**31-1.
    """
    target_ids = source_ids if target_ids is None else target_ids
    if edge_index.device.type != "cpu":
        return _plain_edge_ids(edge_index, source_ids, target_ids)
    from gtrain.nn import dropout_kernels

    out = torch.empty(edge_index.size(1), dtype=torch.int64)
    ends = edge_index.detach().numpy()
    dropout_kernels.edge_ids(ends[0], ends[1], source_ids.numpy(), target_ids.numpy(), out.numpy())
    return out


def _plain_edge_ids(edge_index: Tensor, source_ids: Tensor, target_ids: Tensor) -> Tensor:
    source, target = source_ids[edge_index[0]], target_ids[edge_index[1]]
    mixed = _mix(_mix(source + _signed(GOLDEN)) + target * _signed(GOLDEN))
    return (mixed >> 33) & ((1 << 31) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, of int64."""
    x = (x ^ _shift_right(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(MIX_2)
    return x ^ _shift_right(x, 31)


def _signed(word: int | np.uint64) -> int:
    word = int(word)
    return word - _WORD if word >= _WORD >> 1 else word


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# -------------------------------------------------------------------------------------------------------------- rows


@dataclass(eq=False)
class DropoutRows:
    """Rows that tensors of a step may have.

    Attributes:
        space: the id space: a node type (``node`` in a graph with one type), ``edge`` or ``pair`` (scored edges).
            Calls of dropout are counted for each space.
        count: number of rows.
        compute_ids: returns their ids, int64 ``[count]``.
        prefixes: numbers of first rows that tensors may have instead, as in networks whose layers omit hops.
        index: the tensor that selected them from the nodes' rows; None: they are all of them.
    """

    space: str
    count: int
    compute_ids: Callable[[], Tensor]
    prefixes: frozenset[int] = frozenset()
    index: Tensor | None = None

    @cached_property
    def ids(self) -> Tensor:
        """int64 ``[count]``."""
        return self.compute_ids()

    def match(self, count: int) -> bool:
        """Whether a tensor with ``count`` rows may have these."""
        return count == self.count or count in self.prefixes


@dataclass
class StepRows:
    """The rows of one step.

    Attributes:
        rows: of all spaces; the first ones that match are used if nothing else decides.
        node_ids: for each node type the ids of all nodes that edges may name, int64 ``[n]``: local nodes, then halo.
        node_types: the node type of a tensor of the batch, by the address of its memory; empty for a single type.
        edge_types: the node types at both ends of an ``edge_index``, likewise.
    """

    rows: list[DropoutRows] = field(default_factory=list)
    node_ids: dict[str, Tensor] = field(default_factory=dict)
    node_types: dict[int, str] = field(default_factory=dict)
    edge_types: dict[int, tuple[str, str]] = field(default_factory=dict)

    def ids_of(self, edge_index: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the ids of the nodes at which edges start and end; None if the edges are not the batch's."""
        if not self.node_types:
            ids = self.node_ids.get("node")
            return None if ids is None else (ids, ids)
        types = self.edge_types.get(edge_index.data_ptr())
        return None if types is None else (self.node_ids[types[0]], self.node_ids[types[1]])

    def add_edges(self, edge_index: Tensor, ids: tuple[Tensor, Tensor]) -> None:
        """Append rows of edges between nodes with these ids."""
        self.rows.append(DropoutRows("edge", edge_index.size(1), partial(edge_ids, edge_index, *ids)))


def rows_of(batch: Any, node_ids: Mapping[str, Tensor] | None = None) -> StepRows:
    """Return the rows of a batch: its nodes, seeds, edges and scored edges.

    Args:
        batch: a ``Data`` or ``HeteroData`` with ``orig_id``.
        node_ids: for each node type the ids of local nodes and halo; None: the batch's ``orig_id``.
    """
    step = StepRows()
    if not isinstance(batch, (Data, HeteroData)):
        return step
    typed = isinstance(batch, HeteroData)
    # attribute access on Data is slow for missing names; its single store has all entries
    for node_type in batch.node_types if isinstance(batch, HeteroData) else ("node",):
        nodes = batch[node_type] if typed else batch.stores[0]
        orig_id = nodes.get("orig_id")
        ids = orig_id if node_ids is None else node_ids.get(node_type, orig_id)
        if not isinstance(ids, Tensor):
            continue
        step.node_ids[node_type] = ids
        count = int(nodes.num_nodes or 0) if orig_id is None else len(orig_id)
        hops = nodes.get("num_sampled_nodes")
        prefixes = frozenset(np.cumsum(list(hops))[:-1].tolist()) if hops is not None else frozenset()
        step.rows.append(DropoutRows(node_type, count, partial(_first, ids, count), prefixes))
        if len(ids) > count:
            step.rows.append(DropoutRows(node_type, len(ids), partial(_first, ids, len(ids))))
        if typed:
            tensors = (t for t in nodes.values() if isinstance(t, Tensor) and t.numel())
            step.node_types.update((_address(t), node_type) for t in tensors)
    step.rows += _seed_rows(batch, step)
    for edge_type in batch.edge_types if isinstance(batch, HeteroData) else (("node", "to", "node"),):
        index = (batch[edge_type] if typed else batch.stores[0]).get("edge_index")
        source, target = edge_type[0], edge_type[2]
        if isinstance(index, Tensor) and source in step.node_ids and target in step.node_ids:
            step.edge_types[index.data_ptr()] = source, target
            step.add_edges(index, (step.node_ids[source], step.node_ids[target]))
    return step


def _seed_rows(batch: Data | HeteroData, step: StepRows) -> list[DropoutRows]:
    """Return the rows of a batch's scored edges, or of its seeds if it has none."""
    typed = isinstance(batch, HeteroData)
    for store in (batch, *batch.stores) if typed else batch.stores:
        if "edge_label_id" in store:
            return _pair_rows(store)
    seeds = batch_entry(batch, "seeds")
    # In a link task the seeds are edges, and the target is an edge type.
    seed_type = batch_entry(batch, "target") if typed else "node"
    if not isinstance(seeds, Tensor) or not isinstance(seed_type, str) or seed_type not in step.node_ids:
        return []
    select = partial(torch.index_select, step.node_ids[seed_type], 0, seeds)
    return [DropoutRows(seed_type, len(seeds), select, index=seeds)]


def _address(x: Tensor) -> int:
    """Return the address of a tensor's memory, of a sparse tensor that of its values."""
    if x.layout == torch.strided:
        return address_of(x)
    return (x._values() if x.layout == torch.sparse_coo else x.values()).data_ptr()


def _pair_rows(store: Any) -> list[DropoutRows]:
    """Return the rows of a batch's true edges, and of true and negative ones if the batch lists both."""
    ids, label = store.edge_label_id, getattr(store, "edge_label", None)
    count = len(ids) if label is None else int((label == 1).sum())
    rows = [DropoutRows("pair", count, lambda: ids[:count])]
    if count < len(ids):
        # The negative edges follow: the first one of each true edge, then the second ones, ...
        draw = torch.arange(len(ids), device=ids.device) // max(count, 1)
        rows.append(DropoutRows("pair", len(ids), lambda: ids + (draw << 40)))
    return rows


def _first(ids: Tensor, count: int) -> Tensor:
    return (ids if ids.size(0) == count else ids[:count]).contiguous()


# ------------------------------------------------------------------------------------------------------------- layers


@dataclass
class StepPosition:
    """The position in a step: the running call of a convolution, if any, and its calls of dropout so far.

    Attributes:
        key: identifies the call of the convolution; 0 outside of any.
        counts: calls of dropout so far by space, and of convolutions by their number in the module.
        edge_index: the edges along which messages are passed, or those that the convolution was called with.
        ids: of the nodes at which these edges start and end.
        passing: whether messages are being computed.
        edges: rows of a block of edges that a strategy works on, instead.
        origin: the position that this is a copy of.
    """

    key: int = 0
    counts: dict[str | int, int] = field(default_factory=dict)
    edge_index: Tensor | None = None
    ids: tuple[Tensor, Tensor] | None = None
    passing: bool = False
    edges: DropoutRows | None = None
    origin: StepPosition | None = None

    def copy(self) -> StepPosition:
        """Return a copy with separate counts."""
        return replace(self, counts=dict(self.counts))


class ExactDropout:
    """Dropout with masks that do not depend on ranks and partitioning, for the steps of one module.

    A *token* of torch's generator is drawn for each call of dropout and of a convolution, and compared with the earlier
    ones of the step. Code that computes a part of the step again (activation checkpointing, sequential aggregation)
    resets the generator, so an equal token identifies the same layer.

    Args:
        module: the trained module.
        seed: of all masks.
        follows: whether to follow ``propagate`` of a convolution; a strategy passes the edges of the others itself.
    """

    def __init__(self, module: nn.Module, seed: int, follows: Callable[[nn.Module], bool] = lambda _: True) -> None:
        self.seed = seed
        self._step, self._key = StepRows(), 0
        self._position = self._root = StepPosition()
        self._stack: list[StepPosition] = []
        self._tokens: dict[str | int, dict[int, int]] = {}
        self._warned = self._running = False
        self._undo: list[Callable[[], Any]] = []
        self._type_hooks: list[Callable[[], Any]] = []
        self._module = module
        for number, layer in enumerate(module.modules(), start=1):
            if isinstance(layer, MessagePassing):
                handles = [
                    layer.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True),
                    layer.register_forward_hook(self._leave, always_call=True),
                ]
                if follows(layer):
                    handles += [
                        layer.register_propagate_forward_pre_hook(self._start_messages),
                        layer.register_propagate_forward_hook(self._end_messages),
                        layer.register_edge_update_forward_pre_hook(self._start_messages),
                        layer.register_edge_update_forward_hook(self._end_messages),
                    ]
                self._undo += [handle.remove for handle in handles]
        _install(self)

    def remove(self) -> None:
        """Restore module and torch."""
        self.end_step()
        for undo in (*self._undo, *self._type_hooks):
            undo()
        self._undo, self._type_hooks = [], []
        _uninstall(self)

    def start_step(self, epoch: int, batch: int, rows: StepRows) -> None:
        """Start a step.

        Args:
            epoch: its number.
            batch: number of the batch in the epoch.
            rows: of the batch.
        """
        self._key, self._step, self._running = key(self.seed, epoch, batch), rows, True
        self._position = self._root = StepPosition()
        self._stack = []
        self._tokens.clear()
        if rows.node_types and not self._type_hooks:
            self._type_hooks = [
                layer.register_forward_hook(TypeTag(self._tag), with_kwargs=True).remove
                for layer in self._module.modules()
            ]

    def add_edges(self, edge_index: Tensor) -> None:
        """Declare that tensors of this step may have rows of these edges."""
        ids = self._step.ids_of(edge_index)
        if self._running and ids is not None:
            self._step.add_edges(edge_index, ids)

    def end_step(self) -> None:
        """Let torch compute dropout until the next step; the step's backward pass is complete."""
        self._running, self._step = False, StepRows()
        self._tokens.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let torch compute dropout inside this context, for synthetic values."""
        running, self._running = self._running, False
        try:
            yield
        finally:
            self._running = running

    @contextmanager
    def resumed_at(self, position: StepPosition, edges: DropoutRows | None = None) -> Iterator[None]:
        """Continue from a position: calls of dropout inside this context are the same layers each time.

        Args:
            position: from :meth:`position`.
            edges: of the messages that are computed.
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

    def position(self) -> StepPosition:
        """Return the current position."""
        return replace(self._position.copy(), origin=self._position)

    # ------------------------------------------------------------------------ calls

    def dropout(self, x: Tensor, p: float, inplace: bool) -> Tensor | None:
        """``F.dropout`` in training; None lets torch compute it."""
        compressed = is_compressed(x) and not inplace
        x = x if compressed else as_dense(x)
        if not self._running or not 0 < p < 1 or not x.dim() or not (compressed or _is_plain(x)):
            return None
        rows = self._rows(x)
        if rows is _UNKNOWN_LAYER:
            return x if compressed else None
        mask = Mask(p, self._stream("other" if rows is None else rows.space))
        if not x.numel():
            # Nothing to drop, but the layer is counted.
            return x if compressed else None
        count = x.size(0)
        ids = torch.arange(count, device=x.device)
        if rows is not None:
            ids = (rows.ids if rows.ids.size(0) == count else rows.ids[:count]).to(x.device)
        if is_compressed(x):
            return mask.drop_entries(x, ids)
        if torch.is_grad_enabled() and x.requires_grad:
            return _Drop.apply(x, mask, ids, inplace)
        dropped = mask.drop(x, ids, inplace=inplace)
        return x if inplace else dropped

    def _stream(self, space: str) -> int:
        """Return a hash of everything that a mask depends on but rows and columns."""
        position, token = self._position, _draw_token()
        if position is self._root:
            number = self._number(space, token)
        else:
            # The count starts at 0 in each convolution.
            number = position.counts.get(space, 0)
            position.counts[space] = number + 1
        return key(self._key, position.key, number, *space.encode()) >> 2

    def _number(self, counted: str | int, token: int) -> int:
        """Return the number of this call in the step; an earlier token is the repetition of an earlier call."""
        seen, counts = self._tokens.setdefault(counted, {}), self._root.counts
        if token not in seen:
            seen[token] = counts.get(counted, 0)
            counts[counted] = seen[token] + 1
        return seen[token]

    # ------------------------------------------------------------------------ convolutions

    def _enter(self, layer: int, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stack.append(self._position)
        if not self._running or not conv.training:
            return
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        edge_index = next((t for t in tensors if t.dim() == 2 and t.size(0) == 2 and t.dtype == torch.int64), None)
        ids = None if edge_index is None else self._step.ids_of(edge_index)
        call = key(layer, self._number(layer, _draw_token()), self._position.key)
        self._position = StepPosition(call, {}, edge_index, ids or self._position.ids)

    def _leave(self, *_: Any) -> None:
        self._position = self._stack.pop()

    def _start_messages(self, conv: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Record the edges along which messages are passed."""
        if self._running and isinstance(inputs[0], Tensor):
            self._position.edge_index, self._position.passing = inputs[0], True

    def _end_messages(self, *_: Any) -> None:
        self._position.passing = False

    # ------------------------------------------------------------------------ rows of a tensor

    def _rows(self, x: Tensor) -> DropoutRows | None:
        """Return the rows that a tensor has; None: not known."""
        count = len(x)
        if isinstance(x, nn.Parameter):
            return None
        edges = self._edges(count)
        if edges is not None:
            return edges
        matching = [rows for rows in self._step.rows if rows.match(count)]
        evidence = _evidence(x, self._step, matching)
        if isinstance(evidence, DropoutRows):
            return evidence
        if evidence is _WEIGHT or not matching:
            return None
        if len(matching) == 1:
            return matching[0]
        return self._choose(x, matching) if len(x) else _UNKNOWN_LAYER

    def _edges(self, count: int) -> DropoutRows | None:
        """Return the edges that the running convolution works on, if their number is the tensor's."""
        position = self._position
        if position.edges is not None:
            return position.edges if position.edges.count == count else None
        index, ids = position.edge_index, position.ids
        if index is None or ids is None:
            return None
        if not position.passing and any(rows.space != "edge" and rows.match(count) for rows in self._step.rows):
            return None
        if index.size(1) != count:
            loops, nodes = index[0] == index[1], len(ids[1])
            if index.size(1) - int(loops.sum()) + nodes != count:
                return None
            # PyG has appended a loop for each node
            every = torch.arange(nodes, device=index.device)
            index = torch.cat([index[:, ~loops], every.expand(2, -1)], 1)
        return DropoutRows("edge", count, partial(edge_ids, index, *ids))

    def _choose(self, x: Tensor, matching: Sequence[DropoutRows]) -> DropoutRows:
        """Choose among rows with the same number: the first ones, with a warning unless their ids are the same."""
        first, *others = matching
        spaces = {rows.space for rows in matching}
        if len(spaces) == 1 and all(torch.equal(first.ids[: len(x)], rows.ids[: len(x)]) for rows in others):
            return first
        if len(spaces) > 1:
            # The layer is called for each type in turn, in the order of a loop over a dictionary.
            first = min(matching, key=lambda rows: self._root.counts.get(rows.space, 0))
        if not self._warned:
            self._warned = True
            names = ", ".join(sorted(spaces)) if len(spaces) > 1 else "all nodes and seeds"
            _log.warning(
                "dropout was called with %d rows, the number of several kinds of rows (%s); they are taken for %s. The "
                "mask may differ between numbers of processes.",
                len(x), names, first.space,
            )  # fmt: skip
        return first

    def _tag(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record in autograd's graph which node type the rows of a layer's result have."""
        if not self._running:
            return
        if isinstance(out, dict):
            for node_type, rows in out.items():
                if node_type in self._step.node_ids and isinstance(rows, Tensor) and rows.grad_fn is not None:
                    _types(rows.grad_fn)[rows.output_nr] = node_type
        elif isinstance(out, Tensor) and out.dim() and out.grad_fn is not None and _type_of(out, self._step) is None:
            tensors = [t for t in _tensors((args, tuple(kwargs.values()))) if t.dim() and len(t) == len(out)]
            types = [name for t in reversed(tensors) if (name := _type_of(t, self._step)) is not None]
            if types:
                _types(out.grad_fn)[out.output_nr] = types[0]


@dataclass(frozen=True)
class TypeTag:
    """A hook that notes which node type the rows of a layer's result have, and changes nothing."""

    note: Callable[..., None]

    def __call__(self, *args: Any) -> None:
        """Note it."""
        self.note(*args)


def _draw_token() -> int:
    return int(torch.empty((), dtype=torch.int64).random_())


_TAG = "gtrain: node type"
_WEIGHT = object()
_UNKNOWN_LAYER = DropoutRows("none", 0, lambda: torch.empty(0, dtype=torch.int64))  # of an empty tensor
_LONGEST = 64  # nodes of autograd's graph that are examined
_ROW_OPERAND = {"MmBackward0": 0, "AddmmBackward0": 1, "LinearBackward0": 0, "BmmBackward0": 0}
"""The operand of a product that has the rows of the result."""
_SAVED = {"MmBackward0": "_saved_self", "AddmmBackward0": "_saved_mat1"}
_ROWWISE = (
    "Add", "Sub", "Mul", "Div", "Neg", "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Sigmoid", "Tanh", "Prelu", "Selu",
    "Softplus", "Threshold", "Hardtanh", "NativeLayerNorm", "NativeBatchNorm", "NativeGroupNorm", "View", "UnsafeView",
    "ReshapeAlias", "Clone", "Alias", "ToCopy", "Pow", "Exp", "Log", "Sqrt", "Abs", "LogSoftmax", "Softmax", "Cat",
    "_Drop", "LinalgVectorNorm", "Expand", "Clamp", "ClampMin", "Where", "Unsqueeze", "Squeeze", "Stack", "Mish",
)  # fmt: skip
"""Nodes of autograd's graph whose result has the rows of an operand."""


def _evidence(x: Tensor, step: StepRows, matching: Sequence[DropoutRows]) -> Any:
    """Derive the rows of ``x`` from autograd's graph: some of ``matching``, ``_WEIGHT``, or None for unknown.

    The graph is followed back from ``x`` as long as its nodes keep rows in place, to a tensor whose rows are known.
    """
    by_space = {rows.space: rows for rows in reversed(matching)}
    if step.node_types and _address(x) in step.node_types:
        return by_space.get(step.node_types[_address(x)])
    queue: list[Any] = [(x.grad_fn, x.output_nr)]
    weight = False
    for _ in range(_LONGEST):
        if not queue:
            break
        node, output = queue.pop(0)
        if node is None:
            continue
        node_type = _types(node).get(output) if step.node_types else None
        if node_type is not None:
            return by_space.get(node_type) or _rows_of_type(node_type, len(x), step)
        name = type(node).__name__
        if name == "AccumulateGrad":
            weight |= node.variable.dim() > 1 and len(node.variable) == len(x)
        elif name == "ProductOfEntriesBackward":
            return by_space.get(step.node_types.get(node.rows_address, ""))
        elif name in ("IndexBackward0", "IndexSelectBackward0"):
            return _selected_rows(node, name, len(x), step, matching)
        elif name in _ROW_OPERAND:
            operand = node.next_functions[_ROW_OPERAND[name]]
            if operand[0] is None and name in _SAVED:  # data without a gradient
                saved = getattr(node, _SAVED[name])
                return by_space.get(step.node_types.get(_address(saved) if saved is not None else 0, ""))
            queue.append(operand)
        elif name.removesuffix("0").removesuffix("1").removesuffix("Backward") in _ROWWISE:
            queue += node.next_functions
        else:
            return None
    return _WEIGHT if weight else None


def _selected_rows(
    node: Any, name: str, count: int, step: StepRows, matching: Sequence[DropoutRows]
) -> DropoutRows | None:
    """Return rows that an index selected: of seeds or edges, or any of the nodes'."""
    index = node._saved_index if name == "IndexSelectBackward0" else node._saved_indices[0]
    if not isinstance(index, Tensor) or index.dim() != 1:
        return None
    for rows in matching:
        if rows.space in ("edge", "pair") or (rows.index is not None and rows.index.data_ptr() == index.data_ptr()):
            return rows
    size = int(node._saved_self_sym_sizes[0])
    nodes = [rows for rows in step.rows if rows.index is None and rows.space in step.node_ids and rows.match(size)]
    if len(nodes) != 1 or step.node_types:
        return None
    return DropoutRows(nodes[0].space, count, lambda: nodes[0].ids[index.to(nodes[0].ids.device)], index=index)


def _type_of(x: Tensor, step: StepRows) -> str | None:
    node_type = step.node_types.get(_address(x))
    return node_type if node_type is not None or x.grad_fn is None else _types(x.grad_fn).get(x.output_nr)


def _rows_of_type(node_type: str, count: int, step: StepRows) -> DropoutRows | None:
    ids = step.node_ids.get(node_type)
    return None if ids is None or len(ids) < count else DropoutRows(node_type, count, partial(_first, ids, count))


def _types(node: Any) -> dict[int, str]:
    """Return the node types of the results of a node of autograd's graph, by their number."""
    return node.metadata.setdefault(_TAG, {})


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is a dense one of floating-point numbers in memory."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.is_floating_point()
        and x.layout == torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # type: ignore[attr-defined]
        and not torch.compiler.is_compiling()
    )


# ------------------------------------------------------------------------------------ replacement of torch's functions

_installed: list[ExactDropout] = []
_original: dict[tuple[Any, str], Any] = {}


def installed_dropout() -> ExactDropout | None:
    """Return the object that computes dropout in the steps of the run; None: torch does."""
    return _installed[-1] if _installed else None


def active_dropout() -> ExactDropout | None:
    """Return the object that computes dropout in the running step; None: torch does."""
    dropout = installed_dropout()
    return dropout if dropout is not None and dropout._running else None


def torch_dropout() -> AbstractContextManager[None]:
    """Let torch compute dropout inside this context, for synthetic values whose layers are not counted."""
    dropout = active_dropout()
    return nullcontext() if dropout is None else dropout.suspended()


def current_position() -> StepPosition | None:
    """Return the position in the running step, for :func:`resumed_at`; None: torch computes dropout."""
    dropout = active_dropout()
    return None if dropout is None else dropout.position()


def resumed_at(position: StepPosition | None, edges: DropoutRows | None = None) -> AbstractContextManager[None]:
    """Continue from a position, perhaps repeatedly; see :meth:`ExactDropout.resumed_at`."""
    dropout = active_dropout()
    return nullcontext() if dropout is None or position is None else dropout.resumed_at(position, edges)


def _install(dropout: ExactDropout) -> None:
    """Replace what ``F.dropout`` and ``torch.dropout`` call, which also reaches modules that import these by name."""
    if not _installed:
        for module in (torch._VF, torch):
            for name, inplace in (("dropout", False), ("dropout_", True)):
                _original[module, name] = getattr(module, name)
                setattr(module, name, partial(_call, _original[module, name], inplace))
    _installed.append(dropout)


def _uninstall(dropout: ExactDropout) -> None:
    if dropout in _installed:
        _installed.remove(dropout)
        if not _installed:
            for (module, name), function in _original.items():
                setattr(module, name, function)
            _original.clear()


def _call(original: Callable[..., Tensor], inplace: bool, input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002
    dropout = _installed[-1] if train and _installed else None
    out = None if dropout is None else dropout.dropout(input, p, inplace)
    return original(input, p, train) if out is None else out
