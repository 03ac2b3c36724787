"""A server's block of a table: its rows, their optimizer state, products with them and updates of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import ConfigError, DataError
from gtrain.nn.rules import RULES, Rule
from gtrain_ps.kernels import rows as row_kernels
from gtrain_ps.kernels.products import product_of
from gtrain_ps.kernels.progress import BACKUP_ROWS, DONE, MARKS, STEP, Progress
from gtrain_ps.kernels.rows import Grouped
from gtrain_ps.kernels.rules import rule_of
from gtrain_ps.kernels.updates import update_of
from gtrain_ps.server.memory import Region

Array = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """Sparse rows over the rows of a block.

    Attributes:
        ids: int32 ``[Z]``.
        offsets: int64 ``[m + 1]``.
        values: of the block's dtype ``[Z]``; None: all 1.
    """

    ids: Array
    offsets: Array
    values: Array | None

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Block:
    """Rows ``[n, d]`` of a table, and their optimizer state.

    Args:
        name: of the table.
        height: n.
        width: d.
        dtype: float32 or float64.
        region: where rows and state are kept.
    """

    def __init__(self, name: str, height: int, width: int, dtype: torch.dtype, region: Region) -> None:
        self.name, self.height, self.width = name, height, width
        self._region = region
        self.table = region.tensor(f"{name}/rows", (height, width), dtype)
        self._rows = self.table.numpy()
        self._multiply, self._update = product_of(self._rows), update_of(self._rows)
        self.rule: Rule | None = None
        self.state: dict[str, Tensor] = {}
        self._state: tuple[Array, ...] = ()
        marker = region.tensor(f"{name}/marker", (MARKS,), torch.int64)
        backup = region.tensor(f"{name}/backup", (BACKUP_ROWS, max(1, width)), dtype)
        self.progress = Progress(region.survives, marker.numpy(), backup.numpy())
        self._latest = np.zeros(height, np.int32)
        self._scratch: list[Array] = []
        if f"{name}/rule" in region.notes:
            self.use(region.notes[f"{name}/rule"], {})
            self.progress.repair(region.version + 1, self._rows, self._state)

    @property
    def nbytes(self) -> int:
        """Bytes of rows and state."""
        return self.table.nbytes + sum(tensor.nbytes for tensor in self.state.values())

    # ------------------------------------------------------------------------------------------------- products

    def rows(self, ids: Tensor, lengths: Tensor | None, values: Tensor | None) -> Rows:
        """Check and take in rows as they came.

        Args:
            ids: int32 ``[Z]``.
            lengths: entries of each row, ``[m]``; None: one each.
            values: ``[Z]``, or None.

        Raises:
            DataError: an id is out of range, or the lengths are not those of the ids.
        """
        found = ids.numpy()
        outside = row_kernels.first_outside(found, self.height)
        if outside >= 0:
            raise DataError(
                f"row {found[outside]} of a block of {self.height} rows of the table {self.name} was asked for.",
                hint="all processes have to run the same version of gtrain.",
            )
        if lengths is None:
            offsets = np.arange(len(found) + 1)
        else:
            offsets = np.zeros(lengths.numel() + 1, np.int64)
            np.cumsum(lengths.numpy(), out=offsets[1:])
        if offsets[-1] != len(found) or (values is not None and values.numel() != len(found)):
            raise DataError(
                f"rows with {offsets[-1]} entries came with {len(found)} ids.",
                hint="all processes have to run the same version of gtrain.",
            )
        return Rows(found, offsets, None if values is None else values.to(self.table.dtype).numpy())

    def multiply(self, rows: Rows) -> Tensor:
        """Rows times the block, ``[m, d]``."""
        out = torch.empty(len(rows), self.width, dtype=self.table.dtype)
        values = self.progress.backup[0, :0] if rows.values is None else rows.values
        self._multiply(rows.ids, rows.offsets, values, rows.values is not None, self._rows, out.numpy())
        return out

    # -------------------------------------------------------------------------------------------------- updates

    def group(self, stack: Sequence[Rows]) -> Grouped:
        """Stack rows and group their entries by id. The result is good until the next call."""
        ids, offsets = _joined([rows.ids for rows in stack]), stack[0].offsets
        if len(stack) > 1:
            begins = np.cumsum([0, *(len(rows.ids) for rows in stack)])
            pieces = [rows.offsets[1:] + begin for rows, begin in zip(stack, begins, strict=False)]
            offsets = np.concatenate([stack[0].offsets[:1], *pieces])
        weighted = any(rows.values is not None for rows in stack)
        values = self.progress.backup[0, :0]
        if weighted:
            kind = values.dtype
            values = _joined([np.ones(len(r.ids), kind) if r.values is None else r.values for r in stack])
        unique, first, following, row_of = self._room(len(ids))
        found = row_kernels.group(ids, offsets, self._latest, unique, first, following, row_of)
        return Grouped(found, unique, first, following, row_of, values, weighted)

    def use(self, rule: str, settings: Mapping[str, Any]) -> None:
        """Make the optimizer state, unless it is there.

        Raises:
            ConfigError: the table has another rule's state.
        """
        if self.rule is not None and self.rule.name == rule:
            return
        if self.rule is not None:
            raise ConfigError(
                f"the table {self.name} was trained with {self.rule.name}, and now {rule} is asked for.",
                hint="go on with the same model.sparse_optimizer.",
            )
        self.rule = RULES[rule]
        start, noted = float(settings.get("initial_accumulator", 0.0)), f"{self.name}/rule"
        for name, wide in self.rule.state.items():
            shape = (self.height, self.width) if wide else (self.height,)
            self.state[name] = self._region.tensor(f"{self.name}/{name}", shape, self.table.dtype)
            if noted not in self._region.notes and name == "sum" and start:
                self.state[name].fill_(start)
        self._state = tuple(tensor.numpy() for tensor in self.state.values())
        if noted not in self._region.notes:
            self._region.note(noted, rule)

    def update(self, grouped: Grouped, gradient: Tensor, settings: Mapping[str, Any], step: int) -> None:
        """Apply one step, or what is left of it.

        Args:
            grouped: the rows that were multiplied.
            gradient: of their products, stacked alike, ``[m, d]``, of the block's dtype.
            settings: the rule's numbers.
            step: its number, above 0.
        """
        assert self.rule is not None
        if self.progress.marker[STEP] != step:
            self.progress.start_step(step)
        rule = rule_of(self.rule.name, settings)
        self._update(rule, grouped, gradient.numpy(), self._rows, self._state, self.progress)
        if self.progress.safe:
            self.progress.marker[DONE] = grouped.found

    def _room(self, entries: int) -> list[Array]:
        """Arrays for grouping so many entries; they are kept from step to step."""
        if not self._scratch or len(self._scratch[0]) < entries + 1:
            self._scratch = [np.empty(entries + entries // 4 + 1, np.int32) for _ in range(4)]
        return self._scratch


def _joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
