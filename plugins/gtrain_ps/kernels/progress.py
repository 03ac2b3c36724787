"""Progress of an update of a block, in memory that survives the process: a restarted server resumes the update.

The kernels write it (:func:`start_row`, :func:`end_row`); :meth:`UpdateProgress.repair` reads it after a restart. A
step's rows are stacked in the order of workers and calls, so the next process groups them in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from gtrain.kernels.memory import fence
from gtrain.kernels.options import BARE, bare, by_type
from gtrain.nn.rules import RULES

Array = NDArray[Any]
STEP, DONE, ROW, INDEX = 0, 1, 2, 3
MARKS = 4
"""Entries of the marker, see :class:`UpdateProgress`."""
BACKUP_ROWS = 1 + max(len(rule.state) for rule in RULES.values())
"""Rows of the backup: the table's, and one for each tensor of optimizer state."""


class UpdateProgress(NamedTuple):
    """The marker and backup of one block.

    Attributes:
        safe: whether the memory survives the process; if not, nothing is written.
        marker: int64 ``[MARKS]``: the current step; how many of its distinct rows are done, in the order of their
            grouping; the row being changed, or -1; and that row's index in the order. The change is complete once the
            number of rows done exceeds the index.
        backup: ``[BACKUP_ROWS, d]``, of the block's dtype: the row before its change, then its optimizer state in the
            order of the rule's tensors; a tensor with one number per row is in column 0.
    """

    safe: bool
    marker: Array
    backup: Array

    def start_step(self, step: int) -> None:
        """Mark a step as started. The step is written last: a process that is killed in between has started none."""
        self.marker[ROW:] = -1
        self.marker[DONE] = 0
        self.marker[STEP] = step

    def repair(self, step: int, table: Array, state: Sequence[Array]) -> None:
        """Undo the incomplete change of the row at which ``step`` was interrupted, if any.

        Args:
            step: the step that the previous process may have started.
            table: ``[n, d]``.
            state: the optimizer's tensors ``[n, d]`` or ``[n]``, in the order of the rule.
        """
        started, done, row, index = self.marker.tolist()
        # The change is complete once DONE exceeds the row's index; ROW alone may be left over from the row before.
        if started != step or row < 0 or index < done:
            return
        table[row] = self.backup[0]
        # backup[0] is the row itself, the state follows in the order of the rule.
        for tensor, before in zip(state, self.backup[1:], strict=False):
            tensor[row] = before if tensor.ndim == 2 else before[0]
        self.marker[ROW] = -1


@by_type(
    lambda width, row, state, backup: (
        _copy_nothing if not len(state) else _copy_number if state[0].ndim == 1 else _copy_columns
    ),
    jit_options=BARE,
)
def back_up_state(width: int, row: int, state: Any, backup: Any) -> None:
    """Copy a row of each state tensor to the rows of ``backup``; a recursion that the compiler unrolls."""


def _copy_nothing(width: int, row: int, state: Any, backup: Any) -> None:
    pass


def _copy_number(width: int, row: int, state: Any, backup: Any) -> None:
    backup[0, 0] = state[0][row]
    back_up_state(width, row, state[1:], backup[1:])


def _copy_columns(width: int, row: int, state: Any, backup: Any) -> None:
    for column in range(width):
        backup[0, column] = state[0][row, column]
    back_up_state(width, row, state[1:], backup[1:])


@bare
def start_row(width: int, index: int, row: int, table: Any, state: Any, progress: Any) -> None:
    """Back up a row and its state, and then mark the row as being changed.

    The fences keep the stores in this order: the mark must not be visible before the backup is complete.
    """
    back_up_state(width, row, state, progress.backup[1:])
    for column in range(width):
        progress.backup[0, column] = table[row, column]
    fence()
    # INDEX is written after ROW: a process killed between the two leaves the old index, which is below DONE, so that
    # nothing is undone. Nothing was changed yet either.
    progress.marker[ROW] = row
    fence()
    progress.marker[INDEX] = index
    fence()


@bare
def end_row(index: int, progress: Any) -> None:
    """Mark a row as done."""
    fence()
    progress.marker[DONE] = index + 1
