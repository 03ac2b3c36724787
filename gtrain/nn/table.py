"""Tables: layers whose parameter is many rows of which a batch needs few, and how a strategy takes them over.

A :class:`Table` layer (``Embedding``, ``EmbeddingBag``, ``SparseLinear``) never reads its parameter itself. It asks its
*home*: ``self.home.lookup(ids)`` for rows, ``self.home.product(rows)`` for sparse rows times the table. At first the
home is a :class:`LocalHome`, an ordinary ``nn.Parameter`` with the natural name (``embedding.weight``). A strategy that
keeps rows elsewhere (servers, partitions on disk) does, in its ``install``::

    for name, layer in tables(module):
        layer.move(MyHome(layer.table, layer.weight.detach()))   # rows now live there; layer.weight has none

and in its ``uninstall``::

    layer.move_back(rows)      # a LocalHome again

From ``move`` on, ``layer.weight`` is an *anchor*: the same ``nn.Parameter``, with 0 rows. It hangs lookups onto the
autograd graph, and stands for the table in optimizers, whether they were made before or after; an optimizer of
``gtrain.nn`` that holds it calls ``home.update(rule, settings)`` in its ``step``, with the settings (``lr`` too) of
its parameter group at that moment, and ``home.zero_grad()`` in its ``zero_grad``: schedules reach the home.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from gtrain.errors import ConfigError
from gtrain.nn.csr import Csr
from gtrain.nn.product import product
from gtrain.nn.rules import Rule, Settings

BLOCK_ROWS = 1 << 16
"""Rows of a table that a home hands out at a time."""
INIT_ROWS = 4096
"""Rows of a table that one random generator fills."""

_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@dataclass(frozen=True)
class TableSpec:
    """What a table is, wherever its rows live.

    Attributes:
        name: what its rows are: a node type for ``Embedding``, ``features`` for ``SparseLinear``.
        rows: number of rows, n.
        dim: columns, d.
        ids: the id space of the rows: ``orig_id`` (ids of the source data's nodes) or ``feature``.
        init: ``normal`` or ``uniform``.
        scale: standard deviation of the normal distribution, or half the width of the uniform one.
        seed: of the initial rows; drawn from torch's generator, so that equally seeded ranks draw the same.
    """

    name: str
    rows: int
    dim: int
    ids: str = "orig_id"
    init: str = "normal"
    scale: float = 1.0
    seed: int = field(default_factory=lambda: int(torch.randint(1 << 62, ())))

    def initial(self, begin: int, end: int) -> Tensor:
        """Return initial rows ``begin`` to ``end``, float32.

        Every :data:`INIT_ROWS` rows have a generator of their own, so a row's initial value does not depend on which
        other rows are asked for: blocks of a table made in different places are those of the whole table.
        """
        if begin % INIT_ROWS == 0 and begin < end <= begin + INIT_ROWS:
            return self._block(begin // INIT_ROWS)[: end - begin]  # as most are asked for, without a copy
        made = torch.empty(end - begin, self.dim)
        for block in range(begin // INIT_ROWS, -(-end // INIT_ROWS)):
            first = block * INIT_ROWS
            low, high = max(begin, first), min(end, first + INIT_ROWS)
            made[low - begin : high - begin] = self._block(block)[low - first : high - first]
        return made

    def _block(self, block: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + block)
        if self.init == "normal":
            return torch.randn(INIT_ROWS, self.dim, generator=generator).mul_(self.scale)
        return torch.rand(INIT_ROWS, self.dim, generator=generator).mul_(2).sub_(1).mul_(self.scale)


class TableHome(ABC):
    """Where the rows of one table live: what a layer, an optimizer and a checkpoint ask of them."""

    @abstractmethod
    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows [Z, d] of ids int64 [Z], differentiable."""

    @abstractmethod
    def product(self, rows: Csr) -> Tensor:
        """Return sparse rows [m, n] times the table, [m, d], differentiable."""

    @abstractmethod
    def update(self, rule: Rule, settings: Settings) -> None:
        """Apply the gradients that backward passes left since the last :meth:`zero_grad`, as ``gtrain.nn.rules`` says.

        It is called once for each step of the optimizer, perhaps without any gradient.
        A home may do so by kernels of its own, and later, as its strategy's semantics allow; ``rules`` is what it is
        tested against.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget gradients."""

    @abstractmethod
    def read(self, begin: int, end: int) -> Tensor:
        """Return rows ``begin`` to ``end`` as they are now, detached: for exports and for leaving this home."""

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through all rows once: ids ``[n]`` and rows ``[n, d]``, detached, some at a time, in this home's order.

        What is yielded is valid until the next is asked for.
        """
        rows = self.num_rows
        for begin in range(0, rows, BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, rows)
            yield torch.arange(begin, end), self.read(begin, end)

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows of the table, n."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep of this rank's share: tensors, numbers, strings; rows and optimizer state.

        A strategy returns it from ``shard_state``. The weight in the module's own state_dict has no rows.
        """

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state` gave."""


class LocalHome(TableHome):
    """The rows are the layer's own parameter; torch's autograd, optimizers and state_dict do the rest.

    Args:
        layer: the table.
    """

    def __init__(self, layer: Table) -> None:
        self._layer = layer

    def lookup(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._layer.weight, sparse=self._layer.sparse)

    def product(self, rows: Csr) -> Tensor:
        return product(rows, self._layer.weight, sparse=self._layer.sparse)

    def update(self, rule: Rule, settings: Settings) -> None:
        raise AssertionError("a local table is a parameter: its optimizer updates it")

    def zero_grad(self) -> None:
        self._layer.weight.grad = None

    def read(self, begin: int, end: int) -> Tensor:
        return self._layer.weight.detach()[begin:end]

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.arange(self.num_rows), self.read(0, self.num_rows)

    @property
    def num_rows(self) -> int:
        return self._layer.table.rows

    def state(self) -> dict[str, Any]:
        return {}  # the rows are in the module's state_dict, their optimizer state in the optimizer's

    def load_state(self, state: dict[str, Any]) -> None:
        assert not state


class RemoteHome(TableHome):
    """The rows are elsewhere. A subclass moves rows and gradients; hanging them onto autograd is done here.

    Args:
        table: what the table is.
    """

    anchor: nn.Parameter
    """The layer's parameter without rows, set by :meth:`Table.move`."""

    def __init__(self, table: TableSpec) -> None:
        self.table = table

    @abstractmethod
    def fetch(self, ids: Tensor) -> Tensor:
        """Return rows [Z, d] of ids int64 [Z]."""

    @abstractmethod
    def push(self, ids: Tensor, gradients: Tensor) -> None:
        """Take in the gradients [Z, d] of rows that were fetched; ids may repeat, and calls add up."""

    @abstractmethod
    def multiply(self, rows: Csr) -> tuple[Tensor, Any]:
        """Return sparse rows times the table, [m, d], and a ticket that :meth:`push_product` gets back."""

    @abstractmethod
    def push_product(self, ticket: Any, gradient: Tensor) -> None:
        """Take in the gradient [m, d] of a product; what it means for the table's rows is this home's to work out."""

    @property
    def num_rows(self) -> int:
        return self.table.rows

    def lookup(self, ids: Tensor) -> Tensor:
        found: Tensor = _Lookup.apply(self.anchor, ids, self)
        return found

    def product(self, rows: Csr) -> Tensor:
        if rows.values is not None and rows.values.requires_grad:
            raise ConfigError(
                f"the values of sparse rows need a gradient, and the table {self.table.name} lives in another process.",
                hint="set strategy=single, or let the values be data.",
            )
        result: Tensor = _RemoteProduct.apply(self.anchor, rows, self)
        return result


class Table(nn.Module):
    """Base of the layers that are rows of a table.

    Args:
        table: what the table is.
        sparse: whether the parameter's gradient is sparse (a ``torch.sparse_coo`` tensor of the rows that were used),
            for the optimizers of ``gtrain.nn``; else dense, for any optimizer.
        dtype: of the rows; None: torch's default.

    Attributes:
        table: what the table is.
        home: where its rows live.
        weight: [n, d], its rows; [0, d] while they live elsewhere.
    """

    def __init__(self, table: TableSpec, *, sparse: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.table = table
        self.sparse = sparse
        rows = 0 if _deferred.get() else table.rows
        self.weight = nn.Parameter(_allocated(table, rows, dtype or torch.get_default_dtype()))
        self.home: TableHome = LocalHome(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the rows with their initial values."""
        with torch.no_grad():
            for begin in range(0, self.weight.size(0), INIT_ROWS):
                end = min(begin + INIT_ROWS, self.weight.size(0))
                self.weight[begin:end] = self.table.initial(begin, end)

    def move(self, home: RemoteHome) -> None:
        """Let the rows live in another home, which has them already; ``weight`` keeps none."""
        self.weight.data, self.weight.grad = self.weight.data.new_empty(0, self.table.dim), None
        self.weight.home = home  # type: ignore[attr-defined]
        home.anchor, self.home = self.weight, home

    def move_back(self, rows: Tensor) -> None:
        """Let the rows be the layer's own parameter again."""
        self.weight.data, self.weight.grad = rows.to(self.weight), None
        if hasattr(self.weight, "home"):
            del self.weight.home
        self.home = LocalHome(self)

    def clip(self, ids: Tensor, columns: int, most: float) -> None:
        """Scale the first columns of these rows to a norm of ``most`` where theirs is larger, in place.

        Raises:
            ConfigError: the rows live elsewhere.
        """
        if not isinstance(self.home, LocalHome):
            raise ConfigError(
                "model.max_norm is set, and the rows live in other processes.",
                hint="choose a strategy that keeps tables in the memory of its ranks, or set model.max_norm=null.",
            )
        with torch.no_grad():
            found = ids.unique()
            rows = self.weight[found, :columns]
            norms = rows.norm(dim=1)
            long = norms > most
            found = found[long].unsqueeze(1)
            scale = most / (norms[long] + 1e-7)
            self.weight[found, torch.arange(columns, device=ids.device)] = rows[long] * scale.unsqueeze(1)

    def extra_repr(self) -> str:
        return f"{self.table.rows}, {self.table.dim}, name={self.table.name!r}"


def _allocated(table: TableSpec, rows: int, dtype: torch.dtype) -> Tensor:
    """Return the memory of the rows.

    Raises:
        ConfigError: this process cannot get that much.
    """
    try:
        return torch.empty(rows, table.dim, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        size = rows * table.dim * dtype.itemsize
        raise ConfigError(
            f"the table {table.name!r} has {rows} rows of {table.dim} numbers: {rows} * {table.dim} * {dtype.itemsize} "
            f"bytes = {size / 2**30:,.0f} GiB, which this process cannot allocate.",
            hint="number the rows (data.num_features, or the ids in the data) without gaps, make them narrower "
            "(model.hidden_channels), or choose a strategy that spreads them over servers.",
        ) from error


def tables(module: nn.Module) -> Iterator[tuple[str, Table]]:
    """Yield the name and layer of every table in a module."""
    for name, layer in module.named_modules():
        if isinstance(layer, Table):
            yield name, layer


def home_of(parameter: Tensor) -> TableHome | None:
    """Return the home that the rows of a parameter live in, or None for an ordinary parameter."""
    home: TableHome | None = getattr(parameter, "home", None)
    return home


@contextmanager
def deferred() -> Iterator[None]:
    """Make tables without rows inside this context: a strategy that keeps them elsewhere fills them there.

    A table may be larger than this process's memory. Its home takes ``layer.table.initial(begin, end)``.
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, home: RemoteHome) -> Tensor:
        ctx.home = home
        ctx.save_for_backward(ids)
        rows = home.fetch(ids.reshape(-1))
        return rows.view(*ids.shape, rows.size(1))  # not -1, which is ambiguous where there are no ids

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        ctx.home.push(ids.reshape(-1), gradients[0].reshape(ids.numel(), gradients[0].size(-1)))
        return None, None, None


class _RemoteProduct(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Csr, home: RemoteHome) -> Tensor:
        ctx.home = home
        result, ctx.ticket = home.multiply(rows)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.home.push_product(ctx.ticket, gradients[0].contiguous())
        return None, None, None
