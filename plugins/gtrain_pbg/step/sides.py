"""The two sides of a batch as operands of comparisons: fetch rows, transform them, and go back to gradients by them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gtrain.nn import select_rows
from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.kernels import rows as kernels
from gtrain_pbg.kernels.updates import Bags, SideGradients
from gtrain_pbg.step.layout import BatchLayout, Operand, PartitionRows, Workspace, bits, compact
from gtrain_pbg.step.relations import RelationOperator, RelationWeights


@dataclass
class BatchSide:
    """Heads or tails of a batch.

    Attributes:
        table: the partition that their rows are of.
        ids: int64 ``[Z]``, rows of the table.
        layout: of the rows.
        rows: the rows as fetched.
        by_row: ``[Z, D]``, gradient by all rows; None: none yet.
        by_edge: ``[B, D]``, gradient by the rows of edges, to be added to it; None: none yet.
    """

    table: PartitionRows
    ids: Tensor
    layout: BatchLayout
    rows: Operand
    by_row: Tensor | None = None
    by_edge: Tensor | None = None

    @property
    def gradients(self) -> SideGradients:
        """The gradients for kernels; ``[0, D]`` stands for None."""
        none = self.rows.rows[:0]
        by_row, by_edge = (bits(none if tensor is None else tensor) for tensor in (self.by_row, self.by_edge))
        return SideGradients(by_row, by_edge, self.rows.by_bias.numpy())


def bags_of(table: PartitionRows) -> Bags:
    """Return the bags of a featurized table for kernels."""
    assert table.bags is not None
    return Bags(table.bags.offsets.numpy(), table.bags.ids.numpy())


class SideOperands:
    """Prepares the operands of comparisons, in named buffers.

    Args:
        recipe: of the group of relations.
        work: buffers.
    """

    def __init__(self, recipe: EdgeRecipe, work: Workspace) -> None:
        self._recipe, self._work = recipe, work
        self._no_shift = torch.empty(0, dtype=work.dtype)
        self._no_bits = torch.empty(1, 1, dtype=torch.bfloat16)

    def fetch(
        self,
        name: str,
        table: PartitionRows,
        ends: Tensor,
        drawn: Tensor,
        layout: BatchLayout,
        shift: RelationWeights | None,
    ) -> BatchSide:
        """Fetch the rows of a side; in bfloat16 too, if that is how they are compared.

        Args:
            name: of the side.
            table: the partition.
            ends: ``[B]``, endpoints of the edges.
            drawn: ``[C * u]``, drawn nodes.
            layout: of the rows.
            shift: the vector that is added to all embeddings, ``model.global_emb``; None: none.
        """
        recipe, work, n = self._recipe, self._work, layout.rows
        ids = work.take(f"{name} ids", n, dtype=torch.int64)
        if recipe.all_negs:
            ids[: layout.edges] = ends
            # All nodes are candidates, in the order of their ids, so that an answer's column is its id.
            torch.arange(layout.uniform, out=ids[layout.edges :])
        else:
            kernels.lay_out(ends.numpy(), drawn.numpy(), layout, ids.numpy())
        value = table.value.numpy()
        if recipe.max_norm is not None:
            read = ids if table.bags is None else select_rows(table.bags, ids).ids
            kernels.clip(value, read.numpy(), recipe.dimension, recipe.max_norm)
        bias, by_bias = work.take(f"{name} bias", n), work.take(f"{name} bias gradient", n)
        if recipe.bias:
            by_bias.zero_()
        rows = self.operand(name, n, recipe.dimension, bias, by_bias)
        added = (self._no_shift if shift is None else shift.value.view(-1)).numpy()
        low = bits(self._no_bits if rows.low is None else rows.low)
        result = kernels.FetchedRows(rows.rows.numpy(), bias.numpy(), low, recipe.bias, rows.low is not None)
        if table.bags is None:
            kernels.fetch(value, ids.numpy(), added, result)
        else:
            kernels.fetch_bags(value, bags_of(table), ids.numpy(), added, result)
        return BatchSide(table, ids, layout, rows)

    def operand(self, name: str, n: int, columns: int, bias: Tensor, by_bias: Tensor) -> Operand:
        """Allocate ``[n, columns]`` rows of a side, in bfloat16 too if that is how they are compared."""
        work, none = self._work, self._work.take("none", 1)
        low = work.lowered(f"{name} low", n, columns) if self._recipe.comparator != "cos" else None
        return Operand(work.take(name, n, columns), low, True, none, bias, none, none, by_bias)

    def query(self, name: str, side: BatchSide, operator: RelationOperator | None, relation: Tensor) -> Operand:
        """Return the given endpoints, transformed if there is an operator, with buffers for gradients."""
        work, source, layout = self._work, side.rows, side.layout
        n, columns = layout.edges, self._recipe.dimension
        if operator is not None:
            queries = replace(self.operand(f"{name} moved", n, columns, source.bias, source.by_bias), spread=False)
            operator.forward(source.rows, layout, relation, queries.rows, queries.low)
        elif self._recipe.all_negs:
            # The endpoints come first, and the other side may have another number of rows.
            low = None if source.low is None else source.low[:n]
            queries = replace(source, rows=source.rows[:n], low=low, spread=False)
        else:
            queries = source
        queries = self.compared(name, queries, edges=n)
        if queries.spread and self._recipe.comparator in ("l2", "squared_l2"):
            queries.norm = torch.index_select(queries.norm, 0, layout.spots, out=work.take(f"{name} norm", n))
        if self._recipe.bias:
            queries.bias = torch.index_select(source.bias, 0, layout.spots, out=work.take(f"{name} bias", n))
            queries.by_bias = work.take(f"{name} bias gradient", n)
        return queries

    def compared(self, name: str, rows: Operand, edges: int | None = None) -> Operand:
        """Return rows in the form in which the comparator takes them, with buffers for the gradient by it.

        Args:
            name: of the buffers.
            rows: queries or candidates.
            edges: number of queries; None: these are candidates.
        """
        work, (n, columns) = self._work, rows.rows.shape
        result = replace(rows, gradient=work.product(f"{name} product", edges or n, columns))
        if self._recipe.comparator == "cos":
            result.rows, result.norm = work.take(f"{name} unit", n, columns), work.take(f"{name} inverse", n)
            kernels.normalize(rows.rows.numpy(), result.norm.numpy(), result.rows.numpy())
            result.low = work.lowered(f"{name} low", n, columns)
            if result.low is not None:
                result.low.copy_(result.rows)
        elif self._recipe.comparator != "dot":
            result.norm, result.sums = work.take(f"{name} squares", n), work.take(f"{name} sums", edges or n).zero_()
            kernels.squared_norms(rows.rows.numpy(), result.norm.numpy())
        return result

    def backward(self, name: str, operand: Operand, layout: BatchLayout, *, of_query: bool) -> Tensor:
        """Return the gradient by rows as they were before :meth:`compared`."""
        if self._recipe.comparator == "dot":
            return operand.gradient
        rows = compact(self._work, layout, operand) if of_query else operand.rows
        result = self._work.take(f"{name} gradient", len(operand.gradient), rows.size(1))
        if self._recipe.comparator == "cos":
            inverse = operand.norm[layout.spots] if of_query and operand.spread else operand.norm
            kernels.normalize_backward(bits(operand.gradient), rows.numpy(), inverse.numpy(), result.numpy())
        else:
            kernels.distances_backward(bits(operand.gradient), rows.numpy(), operand.sums.numpy(), result.numpy())
        return result
