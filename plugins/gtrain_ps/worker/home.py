"""A table whose rows are on parameter servers, as its layer sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gtrain.errors import ConfigError
from gtrain.nn import Csr, RemoteHome, TableSpec
from gtrain.nn.product import product
from gtrain.nn.rules import Rule, Settings
from gtrain_ps.placement import Placement
from gtrain_ps.worker.cuts import Cut, cut_ids, cut_rows
from gtrain_ps.worker.servers import ParameterServers, Request

CHUNK_BYTES = 64 << 20
"""Rows are read and written in messages of about this size."""


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


class ServedHome(RemoteHome):
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
        ids, found = torch.arange(begin, end), []
        for some in ids.split(max(1, CHUNK_BYTES // (self.table.dim * self.dtype.itemsize))):
            found.append(self._collect(self._send_ids(some, training=False, exact=True)))
        return torch.cat(found) if found else torch.empty(0, self.table.dim, dtype=self.dtype)

    def write(self, rows: Tensor) -> None:
        """Overwrite all rows ``[n, d]``."""
        for server, block, first, last in self._blocks():
            for begin, end in self._chunks(block, last - first):
                piece = rows[self.placement.ids(block, begin, end), first:last].to(self.dtype).contiguous()
                self.servers.submit(
                    server, "write", {"key": self.key, "begin": begin, "step": self.servers.step}, [piece]
                ).result()

    def state(self) -> dict[str, Any]:
        return self.server_state(range(len(self.servers)))

    def server_state(self, chosen: Iterable[int]) -> dict[str, Any]:
        """Rows and optimizer state of some servers' blocks."""
        found: dict[str, Any] = {"placement": self.placement.fields(), "servers": {}}
        for server, block, first, last in self._blocks():
            if server not in chosen:
                continue
            asked = {"key": self.key, "name": None, "begin": 0, "end": 0, "step": self.servers.step}
            said = self.servers.submit(server, "read_state", asked).result().fields
            chunks = list(self._chunks(block, last - first))
            pieces = {"rows": self._read_pieces(server, "read", chunks, {})}
            for name in said["names"]:
                pieces[name] = self._read_pieces(server, "read_state", chunks, {"name": name})
            found["servers"][str(server)] = {"rule": said["rule"], "tensors": pieces}
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        if state["placement"] != self.placement.fields():
            raise ConfigError(
                f"the checkpoint's table {self.key} was cut as {state['placement']}, and is now as "
                f"{self.placement.fields()}.",
                hint="go on with the same strategy.servers, strategy.split and strategy.blocks.",
            )
        now = self.servers.step
        for server, block, first, last in self._blocks():
            if str(server) not in state["servers"]:
                continue
            entry = state["servers"][str(server)]
            for begin, end in self._chunks(block, last - first):
                for name, tensor in entry["tensors"].items():
                    piece = tensor[begin:end].contiguous()
                    if name == "rows":
                        asked = {"key": self.key, "begin": begin, "step": self.servers.step}
                        self.servers.submit(server, "write", asked, [piece]).result()
                    else:
                        asked = {"key": self.key, "rule": entry["rule"], "name": name, "begin": begin, "step": now}
                        self.servers.submit(server, "write_state", asked, [piece]).result()
            if entry["rule"] is not None:
                asked = {"key": self.key, "rule": entry["rule"], "name": "", "begin": 0, "step": now}
                self.servers.submit(server, "write_state", asked).result()

    def _read_pieces(self, server: int, method: str, chunks: list[tuple[int, int]], more: dict[str, Any]) -> Tensor:
        asked = [{"key": self.key, "begin": b, "end": e, "step": self.servers.step, **more} for b, e in chunks]
        return torch.cat([self.servers.submit(server, method, one).result().tensors[0] for one in asked])

    def _blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Each server, its row block, its first column and the one behind its last."""
        for server in range(self.placement.servers):
            block, column = divmod(server, self.placement.column_blocks)
            yield server, block, *self.placement.columns(column)

    def _chunks(self, block: int, width: int) -> Iterator[tuple[int, int]]:
        height = self.placement.block_rows(block)
        step = max(1, CHUNK_BYTES // max(1, width * self.dtype.itemsize))
        for begin in range(0, max(1, height), step):
            yield begin, min(begin + step, height)

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
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, home: ServedHome, training: bool) -> Tensor:
        rows, ctx.ticket = home.fetch_unique(ids, training)
        ctx.home = home
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.home.push_product(ctx.ticket, gradients[0])
        return None, None, None, None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
