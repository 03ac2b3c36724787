"""One training step: fetch rows, compare them, compute gradients, and update rows and relation parameters.

It computes what :class:`gtrain.model.kg.training.TrainingLoss` and torch's autograd compute, with the gradients written
out. Rows are fetched once for each side; the gradients of both sides are merged, so that a row changes once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.kernels import rows as kernels
from gtrain_pbg.kernels import updates
from gtrain_pbg.kernels.updates import GradientSums, RowChains, UpdatedTable
from gtrain_pbg.step.chunks import ChunkTraining, fits
from gtrain_pbg.step.layout import BatchLayout, EdgeBatch, Operand, PartitionRows, Workspace, bits, compact, layout_of
from gtrain_pbg.step.relation_prediction import predict_relations
from gtrain_pbg.step.relations import RelationOperator, RelationWeights, UpdateRule
from gtrain_pbg.step.scores import SelfNegatives, SideScores
from gtrain_pbg.step.sides import BatchSide, SideOperands, bags_of


class TrainingStep:
    """Trains on batches of one group of relations, one after the other.

    Args:
        recipe: of the group.
        weights: its parameters, by the names of :attr:`EdgeRecipe.parameters`.
        dtype: of tables and parameters.
        matmul: one of :data:`gtrain_pbg.step.matmul_format.FORMATS`.
        work: buffers, which the steps of other groups may use in turn; None: new ones.
    """

    def __init__(
        self,
        recipe: EdgeRecipe,
        weights: Mapping[str, RelationWeights],
        dtype: torch.dtype,
        matmul: str,
        work: Workspace | None = None,
    ) -> None:
        self.recipe, self.weights, self.dtype = recipe, dict(weights), dtype
        self.work = work or Workspace(dtype, matmul)
        self._sides, self._scores = SideOperands(recipe, self.work), SideScores(recipe, self.work)
        self._forwards = self._operator("forwards", recipe.forwards)
        self._backwards = self._operator("backwards", recipe.backwards)
        self._shifts = [self.weights.get(name) for name in ("head_shift", "tail_shift")]
        self._seen = torch.zeros(recipe.num_relations, dtype=torch.int8)
        self._touched = torch.empty(recipe.num_relations, dtype=torch.int64)
        by_relation = recipe.relation_weight
        self._relation_weight = None if by_relation is None else torch.tensor(by_relation, dtype=dtype)
        self._update = TableUpdate(recipe.bias, self.work)
        self._loops: Tensor | None = None  # edges from a node to itself, with model.self_negs
        self._identity = RelationOperator("none", {}, self.work)
        operators = self._forwards or self._identity, self._backwards or self._identity
        self._chunks = ChunkTraining(recipe, operators, self.work) if fits(recipe, self.work) else None

    def _operator(self, direction: str, parameters: Mapping[str, object]) -> RelationOperator | None:
        if not parameters:
            return None
        weights = {name: self.weights[f"{direction}.{name}"] for name in parameters}
        return RelationOperator(self.recipe.operator, weights, self.work)

    def draws(self, edges: int) -> int:
        """Return how many nodes to draw for each end of a batch of this size."""
        recipe = self.recipe
        return 0 if recipe.all_negs else -(-edges // recipe.chunk_size) * recipe.num_uniform_negs

    def __call__(
        self,
        batch: EdgeBatch,
        heads: PartitionRows,
        tails: PartitionRows,
        table_rule: UpdateRule,
        relation_rule: UpdateRule,
    ) -> tuple[float, float]:
        """Train on a batch.

        Args:
            batch: the edges.
            heads, tails: the partitions of their ends, perhaps the same.
            table_rule: of the table's optimizer.
            relation_rule: of the relations' optimizer.

        Returns:
            The weighted sum of the edges' losses, and the sum of the weights: their ratio is the batch's loss.
        """
        if not len(batch):
            return 0.0, 0.0
        recipe, tables = self.recipe, (heads, tails)
        weight, total = self._weights(batch)
        for operator in (self._forwards, self._backwards):
            if operator is not None:
                operator.prepare(batch.relation)
        if self._chunks is not None:
            lost = self._chunks(batch, tables, weight, table_rule)
            self._update_relations(batch.relation, (), relation_rule)
            return lost * total, total
        # Only ends of one partition can be the same node.
        same = heads.value.data_ptr() == tails.value.data_ptr()
        self._loops = batch.heads == batch.tails if recipe.self_negs and same else None
        head, tail = (
            self._sides.fetch(name, table, ends, drawn, layout_of(recipe, len(batch), table.count), shift)
            for name, table, ends, drawn, shift in zip(
                ("heads", "tails"), tables, (batch.heads, batch.tails), batch.drawn, self._shifts, strict=True
            )
        )
        sides = head, tail
        if recipe.reciprocal or self._forwards is None:
            lost = self._train_reciprocal(batch, sides, weight)
        else:
            lost = self._train_static(batch, sides, weight, self._forwards)
        if recipe.has_edge_losses:
            lost += self._train_relations(batch, sides, weight)
        self._update(sides, table_rule)
        self._update_relations(batch.relation, sides, relation_rule)
        return lost * total, total

    def _weights(self, batch: EdgeBatch) -> tuple[Tensor, float]:
        """Return the weight of each edge's loss in the batch's mean, and the sum of the weights."""
        weight = self.work.take("weight", len(batch)).fill_(1.0)
        if batch.weight is not None:
            weight.copy_(batch.weight)
        if self._relation_weight is not None:
            weight.mul_(self._relation_weight[batch.relation])
        total = kernels.count_total(weight.numpy())
        # The batch's loss is a mean. The least positive number stands in for a total of 0, where all weights are 0.
        weight.div_(max(total, torch.finfo(self.dtype).tiny))
        return weight, total

    # ---------------------------------------------------------------------------------------------- both directions

    def _train_reciprocal(self, batch: EdgeBatch, sides: tuple[BatchSide, BatchSide], weight: Tensor) -> float:
        """Reciprocal relations: each direction transforms its queries by its operator, if it has one."""
        lost = 0.0
        directions = ((self.recipe.tail_negs, self._forwards), (self.recipe.head_negs, self._backwards))
        for given, (replaced, operator) in enumerate(directions):
            if not replaced:
                continue
            side, other = sides[given], sides[1 - given]
            more, gradient, other.by_row, own = self._compare(given, side, other, operator, batch, weight)
            lost += more
            if operator is not None:
                by_end = self.work.take(f"by end {given}", len(batch), self.recipe.dimension)
                operator.backward(gradient, side.rows.rows, side.layout, batch.relation, by_end)
                gradient = by_end
            side.by_edge = gradient if own is None else gradient.add_(own.queries * own.gradient.unsqueeze(1))
        return lost

    def _train_static(
        self, batch: EdgeBatch, sides: tuple[BatchSide, BatchSide], weight: Tensor, operator: RelationOperator
    ) -> float:
        """Static relations: all tails, drawn ones too, are transformed by the one relation of the batch."""
        recipe, (head, tail) = self.recipe, sides
        # One chunk without drawn nodes: every row of the side counts as an edge's, so the operator transforms all of
        # them.
        flat = BatchLayout(tail.layout.rows, 0, tail.layout.rows)
        relation = self.work.take("relation", flat.edges, dtype=torch.int64).fill_(int(batch.relation[0]))
        rows = self._sides.operand("moved", flat.edges, recipe.dimension, tail.rows.bias, tail.rows.by_bias)
        operator.forward(tail.rows.rows, flat, relation, rows.rows, rows.low)
        moved = BatchSide(tail.table, tail.ids, tail.layout, rows)
        lost = 0.0
        if recipe.tail_negs:
            lost, head.by_edge, moved.by_row, _ = self._compare(0, head, moved, None, batch, weight)
        if recipe.head_negs:
            more, moved.by_edge, head.by_row, _ = self._compare(1, moved, head, None, batch, weight)
            lost += more
        gradient = self._merged(moved)
        tail.by_row = self.work.take("by tails", flat.edges, recipe.dimension)
        operator.backward(gradient, tail.rows.rows, flat, relation, tail.by_row)
        return lost

    def _compare(
        self,
        given: int,
        side: BatchSide,
        other: BatchSide,
        operator: RelationOperator | None,
        batch: EdgeBatch,
        weight: Tensor,
    ) -> tuple[float, Tensor, Tensor, SelfNegatives | None]:
        """Compare the given ends, transformed if there is an operator, with the rows of the other side.

        Args:
            given: 0: heads are given, tails are compared; 1: the reverse.
            side: of the given ends.
            other: of the candidates.
            operator: transforms the given ends; None: none.
            batch: the edges.
            weight: of each edge.

        Returns:
            The weighted loss, the gradients by the (transformed) ends and by the rows of the other side, and the scores
            of the ends as their own negatives.
        """
        answer = (batch.tails, batch.heads)[given]
        query = self._sides.query(f"query {given}", side, operator, batch.relation)
        candidates = self._sides.compared(f"candidates {1 - given}", other.rows)
        own = self._own(side, query) if self.recipe.self_negs else None
        lost = self._scores(other.layout, query, candidates, answer, weight, own)
        if own is not None:
            rows = compact(self.work, side.layout, side.rows, name="own rows")
            query.gradient.add_(rows * own.gradient.unsqueeze(1))
        if self.recipe.bias:
            if own is not None:
                # The endpoint's score against itself has its bias twice, as query and as candidate.
                query.by_bias.add_(own.gradient, alpha=2)
            side.rows.by_bias.index_add_(0, side.layout.spots, query.by_bias)
        by_end = self._sides.backward(f"query {given}", query, side.layout, of_query=True)
        by_row = self._sides.backward(f"candidates {1 - given}", candidates, other.layout, of_query=False)
        return lost, by_end, by_row, own

    def _own(self, side: BatchSide, query: Operand) -> SelfNegatives:
        """Return the scores of the given ends as answers to themselves."""
        scores, layout = self.work.take("own", side.layout.edges), side.layout
        queries = compact(self.work, layout, query, name="own query")
        kernels.pairs(queries.numpy(), side.rows.rows.numpy(), layout, scores.numpy())
        if self.recipe.bias:
            scores.add_(query.bias, alpha=2)
        if self._loops is not None:
            scores.masked_fill_(self._loops, -torch.inf)
        return SelfNegatives(scores, self.work.take("by own", layout.edges), queries)

    def _merged(self, side: BatchSide) -> Tensor:
        """Return the gradient by all rows of a side, those of its edges added."""
        merged = self.work.take("merged", side.layout.rows, self.recipe.dimension)
        by_row = merged.zero_() if side.by_row is None else side.by_row
        if side.by_edge is None:
            return merged.copy_(by_row)
        kernels.add_rows(bits(by_row), bits(side.by_edge), side.layout, merged.numpy())
        return merged

    # ------------------------------------------------------------------------------------- losses without negatives

    def _train_relations(self, batch: EdgeBatch, sides: tuple[BatchSide, BatchSide], weight: Tensor) -> float:
        """Return the regularizers and the loss of relation prediction; add their gradients to ``by_edge`` of sides."""
        recipe, factor = self.recipe, self.work.take("edge factor", len(batch))
        ends, by_ends = self._ends(sides), self._by_ends(sides)
        lost = 0.0
        if recipe.n3:
            lost += self._n3(ends, by_ends, batch.relation, torch.mul(weight, recipe.n3, out=factor))
        # Static relations transform tails, reciprocal ones the given end.
        for operator, end in ((self._forwards, 0 if recipe.reciprocal else 1), (self._backwards, 1)):
            if operator is None:
                continue
            of_ends = (ends[end], ends[1 - end]), (by_ends[end], by_ends[1 - end])
            if recipe.dura:
                lost += operator.dura(*of_ends, batch.relation, torch.mul(weight, recipe.dura, out=factor))
            if recipe.relation_prediction:
                torch.mul(weight, recipe.relation_prediction, out=factor)
                lost += predict_relations(operator, *of_ends, batch.relation, factor)
        return lost

    def _ends(self, sides: tuple[BatchSide, BatchSide]) -> tuple[Tensor, Tensor]:
        """Return the rows of the edges' heads and tails, ``[B, D]`` each."""
        head, tail = sides
        return (
            compact(self.work, head.layout, head.rows, name="edge heads"),
            compact(self.work, tail.layout, tail.rows, name="edge tails"),
        )

    def _by_ends(self, sides: tuple[BatchSide, BatchSide]) -> tuple[Tensor, Tensor]:
        """Make ``by_edge`` of the sides gradients to which others can be added, and return them."""
        size = sides[0].layout.edges, self.recipe.dimension
        by_heads, by_tails = (self.work.take(f"by edge {end}", *size) for end in (0, 1))
        for wide, side in zip((by_heads, by_tails), sides, strict=True):
            side.by_edge = wide.zero_() if side.by_edge is None else wide.copy_(side.by_edge)
        return by_heads, by_tails

    def _n3(
        self, ends: tuple[Tensor, Tensor], by_ends: tuple[Tensor, Tensor], relation: Tensor, weight: Tensor
    ) -> float:
        """Return the weighted N3 norm of edges, and add its gradients to those by their ends."""
        operators = [operator for operator in (self._forwards, self._backwards) if operator is not None]
        return sum(
            operator.n3(ends, by_ends, relation, weight, with_rows=number == 0)
            for number, operator in enumerate(operators or [self._identity])
        )

    def _update_relations(self, relation: Tensor, sides: tuple[BatchSide, ...], rule: UpdateRule) -> None:
        for shift, side in zip(self._shifts, sides, strict=False):
            if shift is not None:
                for gradients in side.gradients[:2]:
                    kernels.add_all(gradients, shift.gradient.view(-1).numpy())
        for shift in {id(shift): shift for shift in self._shifts}.values():  # both ends may be of one type
            if shift is not None:
                shift.update(self._touched.new_zeros(1).numpy(), 1, rule)
        if self._forwards is None:
            return
        touched = self._touched.numpy()
        if self.recipe.relation_prediction:
            # Every relation is a wrong answer of some edge.
            count = len(touched)
            torch.arange(count, out=self._touched)
        else:
            count = updates.find_touched(relation.numpy(), self._seen.numpy(), touched)
        for operator in (self._forwards, self._backwards):
            if operator is not None:
                operator.update(touched, count, rule)


