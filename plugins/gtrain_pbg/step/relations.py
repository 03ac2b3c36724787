"""Relation operators over the rows of a batch, forward and backward, and the update of their parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gtrain_pbg.kernels import operators as kernels
from gtrain_pbg.kernels import updates
from gtrain_pbg.kernels.updates import RuleNumbers
from gtrain_pbg.step.layout import Array, BatchLayout, Workspace, bits

OPERATOR_CODES = {
    "none": kernels.NONE,
    "translation": kernels.TRANSLATION,
    "diagonal": kernels.DIAGONAL,
    "complex_diagonal": kernels.COMPLEX,
    "rotation": kernels.COMPLEX,
}
PARAMETERS = {
    "none": (),
    "translation": ("vector",),
    "diagonal": ("vector",),
    "linear": ("matrix",),
    "affine": ("matrix", "vector"),
    "complex_diagonal": ("real", "imaginary"),
    "rotation": ("angle",),
}
"""Names of an operator's parameters."""
KERNEL_RULES = {"sgd": updates.SGD, "adagrad": updates.ADAGRAD, "rowwise_adagrad": updates.ROWWISE}


@dataclass
class UpdateRule:
    """An optimizer's rule and its hyperparameters; see ``gtrain.nn.rules``.

    Attributes:
        name: ``sgd``, ``adagrad`` or ``rowwise_adagrad``.
        lr, eps, weight_decay: as there.
    """

    name: str
    lr: float
    eps: float = 1e-10
    weight_decay: float = 0.0

    @property
    def numbers(self) -> RuleNumbers:
        """The same for kernels."""
        return RuleNumbers(KERNEL_RULES[self.name], self.lr, self.eps, self.weight_decay)


def state_width(rule: str, width: int) -> int:
    """Return how many numbers of optimizer state a row of this width has."""
    return {"sgd": 0, "adagrad": width, "rowwise_adagrad": 1}[rule]


@dataclass
class RelationWeights:
    """One parameter: a row for each relation.

    Attributes:
        value: ``[R, ...]``; may be shared with other processes.
        state: ``[R, s]``, of the optimizer.
        gradient: ``[R, ...]``, of this process, zero between steps.
    """

    value: Tensor
    state: Tensor
    gradient: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.gradient = torch.zeros_like(self.value)

    def update(self, touched: Array, count: int, rule: UpdateRule) -> None:
        """Apply the gradients of the first ``count`` relations of ``touched``, and reset them."""
        gradient, value, state = (t.view(len(t), -1).numpy() for t in (self.gradient, self.value, self.state))
        updates.update_rows(touched, count, gradient, value, state, rule.numbers)


