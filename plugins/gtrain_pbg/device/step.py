"""The training step on a device: from the inputs of a batch to updated rows, in two forms.

:class:`FusedStep` serves what is usual for large graphs: inner products of queries transformed by operators that act on
columns, against the batch's and drawn nodes. :class:`PlainStep` serves all other models by autograd. Both read and
write tensors at fixed addresses, so that a CUDA graph can replay them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gtrain.nn.recipe import EdgeRecipe
from gtrain_pbg.device import kernels, scores
from gtrain_pbg.device.batches import BatchShape, BatchTensors, Ends
from gtrain_pbg.device.kernels import DeviceRule, DeviceTable, PackedOperators
from gtrain_pbg.step.relation_prediction import pairs_of
from gtrain_pbg.step.relations import PARAMETERS

PADDED = 8
"""Scores of a query are padded to a multiple of this, because products of aligned rows are faster."""


@dataclass(frozen=True)
class DeviceRules:
    """The rules of the tables' and of the relations' optimizers."""

    table: DeviceRule
    relations: DeviceRule


@dataclass(frozen=True)
class DeviceParameter:
    """A relation parameter on a device.

    Attributes:
        value: ``[R, ...]``.
        state: ``[R, s]``, of the optimizer.
    """

    value: Tensor
    state: Tensor


class DeviceStep(ABC):
    """Trains on batches of one group of relations.

    Args:
        recipe: of the group.
        tables: of tails and of heads; the same object if they are of one type.
        rules: of the optimizers.
        low: dtype of the operands of matrix products.

    Attributes:
        captured: whether the step can be captured in a CUDA graph.
        lost: float64 ``[1]``, sum of the batches' losses, each times the sum of its weights; reset by its reader.
    """

    captured = True

    def __init__(
        self, recipe: EdgeRecipe, tables: tuple[DeviceTable, DeviceTable], rules: DeviceRules, low: torch.dtype
    ) -> None:
        self.recipe, self.tables, self.rules, self.low = recipe, tables, rules, low
        value = tables[0].value
        self.dtype, self.device = value.dtype, value.device
        self.lost = torch.zeros(1, dtype=torch.float64, device=value.device)

    @abstractmethod
    def __call__(self, batch: BatchTensors, shape: BatchShape, ends: tuple[Ends, Ends], relations: Tensor) -> None:
        """Train on a batch.

        Args:
            batch: the inputs, on the device.
            shape: of the batch.
            ends: where the rows of tails and of heads are; a captured step does not read it.
            relations: ``[C m]``, as in the batch, on the host; a captured step does not read it.
        """


@dataclass
class StepBuffers:
    """Buffers of :class:`FusedStep`, reused by all batches of a shape.

    Attributes:
        rows, by_rows: ``[2, C, K, D]``, of tails, then of heads.
        queries, by_queries: ``[2, C, m, D]``, heads, then tails.
        scores: ``[2, C, m, K]``, and the gradient by them.
        by_ends: ``[2, C m, D]``.
        lost: ``[2 C m]``.
    """

    rows: Tensor
    by_rows: Tensor
    queries: Tensor
    by_queries: Tensor
    scores: Tensor
    by_ends: Tensor
    lost: Tensor


def fits(recipe: EdgeRecipe) -> bool:
    """Return whether :class:`FusedStep` can train this model."""
    plain_rows = recipe.bags == (None, None) and recipe.shifts is None and recipe.max_norm is None and not recipe.bias
    by_column = recipe.operator in kernels.CODES and (recipe.reciprocal or not recipe.forwards)
    inner = recipe.comparator == "dot" and not recipe.has_edge_losses
    both = recipe.head_negs and recipe.tail_negs
    answers = recipe.num_batch_negs > 0 and not recipe.all_negs and not recipe.self_negs
    few = recipe.chunk_size + recipe.num_uniform_negs <= kernels.MOST_COLUMNS
    return plain_rows and by_column and inner and both and answers and few


class FusedStep(DeviceStep):
    """Eight kernels and three matrix products; see :mod:`gtrain_pbg.device.kernels`.

    Args:
        recipe, tables, rules, low: see :class:`DeviceStep`; the recipe is one that :func:`fits`.
        operators: of both directions.
    """

    def __init__(
        self,
        recipe: EdgeRecipe,
        tables: tuple[DeviceTable, DeviceTable],
        rules: DeviceRules,
        low: torch.dtype,
        operators: PackedOperators,
    ) -> None:
        super().__init__(recipe, tables, rules, low)
        self._operators = operators
        self._values = tables[0].value, (tables[0] if tables[0] is tables[1] else tables[1]).value
        self._buffers: dict[BatchShape, StepBuffers] = {}

    def __call__(self, batch: BatchTensors, shape: BatchShape, ends: tuple[Ends, Ends], relations: Tensor) -> None:
        buffers, recipe, values = self.buffers(shape), self.recipe, self._values
        kernels.gather(values, batch.ids, shape, buffers.rows)
        kernels.transform(values, batch, shape, self._operators, buffers.queries)
        chunks = [tensor.flatten(0, 1) for tensor in (buffers.rows, buffers.queries, buffers.scores)]
        rows, queries, products = chunks
        products = products[..., : shape.columns]
        torch.bmm(queries, rows.transpose(1, 2), out=products)
        kernels.loss(buffers.scores, batch, shape, recipe.loss, recipe.margin, buffers.lost)
        torch.bmm(products, rows, out=buffers.by_queries.flatten(0, 1))
        torch.bmm(products.transpose(1, 2), queries, out=buffers.by_rows.flatten(0, 1))
        by_ends = buffers.by_ends
        kernels.transform_backward(values, batch, shape, self._operators, buffers.by_queries, by_ends)
        if self._operators.name != "none":
            kernels.update_relations(batch, self._operators, self.rules.relations)
        kernels.update_rows(self.tables, batch, shape, buffers.by_rows.flatten(0, 2), by_ends, self.rules.table)
        self.lost.addcmul_(buffers.lost.sum(dtype=torch.float64), batch.total)

    def buffers(self, shape: BatchShape) -> StepBuffers:
        """Return the buffers of a shape."""
        if shape not in self._buffers:
            c, m, k, columns = shape.chunks, shape.slots, shape.columns, self.recipe.dimension
            padded = -(-k // PADDED) * PADDED

            def low(*size: int) -> Tensor:
                return torch.empty(2, c, *size, dtype=self.low, device=self.device)

            self._buffers[shape] = StepBuffers(
                low(k, columns),
                low(k, columns),
                low(m, columns),
                low(m, columns),
                low(m, padded),
                torch.empty(2, shape.edges, columns, dtype=self.dtype, device=self.device),
                torch.empty(2 * shape.edges, dtype=self.dtype, device=self.device),
            )
        return self._buffers[shape]


class PlainStep(DeviceStep):
    """Any model, by autograd of the formulas of :mod:`gtrain_pbg.device.scores`.

    Args:
        recipe, tables, rules, low: see :class:`DeviceStep`.
        parameters: by the names of :attr:`EdgeRecipe.parameters`.
    """

    def __init__(
        self,
        recipe: EdgeRecipe,
        tables: tuple[DeviceTable, DeviceTable],
        rules: DeviceRules,
        low: torch.dtype,
        parameters: Mapping[str, DeviceParameter],
    ) -> None:
        super().__init__(recipe, tables, rules, low)
        self._parameters = dict(parameters)
        # One product per relation that occurs, whose number depends on the batch; and one candidate per entity.
        products = recipe.operator in ("linear", "affine") and (recipe.reciprocal or recipe.dura > 0)
        self.captured = not recipe.all_negs and not products

    def __call__(self, batch: BatchTensors, shape: BatchShape, ends: tuple[Ends, Ends], relations: Tensor) -> None:
        recipe, ids = self.recipe, batch.ids.long().view(2, -1)
        if recipe.max_norm is not None:
            read = [slice_of(end) for end in ends] if recipe.all_negs else list(ids)
            for table, rows in zip(self.tables, read, strict=True):
                _clip(table.value, rows, recipe.dimension, recipe.max_norm)
        leaves = [table.value[rows].requires_grad_() for table, rows in zip(self.tables, ids, strict=True)]
        every = [
            table.value[slice_of(end)].clone().requires_grad_() if recipe.all_negs else None
            for table, end in zip(self.tables, ends, strict=True)
        ]
        distinct = {id(parameter): parameter for parameter in self._parameters.values()}
        weights = {key: parameter.value.detach().requires_grad_() for key, parameter in distinct.items()}
        values = {name: weights[id(parameter)] for name, parameter in self._parameters.items()}
        with torch.enable_grad():
            lost = EdgeLosses(self, values, batch, shape, relations).total(leaves, every, ends)
        wanted = [*leaves, *(rows for rows in every if rows is not None), *weights.values()]
        gradients = list(torch.autograd.grad(lost, wanted, allow_unused=True))
        by_rows = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients[:2], strict=True)]
        by_every = gradients[2 : 2 + 2 * recipe.all_negs]
        for parameter, gradient in zip(distinct.values(), gradients[2 + len(by_every) :], strict=True):
            if gradient is not None:
                self._update(parameter, gradient)
        if recipe.all_negs:
            self._update_all(ids, ends, by_rows, by_every)
        else:
            kernels.update_rows(self.tables, batch, shape, torch.cat(by_rows), None, self.rules.table)
        self.lost.addcmul_(lost.detach().double(), batch.total)

    def _update(self, parameter: DeviceParameter, gradient: Tensor) -> None:
        rows = torch.arange(len(gradient), device=gradient.device)
        value = parameter.value.view(len(gradient), -1)
        kernels.apply_rule(value, parameter.state, rows, gradient.reshape(value.shape), self.rules.relations)

    def _update_all(
        self, ids: Tensor, ends: tuple[Ends, Ends], by_rows: Sequence[Tensor], by_every: Sequence[Tensor | None]
    ) -> None:
        """Update all rows of the partitions."""
        sums: dict[tuple[int, int], Tensor] = {}  # by table and partition: both sides may be of one partition
        for table, end, rows, by_row, by_all in zip(self.tables, ends, ids, by_rows, by_every, strict=True):
            key = id(table.value), end.first
            if key not in sums:
                sums[key] = table.value.new_zeros(end.count, table.value.size(1))
            if by_all is not None:
                sums[key] += by_all
            sums[key].index_add_(0, rows - end.first, by_row)
        for table, end in zip(self.tables, ends, strict=True):
            total = sums.pop((id(table.value), end.first), None)
            if total is not None:
                rows = torch.arange(end.first, end.first + end.count, device=total.device)
                kernels.apply_rule(table.value, table.state, rows, total, self.rules.table)


def slice_of(end: Ends) -> slice:
    """Return the rows of a partition."""
    return slice(end.first, end.first + end.count)


def _clip(table: Tensor, rows: Tensor | slice, columns: int, most: float) -> None:
    """Scale the first columns of rows to a norm of at most ``most``, in place; rows may repeat."""
    old = table[rows]
    norm = old[:, :columns].norm(dim=1, keepdim=True)
    # All copies of a row are scaled alike.
    old[:, :columns] *= torch.where(norm > most, most / (norm + 1e-7), 1)
    table[rows] = old


class EdgeLosses:
    """The loss of one batch, from rows and parameters, differentiable.

    Args:
        step: of the group.
        parameters: by name.
        batch: the inputs.
        shape: of the batch.
        relations: on the host.
    """

    def __init__(
        self,
        step: PlainStep,
        parameters: Mapping[str, Tensor],
        batch: BatchTensors,
        shape: BatchShape,
        relations: Tensor,
    ) -> None:
        self._step, self._recipe, self._batch, self._shape = step, step.recipe, batch, shape
        self._parameters, self._relations = parameters, relations
        self._static = not step.recipe.reciprocal and bool(step.recipe.forwards)
        device = step.device
        edge = torch.arange(shape.edges, device=device).view(shape.chunks, shape.slots)
        self._valid = edge < batch.edges  # (C, m)
        column = torch.arange(shape.columns, device=device)
        # The answer, and columns of empty slots, are no negatives. (C, m, K)
        filled = torch.cat([self._valid, self._valid.new_ones(shape.chunks, shape.uniform)], dim=1)
        own = torch.arange(shape.slots, device=device).unsqueeze(1) == column
        self._absent = ~filled.unsqueeze(1) | own

    def total(self, leaves: Sequence[Tensor], every: Sequence[Tensor | None], ends: tuple[Ends, Ends]) -> Tensor:
        """Return the weighted loss.

        Args:
            leaves: rows of tails and of heads, ``[C K, W]``.
            every: all rows of tails' and of heads' partitions, with ``all_negs``.
            ends: where these are in their tables.
        """
        recipe, shape = self._recipe, self._shape
        tails, heads = (
            self._shifted(rows, name).view(shape.chunks, shape.columns, -1)
            for rows, name in zip(leaves, ("tail_shift", "head_shift"), strict=True)
        )
        all_tails, all_heads = (
            None if rows is None else self._shifted(rows, name)
            for rows, name in zip(every, ("tail_shift", "head_shift"), strict=True)
        )
        given_tails, given_heads = tails[:, : shape.slots], heads[:, : shape.slots]
        kinds = (recipe.n3, self._n3), (recipe.dura, self._dura), (recipe.relation_prediction, self._relation_loss)
        losses = [weight * loss(given_heads, given_tails) for weight, loss in kinds if weight]
        if self._static:
            tails = self._transformed("forwards", tails)
            all_tails = None if all_tails is None else self._transformed("forwards", all_tails.unsqueeze(0)).squeeze(0)
        if recipe.tail_negs:
            query = self._transformed("forwards", given_heads) if recipe.reciprocal else given_heads
            losses.append(self._side(query, tails, given_heads, all_tails, ends[0], 0))
        if recipe.head_negs:
            given = tails[:, : shape.slots]
            query = self._transformed("backwards", given) if recipe.reciprocal else given
            losses.append(self._side(query, heads, given_tails, all_heads, ends[1], 1))
        each = torch.stack(losses).sum(0)
        return torch.where(self._valid.flatten(), each.flatten() * self._batch.weight, 0).sum()

    def _side(self, query: Tensor, rows: Tensor, given: Tensor, every: Tensor | None, end: Ends, side: int) -> Tensor:
        """Return the loss of each edge ``[C, m]`` in one direction; ``side`` is that of the candidates."""
        shape, recipe = self._shape, self._recipe
        answers = rows[:, : shape.slots]
        true = self._pairs(query, answers)
        ids = self._batch.ids.view(2, shape.chunks, shape.columns)[:, :, : shape.slots]
        if every is not None:
            negative = self._all_pairs(query, every.unsqueeze(0))
            negative = negative.scatter(-1, (ids[side].long() - end.first).unsqueeze(-1), -torch.inf)
        elif recipe.num_batch_negs:
            negative = self._all_pairs(query, rows).masked_fill(self._absent, -torch.inf)
        else:
            negative = self._all_pairs(query, rows[:, shape.slots :])
        if recipe.self_negs:
            loops = ids[0] == ids[1]
            own = self._pairs(query, given).masked_fill(loops, -torch.inf)
            negative = torch.cat([negative, own.unsqueeze(-1)], dim=-1)
        return scores.loss_of(recipe.loss, true, negative, recipe.margin)

    # ------------------------------------------------------------------------------------------ rows and scores

    def _shifted(self, rows: Tensor, name: str) -> Tensor:
        shift = self._parameters.get(name)
        if shift is None:
            return rows
        d = self._recipe.dimension
        return torch.cat([rows[:, :d] + shift, rows[:, d:]], dim=1)

    def _pairs(self, queries: Tensor, candidates: Tensor) -> Tensor:
        d = self._recipe.dimension
        product = scores.pairs(self._recipe.comparator, queries[..., :d], candidates[..., :d])
        return product + queries[..., d] + candidates[..., d] if self._recipe.bias else product

    def _all_pairs(self, queries: Tensor, candidates: Tensor) -> Tensor:
        d = self._recipe.dimension
        pair = queries[..., :d], candidates[..., :d]
        product = scores.all_pairs(self._recipe.comparator, *pair, self._step.low)
        if not self._recipe.bias:
            return product
        return product + queries[..., d].unsqueeze(-1) + candidates[..., d].unsqueeze(-2)

    def _transformed(self, direction: str, rows: Tensor) -> Tensor:
        """Transform rows ``[C, n, W]`` by the relations of the edges, or by the one relation of a static batch."""
        d, name = self._recipe.dimension, self._recipe.operator
        if name == "none":
            return rows
        x, bias = rows[..., :d], rows[..., d:]
        of = {
            parameter: self._parameters[f"{direction}.{parameter}"]
            for parameter in ("vector", "matrix", "real", "imaginary", "angle")
            if f"{direction}.{parameter}" in self._parameters
        }
        if name in ("linear", "affine") and not self._static:
            y = self._products(x, of["matrix"])
            if "vector" in of:
                y = y + self._by_edge(of["vector"])
        elif name in ("linear", "affine"):
            y = x @ self._by_edge(of["matrix"]).squeeze(0).transpose(-1, -2)
            if "vector" in of:
                y = y + self._by_edge(of["vector"])
        elif name in ("complex_diagonal", "rotation"):
            real, imaginary = x.chunk(2, dim=-1)
            if name == "rotation":
                angle = self._by_edge(of["angle"])
                a, b = angle.cos(), angle.sin()
            else:
                a, b = self._by_edge(of["real"]), self._by_edge(of["imaginary"])
            y = torch.cat([real * a - imaginary * b, real * b + imaginary * a], dim=-1)
        else:
            v = self._by_edge(of["vector"])
            y = x + v if name == "translation" else x * v
        return torch.cat([y, bias], dim=-1) if self._recipe.bias else y

    def _by_edge(self, parameter: Tensor) -> Tensor:
        """Return the parameter of each edge ``[C, m, ...]``, or that of a static batch's relation ``[1, 1, ...]``."""
        relation = self._batch.relation.long()
        if self._static:
            return parameter.index_select(0, relation[:1]).unsqueeze(0)
        return parameter.index_select(0, relation).view(self._shape.chunks, self._shape.slots, *parameter.shape[1:])

    def _products(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Multiply each edge's row by the matrix of its relation: one product per relation that occurs."""
        order = self._relations.argsort(stable=True)
        relations, counts = self._relations[order].unique_consecutive(return_counts=True)
        position = order.to(x.device)
        pieces = x.flatten(0, 1)[position].split(counts.tolist())
        products = [piece @ matrix[r].T for piece, r in zip(pieces, relations.tolist(), strict=True)]
        return torch.cat(products)[position.argsort()].view(x.shape)

    def _n3(self, heads: Tensor, tails: Tensor) -> Tensor:
        """Return the N3 norm of each edge, ``[C, m]``."""
        d, recipe = self._recipe.dimension, self._recipe
        parts = [self._magnitudes(rows[..., :d]) for rows in (heads, tails)]
        for direction in ("forwards", "backwards"):
            if f"{direction}.real" in self._parameters:
                pair = (self._by_edge(self._parameters[f"{direction}.{name}"]) for name in ("real", "imaginary"))
                parts.append(_modulus(*pair))
            elif recipe.operator in ("translation", "diagonal") and f"{direction}.vector" in self._parameters:
                parts.append(self._by_edge(self._parameters[f"{direction}.vector"]).abs())
        norms = [part.pow(3).sum(-1) for part in parts]
        return torch.stack([norm.expand(heads.shape[:2]) for norm in norms]).sum(0)

    def _dura(self, heads: Tensor, tails: Tensor) -> Tensor:
        """Return the DURA norm of each edge, ``[C, m]``; of both directions if reciprocal."""
        d, name = self._recipe.dimension, self._recipe.operator
        heads, tails = heads[..., :d], tails[..., :d]
        squares = []
        for direction, (rows, others) in self._transformed_ends(heads, tails).items():
            moved = self._transformed(direction, rows)
            if name == "linear":
                back = self._products(others, self._parameters[f"{direction}.matrix"].transpose(1, 2))
            else:
                # Of an operator on columns the adjoint has the same absolute values.
                back = self._transformed(direction, others)
            squares += [rows, others, moved, back]
        return torch.stack([each.square().sum(-1) for each in squares]).sum(0)

    def _transformed_ends(self, heads: Tensor, tails: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return by direction the ends that its operator transforms, and the others."""
        return (
            {"forwards": (heads, tails), "backwards": (tails, heads)}
            if self._recipe.reciprocal
            else {"forwards": (tails, heads)}
        )

    def _relation_loss(self, heads: Tensor, tails: Tensor) -> Tensor:
        """Return the cross-entropy of predicting each edge's relation, ``[C, m]``; of both directions if reciprocal."""
        d, name = self._recipe.dimension, self._recipe.operator
        heads, tails = (rows[..., :d].flatten(0, 1) for rows in (heads, tails))
        losses = []
        for direction, (rows, others) in self._transformed_ends(heads, tails).items():
            parameters = [self._parameters[f"{direction}.{key}"] for key in PARAMETERS[name]]
            logits = pairs_of(name, rows, others) @ torch.cat(parameters, dim=-1).T
            losses.append(F.cross_entropy(logits, self._batch.relation.long(), reduction="none"))
        return torch.stack(losses).sum(0).view(self._shape.chunks, self._shape.slots)

    def _magnitudes(self, rows: Tensor) -> Tensor:
        is_complex = self._recipe.operator in ("complex_diagonal", "rotation")
        return _modulus(*rows.chunk(2, dim=-1)) if is_complex else rows.abs()


def _modulus(real: Tensor, imaginary: Tensor) -> Tensor:
    """Return absolute values; the least positive number keeps the root's gradient finite at 0."""
    return (real.square() + imaginary.square()).clamp(min=torch.finfo(real.dtype).tiny).sqrt()
