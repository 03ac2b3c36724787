"""Tables: layers with many rows, of which a batch needs few, and the interface by which a strategy stores them.

A :class:`Table` layer (``Embedding``, ``EmbeddingBag``, ``SparseLinear``) reads its rows through its *storage*:
``self.storage.lookup(ids)`` returns rows, ``self.storage.product(rows)`` sparse rows times the table. Initially the
storage is a :class:`LocalTableStorage`: the rows are an ordinary ``nn.Parameter`` with the usual name
(``embedding.weight``). A strategy that stores rows elsewhere (servers, partitions on disk) moves them in its
``install``::

    for name, layer in tables(module):
        layer.move(MyStorage(layer.table, layer.weight.detach()))   # the rows are stored there; layer.weight has none

and in its ``uninstall``::

    layer.move_back(rows)      # a LocalTableStorage again

From ``move`` on, ``layer.weight`` is an *anchor*: the same ``nn.Parameter``, with 0 rows. It connects lookups to the
autograd graph, and represents the table in optimizers, whether they were created before or after. An optimizer of
``gtrain.nn`` calls ``storage.update(rule, settings)`` in its ``step``, with the current settings of the parameter group
(``lr`` included, so that schedules apply), and ``storage.zero_grad()`` in its ``zero_grad``.
"""

from __future__ import annotations

import math
import warnings
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
from gtrain.moved import renamed
from gtrain.nn.csr import Csr, as_csr, product
from gtrain.nn.rules import Rule, Settings

BLOCK_ROWS = 1 << 16
"""Rows of a table that a storage returns at once."""
INIT_ROWS = 4096
"""Rows of a table that one random generator fills."""

_deferred: ContextVar[bool] = ContextVar("deferred", default=False)

MODES = ("sum", "mean")

RENAMED = {"TableHome": "TableStorage", "LocalHome": "LocalTableStorage", "RemoteHome": "RemoteTableStorage"}
__getattr__ = renamed(__name__, RENAMED)


