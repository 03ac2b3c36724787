"""How far an update of a block is, in memory that outlives the process: what a restarted server goes on from.

The kernels write it (:func:`start_row`, :func:`end_row`); :meth:`Progress.repair` reads it after a restart. A step's
rows are stacked in the order of workers and calls, so the next process groups them in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numba.extending import overload
from numpy.typing import NDArray

from gtrain.kernels.memory import fence
from gtrain.kernels.options import BARE, bare
from gtrain.nn.rules import RULES

Array = NDArray[Any]
STEP, DONE, ROW, INDEX = 0, 1, 2, 3
MARKS = 4
"""Entries of the marker, see :class:`Progress`."""
BACKUP_ROWS = 1 + max(len(rule.state) for rule in RULES.values())
"""Rows of the backup: the table's, and one for each tensor of optimizer state."""


class Progress(NamedTuple):
    """The marker and backup of one block.

    Attributes:
        safe: whether the process may be killed at any moment and the next one goes on with the step; if not, nothing
            is written.
        marker: int64 ``[MARKS]``: the step under way; how many of its distinct rows are done, in the order of their
            grouping; the row being changed, or -1; and that row's index in the order, which is below the number of
            rows done as soon as the change is complete.
        backup: ``[BACKUP_ROWS, d]``, of the block's dtype: the row being changed before its change, then its optimizer
            state in the order of the rule's tensors; a tensor with one number per row is in column 0.
    """

    safe: bool
    marker: Array
    backup: Array

    def start_step(self, step: int) -> None:
        """Mark a step as started; in this order, so that a process that is killed in between has started none."""
        self.marker[ROW:] = -1
        self.marker[DONE] = 0
        self.marker[STEP] = step

    def repair(self, step: int, table: Array, state: Sequence[Array]) -> None:
        """Undo the change of the row at which ``step`` was cut off, if one was under way.

        Args:
            step: the step that the process before this one may have started.
            table: ``[n, d]``.
            state: the optimizer's tensors ``[n, d]`` or ``[n]``, in the order of the rule.
        """
        started, done, row, index = self.marker.tolist()
        if started != step or row < 0 or index < done:
            return
        table[row] = self.backup[0]
        for tensor, before in zip(state, self.backup[1:], strict=False):
            tensor[row] = before if tensor.ndim == 2 else before[0]
        self.marker[ROW] = -1


def back_up_state(width: int, row: int, state: Any, backup: Any) -> None:
    """Copy a row of each of the state's tensors to the lines of ``backup``."""
    raise NotImplementedError("compiled only")


def _nothing(width: int, row: int, state: Any, backup: Any) -> None:
    pass


def _number(width: int, row: int, state: Any, backup: Any) -> None:
    backup[0, 0] = state[0][row]
    back_up_state(width, row, state[1:], backup[1:])


def _columns(width: int, row: int, state: Any, backup: Any) -> None:
    for column in range(width):
        backup[0, column] = state[0][row, column]
    back_up_state(width, row, state[1:], backup[1:])


@overload(back_up_state, jit_options=BARE)
def _typed_back_up(width: int, row: int, state: Any, backup: Any) -> Any:
    if not len(state):
        return _nothing
    return _number if state[0].ndim == 1 else _columns


@bare
def start_row(width: int, index: int, row: int, table: Any, state: Any, progress: Any) -> None:
    """Back up a row and its state, and then mark the row as being changed."""
    back_up_state(width, row, state, progress.backup[1:])
    for column in range(width):
        progress.backup[0, column] = table[row, column]
    fence()
    progress.marker[ROW] = row
    fence()
    progress.marker[INDEX] = index
    fence()


@bare
def end_row(index: int, progress: Any) -> None:
    """Mark a row as done."""
    fence()
    progress.marker[DONE] = index + 1
