"""Layers whose parameter is a table that a strategy may store elsewhere, and the optimizers of such tables.

:mod:`gtrain.nn.table` is the interface by which a strategy stores their rows; :mod:`gtrain.nn.rules` is the reference
for the optimizers of every backend.
"""

from gtrain.moved import renamed
from gtrain.nn.csr import Csr, as_csr, mean_rows, select_rows
from gtrain.nn.dgl_graph import DglGraph
from gtrain.nn.optim import SGD, Adagrad, JointOptimizer, LazyAdam, RowOptimizer, RowwiseAdagrad
from gtrain.nn.table import (
    RENAMED,
    Embedding,
    EmbeddingBag,
    LocalTableStorage,
    RemoteTableStorage,
    SparseLinear,
    Table,
    TableSpec,
    TableStorage,
    deferred,
    tables,
)

__getattr__ = renamed(__name__, RENAMED)

__all__ = [
    "SGD",
    "Adagrad",
    "Csr",
    "DglGraph",
    "Embedding",
    "EmbeddingBag",
    "JointOptimizer",
    "LazyAdam",
    "LocalTableStorage",
    "RemoteTableStorage",
    "RowOptimizer",
    "RowwiseAdagrad",
    "SparseLinear",
    "Table",
    "TableStorage",
    "TableSpec",
    "as_csr",
    "deferred",
    "mean_rows",
    "select_rows",
    "tables",
]