class TableUpdate:
    """Applies the gradients of a batch to rows of tables.

    Args:
        has_bias: whether the last column of a row is the bias.
        work: buffers.
    """

    def __init__(self, has_bias: bool, work: Workspace) -> None:
        self._has_bias, self._work = has_bias, work

    def __call__(self, sides: tuple[BatchSide, BatchSide], rule: UpdateRule) -> None:
        """Update both sides at once if they are of the same partition, so that each row changes once."""
        head, tail = sides
        if head.table.value.data_ptr() == tail.table.value.data_ptr():
            self._apply([head, tail], rule)
        else:
            for side in sides:
                self._apply([side], rule)

    def _apply(self, sides: list[BatchSide], rule: UpdateRule) -> None:
        table = sides[0].table
        value, state, head = table.value.numpy(), table.state.numpy(), table.head.numpy()
        if table.bags is not None:
            offsets = table.bags.offsets
            total = sum(int((offsets[side.ids + 1] - offsets[side.ids]).sum()) for side in sides)
            most, count = min(len(value), total), self._work.take("bag count", 1, dtype=torch.int64).zero_()
            touched = self._work.take("touched", most, dtype=torch.int64).numpy()
            room = self._work.take("bag sums", most, value.shape[1]).numpy()
            sums = GradientSums(head, touched, count.numpy(), room)
            for side in sides:
                updates.add_bags(side.ids.numpy(), bags_of(table), side.gradients, side.layout, sums, self._has_bias)
            updates.apply_sums(sums, value, state, rule.numbers)
            return
        total, first, rows = sum(side.ids.numel() for side in sides), 0, 0
        touched = self._work.take("touched", min(total, len(value)), dtype=torch.int64).numpy()
        chains = RowChains(touched, head, self._work.take("after", total, dtype=torch.int32).numpy())
        for side in sides:
            rows = updates.chain(side.ids.numpy(), first, chains, rows)
            first += side.ids.numel()
        split, gradients = sides[0].ids.numel(), (sides[0].gradients, sides[-1].gradients)
        work = self._work.take("row", value.shape[1]).numpy()
        updated = UpdatedTable(value, state, rule.numbers, self._has_bias)
        updates.scatter(chains, rows, split, gradients, sides[0].layout, updated, work)