@dataclass(frozen=True)
class TableSpec:
    """Description of a table, wherever its rows are stored.

    Attributes:
        name: of its rows: a node type for ``Embedding``, ``features`` for ``SparseLinear``.
        rows: number of rows, n.
        dim: columns, d.
        ids: the id space of the rows: ``orig_id`` (ids of the source data's nodes) or ``feature``.
        init: ``normal`` or ``uniform``.
        scale: standard deviation of the normal distribution, or half the width of the uniform one.
        seed: of the initial rows; drawn from torch's generator, so that ranks with the same seed agree.
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

        Every block of :data:`INIT_ROWS` rows has its generator, so a row's initial value does not depend on the
        requested range: blocks that different processes initialise are those of the whole table.
        """
        if begin % INIT_ROWS == 0 and begin < end <= begin + INIT_ROWS:
            return self._block(begin // INIT_ROWS)[: end - begin]  # the common case, without a copy
        rows = torch.empty(end - begin, self.dim)
        for block in range(begin // INIT_ROWS, -(-end // INIT_ROWS)):
            first = block * INIT_ROWS
            low, high = max(begin, first), min(end, first + INIT_ROWS)
            rows[low - begin : high - begin] = self._block(block)[low - first : high - first]
        return rows

    def _block(self, block: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + block)
        if self.init == "normal":
            return torch.randn(INIT_ROWS, self.dim, generator=generator).mul_(self.scale)
        return torch.rand(INIT_ROWS, self.dim, generator=generator).mul_(2).sub_(1).mul_(self.scale)


class TableStorage(ABC):
    """Storage of the rows of one table: the interface that layers, optimizers and checkpoints use."""

    @abstractmethod
    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows [Z, d] of ids int64 [Z], differentiable."""

    @abstractmethod
    def product(self, rows: Csr) -> Tensor:
        """Return sparse rows [m, n] times the table, [m, d], differentiable."""

    @abstractmethod
    def update(self, rule: Rule, settings: Settings) -> None:
        """Apply the gradients of backward passes since the last :meth:`zero_grad`, as ``gtrain.nn.rules`` specifies.

        The optimizer calls it once per step, even if no gradient was pushed. An implementation may use its own kernels,
        and apply gradients later if its strategy's semantics allow that; ``rules`` is the reference in its tests.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Reset gradients."""

    @abstractmethod
    def read(self, begin: int, end: int) -> Tensor:
        """Return the current rows ``begin .. end - 1``, detached: for exports and for :meth:`Table.move_back`."""

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows once, in blocks: ids ``[n]`` and rows ``[n, d]``, detached, in this storage's order.

        A block is valid until the next one is yielded.
        """
        for begin in range(0, self.num_rows, BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, self.num_rows)
            yield torch.arange(begin, end), self.read(begin, end)

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Number of rows, n."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return this rank's share of a checkpoint: tensors, numbers, strings; rows and optimizer state.

        A strategy returns it from ``shard_state``. The weight in the module's own state_dict has no rows.
        """

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""


class LocalTableStorage(TableStorage):
    """The rows are the layer's parameter, which torch's autograd, optimizers and state_dict handle.

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
        # The rows are in the module's state_dict, their optimizer state in the optimizer's.
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        assert not state


class RemoteTableStorage(TableStorage):
    """The rows are stored elsewhere. A subclass moves rows and gradients; this class connects them to autograd.

    Args:
        table: its description.
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
        """Add the gradients [Z, d] of rows that were fetched; ids may repeat, and calls accumulate."""

    @abstractmethod
    def multiply(self, rows: Csr) -> tuple[Tensor, Any]:
        """Return sparse rows times the table, [m, d], and an object to pass to :meth:`push_product`."""

    @abstractmethod
    def push_product(self, pending: Any, gradient: Tensor) -> None:
        """Compute and add the gradients of the table's rows.

        Args:
            pending: the object that :meth:`multiply` returned.
            gradient: of the product, [m, d].
        """

    @property
    def num_rows(self) -> int:
        return self.table.rows

    def lookup(self, ids: Tensor) -> Tensor:
        return _Lookup.apply(self.anchor, ids, self)

    def product(self, rows: Csr) -> Tensor:
        if rows.values is not None and rows.values.requires_grad:
            raise ConfigError(
                f"the values of sparse rows need a gradient, but table {self.table.name} is stored in another process.",
                hint="set strategy=single, or use values without a gradient.",
            )
        return _RemoteProduct.apply(self.anchor, rows, self)


class Table(nn.Module):
    """Base of the layers whose parameter is a table.

    Args:
        table: its description.
        sparse: whether the parameter's gradient is sparse (a ``torch.sparse_coo`` tensor of the rows that were read),
            for the optimizers of ``gtrain.nn``; else dense, for any optimizer.
        dtype: of the rows; None: torch's default.

    Attributes:
        table: its description.
        storage: where its rows are stored, see :class:`TableStorage`.
        weight: [n, d], its rows; [0, d] while they are stored elsewhere.
    """

    def __init__(self, table: TableSpec, *, sparse: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.table = table
        self.sparse = sparse
        rows = 0 if _deferred.get() else table.rows
        self.weight = nn.Parameter(_allocated(table, rows, dtype or torch.get_default_dtype()))
        self.storage: TableStorage = LocalTableStorage(self)
        self.reset_parameters()

    @property
    def home(self) -> TableStorage:
        """The former name of :attr:`storage`; works until the next release."""
        warnings.warn("Table.home is now Table.storage", FutureWarning, stacklevel=2)
        return self.storage

    def reset_parameters(self) -> None:
        """Fill the rows with their initial values."""
        with torch.no_grad():
            for begin in range(0, self.weight.size(0), INIT_ROWS):
                end = min(begin + INIT_ROWS, self.weight.size(0))
                self.weight[begin:end] = self.table.initial(begin, end)

    def move(self, storage: RemoteTableStorage) -> None:
        """Switch to another storage, which has the rows already; ``weight`` keeps none."""
        self.weight.data, self.weight.grad = self.weight.data.new_empty(0, self.table.dim), None
        self.weight.table_storage = storage  # type: ignore[attr-defined]
        storage.anchor, self.storage = self.weight, storage

    def move_back(self, rows: Tensor) -> None:
        """Store the rows in the layer's parameter again."""
        self.weight.data, self.weight.grad = rows.to(self.weight), None
        if hasattr(self.weight, "table_storage"):
            del self.weight.table_storage
        self.storage = LocalTableStorage(self)

    def clip(self, ids: Tensor, columns: int, most: float) -> None:
        """Scale the first columns of these rows to a norm of at most ``most``, in place.

        Raises:
            ConfigError: the rows are stored elsewhere.
        """
        if not isinstance(self.storage, LocalTableStorage):
            raise ConfigError(
                "model.max_norm is set, but the rows are stored in other processes.",
                hint="choose a strategy that keeps tables in the memory of its ranks, or set model.max_norm=null.",
            )
        with torch.no_grad():
            distinct = ids.unique()
            rows = self.weight[distinct, :columns]
            norms = rows.norm(dim=1)
            clipped = norms > most
            scale = (most / (norms[clipped] + 1e-7)).unsqueeze(1)
            columns_ids = torch.arange(columns, device=ids.device)
            self.weight[distinct[clipped].unsqueeze(1), columns_ids] = rows[clipped] * scale

    def extra_repr(self) -> str:
        return f"{self.table.rows}, {self.table.dim}, name={self.table.name!r}"


def _allocated(table: TableSpec, rows: int, dtype: torch.dtype) -> Tensor:
    """Allocate the rows.

    Raises:
        ConfigError: the process cannot allocate that much memory.
    """
    try:
        return torch.empty(rows, table.dim, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        size = rows * table.dim * dtype.itemsize
        raise ConfigError(
            f"the table {table.name!r} has {rows} rows of {table.dim} numbers: {rows} * {table.dim} * {dtype.itemsize} "
            f"bytes = {size / 2**30:,.0f} GiB, which this process cannot allocate.",
            hint="number the rows (data.num_features, or the ids in the data) without gaps, reduce their width "
            "(model.hidden_channels), or choose a strategy that spreads them over servers.",
        ) from error


def tables(module: nn.Module) -> Iterator[tuple[str, Table]]:
    """Yield the name and layer of every table in a module."""
    for name, layer in module.named_modules():
        if isinstance(layer, Table):
            yield name, layer


def storage_of(parameter: Tensor) -> TableStorage | None:
    """Return the storage of a parameter's rows, or None for an ordinary parameter."""
    return getattr(parameter, "table_storage", None)


@contextmanager
def deferred() -> Iterator[None]:
    """Create tables without rows inside this context: a strategy that stores them elsewhere initialises them there.

    A table may be larger than this process's memory. Its storage reads ``layer.table.initial(begin, end)``.
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, storage: RemoteTableStorage) -> Tensor:
        ctx.storage = storage
        ctx.save_for_backward(ids)
        rows = storage.fetch(ids.reshape(-1))
        # Not -1, which is ambiguous without ids.
        return rows.view(*ids.shape, rows.size(1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        ctx.storage.push(ids.reshape(-1), gradients[0].reshape(ids.numel(), gradients[0].size(-1)))
        return None, None, None


class _RemoteProduct(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Csr, storage: RemoteTableStorage) -> Tensor:
        ctx.storage = storage
        result, ctx.pending = storage.multiply(rows)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.storage.push_product(ctx.pending, gradients[0].contiguous())
        return None, None, None


class Embedding(Table):
    """A learned row for each node of a type.

    Args:
        num_embeddings: rows, n.
        embedding_dim: columns, d.
        node_type: the node type of the rows; ``node`` in a graph with one type.
        init_std: standard deviation of the initial rows.
        sparse: whether the gradient is sparse; see :class:`~gtrain.nn.table.Table`.
        dtype: of the rows; None: torch's default.

    Shapes:
        ids int64 [...], ids of the source data (``batch.orig_id``); result [..., d].
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        node_type: str = "node",
        init_std: float = 1.0,
        sparse: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        table = TableSpec(node_type, num_embeddings, embedding_dim, scale=init_std)
        super().__init__(table, sparse=sparse, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids."""
        return self.storage.lookup(ids)


class EmbeddingBag(Table):
    """One row for each bag of ids: the sum or the mean of their learned rows, weighted if the bag has values.

    Args:
        num_embeddings: rows of the table, n.
        embedding_dim: columns, d.
        mode: ``sum``, or ``mean``: the sum divided by the sum of the values (by the count without values); the row of
            an empty bag is 0.
        node_type: the node type of the ids.
        init_std: standard deviation of the initial rows.
        sparse: whether the gradient is sparse; see :class:`~gtrain.nn.table.Table`.
        dtype: of the rows; None: torch's default.

    Shapes:
        bags: :class:`~gtrain.nn.csr.Csr`, (ids, values, offsets), or a ``torch.sparse_csr`` tensor, m rows;
        result [m, d].
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "sum",
        node_type: str = "node",
        init_std: float = 1.0,
        sparse: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(
                f"EmbeddingBag(mode={mode!r}) was called; the modes are {' and '.join(MODES)}.",
                hint=f"choose {' or '.join(MODES)}.",
            )
        table = TableSpec(node_type, num_embeddings, embedding_dim, scale=init_std)
        super().__init__(table, sparse=sparse, dtype=dtype)
        self.mode = mode

    def forward(self, bags: Tensor | Csr | tuple[Tensor, Tensor | None, Tensor]) -> Tensor:
        """Return one row per bag."""
        rows = as_csr(bags, self.table.rows)
        summed = self.storage.product(rows)
        return summed if self.mode == "sum" else summed / _weights(rows, summed)[:, None]


class SparseLinear(Table):
    """Y = X W + b for sparse rows X: a linear layer over very many features, of which a row has few.

    Args:
        in_features: features, n.
        out_features: columns of the result, d.
        bias: whether to add b, initially zero; it is an ordinary parameter, wherever W is stored.
        init_bound: initial weights are uniform in +-init_bound; None: 1 / sqrt(n), as ``torch.nn.Linear``.
        sparse: whether W's gradient is sparse; see :class:`~gtrain.nn.table.Table`.
        dtype: of the parameters; None: torch's default.

    Shapes:
        x: a ``torch.sparse_csr`` tensor or a dense matrix [m, n], or (ids, values, offsets) as in
        :class:`~gtrain.nn.csr.Csr`; result [m, d]; ``weight`` [n, d], a row for each feature.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init_bound: float | None = None,
        sparse: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        scale = 1 / math.sqrt(max(1, in_features)) if init_bound is None else init_bound
        table = TableSpec("features", in_features, out_features, "feature", "uniform", scale)
        super().__init__(table, sparse=sparse, dtype=dtype)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None

    def forward(self, x: Tensor | Csr | tuple[Tensor, Tensor | None, Tensor]) -> Tensor:
        """Return X W + b."""
        result = self.storage.product(as_csr(x, self.table.rows))
        return result if self.bias is None else result + self.bias


def _weights(rows: Csr, like: Tensor) -> Tensor:
    """Return the divisor of a mean, [m]: the sum of each row's values; 1 for a row without entries."""
    counts = rows.offsets.diff()
    if rows.values is None:
        return counts.clamp(min=1).to(like)
    rows, counts = rows.to(like.device), counts.to(like.device)  # the product may be on another device than its rows
    assert rows.values is not None
    total = like.new_zeros(rows.num_rows).index_add_(0, rows.row_of_entry(), rows.values.to(like))
    return torch.where(counts > 0, total, torch.ones_like(total))
