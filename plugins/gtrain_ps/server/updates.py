"""The update of a server's blocks from what all workers said of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gtrain_ps.server.block import Block, Grouped
from gtrain_ps.server.requests import Commit, Product, factor_of

Rows = Mapping[tuple[int, int], Product]
"""What was multiplied for a step, by worker and call."""


@dataclass(frozen=True)
class _Stacked:
    """Rows of one table that were multiplied in one step, over all workers."""

    calls: list[tuple[int, int]]
    grouped: Grouped


class Updates:
    """One update of each block from the workers' stacked batches.

    Rows can be stacked, and grouped by id, before their gradients are there.

    Args:
        blocks: by name; more may come.
    """

    def __init__(self, blocks: Mapping[str, Block]) -> None:
        self._blocks = blocks
        self._stacked: dict[str, _Stacked] = {}

    def ahead(self, rows: Rows, workers: int) -> str | None:
        """A table whose rows of the next step seem to be all there, and are not grouped yet."""
        if len({worker for worker, _ in rows}) < workers:
            return None
        for product in rows.values():
            name = product.block.name
            stacked = self._stacked.get(name)
            if stacked is None or stacked.calls != _calls_of(rows, name):
                return name
        return None

    def stack(self, rows: Rows, name: str) -> None:
        """Stack and group a table's rows ahead of the update."""
        kept = dict(rows)
        calls = _calls_of(kept, name)
        self._stacked[name] = _Stacked(calls, self._blocks[name].group([kept[call].rows for call in calls]))

    def apply(self, rows: Rows, commits: Sequence[Commit], step: int) -> None:
        """Apply a step to all blocks that have a gradient.

        Args:
            rows: what was multiplied.
            commits: of all workers, in the order of their ranks.
            step: its number, above 0.
        """
        factor = factor_of(commits)
        given = {
            (commit.worker, call): gradient
            for commit in commits
            for call, gradient in zip(commit.calls, commit.gradients, strict=True)
        }
        for name in sorted({rows[call].block.name for call in given}):
            block, (rule, settings) = self._blocks[name], commits[0].rules[name]
            block.use(rule, settings)
            calls = [call for call in _calls_of(rows, name) if call in given]
            stacked = self._stacked.get(name)
            if stacked is None or stacked.calls != calls:
                stacked = _Stacked(calls, block.group([rows[call].rows for call in calls]))
            gradients = [given[call].to(block.table.dtype) for call in calls]
            gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
            if factor != 1.0:
                gradient = gradient * factor
            block.update(stacked.grouped, gradient.contiguous(), settings, step)
        self._stacked.clear()


def _calls_of(rows: Rows, name: str) -> list[tuple[int, int]]:
    """The products of one table, by worker and call."""
    return sorted(call for call, product in rows.items() if product.block.name == name)
