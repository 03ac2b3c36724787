"""The rows of a batch's two sides: fetched, transformed, made comparable; and the way back from gradients by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gtrain.nn import select_rows
from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.kernels import bags
from gtrain_pbg.kernels import rows as kernels
from gtrain_pbg.step.batch import PartitionRows
from gtrain_pbg.step.layout import BatchLayout, Operand, Workspace, bits
from gtrain_pbg.step.relations import RelationOperator, RelationWeights
from gtrain_pbg.step.scores import compact


class SideOperands:
    """Makes the operands of comparisons, in buffers that have names.

    Args:
        recipe: the model.
        work: buffers.
    """

    def __init__(self, recipe: EdgeRecipe, work: Workspace) -> None:
        self._recipe, self._work = recipe, work
        self._no_shift = torch.empty(0, dtype=work.dtype)
        self._no_bits = torch.empty(1, 1, dtype=torch.bfloat16)

    def ids(self, name: str, ends: Tensor, drawn: Tensor, layout: BatchLayout) -> Tensor:
        """The rows of the table that a side has: its edges' ends and what was drawn, chunk by chunk."""
        ids = self._work.take(f"{name} ids", layout.rows, dtype=torch.int64)
        if self._recipe.all_negs:
            ids[: layout.edges] = ends
            torch.arange(layout.uniform, out=ids[layout.edges :])
        else:
            kernels.lay_out(ends.numpy(), drawn.numpy(), layout.places, layout.uniform, ids.numpy())
        return ids

    def fetch(
        self, name: str, table: PartitionRows, ids: Tensor, layout: BatchLayout, common: RelationWeights | None
    ) -> Operand:
        """The rows of a side, as they are; in bfloat16 too, if that is how they are compared."""
        recipe, n = self._recipe, layout.rows
        value = table.value.numpy()
        if recipe.max_norm is not None:
            read = ids if table.bags is None else select_rows(table.bags, ids).ids
            kernels.clip(value, read.numpy(), recipe.dimension, recipe.max_norm)
        bias, by_bias = self._work.take(f"{name} bias", n), self._work.take(f"{name} bias gradient", n)
        if recipe.bias:
            by_bias.zero_()
        side = self.operand(name, n, recipe.dimension, bias, by_bias)
        shift = self._no_shift if common is None else common.value.view(-1)
        low = bits(self._no_bits if side.low is None else side.low)
        rest: list[Any] = [ids.numpy(), shift.numpy(), side.rows.numpy(), bias.numpy(), low]
        rest += [recipe.bias, side.low is not None]
        if table.bags is None:
            kernels.fetch(value, *rest)
        else:
            bags.fetch_bags(value, table.bags.offsets.numpy(), table.bags.ids.numpy(), *rest)
        return side

    def operand(self, name: str, n: int, columns: int, bias: Tensor, by_bias: Tensor) -> Operand:
        """Room for ``[n, columns]`` rows of a side, in bfloat16 too where that is how they are compared."""
        work, none = self._work, self._work.take("none", 1)
        low = work.lowered(f"{name} low", n, columns) if self._recipe.comparator != "cos" else None
        return Operand(work.take(name, n, columns), low, True, none, bias, none, none, by_bias)

    def query(
        self, name: str, source: Operand, layout: BatchLayout, operator: RelationOperator | None, relation: Tensor
    ) -> Operand:
        """The ends that are given, transformed if need be, with room for gradients."""
        work, n, columns = self._work, layout.edges, self._recipe.dimension
        if operator is None:
            asked = replace(source)
            if self._recipe.all_negs:  # the ends come first, and the other side may have another number of rows
                asked.rows, asked.low = source.rows[:n], None if source.low is None else source.low[:n]
                asked.spread = False
        else:
            asked = self.operand(f"{name} moved", n, columns, source.bias, source.by_bias)
            asked.spread = False
            operator.forward(source.rows, layout, relation, asked.rows, asked.low)
        asked = self.compared(name, asked, edges=n)
        if asked.spread and self._recipe.comparator in ("l2", "squared_l2"):
            asked.norm = torch.index_select(asked.norm, 0, layout.spots, out=work.take(f"{name} norm", n))
        if self._recipe.bias:
            asked.bias = torch.index_select(source.bias, 0, layout.spots, out=work.take(f"{name} bias", n))
            asked.by_bias = work.take(f"{name} bias gradient", n)
        return asked

    def compared(self, name: str, side: Operand, edges: int | None = None) -> Operand:
        """A side in the form in which it is compared, with room for the gradient by it.

        Args:
            name: of its buffers.
            side: the rows.
            edges: number of queries; None: these are candidates.
        """
        work, (n, columns) = self._work, side.rows.shape
        rows, low, norm, sums = side.rows, side.low, side.norm, side.sums
        gradient = work.product(f"{name} product", edges or n, columns)
        if self._recipe.comparator == "cos":
            rows, norm, low = work.take(f"{name} unit", n, columns), work.take(f"{name} inverse", n), None
            kernels.normalize(side.rows.numpy(), norm.numpy(), rows.numpy())
            if work.low:
                low = work.take(f"{name} low", n, columns, dtype=torch.bfloat16)
                kernels.lower(rows.numpy(), bits(low))
        elif self._recipe.comparator != "dot":
            norm, sums = work.take(f"{name} squares", n), work.take(f"{name} sums", edges or n).zero_()
            kernels.squared_norms(rows.numpy(), norm.numpy())
        return Operand(rows, low, side.spread, norm, side.bias, gradient, sums, side.by_bias)

    def take_bias(self, side: Operand, query: Operand, layout: BatchLayout) -> None:
        """Give the end of an edge the gradient by its bias as a query."""
        if self._recipe.bias:
            side.by_bias.index_add_(0, layout.spots, query.by_bias)

    def finished(self, name: str, operand: Operand, layout: BatchLayout, *, of_query: bool) -> Tensor:
        """The gradient by rows as they were before they were made comparable."""
        if self._recipe.comparator == "dot":
            return operand.gradient
        rows = compact(self._work, layout, operand) if of_query else operand.rows
        found = self._work.take(f"{name} gradient", len(operand.gradient), rows.size(1))
        if self._recipe.comparator == "cos":
            inverse = operand.norm[layout.spots] if of_query and operand.spread else operand.norm
            kernels.from_units(bits(operand.gradient), rows.numpy(), inverse.numpy(), found.numpy())
        else:
            kernels.from_distances(bits(operand.gradient), rows.numpy(), operand.sums.numpy(), found.numpy())
        return found
