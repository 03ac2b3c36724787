"""Gradients by the rows of a batch, brought to the tables: a row changes once, however often it occurs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gtrain.nn import Csr
from gtrain_pbg.kernels import bags, updates
from gtrain_pbg.step.batch import Rows
from gtrain_pbg.step.layout import Layout, Workspace, bits
from gtrain_pbg.step.relations import UpdateRule


class TableUpdate:
    """Changes rows of tables.

    Args:
        bias: whether rows have a bias.
        nothing: ``[0, D]``, stands for gradients that there are none of.
        work: buffers.
    """

    def __init__(self, bias: bool, nothing: Tensor, work: Workspace) -> None:
        self._bias, self._nothing, self._work = bias, nothing, work

    def __call__(
        self,
        tables: tuple[Rows, Rows],
        ids: list[Tensor],
        layouts: tuple[Layout, Layout],
        by_row: list[Tensor | None],
        by_edge: list[Tensor | None],
        by_bias: tuple[Tensor, Tensor],
        rule: UpdateRule,
    ) -> None:
        """Both sides at once where they are of the same partition."""
        if tables[0].value.data_ptr() == tables[1].value.data_ptr():
            self._scatter(tables[0], ids, layouts, by_row, by_edge, by_bias, rule)
            return
        for end in (0, 1):
            self._scatter(
                tables[end], ids[end : end + 1], layouts[end:], by_row[end:], by_edge[end:], by_bias[end:], rule
            )

    def _scatter(
        self,
        table: Rows,
        ids: list[Tensor],
        layouts: tuple[Layout, ...],
        by_row: list[Tensor | None],
        by_edge: list[Tensor | None],
        by_bias: tuple[Tensor, ...],
        rule: UpdateRule,
    ) -> None:
        if table.bags is not None:
            self._scatter_bags(table, table.bags, ids, layouts, by_row, by_edge, by_bias, rule)
            return
        total = sum(some.numel() for some in ids)
        after = self._work.take("after", total, dtype=torch.int32).numpy()
        touched = self._work.take("touched", min(total, len(table.value)), dtype=torch.int64).numpy()
        head, count, first = table.head.numpy(), 0, 0
        for some in ids:
            count = updates.chain(some.numpy(), first, head, after, touched, count)
            first += some.numel()
        sides: list[Any] = []
        for end in range(len(ids)):
            sides += [bits(self._or_nothing(by_row[end])), bits(self._or_nothing(by_edge[end])), by_bias[end].numpy()]
        if len(ids) == 1:
            sides += sides
        layout = layouts[0]
        rest = (layout.places, layout.uniform, layout.edges, table.value.numpy(), table.state.numpy(), *rule.numbers)
        work = self._work.take("row", table.value.size(1)).numpy()
        arguments: list[Any] = [touched, count, head, after, ids[0].numel(), *sides, *rest, self._bias, work]
        updates.scatter(*arguments)

    def _scatter_bags(
        self,
        table: Rows,
        entities: Csr,
        ids: list[Tensor],
        layouts: tuple[Layout, ...],
        by_row: list[Tensor | None],
        by_edge: list[Tensor | None],
        by_bias: tuple[Tensor, ...],
        rule: UpdateRule,
    ) -> None:
        """The same where an entity's row is the mean of a bag's."""
        offsets, features = entities.offsets, entities.ids
        total = min(len(table.value), sum(int((offsets[some + 1] - offsets[some]).sum()) for some in ids))
        sums = self._work.take("bag sums", total, table.value.size(1)).numpy()
        touched, head, count = self._work.take("touched", total, dtype=torch.int64).numpy(), table.head.numpy(), 0
        for end, some in enumerate(ids):
            gradients = [bits(self._or_nothing(given[end])) for given in (by_row, by_edge)]
            place = (layouts[end].places, layouts[end].uniform, layouts[end].edges)
            arguments: list[Any] = [some.numpy(), offsets.numpy(), features.numpy(), *gradients, by_bias[end].numpy()]
            arguments += [*place, head, touched, count, sums, self._bias]
            count = bags.add_bags(*arguments)
        bags.apply_bags(touched, count, head, sums, table.value.numpy(), table.state.numpy(), *rule.numbers)

    def _or_nothing(self, tensor: Tensor | None) -> Tensor:
        return self._nothing if tensor is None else tensor
