"""Relation operators over the rows of a batch, forward and backward, and the update of their parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain_pbg.kernels import operators as kernels
from gtrain_pbg.kernels import updates
from gtrain_pbg.step.layout import BatchLayout, Floats, Workspace, bits

OPERATOR_CODES = {
    "none": kernels.NONE,
    "translation": kernels.TRANSLATION,
    "diagonal": kernels.DIAGONAL,
    "complex_diagonal": kernels.COMPLEX,
}
_NAMES = {
    "none": (),
    "translation": ("vector",),
    "diagonal": ("vector",),
    "linear": ("matrix",),
    "affine": ("matrix", "vector"),
    "complex_diagonal": ("real", "imaginary"),
}


@dataclass
class UpdateRule:
    """An optimizer's rule with its numbers; see ``gtrain.nn.rules``.

    Attributes:
        kind: ``sgd``, ``adagrad`` or ``rowwise_adagrad``.
        lr, eps, weight_decay: as there.
    """

    kind: str
    lr: float
    eps: float = 1e-10
    weight_decay: float = 0.0

    @property
    def numbers(self) -> tuple[int, float, float, float]:
        """As kernels take them."""
        return KERNEL_RULES[self.kind], self.lr, self.eps, self.weight_decay


KERNEL_RULES = {"sgd": updates.SGD, "adagrad": updates.ADAGRAD, "rowwise_adagrad": updates.ROWWISE}


def state_width(kind: str, width: int) -> int:
    """Numbers of optimizer state for each row of a table."""
    return {"sgd": 0, "adagrad": width, "rowwise_adagrad": 1}[kind]


@dataclass
class RelationWeights:
    """One parameter: a row for each relation.

    Attributes:
        value: ``[R, ...]``; may be shared with other processes.
        state: ``[R, s]``, the optimizer's.
        gradient: ``[R, ...]``, of this process, zero between steps.
    """

    value: Tensor
    state: Tensor
    gradient: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.gradient = torch.zeros_like(self.value)

    def update(self, touched: Floats, count: int, rule: UpdateRule) -> None:
        """Apply the gradients of these relations."""
        gradient, value, state = (t.view(len(t), -1).numpy() for t in (self.gradient, self.value, self.state))
        updates.update_rows(touched, count, gradient, value, state, *rule.numbers)


class RelationOperator:
    """The operator of one direction.

    Args:
        name: the operator.
        weights: its parameters by name.
        work: buffers.
    """

    def __init__(self, name: str, weights: dict[str, RelationWeights], work: Workspace) -> None:
        assert tuple(weights) == _NAMES[name], (name, tuple(weights))
        self.name, self.weights, self._work = name, weights, work
        self._pair = [weights[key] for key in _NAMES[name]] * 2

    @property
    def is_linear(self) -> bool:
        """Whether it has matrices."""
        return self.name in ("linear", "affine")

    def forward(self, rows: Tensor, layout: BatchLayout, relation: Tensor, result: Tensor, low: Tensor | None) -> None:
        """Transform the rows of a side's edges ``[Z, D]`` by their relations ``[B]`` into ``[B, D]``."""
        if self.is_linear:
            self._forward_linear(rows, layout, relation, result)
            if low is not None:
                low.copy_(result)
            return
        a, b = (weights.value.numpy() for weights in self._pair[:2])
        target = bits(torch.empty(1, 1, dtype=torch.bfloat16) if low is None else low)
        place = (layout.places, layout.uniform, relation.numpy())
        kernels.transform(
            OPERATOR_CODES[self.name], rows.numpy(), *place, a, b, result.numpy(), target, low is not None
        )

    def backward(self, gradient: Tensor, rows: Tensor, layout: BatchLayout, relation: Tensor, by_row: Tensor) -> None:
        """From the gradient by the results ``[B, D]`` to those by rows ``[B, D]`` and parameters (added)."""
        if self.is_linear:
            self._backward_linear(gradient, rows, layout, relation, by_row)
            return
        a, b = (weights.value.numpy() for weights in self._pair[:2])
        by_a, by_b = (weights.gradient.numpy() for weights in self._pair[:2])
        place = (layout.places, layout.uniform, relation.numpy())
        kernels.transform_back(
            OPERATOR_CODES[self.name], bits(gradient), rows.numpy(), *place, a, b, by_row.numpy(), by_a, by_b
        )

    def _groups(self, layout: BatchLayout, relation: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Each relation with its edges and their rows; one product of matrices each."""
        if layout.edges and bool((relation == relation[0]).all()):
            return [(int(relation[0]), torch.arange(layout.edges), layout.spots)]
        order = relation.argsort(stable=True)
        found, counts = relation[order].unique_consecutive(return_counts=True)
        edges = order.split(counts.tolist())
        return [(r, some, layout.spots[some]) for r, some in zip(found.tolist(), edges, strict=True)]

    def _forward_linear(self, rows: Tensor, layout: BatchLayout, relation: Tensor, result: Tensor) -> None:
        matrix, vector = self.weights["matrix"].value, self.weights.get("vector")
        for r, edges, spots in self._groups(layout, relation):
            found = rows[spots] @ matrix[r].T
            result[edges] = found if vector is None else found + vector.value[r]

    def _backward_linear(
        self, gradient: Tensor, rows: Tensor, layout: BatchLayout, relation: Tensor, by_row: Tensor
    ) -> None:
        matrix, vector = self.weights["matrix"], self.weights.get("vector")
        for r, edges, spots in self._groups(layout, relation):
            some = gradient[edges].to(rows.dtype)
            by_row[edges] = some @ matrix.value[r]
            matrix.gradient[r].addmm_(some.T, rows[spots])
            if vector is not None:
                vector.gradient[r] += some.sum(0)

    def regularize(
        self,
        sides: tuple[Tensor, Tensor],
        layout: BatchLayout,
        relation: Tensor,
        weight: Tensor,
        by_rows: tuple[Tensor, Tensor],
        with_rows: bool,
    ) -> float:
        """The weighted N3 norms of edges, and their gradients, added."""
        complex_numbers = self.name == "complex_diagonal"
        with_relation = self.name in OPERATOR_CODES and bool(self.weights)
        nothing: Any = np.empty((1, 1), dtype=sides[0].numpy().dtype)
        a, b = (w.value.numpy() for w in self._pair[:2]) if with_relation else (nothing, nothing)
        by_a, by_b = (w.gradient.numpy() for w in self._pair[:2]) if with_relation else (nothing, nothing)
        (heads, tails), (by_heads, by_tails) = sides, by_rows
        found: float = kernels.regularize(
            complex_numbers,
            heads.numpy(),
            tails.numpy(),
            layout.places,
            layout.uniform,
            relation.numpy(),
            weight.numpy(),
            a,
            b,
            by_heads.numpy(),
            by_tails.numpy(),
            by_a,
            by_b,
            with_rows,
            with_relation,
        )
        return found

    def update(self, touched: Floats, count: int, rule: UpdateRule) -> None:
        """Apply the gradients of these relations."""
        for weights in self.weights.values():
            weights.update(touched, count, rule)
