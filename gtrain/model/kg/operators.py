"""Relation operators: how a relation transforms the embedding of an edge's end before the ends are compared.

They are those of PyTorch-BigGraph (Lerer et al. 2019, section 3), initialized as the identity, as there, or at random.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from gtrain.errors import ConfigError


class Operator(nn.Module):
    """Transforms rows, each group of them by one relation.

    Args:
        num_relations: R.
        dim: columns of a row, D.

    Shapes:
        rows ``[G, n, D]``, relation int64 ``[G]``; result ``[G, n, D]``.
    """

    def __init__(self, num_relations: int, dim: int) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        """Return the transformed rows."""

    def magnitudes(self, rows: Tensor) -> Tensor:
        """Return the absolute values of a row's numbers ``[..., D]``, which the N3 regularizer cubes."""
        return rows.abs()

    def relation_magnitudes(self, relation: Tensor) -> Tensor | None:
        """Return those of the parameters of relations ``[B]``; None: they are not regularized."""
        return None


class Identity(Operator):
    """``g(x) = x`` for all relations."""

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        return rows


class Translation(Operator):
    """``g(x) = x + v`` (TransE, Bordes et al. 2013)."""

    initial: ClassVar[float] = 0.0

    def __init__(self, num_relations: int, dim: int) -> None:
        super().__init__(num_relations, dim)
        self.vector = nn.Parameter(torch.full((num_relations, dim), self.initial))

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        return rows + self.vector[relation].unsqueeze(1)

    def relation_magnitudes(self, relation: Tensor) -> Tensor | None:
        return self.vector[relation].abs()


class Diagonal(Translation):
    """``g(x) = v * x`` (DistMult with the dot comparator, Yang et al. 2015)."""

    initial = 1.0

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        return rows * self.vector[relation].unsqueeze(1)


class Linear(Operator):
    """``g(x) = A x`` (RESCAL with the dot comparator, Nickel et al. 2011)."""

    def __init__(self, num_relations: int, dim: int) -> None:
        super().__init__(num_relations, dim)
        self.matrix = nn.Parameter(torch.eye(dim).repeat(num_relations, 1, 1))

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        """Compute one product per relation that occurs: a matrix per group of rows would not fit into memory."""
        order = relation.argsort()
        relations, counts = relation[order].unique_consecutive(return_counts=True)
        pieces = rows[order].split(counts.tolist())
        products = [piece @ self.matrix[r].T for piece, r in zip(pieces, relations.tolist(), strict=True)]
        return torch.cat(products)[order.argsort()] if products else rows


class Affine(Linear):
    """``g(x) = A x + v`` (TransR, Lin et al. 2015)."""

    def __init__(self, num_relations: int, dim: int) -> None:
        super().__init__(num_relations, dim)
        self.vector = nn.Parameter(torch.zeros(num_relations, dim))

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        return super().forward(rows, relation) + self.vector[relation].unsqueeze(1)


class ComplexDiagonal(Operator):
    """``g(x) = v * x`` over complex numbers (ComplEx with the dot comparator, Trouillon et al. 2016).

    The first half of a row is the real part, the second the imaginary one.

    Raises:
        ConfigError: the dimension is odd.
    """

    def __init__(self, num_relations: int, dim: int) -> None:
        super().__init__(num_relations, dim)
        if dim % 2:
            raise ConfigError(
                f"model.dimension={dim} with model.operator=complex_diagonal: {dim} / 2 = {dim / 2} complex numbers.",
                hint=f"set model.dimension={dim + 1}.",
            )
        self.real = nn.Parameter(torch.ones(num_relations, dim // 2))
        self.imaginary = nn.Parameter(torch.zeros(num_relations, dim // 2))

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        real, imaginary = rows.chunk(2, dim=-1)
        a, b = self.real[relation].unsqueeze(1), self.imaginary[relation].unsqueeze(1)
        return torch.cat([real * a - imaginary * b, real * b + imaginary * a], dim=-1)

    def magnitudes(self, rows: Tensor) -> Tensor:
        """Absolute values of the complex numbers ``[..., D / 2]``."""
        return _modulus(*rows.chunk(2, dim=-1))

    def relation_magnitudes(self, relation: Tensor) -> Tensor | None:
        return _modulus(self.real[relation], self.imaginary[relation])


def _modulus(real: Tensor, imaginary: Tensor) -> Tensor:
    """Return the absolute values; clamping at the least positive number keeps the root's gradient finite at 0."""
    return (real.square() + imaginary.square()).clamp(min=torch.finfo(real.dtype).tiny).sqrt()


OPERATORS: dict[str, type[Operator]] = {
    "none": Identity,
    "translation": Translation,
    "diagonal": Diagonal,
    "linear": Linear,
    "affine": Affine,
    "complex_diagonal": ComplexDiagonal,
}


def make_operator(name: str, num_relations: int, dim: int, init_scale: float | None = None) -> Operator:
    """Return the operator of this name.

    Args:
        name: of the operator.
        num_relations: R.
        dim: columns of a row.
        init_scale: standard deviation of the initial parameters, whose mean is 0; None: the identity.

    Raises:
        ConfigError: the name is unknown, or the operator does not allow the dimension.
    """
    if name not in OPERATORS:
        raise ConfigError(f"model.operator={name} was set.", hint=f"the operators are {', '.join(OPERATORS)}.")
    operator = OPERATORS[name](num_relations, dim)
    if init_scale is not None:
        for parameter in operator.parameters():
            nn.init.normal_(parameter, std=init_scale)
    return operator
