"""Tables of a checkpoint, in memory or read in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.memory.limits import meminfo
from gtrain.nn import Csr, TableSpec, tables
from gtrain.nn.rules import Rule, Settings
from gtrain.nn.table import RemoteTableStorage
from gtrain.strategy.checkpoint import SavedRows


def load_rows(module: torch.nn.Module, rows: Mapping[str, SavedRows], limit: int | None = None) -> None:
    """Give the tables of a module, which has been built without rows, those of a checkpoint.

    Args:
        module: the model.
        rows: by the layer's name.
        limit: bytes of tables that are read into memory; None: half of what is available. Larger tables are read from
            the checkpoint for each question.
    """
    layers = dict(tables(module))
    size = sum(layer.table.rows * layer.table.dim * layer.weight.element_size() for layer in layers.values())
    in_memory = size <= (meminfo("MemAvailable") // 2 if limit is None else limit)
    for name, layer in layers.items():
        if not in_memory:
            layer.move(SavedTableStorage(layer.table, rows[name], layer.weight.dtype))
            continue
        weight = torch.empty(layer.table.rows, layer.table.dim, dtype=layer.weight.dtype)
        for ids, piece in rows[name].pieces():
            weight[ids] = piece.to(weight)
        layer.move_back(weight)


class SavedTableStorage(RemoteTableStorage):
    """Rows that stay in the files of a checkpoint, for reading alone.

    Args:
        table: its description.
        saved: its rows.
        dtype: of the rows that are returned.
    """

    def __init__(self, table: TableSpec, saved: SavedRows, dtype: torch.dtype) -> None:
        super().__init__(table)
        self._saved, self._dtype = saved, dtype

    def fetch(self, ids: Tensor) -> Tensor:
        """Return rows; one pass over the ids of the file finds them."""
        wanted, inverse = ids.unique(return_inverse=True)
        rows = torch.empty(len(wanted), self.table.dim, dtype=self._dtype)
        for piece_ids, piece in self._saved.pieces():
            positions = torch.searchsorted(wanted, piece_ids).clamp(max=len(wanted) - 1)
            present = (wanted[positions] == piece_ids).nonzero().flatten() if len(wanted) else positions[:0]
            rows[positions[present]] = piece[present].to(rows)
        return rows[inverse]

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((ids, piece.to(self._dtype)) for ids, piece in self._saved.pieces())

    def read(self, begin: int, end: int) -> Tensor:
        return self.fetch(torch.arange(begin, end))

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        raise _read_only()

    def multiply(self, rows: Csr) -> tuple[Tensor, Any]:
        raise _read_only()

    def push_product(self, pending: Any, gradient: Tensor) -> None:
        raise _read_only()

    def update(self, rule: Rule, settings: Settings) -> None:
        raise _read_only()

    def zero_grad(self) -> None:
        """Nothing: gradients are not stored."""

    def state(self) -> dict[str, Any]:
        raise _read_only()

    def load_state(self, state: dict[str, Any]) -> None:
        raise _read_only()


def _read_only() -> ConfigError:
    return ConfigError(
        "the rows are those of a checkpoint, which is read and never changed.", hint="train with gtrain."
    )
