"""Layers whose parameter is a table: embeddings, bags of embeddings, and a linear layer over sparse rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gtrain.errors import ConfigError
from gtrain.nn.csr import Csr, as_csr
from gtrain.nn.table import Table, TableSpec

MODES = ("sum", "mean")


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
    total = like.new_zeros(rows.num_rows).index_add_(0, rows.row_of_entry(), rows.values.to(like))
    return torch.where(counts > 0, total, torch.ones_like(total))
