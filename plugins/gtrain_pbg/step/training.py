"""One batch: fetch rows, compare, go back, and change rows and relations.

It computes what :class:`gtrain.model.kg.training.TrainingLoss` and torch's autograd do, with the gradients written
out. Rows are fetched once for each side; the gradients of both sides are merged, so that a row changes once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gtrain.nn import Csr
from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.kernels import bags, updates
from gtrain_pbg.kernels import rows as kernels
from gtrain_pbg.step.batch import EdgeBatch, PartitionRows
from gtrain_pbg.step.chunks import ChunkTraining, fits
from gtrain_pbg.step.layout import BatchLayout, Operand, Workspace, bits, layout_of
from gtrain_pbg.step.relations import RelationOperator, RelationWeights, UpdateRule
from gtrain_pbg.step.scores import SelfNegatives, SideScores, compact
from gtrain_pbg.step.sides import SideOperands


class TrainingStep:
    """Trains on batches of one group of relations, one after the other.

    Args:
        recipe: the group's.
        weights: its parameters, by the names of :attr:`EdgeRecipe.parameters`.
        dtype: of tables and parameters.
        matmul: one of :data:`gtrain_pbg.step.arithmetic.FORMATS`.
        work: buffers, which steps of other groups may use in turn; None: its own.
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
        self._nothing = torch.empty(0, recipe.dimension, dtype=dtype)
        self._update = TableUpdate(recipe.bias, self._nothing, self.work)
        self._layouts: dict[tuple[int, int], BatchLayout] = {}
        self._loops: Tensor | None = None
        operators = self._forwards, self._backwards
        self._chunks = ChunkTraining(recipe, operators, self.work) if fits(recipe, self.work) else None

    def _operator(self, direction: str, parameters: Mapping[str, object]) -> RelationOperator | None:
        if not parameters:
            return None
        weights = {name: self.weights[f"{direction}.{name}"] for name in parameters}
        return RelationOperator(self.recipe.operator, weights, self.work)

    def draws(self, edges: int) -> int:
        """Nodes to draw for each end of a batch of that many edges."""
        recipe = self.recipe
        return 0 if recipe.all_negs else -(-edges // recipe.places) * recipe.num_uniform_negs

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
            table_rule: the table's optimizer.
            relation_rule: the relations' optimizer.

        Returns:
            The weighted sum of the edges' losses, and the sum of the weights: their ratio is the batch's loss.
        """
        if not len(batch):
            return 0.0, 0.0
        layouts = self._layout(len(batch), heads.count), self._layout(len(batch), tails.count)
        return self._train(batch, (heads, tails), layouts, table_rule, relation_rule)

    def _layout(self, edges: int, nodes: int) -> BatchLayout:
        """That of a batch; few sizes occur, and each has its own once."""
        key = edges, nodes if self.recipe.all_negs else 0
        if key not in self._layouts:
            self._layouts[key] = layout_of(self.recipe, *key)
        return self._layouts[key]

    # ---------------------------------------------------------------------------------------------- one batch

    def _train(
        self,
        batch: EdgeBatch,
        tables: tuple[PartitionRows, PartitionRows],
        layouts: tuple[BatchLayout, BatchLayout],
        table_rule: UpdateRule,
        relation_rule: UpdateRule,
    ) -> tuple[float, float]:
        recipe = self.recipe
        weight, total = self._weights(batch)
        if self._chunks is not None:
            lost = self._chunks(batch, tables, weight, table_rule)
            self._update_relations(batch.relation, [None, None], [None, None], relation_rule)
            return lost * total, total
        same = tables[0].value.data_ptr() == tables[1].value.data_ptr()
        self._loops = batch.heads == batch.tails if recipe.self_negs and same else None
        ids = [
            self._sides.ids(name, ends, drawn, layout)
            for name, ends, drawn, layout in zip(
                ("heads", "tails"), (batch.heads, batch.tails), batch.drawn, layouts, strict=True
            )
        ]
        head, tail = (
            self._sides.fetch(name, table, rows, layout, shift)
            for name, table, rows, layout, shift in zip(
                ("heads", "tails"), tables, ids, layouts, self._shifts, strict=True
            )
        )
        by_edge: list[Tensor | None] = [None, None]
        by_row: list[Tensor | None] = [None, None]
        if recipe.reciprocal or self._forwards is None:
            lost = self._train_reciprocal(batch, (head, tail), layouts, weight, by_edge, by_row)
        else:
            lost = self._train_static(batch, (head, tail), layouts, weight, by_edge, by_row)
        if recipe.n3:
            lost += self._regularize(batch, (head, tail), layouts, weight, by_edge)
        self._update(tables, ids, layouts, by_row, by_edge, (head.by_bias, tail.by_bias), table_rule)
        self._update_relations(batch.relation, by_row, by_edge, relation_rule)
        return lost * total, total

    def _train_reciprocal(
        self,
        batch: EdgeBatch,
        sides: tuple[Operand, Operand],
        layouts: tuple[BatchLayout, BatchLayout],
        weight: Tensor,
        by_edge: list[Tensor | None],
        by_row: list[Tensor | None],
    ) -> float:
        """Queries are transformed, each direction by its own operator, or there is none."""
        lost = 0.0
        wanted = ((self.recipe.tail_negs, self._forwards), (self.recipe.head_negs, self._backwards))
        for given, (replaced, operator) in enumerate(wanted):
            if not replaced:
                continue
            compared = self._compare(given, sides, layouts, operator, batch, weight)
            more, gradient, by_row[1 - given], own = compared
            lost += more
            if operator is not None:
                found = self.work.take(f"by end {given}", len(batch), self.recipe.dimension)
                operator.backward(gradient, sides[given].rows, layouts[given], batch.relation, found)
                gradient = found
            by_edge[given] = gradient if own is None else gradient.add_(own.queries * own.gradient.unsqueeze(1))
        return lost

    def _train_static(
        self,
        batch: EdgeBatch,
        sides: tuple[Operand, Operand],
        layouts: tuple[BatchLayout, BatchLayout],
        weight: Tensor,
        by_edge: list[Tensor | None],
        by_row: list[Tensor | None],
    ) -> float:
        """Tails are transformed, drawn ones too, all by the one relation of the batch."""
        operator, recipe = self._forwards, self.recipe
        assert operator is not None
        head, tail = sides
        flat = BatchLayout(layouts[1].rows, layouts[1].rows, 0)
        relation = self.work.take("relation", flat.edges, dtype=torch.int64).fill_(int(batch.relation[0]))
        moved = self._sides.operand("moved", flat.edges, self.recipe.dimension, tail.bias, tail.by_bias)
        operator.forward(tail.rows, flat, relation, moved.rows, moved.low)
        lost, by_moved, by_asked = 0.0, None, None
        if recipe.tail_negs:
            lost, by_edge[0], by_moved, _ = self._compare(0, (head, moved), layouts, None, batch, weight)
        if recipe.head_negs:
            more, by_asked, by_row[0], _ = self._compare(1, (head, moved), layouts, None, batch, weight)
            lost += more
        gradient = self._merged(by_moved, by_asked, layouts[1])
        by_row[1] = found = self.work.take("by tails", flat.edges, self.recipe.dimension)
        operator.backward(gradient, tail.rows, flat, relation, found)
        return lost

    def _compare(
        self,
        given: int,
        sides: tuple[Operand, Operand],
        layouts: tuple[BatchLayout, BatchLayout],
        operator: RelationOperator | None,
        batch: EdgeBatch,
        weight: Tensor,
    ) -> tuple[float, Tensor, Tensor, SelfNegatives | None]:
        """Compare the ends that are given, perhaps transformed, with the rows of the other side.

        Args:
            given: 0: heads are given, tails are compared; 1: the other way round.
            sides: heads and tails.
            layouts: of both sides.
            operator: transforms the ends; None: they are taken as they are.
            batch: the edges.
            weight: of each edge.

        Returns:
            The weighted loss, the gradients by the (transformed) ends and by the rows of the other side, and what the
            ends were compared with themselves by.
        """
        other, answer = 1 - given, (batch.tails, batch.heads)[given]
        source, layout = sides[given], layouts[given]
        query = self._sides.query(f"query {given}", source, layout, operator, batch.relation)
        candidates = self._sides.compared(f"candidates {other}", sides[other])
        own = self._own(source, query, layout) if self.recipe.self_negs else None
        lost = self._scores(layouts[other], query, candidates, answer, weight, own)
        if own is not None:
            self._take_own(own, source, query, layout)
        self._sides.take_bias(source, query, layout)
        by_end = self._sides.finished(f"query {given}", query, layout, of_query=True)
        return (
            lost,
            by_end,
            self._sides.finished(f"candidates {other}", candidates, layouts[other], of_query=False),
            own,
        )

    def _own(self, source: Operand, query: Operand, layout: BatchLayout) -> SelfNegatives:
        """Scores of the ends that are given as answers to themselves."""
        scores, work = self.work.take("own", layout.edges), self.work
        asked = compact(work, layout, query, name="own query")
        kernels.pairs(asked.numpy(), source.rows.numpy(), layout.places, layout.uniform, scores.numpy())
        if self.recipe.bias:
            scores.add_(query.bias, alpha=2)
        if self._loops is not None:
            scores.masked_fill_(self._loops, -torch.inf)
        return SelfNegatives(scores, work.take("by own", layout.edges), asked)

    def _take_own(self, own: SelfNegatives, source: Operand, query: Operand, layout: BatchLayout) -> None:
        """Give queries the gradient by these scores."""
        query.gradient.add_(compact(self.work, layout, source, name="own rows") * own.gradient.unsqueeze(1))
        if self.recipe.bias:
            query.by_bias.add_(own.gradient, alpha=2)

    def _merged(self, by_row: Tensor | None, by_edge: Tensor | None, layout: BatchLayout) -> Tensor:
        """Gradients by all rows of a side and by its edges, as one."""
        merged = self.work.take("merged", layout.rows, self.recipe.dimension)
        if by_row is None:
            by_row = merged.zero_()
        if by_edge is None:
            by_edge = self._nothing
            kernels.widen(bits(by_row), merged.numpy())
        else:
            place = (layout.places, layout.uniform, layout.edges)
            kernels.add_rows(bits(by_row), bits(by_edge), *place, merged.numpy())
        return merged

    # ---------------------------------------------------------------------------------------------- operands

    def _weights(self, batch: EdgeBatch) -> tuple[Tensor, float]:
        """The weight of each edge's loss in the batch's mean, and the sum of the weights."""
        weight = self.work.take("weight", len(batch))
        if batch.weight is None:
            weight.fill_(1.0)
        else:
            weight.copy_(batch.weight)
        if self._relation_weight is not None:
            weight.mul_(self._relation_weight[batch.relation])
        total = kernels.count_total(weight.numpy())
        weight.div_(max(total, torch.finfo(self.dtype).tiny))
        return weight, total

    # ---------------------------------------------------------------------------------------------- updates

    def _regularize(
        self,
        batch: EdgeBatch,
        sides: tuple[Operand, Operand],
        layouts: tuple[BatchLayout, BatchLayout],
        weight: Tensor,
        by_edge: list[Tensor | None],
    ) -> float:
        """The N3 norm of the batch; its gradients by rows come on top of ``by_edge``."""
        heavy = self.work.take("n3 weight", len(batch))
        torch.mul(weight, self.recipe.n3, out=heavy)
        wide = [self.work.take(f"n3 {end}", len(batch), self.recipe.dimension) for end in (0, 1)]
        for end, given in enumerate(by_edge):
            if given is None:
                wide[end].zero_()
            else:
                kernels.widen(bits(given), wide[end].numpy())
            by_edge[end] = wide[end]
        operators = [operator for operator in (self._forwards, self._backwards) if operator is not None]
        if not operators:
            operators = [RelationOperator("none", {}, self.work)]
        rows = [
            compact(self.work, *pair, name=f"n3 rows {end}")
            for end, pair in enumerate(zip(layouts, sides, strict=True))
        ]
        whole = BatchLayout(len(batch), len(batch), 0)
        found = 0.0
        for number, operator in enumerate(operators):
            found += operator.regularize(
                (rows[0], rows[1]),
                whole,
                batch.relation,
                heavy,
                (wide[0], wide[1]),
                with_rows=number == 0,
            )
        return found

    def _or_nothing(self, tensor: Tensor | None) -> Tensor:
        return self._nothing if tensor is None else tensor

    def _update_relations(
        self, relation: Tensor, by_row: list[Tensor | None], by_edge: list[Tensor | None], rule: UpdateRule
    ) -> None:
        for shift, rows, edges in zip(self._shifts, by_row, by_edge, strict=True):
            if shift is not None:
                gradient = shift.gradient.view(-1).numpy()
                kernels.add_all(bits(self._or_nothing(rows)), bits(self._or_nothing(edges)), gradient)
        for shift in {id(shift): shift for shift in self._shifts}.values():  # both ends may be of one type
            if shift is not None:
                shift.update(self._touched.new_zeros(1).numpy(), 1, rule)
        if self._forwards is None:
            return
        touched = self._touched.numpy()
        count = updates.find_touched(relation.numpy(), self._seen.numpy(), touched)
        for operator in (self._forwards, self._backwards):
            if operator is not None:
                operator.update(touched, count, rule)


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
        tables: tuple[PartitionRows, PartitionRows],
        ids: list[Tensor],
        layouts: tuple[BatchLayout, BatchLayout],
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
        table: PartitionRows,
        ids: list[Tensor],
        layouts: tuple[BatchLayout, ...],
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
        table: PartitionRows,
        entities: Csr,
        ids: list[Tensor],
        layouts: tuple[BatchLayout, ...],
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