class RelationOperator:
    """The operator of one direction.

    Args:
        name: of the operator, ``model.operator``.
        weights: its parameters by name.
        work: buffers.

    Attributes:
        arrays: the operator for kernels; without parameters if it has matrices.
    """

    def __init__(self, name: str, weights: dict[str, RelationWeights], work: Workspace) -> None:
        assert tuple(weights) == PARAMETERS[name], (name, tuple(weights))
        self.name, self.weights = name, weights
        self.is_linear = name in ("linear", "affine")
        empty = RelationWeights(torch.empty(1, 1, dtype=work.dtype), torch.empty(1, 0))
        # The real and imaginary parts of the rotations of the batch's relations, as an operator for kernels.
        self._turns: tuple[RelationWeights, RelationWeights] | None = None
        if name == "rotation":
            angle = weights["angle"].value
            self._turns = tuple(RelationWeights(torch.empty_like(angle), torch.empty(len(angle), 0)) for _ in range(2))  # type: ignore[assignment]
        pair = list(self._turns or ([] if self.is_linear else weights.values())) or [empty]
        first, second = pair[0], pair[-1]
        arrays = (tensor.numpy() for tensor in (first.value, second.value, first.gradient, second.gradient))
        self.arrays = kernels.OperatorArrays(OPERATOR_CODES.get(name, kernels.NONE), *arrays)

    def prepare(self, relation: Tensor) -> None:
        """Read the parameters of a batch's relations ``[B]``; called before its first :meth:`forward`."""
        if self._turns is not None:
            rows = relation.unique()
            angle = self.weights["angle"].value[rows]
            for turn, value in zip(self._turns, (angle.cos(), angle.sin()), strict=True):
                turn.value[rows] = value

    def forward(self, rows: Tensor, layout: BatchLayout, relation: Tensor, result: Tensor, low: Tensor | None) -> None:
        """Transform the rows of a side's edges ``[Z, D]`` by their relations ``[B]`` into ``[B, D]``."""
        if self.is_linear:
            matrix, vector = self.weights["matrix"].value, self.weights.get("vector")
            for r, edges in self._by_relation(relation):
                product = rows[layout.spots[edges]] @ matrix[r].T
                result[edges] = product if vector is None else product + vector.value[r]
            if low is not None:
                low.copy_(result)
            return
        target = bits(torch.empty(1, 1, dtype=torch.bfloat16) if low is None else low)
        arrays = self.arrays, rows.numpy(), layout, relation.numpy(), result.numpy(), target
        kernels.transform(*arrays, low is not None)

    def backward(self, gradient: Tensor, rows: Tensor, layout: BatchLayout, relation: Tensor, by_row: Tensor) -> None:
        """From the gradient by the results ``[B, D]``, write that by the rows ``[B, D]`` and add that by parameters."""
        if not self.is_linear:
            edges = relation.numpy()
            kernels.transform_backward(self.arrays, bits(gradient), rows.numpy(), layout, edges, by_row.numpy())
            return
        matrix, vector = self.weights["matrix"], self.weights.get("vector")
        for r, members in self._by_relation(relation):
            by_result = gradient[members].to(rows.dtype)
            by_row[members] = by_result @ matrix.value[r]
            matrix.gradient[r].addmm_(by_result.T, rows[layout.spots[members]])
            if vector is not None:
                vector.gradient[r] += by_result.sum(0)

    @staticmethod
    def _by_relation(relation: Tensor) -> list[tuple[int, Tensor]]:
        """Return each relation of edges ``[B]`` with its edges: one matrix product each."""
        # The common case of one relation per batch needs no sort.
        if len(relation) and bool((relation == relation[0]).all()):
            return [(int(relation[0]), torch.arange(len(relation)))]
        order = relation.argsort(stable=True)
        relations, counts = relation[order].unique_consecutive(return_counts=True)
        return list(zip(relations.tolist(), order.split(counts.tolist()), strict=True))

    def n3(
        self,
        ends: tuple[Tensor, Tensor],
        by_ends: tuple[Tensor, Tensor],
        relation: Tensor,
        weight: Tensor,
        with_rows: bool,
    ) -> float:
        """Return the weighted N3 norms of edges, and add their gradients; matrices are not regularized.

        Args:
            ends: rows of heads and tails, ``[B, D]`` each.
            by_ends: the gradients by them.
            relation, weight: ``[B]``.
            with_rows: whether heads and tails count, or the parameters alone.
        """
        heads_tails, gradients = (tuple(end.numpy() for end in pair) for pair in (ends, by_ends))
        with_relation = bool(self.weights) and not self.is_linear and self._turns is None
        edges = relation.numpy(), weight.numpy()
        norm: float = kernels.n3(self.arrays, heads_tails, gradients, *edges, with_rows, with_relation)
        return norm

    def dura(
        self,
        ends: tuple[Tensor, Tensor],
        by_ends: tuple[Tensor, Tensor],
        relation: Tensor,
        weight: Tensor,
    ) -> float:
        """Return the weighted DURA norms of edges by this operator, and add their gradients.

        Args:
            ends: the rows that the operator transforms, and the others, ``[B, D]`` each.
            by_ends: the gradients by them.
            relation, weight: ``[B]``.
        """
        if not self.is_linear:
            rows, gradients = (tuple(end.numpy() for end in pair) for pair in (ends, by_ends))
            norm: float = kernels.dura(self.arrays, rows, gradients, relation.numpy(), weight.numpy())
            return norm
        matrix, total = self.weights["matrix"], 0.0
        for r, members in self._by_relation(relation):
            transform, factor = matrix.value[r], weight[members].unsqueeze(1)
            given, other = (end[members] for end in ends)
            moved, back = given @ transform.T, other @ transform
            total += float(sum((factor * rows.square()).sum() for rows in (given, other, moved, back)))
            factor = 2 * factor
            by_ends[0][members] += factor * (given + moved @ transform)
            by_ends[1][members] += factor * (other + back @ transform.T)
            matrix.gradient[r].addmm_((factor * moved).T, given).addmm_((factor * other).T, back)
        return total

    def update(self, touched: Array, count: int, rule: UpdateRule) -> None:
        """Apply the gradients of these relations."""
        if self._turns is not None:
            rows = torch.from_numpy(touched[:count])
            real, imaginary = self._turns
            # With z = exp(i v): dz / dv = i z.
            by_angle = real.value[rows] * imaginary.gradient[rows] - imaginary.value[rows] * real.gradient[rows]
            self.weights["angle"].gradient[rows] = by_angle
            real.gradient[rows] = imaginary.gradient[rows] = 0.0
        for weights in self.weights.values():
            weights.update(touched, count, rule)
