"""A table whose rows are on parameter servers, as its layer sees it: products, lookups, gradients, reads and writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gtrain.errors import DataError
from gtrain.nn import Csr, RemoteTableStorage, TableSpec
from gtrain.nn.csr import product
from gtrain.nn.rules import RULES, Rule, Settings
from gtrain_ps.kernels import rows as kernels
from gtrain_ps.placement import Placement
from gtrain_ps.worker.device import HOST, WorkerDevice
from gtrain_ps.worker.servers import ParameterServers, ServerRequest

PIECE_BYTES = 1 << 19
"""Rows are read and written in messages of about this size; server and worker hold a few of them at a time."""
_ID_BYTES = 32  # an id, its block and position, and the order of blocks
_PIECES_PER_BLOCK = 4  # of those that blocks() yields: a model does some work with each
_READS_IN_FLIGHT = 2  # the server prepares the next piece while this one is used


@dataclass(frozen=True)
class PendingProduct:
    """A product that was requested from the servers.

    Attributes:
        step: number of the training step.
        call: number of the product in that step; None if no gradient will be pushed for it.
        rows: m.
        requests: to each server.
        order: of a lookup, the rows sorted by block; None if every server's product has all rows.
        begin: start of each block's rows in ``order``.
    """

    step: int
    call: int | None
    rows: int
    requests: list[ServerRequest]
    order: Tensor | None
    begin: list[int]


@dataclass(frozen=True)
class InitialBlock:
    """What the rows of a block are that were never changed.

    Attributes:
        table: the fields of the :class:`.TableSpec` of the initial rows.
        accumulator: initial value of the optimizer state called ``sum``; that of the others is 0.
    """

    table: Mapping[str, Any]
    accumulator: float


@dataclass(frozen=True)
class BlockDescription:
    """What a server's block consists of.

    Attributes:
        rule: the optimizer's name; None before the first update.
        shapes: of ``rows`` and the optimizer's state.
        changed: number of rows that were changed.
        initial: the other rows; None if they are not known.
    """

    rule: str | None
    shapes: Mapping[str, tuple[int, ...]]
    changed: int
    initial: InitialBlock | None


class ServerTableStorage(RemoteTableStorage):
    """The rows of one table, in blocks on the servers.

    Args:
        key: the layer's name in the module.
        table: the table's specification.
        placement: the rows and columns of each server.
        servers: the servers.
        dtype: of the rows.
        wire_dtype: of products and gradients on the wire.
        pull: whether the worker computes products, from rows that it fetches.
        device: of the layers behind the table: products and rows are returned there, and gradients come from there.
            Rows to multiply and ids are on the host, or are copied there.
    """

    def __init__(
        self,
        key: str,
        table: TableSpec,
        placement: Placement,
        servers: ParameterServers,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        pull: bool,
        device: WorkerDevice = HOST,
    ) -> None:
        super().__init__(table)
        self.key, self.placement, self.servers = key, placement, servers
        self.dtype, self.wire_dtype, self.pull, self.device = dtype, wire_dtype, pull, device
        self._prefetched: dict[int, tuple[Tensor, int | None, PendingProduct | None]] = {}
        self._gradients: list[tuple[PendingProduct, Tensor]] = []
        self._training = False

    def open(self) -> bool:
        """Have the servers create their blocks; return whether the blocks are new."""
        fields = {
            "key": self.key,
            "table": asdict(self.table),
            "placement": self.placement.fields(),
            "dtype": _name(self.dtype),
        }
        return any([reply.fields["new"] for reply in self.servers.request_all("open", fields)])

    # ------------------------------------------------------------------------------------------------- products

    def prefetch(self, rows: Csr, step: int, training: bool) -> None:
        """Send rows whose product will be needed later, with the same tensor of ids. Any thread may call this.

        Rows that would take the room of the requests before them are not sent yet, but their product has its number.
        """
        call, pending = self._next_call(step, training), None
        entries = sort_rows(rows, self.placement, self.dtype, self.key)
        with self.servers.sending_ahead:
            if self.servers.has_room_ahead(entries.nbytes, training):
                pending = self._send(entries, rows.num_rows, step, call)
            # The key is the identity of the tensor. The entry holds the tensor: no other gets the same identity.
            self._prefetched[id(rows.ids)] = rows.ids, call, pending

    @property
    def has_prefetched(self) -> bool:
        """Whether rows of later steps were sent ahead."""
        return any(call is not None for _, call, _ in list(self._prefetched.values()))

    def withdraw(self) -> None:
        """Send the rows of later steps again in their turn: the servers have dropped their products."""
        for key, (ids, call, _) in list(self._prefetched.items()):
            if call is not None:
                self._prefetched[key] = ids, call, None

    def discard_prefetched(self, training: bool) -> None:
        """Forget the products, for training or not, that were prefetched and not used."""
        for key, (_, call, _) in list(self._prefetched.items()):
            if (call is not None) == training:
                self._prefetched.pop(key, None)

    def product(self, rows: Csr) -> Tensor:
        if not self.pull or id(rows.ids) in self._prefetched:
            self._training = torch.is_grad_enabled()  # an autograd function cannot see it
            return super().product(rows)
        ids, inverse = torch.unique(rows.ids.cpu(), return_inverse=True)
        # On the device: it copies the U fetched rows, and the product and its backward pass read Z >= U rows each.
        return product(rows._replace(ids=inverse).to(self.device.device), self._pull_rows(ids))

    def lookup(self, ids: Tensor) -> Tensor:
        unique, inverse = torch.unique(self.device.ids_on_host(ids), return_inverse=True)
        return F.embedding(self.device.to_device(inverse), self._pull_rows(unique))

    def multiply(self, rows: Csr) -> tuple[Tensor, PendingProduct]:
        prefetched = self._prefetched.pop(id(rows.ids), None)
        step = self.servers.step
        _, call, pending = prefetched or (None, self._next_call(step, self._training), None)
        if pending is None:
            rows = rows.to(HOST.device)
            entries = sort_rows(rows, self.placement, self.dtype, self.key)
            pending = self._send(entries, rows.num_rows, step, call)
        return self._receive(pending), pending

    def push_product(self, pending: PendingProduct, gradient: Tensor) -> None:
        gradient = gradient if self.device.is_host else self.device.to_host(gradient.to(self.wire_dtype))
        self._gradients.append((pending, gradient))

    def fetch(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.lookup(ids)

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        raise AssertionError("lookups of this storage are products")

    def fetch_unique(self, ids: Tensor, training: bool) -> tuple[Tensor, PendingProduct]:
        """Return rows of distinct ids, and the object to push their gradient with."""
        pending = self._send_ids(ids, training)
        return self._receive(pending), pending

    def _pull_rows(self, ids: Tensor) -> Tensor:
        rows: Tensor = _Pull.apply(self.anchor, ids, self, torch.is_grad_enabled())
        return rows

    # --------------------------------------------------------------------------------------------------- updates

    def update(self, rule: Rule, settings: Settings) -> None:
        """Do nothing: the strategy has sent the step, see :meth:`gtrain_ps.strategy.PsStrategy.sum_gradients`."""

    def zero_grad(self) -> None:
        self._gradients.clear()

    def take_gradients(self) -> list[tuple[PendingProduct, Tensor]]:
        """Return the gradients of products since the last call, on the host."""
        self.device.synchronize()
        gradients, self._gradients = self._gradients, []
        return gradients

    def split_gradient(self, pending: PendingProduct, gradient: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each server and its part of a product's gradient ``[m, d]``."""
        columns = self.placement.column_blocks
        gradient = gradient.to(self.wire_dtype)
        for column in range(columns):
            first, last = self.placement.columns(column)
            part = gradient[:, first:last].contiguous()
            if pending.order is not None:
                part = part[pending.order]
            for block in range(self.placement.row_blocks):
                rows = slice(None) if pending.order is None else slice(pending.begin[block], pending.begin[block + 1])
                yield block * columns + column, part[rows]

    # --------------------------------------------------------------------------------------- reading and writing

    def read(self, begin: int, end: int) -> Tensor:
        rows = torch.empty(end - begin, self.table.dim, dtype=self.dtype)
        step = piece_rows(self.table.dim, self.dtype)
        for low in range(begin, end, step):
            high = min(low + step, end)
            pending = self._send_ids(torch.arange(low, high), training=False, exact=True)
            rows[low - begin : high - begin] = self._receive_on_host(pending)
        return rows

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        step = _PIECES_PER_BLOCK * piece_rows(self.table.dim, self.dtype)
        for begin in range(0, self.num_rows, step):
            end = min(begin + step, self.num_rows)
            yield torch.arange(begin, end), self.device.to_device(self.read(begin, end))

    def write(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Overwrite rows.

        Args:
            pieces: ids int64 [m] and rows [m, d]; large ones are sent in smaller pieces.
        """
        placement, step = self.placement, piece_rows(self.table.dim, self.dtype)
        fields = {"key": self.key, "begin": 0, "step": self.servers.step}
        for ids, rows in pieces:
            for begin in range(0, len(ids), step):
                piece = rows[begin : begin + step].to("cpu", self.dtype)
                blocks, positions = placement.locate(ids[begin : begin + step].cpu())
                requests = []
                for server in range(placement.servers):
                    block, columns = placement.block_of(server)
                    mine = (blocks == block).nonzero().flatten()
                    tensors = [piece[mine, columns].contiguous(), positions[mine]]
                    requests.append(self.servers.submit(server, "write", fields, tensors))
                for request in requests:
                    request.result()

    def state(self) -> dict[str, Any]:
        # Blocks are files of the checkpoint, see gtrain_ps.checkpoints.
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        assert not state

    def describe_block(self, server: int) -> BlockDescription:
        """Return what a server's block consists of after this step."""
        fields = {"key": self.key, "name": None, "begin": 0, "end": 0, "step": self.servers.step}
        reply = self.servers.submit(server, "read_state", fields).result().fields
        height, width = self._block_shape(server)
        wide = {} if reply["rule"] is None else RULES[reply["rule"]].state
        state = {name: (height, width) if wide[name] else (height,) for name in reply["names"]}
        initial = InitialBlock(reply["initial"], reply["accumulator"]) if reply["initial"] is not None else None
        return BlockDescription(reply["rule"], {"rows": (height, width), **state}, reply["changed"], initial)

    def read_block(self, server: int, name: str, positions: Tensor | None = None) -> Iterator[Tensor]:
        """Yield ``rows``, a tensor of the optimizer state, or the flags ``changed`` of a server's block, in pieces.

        Args:
            server: its number.
            name: of the tensor.
            positions: rows of the block ``[k]``; None: all.
        """
        height, width = self._block_shape(server)
        count = height if positions is None else len(positions)
        step, method = piece_rows(width, self.dtype), "read" if name == "rows" else "read_state"
        requests: deque[ServerRequest] = deque()
        for begin in range(0, count, step):
            end = min(begin + step, count)
            fields = {"key": self.key, "begin": begin, "end": end, "step": self.servers.step, "name": name}
            tensors = () if positions is None else (positions[begin:end],)
            requests.append(self.servers.submit(server, method, fields, tensors))
            if len(requests) == _READS_IN_FLIGHT:
                yield requests.popleft().result().tensors[0]
        while requests:
            yield requests.popleft().result().tensors[0]

    def changed_positions(self, server: int) -> Iterator[Tensor]:
        """Yield the rows of a server's block that were changed, in pieces: positions in the block, int32, ascending."""
        begin = 0
        for flags in self.read_block(server, "changed"):
            yield (flags.nonzero().flatten() + begin).int()
            begin += len(flags)

    def write_block(
        self,
        server: int,
        rule: str | None,
        tensors: Mapping[str, Tensor],
        positions: Tensor | None = None,
        initial: InitialBlock | None = None,
    ) -> None:
        """Overwrite a server's block.

        Args:
            server: its number.
            rule: the optimizer whose state is among ``tensors``; None: the state is not changed.
            tensors: ``rows`` and the optimizer's state by name; they may be mapped files.
            positions: the rows of the block that the tensors have ``[k]``; None: all.
            initial: the other rows.
        """
        height, width = self._block_shape(server)
        count = height if positions is None else len(positions)
        step, common = piece_rows(width, self.dtype), {"key": self.key, "step": self.servers.step}
        if initial is not None:
            others = {"table": initial.table, "accumulator": initial.accumulator, "rule": rule}
            self.servers.submit(server, "reset", {**common, **others}).result()
        for name, tensor in tensors.items():
            method, more = ("write", {}) if name == "rows" else ("write_state", {"rule": rule, "name": name})
            for begin in range(0, count, step):
                pieces = [each[begin : begin + step].contiguous() for each in (tensor, positions) if each is not None]
                self.servers.submit(server, method, {**common, **more, "begin": begin}, pieces).result()
        if rule is not None:
            self.servers.submit(server, "write_state", {**common, "rule": rule, "name": "", "begin": 0}).result()

    def _block_shape(self, server: int) -> tuple[int, int]:
        """Return rows and columns of a server's block."""
        block, columns = self.placement.block_of(server)
        return self.placement.block_rows(block), columns.stop - columns.start

    # -------------------------------------------------------------------------------------------------- requests

    def _next_call(self, step: int, training: bool) -> int | None:
        return self.servers.next_call(step) if training else None

    def _send_ids(self, ids: Tensor, training: bool, exact: bool = False) -> PendingProduct:
        entries, step = sort_ids(ids, self.placement, self.key), self.servers.step
        return self._send(entries, ids.numel(), step, self._next_call(step, training), exact)

    def _send(
        self, entries: BlockEntries, count: int, step: int, call: int | None, exact: bool = False
    ) -> PendingProduct:
        """Request every server's part of a product."""
        dtype = _name(self.dtype if exact else self.wire_dtype)
        each, valued = entries.lengths is None, entries.values is not None
        fields = {"key": self.key, "step": step, "call": call, "dtype": dtype, "each": each, "valued": valued}
        requests = []
        for block in range(self.placement.row_blocks):
            part = slice(entries.begin[block], entries.begin[block + 1])
            tensors = [entries.ids[part]]
            if entries.lengths is not None:
                tensors.append(entries.lengths[block])
            if entries.values is not None:
                tensors.append(entries.values[part])
            for column in range(self.placement.column_blocks):
                server = block * self.placement.column_blocks + column
                requests.append(self.servers.submit(server, "multiply", fields, tensors))
        return PendingProduct(step, call, count, requests, entries.order, entries.begin)

    def _receive(self, pending: PendingProduct) -> Tensor:
        """Return a product on the device."""
        return self.device.to_device(self._receive_on_host(pending))

    def _receive_on_host(self, pending: PendingProduct) -> Tensor:
        """Wait for the servers' parts, sum those of the row blocks, and concatenate those of the column blocks."""
        columns = self.placement.column_blocks
        parts = [request.result().tensors[0].to(self.dtype) for request in pending.requests]
        if not self.device.is_host:
            whole = self.device.buffer(pending.rows, self.table.dim, dtype=self.dtype)
            for column in range(columns):
                first, last = self.placement.columns(column)
                _join_rows_into(whole[:, first:last], parts[column::columns], pending.order)
            return whole
        products = [_join_rows(parts[column::columns], pending.order) for column in range(columns)]
        return products[0] if columns == 1 else torch.cat(products, dim=1)


def _join_rows(parts: list[Tensor], order: Tensor | None) -> Tensor:
    """Return the product of one column block from its row blocks: their sum, or the rows of a lookup."""
    if order is not None:
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        return torch.empty_like(rows).index_copy_(0, order, rows)
    total = parts[0]
    for part in parts[1:]:
        total = total.add_(part)
    return total


def _join_rows_into(target: Tensor, parts: list[Tensor], order: Tensor | None) -> None:
    """Write what :func:`_join_rows` returns into ``target``: page-locked memory is written once and not copied to."""
    if order is not None:
        target.index_copy_(0, order, torch.cat(parts) if len(parts) > 1 else parts[0])
    elif len(parts) == 1:
        target.copy_(parts[0])
    else:
        torch.add(parts[0], parts[1], out=target)
        for part in parts[2:]:
            target.add_(part)


class _Pull(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, table: ServerTableStorage, training: bool) -> Tensor:
        rows, ctx.pending = table.fetch_unique(ids, training)
        ctx.table = table
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.table.push_product(ctx.pending, gradients[0])
        return None, None, None, None


def piece_rows(width: int, dtype: torch.dtype) -> int:
    """Return the number of rows in a piece of about :data:`PIECE_BYTES`, with their ids and positions."""
    return max(1, PIECE_BYTES // (width * dtype.itemsize + _ID_BYTES))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class BlockEntries:
    """Entries of sparse rows, sorted by the row block of their ids.

    Attributes:
        ids: int32 ``[Z]``, rows of the blocks.
        values: ``[Z]``; None: all 1.
        begin: start of each block's entries, and the end, ``[Pr + 1]``.
        lengths: entries of each row in each block, ``[Pr, m]``; None if each row has one entry.
        order: the row of each entry, if ``lengths`` is None.
    """

    ids: Tensor
    values: Tensor | None
    begin: list[int]
    lengths: Tensor | None
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the largest block's tensors."""
        entry = self.ids.itemsize + (0 if self.values is None else self.values.itemsize)
        lengths = 0 if self.lengths is None else self.lengths[0].nbytes
        return entry * max(end - begin for begin, end in pairwise(self.begin)) + lengths


def sort_rows(rows: Csr, placement: Placement, dtype: torch.dtype, name: str) -> BlockEntries:
    """Sort the entries of sparse rows by the row block of their ids.

    Args:
        rows: the rows.
        placement: of the table.
        dtype: of the values.
        name: the table's name, for messages.

    Raises:
        DataError: an id is out of range.
    """
    block, position = _locate(rows.ids, placement, name)
    blocks, offsets = placement.row_blocks, rows.offsets.numpy()
    # Most rows have few entries: 2 bytes per length instead of 4.
    lengths_dtype = np.uint16 if np.diff(offsets).max(initial=0) < 1 << 16 else np.int32
    lengths = np.zeros((blocks, rows.num_rows), lengths_dtype)
    totals = np.zeros(blocks, np.int64)
    kernels.count_blocks(block, offsets, lengths, totals)
    values = None if rows.values is None else rows.values.detach().to(dtype)
    # Ones are not sent: the server then adds rows without a factor.
    if values is not None and kernels.all_ones(values.numpy()):
        values = None
    begin = np.zeros(blocks + 1, np.int64)
    np.cumsum(totals, out=begin[1:])
    ids = position
    if blocks > 1:
        weighted, no_values = values is not None, np.empty(0, torch.empty(0, dtype=dtype).numpy().dtype)
        given = no_values if values is None else values.numpy()
        ids, sorted_values = np.empty(len(position), np.int32), np.empty_like(given)
        kernels.sort_by_block(block, position, given, weighted, begin[:-1].copy(), ids, sorted_values)
        values = torch.from_numpy(sorted_values) if weighted else None
    return BlockEntries(torch.from_numpy(ids), values, begin.tolist(), torch.from_numpy(lengths))


def sort_ids(ids: Tensor, placement: Placement, name: str) -> BlockEntries:
    """Sort the ids of a lookup by row block: rows with one entry each, of the value 1. See :func:`sort_rows`."""
    block, position = _locate(ids, placement, name)
    order = np.argsort(block, kind="stable")
    begin = [0, *np.cumsum(np.bincount(block, minlength=placement.row_blocks)).tolist()]
    return BlockEntries(torch.from_numpy(position[order]), None, begin, None, torch.from_numpy(order))


def _locate(ids: Tensor, placement: Placement, name: str) -> tuple[Any, Any]:
    """Return the row block (uint8) of each id, and its row in the block (int32)."""
    numbers = ids.numpy()
    block, position = np.empty(len(numbers), np.uint8), np.empty(len(numbers), np.int32)
    outside = kernels.locate_ids(numbers, placement.multiplier, placement.rows, placement.height, block, position)
    if outside >= 0:
        raise DataError(
            f"the id {int(numbers[outside])} was looked up in the table {name}, whose ids are 0 to "
            f"{placement.rows - 1}.",
            hint="correct the data, or give the model more rows (data.num_features).",
        )
    return block, position
