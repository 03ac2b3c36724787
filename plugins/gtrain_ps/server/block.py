"""A server's block of a table: its rows and optimizer state, products with it and updates of it."""

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
from gtrain_ps.kernels.products import product_kernel
from gtrain_ps.kernels.progress import BACKUP_ROWS, DONE, MARKS, STEP, UpdateProgress
from gtrain_ps.kernels.rows import GroupedEntries
from gtrain_ps.kernels.rules import rule_of
from gtrain_ps.kernels.updates import update_kernel
from gtrain_ps.server.memory import ServerMemory

Array = NDArray[Any]
_SAME_VERSION = "run the same version of gtrain in all processes."


@dataclass(frozen=True)
class SparseRows:
    """Sparse rows over the rows of a block.

    Attributes:
        ids: int32 ``[Z]``.
        offsets: int64 ``[m + 1]``.
        values: ``[Z]``, of the block's dtype; None: all 1.
    """

    ids: Array
    offsets: Array
    values: Array | None

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Block:
    """Rows ``[n, d]`` of a table, and their optimizer state.

    Args:
        name: the table's name.
        height: n.
        width: d.
        dtype: float32 or float64.
        memory: holds the rows and the optimizer state; persistent memory has those of the process before a restart.

    Attributes:
        changed: rows that differ from the initial ones, or may, uint8 ``[n]``.
    """

    def __init__(self, name: str, height: int, width: int, dtype: torch.dtype, memory: ServerMemory) -> None:
        self.name, self.height, self.width = name, height, width
        self._memory = memory
        self.table = memory.tensor(f"{name}/rows", (height, width), dtype)
        self.changed = memory.tensor(f"{name}/changed", (height,), torch.uint8)
        self._rows = self.table.numpy()
        self._multiply, self._update = product_kernel(self._rows), update_kernel(self._rows)
        self.rule: Rule | None = None
        self.state: dict[str, Tensor] = {}
        self._state: tuple[Array, ...] = ()
        marker = memory.tensor(f"{name}/marker", (MARKS,), torch.int64)
        backup = memory.tensor(f"{name}/backup", (BACKUP_ROWS, max(1, width)), dtype)
        self.progress = UpdateProgress(memory.survives, marker.numpy(), backup.numpy())
        # An empty array of the right dtype: the kernels are compiled for one type of ``values``.
        self._no_values = self.progress.backup[0, :0]
        self._latest = np.zeros(height, np.int32)
        self._scratch: list[Array] = []
        if f"{name}/rule" in memory.notes:
            self.set_rule(memory.notes[f"{name}/rule"], {})
            self.progress.repair(memory.version + 1, self._rows, self._state)

    # ------------------------------------------------------------------------------------------------- products

    def rows(self, ids: Tensor, lengths: Tensor | None, values: Tensor | None) -> SparseRows:
        """Return received rows, checked.

        Args:
            ids: int32 ``[Z]``.
            lengths: entries of each row, ``[m]``; None: one each.
            values: ``[Z]``, or None.

        Raises:
            DataError: an id is out of range, or the lengths do not match the ids.
        """
        numbers = ids.numpy()
        outside = row_kernels.first_outside(numbers, self.height)
        if outside >= 0:
            raise DataError(
                f"a request names row {numbers[outside]} of a block of {self.height} rows of the table {self.name}.",
                hint=_SAME_VERSION,
            )
        if lengths is None:
            offsets = np.arange(len(numbers) + 1)
        else:
            offsets = np.zeros(lengths.numel() + 1, np.int64)
            np.cumsum(lengths.numpy(), out=offsets[1:])
        if offsets[-1] != len(numbers) or (values is not None and values.numel() != len(numbers)):
            raise DataError(f"rows with {offsets[-1]} entries came with {len(numbers)} ids.", hint=_SAME_VERSION)
        return SparseRows(numbers, offsets, None if values is None else values.to(self.table.dtype).numpy())

    def multiply(self, rows: SparseRows) -> Tensor:
        """Return rows times the block, ``[m, d]``."""
        out = torch.empty(len(rows), self.width, dtype=self.table.dtype)
        values = self._no_values if rows.values is None else rows.values
        self._multiply(rows.ids, rows.offsets, values, rows.values is not None, self._rows, out.numpy())
        return out

    # -------------------------------------------------------------------------------------------------- updates

    def group(self, stack: Sequence[SparseRows]) -> GroupedEntries:
        """Stack rows and group their entries by id. The result is valid until the next call."""
        ids, offsets = _concatenate([rows.ids for rows in stack]), stack[0].offsets
        if len(stack) > 1:
            starts = np.cumsum([0, *(len(rows.ids) for rows in stack)])
            pieces = [rows.offsets[1:] + start for rows, start in zip(stack, starts, strict=False)]
            offsets = np.concatenate([stack[0].offsets[:1], *pieces])
        weighted = any(rows.values is not None for rows in stack)
        values = self._no_values
        if weighted:
            values = _concatenate(
                [np.ones(len(rows.ids), values.dtype) if rows.values is None else rows.values for rows in stack]
            )
        if not self._scratch or len(self._scratch[0]) < len(ids) + 1:  # reused from step to step
            self._scratch = [np.empty(len(ids) + len(ids) // 4 + 1, np.int32) for _ in range(4)]
        unique, first, following, row_of = self._scratch
        count = row_kernels.group(ids, offsets, self._latest, unique, first, following, row_of)
        return GroupedEntries(count, unique, first, following, row_of, values, weighted)

    def set_rule(self, rule: str, settings: Mapping[str, Any]) -> None:
        """Create the optimizer state of a rule, unless the block has it.

        Raises:
            ConfigError: the block has the state of another rule.
        """
        if self.rule is not None and self.rule.name == rule:
            return
        if self.rule is not None:
            raise ConfigError(
                f"the table {self.name} was trained with {self.rule.name}; model.sparse_optimizer is now {rule}.",
                hint=f"set the same model.sparse_optimizer as before, {self.rule.name}.",
            )
        self.rule = RULES[rule]
        note = f"{self.name}/rule"
        is_new = note not in self._memory.notes
        for name, wide in self.rule.state.items():
            shape = (self.height, self.width) if wide else (self.height,)
            self.state[name] = self._memory.tensor(f"{self.name}/{name}", shape, self.table.dtype)
        self._state = tuple(tensor.numpy() for tensor in self.state.values())
        if is_new:
            self._fill_state(float(settings.get("initial_accumulator", 0.0)))
            self._memory.set_note(note, rule)

    def reset(self, rule: str | None, accumulator: float) -> None:
        """Note that the rows are initial ones, and set the optimizer state of a rule to its initial value.

        Args:
            rule: the rule; None: the state is not changed.
            accumulator: initial value of the state called ``sum``.

        Raises:
            ConfigError: the block has the state of another rule.
        """
        if rule is not None:
            self.set_rule(rule, {})
            for tensor in self.state.values():
                tensor.zero_()
            self._fill_state(accumulator)
        self.changed.zero_()

    @property
    def accumulator(self) -> float:
        """Initial value of the optimizer state called ``sum``."""
        return float(self._memory.notes.get(f"{self.name}/accumulator", 0.0))

    def _fill_state(self, accumulator: float) -> None:
        if "sum" in self.state and accumulator:
            self.state["sum"].fill_(accumulator)
        self._memory.set_note(f"{self.name}/accumulator", accumulator)

    def update(self, grouped: GroupedEntries, gradient: Tensor, settings: Mapping[str, Any], step: int) -> None:
        """Apply one step, or the rest of a step that was interrupted.

        Args:
            grouped: the rows that were multiplied.
            gradient: of their products, stacked alike, ``[m, d]``, of the block's dtype.
            settings: the rule's numbers.
            step: the step's number, from 1.
        """
        assert self.rule is not None
        # Otherwise a restarted server continues the step where the process before it was killed.
        if self.progress.marker[STEP] != step:
            self.progress.start_step(step)
        rule = rule_of(self.rule.name, settings)
        self.changed.numpy()[grouped.unique[: grouped.num_ids]] = 1
        self._update(rule, grouped, gradient.numpy(), self._rows, self._state, self.progress)
        if self.progress.safe:
            # Trailing rows without a gradient have not advanced the marker.
            self.progress.marker[DONE] = grouped.num_ids


def _concatenate(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
