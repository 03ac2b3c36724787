"""A table whose rows are on parameter servers, as its layer sees it; sparse rows are cut by the blocks of the table."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gtrain.errors import DataError
from gtrain.nn import Csr, RemoteHome, TableSpec
from gtrain.nn.product import product
from gtrain.nn.rules import RULES, Rule, Settings
from gtrain_ps.kernels import rows as kernels
from gtrain_ps.placement import Placement
from gtrain_ps.worker.servers import ParameterServers, Request

PIECE_BYTES = 1 << 19
"""Rows are read and written in messages of about this size: server and worker hold some of them at a time."""
_ID_BYTES = 32  # an id, its block and place, and the order of blocks
_BLOCK_PIECES = 4  # that blocks() hands out at a time: a model does something with each
_UNDER_WAY = 2  # of such messages: the next one is made while this one is used


@dataclass(frozen=True)
class Ticket:
    """A product that was asked for.

    Attributes:
        step: the step that it is for.
        call: its number in that step; None where nothing will be trained from it.
        rows: m.
        answers: of each server.
        order: rows by block, where each has one entry (a lookup); None: every server's product has all rows.
        begin: where each block's rows begin in ``order``.
    """

    step: int
    call: int | None
    rows: int
    answers: list[Request]
    order: Tensor | None
    begin: list[int]


class ServedTable(RemoteHome):
    """The rows of one table, in blocks on the servers.

    Args:
        key: the layer's name in the module.
        table: what it is.
        placement: which server has what.
        servers: the servers.
        dtype: of the rows.
        wire_dtype: of products and gradients on the wire.
        pull: whether products are made here, of rows that are fetched.
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
    ) -> None:
        super().__init__(table)
        self.key, self.placement, self.servers = key, placement, servers
        self.dtype, self.wire_dtype, self.pull = dtype, wire_dtype, pull
        self._ahead: dict[int, tuple[Tensor, Ticket]] = {}
        self._given: list[tuple[Ticket, Tensor]] = []
        self._training = False

    def open(self) -> bool:
        """Have the servers make their blocks; return whether they are new."""
        spec = {name: getattr(self.table, name) for name in ("name", "rows", "dim", "ids", "init", "scale", "seed")}
        said = {"key": self.key, "table": spec, "placement": self.placement.fields(), "dtype": _name(self.dtype)}
        return any([answer.fields["new"] for answer in self.servers.everybody("open", said)])

    # ------------------------------------------------------------------------------------------------- products

    def ahead(self, rows: Csr, step: int, training: bool) -> None:
        """Send rows now whose product will be asked for later, with the same tensor of ids; any thread may do so."""
        self._ahead[id(rows.ids)] = rows.ids, self._send_rows(rows, step, training)

    def forget_ahead(self) -> None:
        """Forget what was sent and never asked for."""
        self._ahead.clear()

    def product(self, rows: Csr) -> Tensor:
        if not self.pull or id(rows.ids) in self._ahead:
            self._training = torch.is_grad_enabled()  # not to be known inside of an autograd function
            return super().product(rows)
        ids, inverse = torch.unique(rows.ids, return_inverse=True)
        return product(rows._replace(ids=inverse), self._pulled(ids))

    def lookup(self, ids: Tensor) -> Tensor:
        unique, inverse = torch.unique(ids, return_inverse=True)
        return F.embedding(inverse, self._pulled(unique))

    def multiply(self, rows: Csr) -> tuple[Tensor, Ticket]:
        _, ticket = self._ahead.pop(id(rows.ids), (None, None))
        if ticket is None:
            ticket = self._send_rows(rows, self.servers.step, self._training)
        return self._collect(ticket), ticket

    def push_product(self, ticket: Ticket, gradient: Tensor) -> None:
        self._given.append((ticket, gradient))

    def fetch(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.lookup(ids)

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        raise AssertionError("lookups of this home are products")

    def fetch_unique(self, ids: Tensor, training: bool) -> tuple[Tensor, Ticket]:
        """Rows of different ids, and the ticket for their gradient."""
        ticket = self._send_ids(ids, training)
        return self._collect(ticket), ticket

    def _pulled(self, ids: Tensor) -> Tensor:
        rows: Tensor = _Pull.apply(self.anchor, ids, self, torch.is_grad_enabled())
        return rows

    # --------------------------------------------------------------------------------------------------- updates

    def update(self, rule: Rule, settings: Settings) -> None:
        """The strategy has sent the step already: see :meth:`gtrain_ps.strategy.PsStrategy.post_backward`."""

    def zero_grad(self) -> None:
        self._given.clear()

    def take(self) -> list[tuple[Ticket, Tensor]]:
        """The gradients of products since the last call."""
        given, self._given = self._given, []
        return given

    def pieces(self, ticket: Ticket, gradient: Tensor) -> Iterator[tuple[int, Tensor]]:
        """What each server gets of a product's gradient."""
        columns = self.placement.column_blocks
        wide = gradient.to(self.wire_dtype)
        for column in range(columns):
            first, last = self.placement.columns(column)
            piece = wide[:, first:last].contiguous()
            ordered = piece if ticket.order is None else piece[ticket.order]
            for block in range(self.placement.row_blocks):
                if ticket.order is None:
                    yield block * columns + column, ordered
                else:
                    yield block * columns + column, ordered[ticket.begin[block] : ticket.begin[block + 1]]

    # --------------------------------------------------------------------------------------- reading and writing

    def read(self, begin: int, end: int) -> Tensor:
        rows = torch.empty(end - begin, self.table.dim, dtype=self.dtype)
        step = piece_rows(self.table.dim, self.dtype)
        for low in range(begin, end, step):
            high = min(low + step, end)
            ticket = self._send_ids(torch.arange(low, high), training=False, exact=True)
            rows[low - begin : high - begin] = self._collect(ticket)
        return rows

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        step = _BLOCK_PIECES * piece_rows(self.table.dim, self.dtype)
        for begin in range(0, self.num_rows, step):
            end = min(begin + step, self.num_rows)
            yield torch.arange(begin, end), self.read(begin, end)

    def write(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Overwrite rows.

        Args:
            pieces: ids int64 [m] and rows [m, d]; large ones are sent in smaller pieces.
        """
        cut, step = self.placement, piece_rows(self.table.dim, self.dtype)
        for ids, rows in pieces:
            for begin in range(0, len(ids), step):
                some = rows[begin : begin + step].to(self.dtype)
                block, place = cut.places(ids[begin : begin + step])
                written = []
                for server, row_block, first, last in self._blocks():
                    mine = (block == row_block).nonzero().flatten()
                    fields = {"key": self.key, "begin": 0, "step": self.servers.step}
                    tensors = [some[mine, first:last].contiguous(), place[mine]]
                    written.append(self.servers.submit(server, "write", fields, tensors))
                for request in written:
                    request.result()

    def state(self) -> dict[str, Any]:
        return {}  # blocks are files of the checkpoint, see gtrain_ps.checkpoints

    def load_state(self, state: dict[str, Any]) -> None:
        assert not state

    def describe_block(self, server: int) -> tuple[str | None, dict[str, tuple[int, ...]]]:
        """A server's block as it is after this step: the optimizer's name, and the shapes of ``rows`` and its state."""
        asked = {"key": self.key, "name": None, "begin": 0, "end": 0, "step": self.servers.step}
        said = self.servers.submit(server, "read_state", asked).result().fields
        height, width = self._shape(server)
        wide = {} if said["rule"] is None else RULES[said["rule"]].state
        return said["rule"], {"rows": (height, width)} | {
            name: (height, width) if wide[name] else (height,) for name in said["names"]
        }

    def read_block(self, server: int, name: str) -> Iterator[Tensor]:
        """``rows`` or a tensor of the optimizer state of a server's block, from its first row to its last."""
        height, width = self._shape(server)
        step, method = piece_rows(width, self.dtype), "read" if name == "rows" else "read_state"
        asked: deque[Request] = deque()
        for begin in range(0, height, step):
            fields = {"key": self.key, "begin": begin, "end": min(begin + step, height), "step": self.servers.step}
            asked.append(self.servers.submit(server, method, {**fields, "name": name}))
            if len(asked) == _UNDER_WAY:
                yield asked.popleft().result().tensors[0]
        while asked:
            yield asked.popleft().result().tensors[0]

    def write_block(self, server: int, rule: str | None, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite a server's block: ``rows`` and the optimizer's state by name, which may be mapped files."""
        height, width = self._shape(server)
        step, common = piece_rows(width, self.dtype), {"key": self.key, "step": self.servers.step}
        for name, tensor in tensors.items():
            method, more = ("write", {}) if name == "rows" else ("write_state", {"rule": rule, "name": name})
            for begin in range(0, height, step):
                piece = tensor[begin : begin + step].contiguous()
                self.servers.submit(server, method, {**common, **more, "begin": begin}, [piece]).result()
        if rule is not None:
            self.servers.submit(server, "write_state", {**common, "rule": rule, "name": "", "begin": 0}).result()

    def _shape(self, server: int) -> tuple[int, int]:
        """Rows and columns of a server's block."""
        block, column = divmod(server, self.placement.column_blocks)
        first, last = self.placement.columns(column)
        return self.placement.block_rows(block), last - first

    def _blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Each server, its row block, its first column and the one behind its last."""
        for server in range(self.placement.servers):
            block, column = divmod(server, self.placement.column_blocks)
            yield server, block, *self.placement.columns(column)

    # -------------------------------------------------------------------------------------------------- the wire

    def _send_rows(self, rows: Csr, step: int, training: bool) -> Ticket:
        return self._send(cut_rows(rows, self.placement, self.dtype, self.key), rows.num_rows, step, training)

    def _send_ids(self, ids: Tensor, training: bool, exact: bool = False) -> Ticket:
        cut = cut_ids(ids, self.placement, self.key)
        return self._send(cut, ids.numel(), self.servers.step, training, exact)

    def _send(self, cut: Cut, count: int, step: int, training: bool, exact: bool = False) -> Ticket:
        """Ask every server for its part of a product."""
        call = self.servers.next_call(step) if training else None
        dtype = _name(self.dtype if exact else self.wire_dtype)
        each = cut.lengths is None
        said = {"key": self.key, "step": step, "call": call, "dtype": dtype, "each": each}
        answers = []
        for block in range(self.placement.row_blocks):
            entries = slice(cut.begin[block], cut.begin[block + 1])
            tensors = [cut.ids[entries]]
            if cut.lengths is not None:
                tensors.append(cut.lengths[block])
            if cut.values is not None:
                tensors.append(cut.values[entries])
            fields = {**said, "valued": cut.values is not None}
            for column in range(self.placement.column_blocks):
                server = block * self.placement.column_blocks + column
                answers.append(self.servers.submit(server, "multiply", fields, tensors))
        return Ticket(step, call, count, answers, cut.order, cut.begin)

    def _collect(self, ticket: Ticket) -> Tensor:
        """Wait for the servers' parts, add up those of the row blocks, and put those of the columns side by side."""
        columns = self.placement.column_blocks
        parts = [answer.result().tensors[0].to(self.dtype) for answer in ticket.answers]
        made = [self._of_column(parts[column::columns], ticket) for column in range(columns)]
        return made[0] if columns == 1 else torch.cat(made, dim=1)

    def _of_column(self, parts: list[Tensor], ticket: Ticket) -> Tensor:
        if ticket.order is not None:
            rows = torch.cat(parts) if len(parts) > 1 else parts[0]
            return torch.empty_like(rows).index_copy_(0, ticket.order, rows)
        total = parts[0]
        for part in parts[1:]:
            total = total.add_(part)
        return total


class _Pull(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, home: ServedTable, training: bool) -> Tensor:
        rows, ctx.ticket = home.fetch_unique(ids, training)
        ctx.home = home
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.home.push_product(ctx.ticket, gradients[0])
        return None, None, None, None


def piece_rows(width: int, dtype: torch.dtype) -> int:
    """Rows of a piece of about :data:`PIECE_BYTES`, with their ids and where these are."""
    return max(1, PIECE_BYTES // (width * dtype.itemsize + _ID_BYTES))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Cut:
    """Entries of sparse rows by the row block of their ids.

    Attributes:
        ids: int32, their rows in the blocks, block by block.
        values: likewise; None: all 1.
        begin: where each block's entries begin, and the end, ``[Pr + 1]``.
        lengths: entries of each row in each block, ``[Pr, m]``; None: each row has one, and ``order`` says which.
        order: the row of each entry, where ``lengths`` is None.
    """

    ids: Tensor
    values: Tensor | None
    begin: list[int]
    lengths: Tensor | None
    order: Tensor | None = None


def cut_rows(rows: Csr, placement: Placement, dtype: torch.dtype, name: str) -> Cut:
    """Cut sparse rows by the blocks of their ids.

    Args:
        rows: the rows.
        placement: which block has what.
        dtype: of the values.
        name: of the table, for messages.

    Raises:
        DataError: an id is out of range.
    """
    block, place = _places(rows.ids, placement, name)
    blocks, offsets = placement.row_blocks, rows.offsets.numpy()
    short = kernels.most_entries(offsets) < 1 << 16
    lengths = np.zeros((blocks, rows.num_rows), np.uint16 if short else np.int32)
    totals = np.zeros(blocks, np.int64)
    kernels.count_blocks(block, offsets, lengths, totals)
    values = None if rows.values is None else rows.values.detach().to(dtype)
    if values is not None and kernels.all_ones(values.numpy()):
        values = None
    begin = np.zeros(blocks + 1, np.int64)
    np.cumsum(totals, out=begin[1:])
    if blocks == 1:
        return Cut(torch.from_numpy(place), values, begin.tolist(), torch.from_numpy(lengths))
    weighted = values is not None
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    given = np.empty(0, kind) if values is None else values.numpy()
    ids_out, values_out = np.empty(len(place), np.int32), np.empty(len(place) if weighted else 0, kind)
    kernels.deal(block, place, given, weighted, begin[:-1].copy(), ids_out, values_out)
    cut_values = torch.from_numpy(values_out) if weighted else None
    return Cut(torch.from_numpy(ids_out), cut_values, begin.tolist(), torch.from_numpy(lengths))


def cut_ids(ids: Tensor, placement: Placement, name: str) -> Cut:
    """Rows with one entry each, of the value 1: a lookup. They are sent by block; see :func:`cut_rows`."""
    block, place = _places(ids, placement, name)
    order = np.argsort(block, kind="stable")
    counts = np.bincount(block, minlength=placement.row_blocks)
    begin = [0, *np.cumsum(counts).tolist()]
    return Cut(torch.from_numpy(place[order]), None, begin, None, torch.from_numpy(order))


def _places(ids: Tensor, placement: Placement, name: str) -> tuple[Any, Any]:
    """Row block (uint8) and place in it (int32) of each id."""
    found = ids.numpy()
    block, place = np.empty(len(found), np.uint8), np.empty(len(found), np.int32)
    wrong = kernels.place_ids(found, placement.multiplier, placement.rows, placement.height, block, place)
    if wrong >= 0:
        raise DataError(
            f"the id {int(found[wrong])} was looked up in the table {name}, whose ids are 0 to {placement.rows - 1}.",
            hint="correct the data, or give the model more rows (data.num_features).",
        )
    return block, place
