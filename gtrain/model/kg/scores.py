"""Scores of edges from embeddings: a relation operator, a comparator, and biases.

A relation operator transforms the embedding of an edge's end before the ends are compared; it is initialized as the
identity, or at random. A comparator measures the similarity of two embeddings. Both are those of PyTorch-BigGraph
(Lerer et al. 2019, section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtrain.errors import ConfigError

TINY = 1e-30
"""Least squared distance: keeps the root's gradient finite where two rows are equal."""


class Operator(nn.Module):
    """Transforms rows, each group of them by one relation.

    Args:
        num_relations: R.
        dim: columns of a row, D.

    Shapes:
        rows ``[G, n, D]``, relation int64 ``[G]``; result ``[G, n, D]``.
    """

    preserves_norms: ClassVar[bool] = False
    """Whether transformed rows have the norms of the rows."""

    def __init__(self, num_relations: int, dim: int) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        """Return the transformed rows."""

    @abstractmethod
    def adjoint(self, rows: Tensor, relation: Tensor) -> Tensor:
        """Return rows whose inner product with any ``x`` is that of the given rows and ``g(x)``, plus a constant."""

    def inverse(self, rows: Tensor, relation: Tensor) -> Tensor | None:
        """Return rows as far from any ``x`` as the given rows are from ``g(x)``; None if g changes distances."""
        return None

    def magnitudes(self, rows: Tensor) -> Tensor:
        """Return the absolute values of a row's numbers ``[..., D]``, which the N3 regularizer cubes."""
        return rows.abs()

    def relation_magnitudes(self, relation: Tensor) -> Tensor | None:
        """Return those of the parameters of relations ``[B]``; None: they are not regularized."""
        return None

    def linear_form(self, rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Write the inner products of transformed rows and others as products with the parameters of relations.

        Returns:
            Pairs ``[B, K]`` and parameters ``[R, K]``. The inner product of ``g_r(rows[b])`` and ``others[b]`` is that
            of ``pairs[b]`` and ``parameters[r]``, plus a number that is the same for all relations.

        Shapes:
            rows and others ``[B, D]``.
        """
        raise NotImplementedError


class Identity(Operator):
    """``g(x) = x`` for all relations."""

    preserves_norms = True

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        return rows

    def adjoint(self, rows: Tensor, relation: Tensor) -> Tensor:
        return rows

    def inverse(self, rows: Tensor, relation: Tensor) -> Tensor:
        return rows


class Translation(Operator):
    """``g(x) = x + v`` (TransE, Bordes et al. 2013)."""

    initial: ClassVar[float] = 0.0

    def __init__(self, num_relations: int, dim: int) -> None:
        super().__init__(num_relations, dim)
        self.vector = nn.Parameter(torch.full((num_relations, dim), self.initial))

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        return rows + self.vector[relation].unsqueeze(1)

    def adjoint(self, rows: Tensor, relation: Tensor) -> Tensor:
        return rows

    def inverse(self, rows: Tensor, relation: Tensor) -> Tensor | None:
        return rows - self.vector[relation].unsqueeze(1)

    def relation_magnitudes(self, relation: Tensor) -> Tensor | None:
        return self.vector[relation].abs()

    def linear_form(self, rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        return others, self.vector


class Diagonal(Translation):
    """``g(x) = v * x`` (DistMult with the dot comparator, Yang et al. 2015)."""

    initial = 1.0

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        return rows * self.vector[relation].unsqueeze(1)

    def adjoint(self, rows: Tensor, relation: Tensor) -> Tensor:
        return self(rows, relation)

    def inverse(self, rows: Tensor, relation: Tensor) -> Tensor | None:
        return None

    def linear_form(self, rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        return rows * others, self.vector


class Linear(Operator):
    """``g(x) = A x`` (RESCAL with the dot comparator, Nickel et al. 2011)."""

    def __init__(self, num_relations: int, dim: int) -> None:
        super().__init__(num_relations, dim)
        self.matrix = nn.Parameter(torch.eye(dim).repeat(num_relations, 1, 1))

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        # Embeddings are rows: A x becomes x @ A.T.
        return self._product(rows, relation, self.matrix.transpose(1, 2))

    def adjoint(self, rows: Tensor, relation: Tensor) -> Tensor:
        return self._product(rows, relation, self.matrix)

    @staticmethod
    def _product(rows: Tensor, relation: Tensor, matrices: Tensor) -> Tensor:
        """Compute one product per relation that occurs: a matrix per group of rows would not fit into memory."""
        order = relation.argsort()
        relations, counts = relation[order].unique_consecutive(return_counts=True)
        pieces = rows[order].split(counts.tolist())
        products = [piece @ matrices[r] for piece, r in zip(pieces, relations.tolist(), strict=True)]
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
        _check_even("complex_diagonal", dim)
        self.real = nn.Parameter(torch.ones(num_relations, dim // 2))
        self.imaginary = nn.Parameter(torch.zeros(num_relations, dim // 2))

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        return _complex_product(rows, self.real[relation].unsqueeze(1), self.imaginary[relation].unsqueeze(1))

    def adjoint(self, rows: Tensor, relation: Tensor) -> Tensor:
        return _complex_product(rows, self.real[relation].unsqueeze(1), -self.imaginary[relation].unsqueeze(1))

    def magnitudes(self, rows: Tensor) -> Tensor:
        """Absolute values of the complex numbers ``[..., D / 2]``."""
        return _modulus(*rows.chunk(2, dim=-1))

    def relation_magnitudes(self, relation: Tensor) -> Tensor | None:
        return _modulus(self.real[relation], self.imaginary[relation])

    def linear_form(self, rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs are ``conj(rows) * others``: the inner product is the real part of ``v * rows * conj(others)``."""
        (x, y), (z, w) = rows.chunk(2, dim=-1), others.chunk(2, dim=-1)
        return torch.cat([x * z + y * w, x * w - y * z], dim=-1), torch.cat([self.real, self.imaginary], dim=-1)


class Rotation(Operator):
    """``g(x) = exp(i v) * x`` over complex numbers (RotatE with the l2 comparator, Sun et al. 2019).

    The first half of a row is the real part, the second the imaginary one. Angles ``v`` are not regularized.

    Raises:
        ConfigError: the dimension is odd.
    """

    def __init__(self, num_relations: int, dim: int) -> None:
        super().__init__(num_relations, dim)
        _check_even("rotation", dim)
        self.angle = nn.Parameter(torch.zeros(num_relations, dim // 2))

    preserves_norms = True

    def forward(self, rows: Tensor, relation: Tensor) -> Tensor:
        return self._rotated(rows, self.angle[relation])

    def adjoint(self, rows: Tensor, relation: Tensor) -> Tensor:
        return self._rotated(rows, -self.angle[relation])

    def inverse(self, rows: Tensor, relation: Tensor) -> Tensor:
        return self.adjoint(rows, relation)

    @staticmethod
    def _rotated(rows: Tensor, angle: Tensor) -> Tensor:
        return _complex_product(rows, angle.cos().unsqueeze(1), angle.sin().unsqueeze(1))

    def magnitudes(self, rows: Tensor) -> Tensor:
        """Absolute values of the complex numbers ``[..., D / 2]``."""
        return _modulus(*rows.chunk(2, dim=-1))


def _check_even(operator: str, dim: int) -> None:
    if dim % 2:
        raise ConfigError(
            f"model.dimension={dim} with model.operator={operator}: {dim} / 2 = {dim / 2} complex numbers.",
            hint=f"set model.dimension={dim + 1}.",
        )


def _complex_product(rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Multiply the complex numbers of rows by ``a + ib``."""
    real, imaginary = rows.chunk(2, dim=-1)
    return torch.cat([real * a - imaginary * b, real * b + imaginary * a], dim=-1)


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
    "rotation": Rotation,
}


BILINEAR = ("diagonal", "linear", "complex_diagonal")
"""Operators that multiply: inner products are linear in each end, and :meth:`EdgeScores.dura_norm` bounds them."""
PREDICTS_RELATIONS = ("translation", "diagonal", "complex_diagonal")
"""Operators with a :meth:`Operator.linear_form`: with inner products, the scores of an edge's ends with all relations
are one matrix product."""


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


class Comparator(ABC):
    """Scores pairs of rows; a higher score means more similar rows."""

    @abstractmethod
    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the score of each pair: ``[..., D]`` and ``[..., D]`` to ``[...]``."""

    @abstractmethod
    def all_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the scores of all pairs: ``[..., m, D]`` and ``[..., n, D]`` to ``[..., m, n]``."""

    def in_order(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        """Return numbers that order each row as ``all_pairs(left, right) + bias`` does.

        Shapes:
            left ``[m, D]``, right ``[n, D]``, bias ``[n]``; result ``[m, n]``.
        """
        scores = self.all_pairs(left, right)
        return scores if bias is None else scores + bias

    @abstractmethod
    def untransformed(self, operator: Operator, left: Tensor, relation: Tensor) -> Tensor | None:
        """Return rows that order any others as ``left`` orders those that an operator has transformed.

        None: no row does with this operator. Shapes are those of :class:`Operator`.
        """


class Dot(Comparator):
    """The inner product."""

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(-1)

    def all_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right.transpose(-1, -2)

    def in_order(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        return left @ right.T if bias is None else torch.addmm(bias, left, right.T)

    def untransformed(self, operator: Operator, left: Tensor, relation: Tensor) -> Tensor | None:
        return operator.adjoint(left, relation)


class Cosine(Dot):
    """The cosine of the angle."""

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return super().pairs(F.normalize(left, dim=-1), F.normalize(right, dim=-1))

    def all_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return super().all_pairs(F.normalize(left, dim=-1), F.normalize(right, dim=-1))

    def in_order(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        return super().in_order(F.normalize(left, dim=-1), F.normalize(right, dim=-1), bias)

    def untransformed(self, operator: Operator, left: Tensor, relation: Tensor) -> Tensor | None:
        return operator.adjoint(left, relation) if operator.preserves_norms else None


class SquaredL2(Comparator):
    """Minus the squared Euclidean distance; of all pairs as ``2 a.b - a.a - b.b``, without an array ``[m, n, D]``."""

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return -(left - right).square().sum(-1)

    def all_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = left.square().sum(-1).unsqueeze(-1), right.square().sum(-1).unsqueeze(-2)
        return 2 * (left @ right.transpose(-1, -2)) - a - b

    def in_order(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        # A row's a.a is the same for all others.
        own = right.square().sum(-1) if bias is None else right.square().sum(-1) - bias
        return torch.addmm(own, left, right.T, beta=-1, alpha=2)

    def untransformed(self, operator: Operator, left: Tensor, relation: Tensor) -> Tensor | None:
        return operator.inverse(left, relation)


class L2(SquaredL2):
    """Minus the Euclidean distance."""

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return _minus_root(super().pairs(left, right))

    def all_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return _minus_root(super().all_pairs(left, right))

    def in_order(self, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        return super().in_order(left, right, None) if bias is None else self.all_pairs(left, right) + bias


def _minus_root(negative: Tensor) -> Tensor:
    return -torch.sqrt((-negative).clamp(min=TINY))


COMPARATORS: dict[str, type[Comparator]] = {"dot": Dot, "cos": Cosine, "l2": L2, "squared_l2": SquaredL2}


def make_comparator(name: str) -> Comparator:
    """Return the comparator of this name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in COMPARATORS:
        raise ConfigError(f"model.comparator={name} was set.", hint=f"the comparators are {', '.join(COMPARATORS)}.")
    return COMPARATORS[name]()


class EdgeScores(nn.Module):
    """Scores edges, and candidates for the missing end of an edge.

    A query is the given end with a relation; candidates are nodes for the other end. Static relations transform tails,
    whichever end is the query. Reciprocal relations transform the query, with separate parameters per direction, so
    that one set of candidates serves queries of any relation.

    Args:
        num_relations: R.
        dimension: columns of an embedding, D.
        operator: see the module.
        comparator: see the module.
        reciprocal: whether each direction has its parameters.
        bias: whether rows have one more column, the bias.
        init_scale: of relation parameters, see :func:`~gtrain.model.kg.scores.make_operator`.

    Shapes:
        rows are ``[G, n, D]``, or ``[G, n, D + 1]`` with the bias last: G groups, each with one relation ``[G]``.
    """

    def __init__(
        self,
        num_relations: int,
        dimension: int,
        operator: str,
        comparator: str,
        reciprocal: bool,
        bias: bool,
        init_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.dimension, self.num_relations, self.reciprocal, self.bias = dimension, num_relations, reciprocal, bias
        self.comparator = make_comparator(comparator)
        self.forwards = make_operator(operator, num_relations, dimension, init_scale)
        self.backwards = make_operator(operator, num_relations, dimension, init_scale) if reciprocal else None

    def tail_queries(self, heads: Tensor, relation: Tensor) -> Tensor:
        """Return heads as queries, to be compared with tails."""
        return self._transformed(self.forwards, heads, relation) if self.reciprocal else heads

    def head_queries(self, tails: Tensor, relation: Tensor) -> Tensor:
        """Return tails as queries, to be compared with heads."""
        return self._transformed(self.backwards or self.forwards, tails, relation)

    def tail_candidates(self, tails: Tensor, relation: Tensor) -> Tensor:
        """Return tails as candidates, to be compared with heads as queries."""
        return tails if self.reciprocal else self._transformed(self.forwards, tails, relation)

    def pairs(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Return the scores of pairs of rows ``[..., D]``: ``[...]``."""
        d = self.dimension
        scores = self.comparator.pairs(queries[..., :d], candidates[..., :d])
        return scores + queries[..., d] + candidates[..., d] if self.bias else scores

    def all_pairs(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Return the scores of all pairs of ``[..., m, D]`` and ``[..., n, D]``: ``[..., m, n]``."""
        d = self.dimension
        scores = self.comparator.all_pairs(queries[..., :d], candidates[..., :d])
        if not self.bias:
            return scores
        return scores + queries[..., d].unsqueeze(-1) + candidates[..., d].unsqueeze(-2)

    def in_order(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Return numbers ``[m, n]`` that order candidates ``[n, D]`` for each query ``[m, D]`` as their scores do."""
        d = self.dimension
        bias = candidates[:, d] if self.bias else None
        return self.comparator.in_order(queries[:, :d], candidates[:, :d], bias)

    def tail_queries_of_rows(self, heads: Tensor, relation: Tensor) -> Tensor | None:
        """Return heads as queries that order untransformed tails as :meth:`tail_candidates` are ordered.

        They cost one transformation for each query in place of one for each relation and candidate. None: no query of
        this operator and comparator does.
        """
        if self.reciprocal:
            return self.tail_queries(heads, relation)
        d = self.dimension
        rows = self.comparator.untransformed(self.forwards, heads[..., :d], relation)
        return torch.cat([rows, heads[..., d:]], dim=-1) if self.bias and rows is not None else rows

    def of_edges(self, heads: Tensor, relation: Tensor, tails: Tensor) -> Tensor:
        """Return the scores of the tails: heads and tails ``[B, D]``, relation ``[B]``, scores ``[B]``."""
        queries = self.tail_queries(heads.unsqueeze(1), relation)
        return self.pairs(queries, self.tail_candidates(tails.unsqueeze(1), relation)).squeeze(1)

    def n3_norm(self, heads: Tensor, relation: Tensor, tails: Tensor, end: int | None = None) -> Tensor:
        """Return the N3 norm of each edge, ``[B]``: the cubed absolute values of embeddings and parameters, summed.

        Args:
            heads, tails: ``[B, D]``.
            relation: ``[B]``.
            end: 1 for the direction that finds tails, 0 for the other, of reciprocal relations: half of the embeddings'
                part, and the direction's parameters; None: both directions.
        """
        d = self.dimension
        rows = [self.forwards.magnitudes(rows[:, :d]).pow(3).sum(-1) for rows in (heads, tails)]
        parts = rows if end is None else [0.5 * part for part in rows]
        # With reciprocal relations an edge has the parameters of both directions.
        for operator in self._operators(end):
            if (parameters := operator.relation_magnitudes(relation)) is not None:
                parts.append(parameters.pow(3).sum(-1))
        return reduce(torch.add, parts)

    def dura_norm(self, heads: Tensor, relation: Tensor, tails: Tensor, end: int | None = None) -> Tensor:
        """Return the DURA norm of each edge, ``[B]``: the squared norms of its ends and of both as transformed.

        It is that of Zhang, Cai and Wang (2020): ``|h|^2 + |t|^2 + |M h|^2 + |M' t|^2``, where the score is that of
        ``M h`` and ``t``; the sum over both directions with reciprocal relations. It needs the comparator ``dot`` and
        an operator of :data:`BILINEAR`.

        Args:
            heads, tails: ``[B, D]``.
            relation: ``[B]``.
            end: 1 for the direction that finds tails alone, 0 for the other, of reciprocal relations; None: both.
        """
        d, parts = self.dimension, []
        for operator in self._operators(end):
            given, other = self._as_transformed(operator, heads[:, :d], tails[:, :d])
            moved = operator(given.unsqueeze(1), relation), operator.adjoint(other.unsqueeze(1), relation)
            parts += [rows.square().flatten(1).sum(-1) for rows in (given, other, *moved)]
        return reduce(torch.add, parts)

    def relation_loss(self, heads: Tensor, relation: Tensor, tails: Tensor, end: int | None = None) -> Tensor:
        """Return the cross-entropy of classifying each edge's relation among all relations, ``[B]``.

        With reciprocal relations it is the sum of both directions, each of which has its scores. They need a
        comparator and an operator of :data:`PREDICTS_RELATIONS`.

        Args:
            heads, tails: ``[B, D]``.
            relation: ``[B]``.
            end: 1 for the direction that finds tails alone, 0 for the other, of reciprocal relations; None: both.
        """
        d = self.dimension
        heads, tails = heads[:, :d], tails[:, :d]
        losses = []
        for operator in self._operators(end):
            pairs, parameters = operator.linear_form(*self._as_transformed(operator, heads, tails))
            losses.append(F.cross_entropy(pairs @ parameters.T, relation, reduction="none"))
        return torch.stack(losses).sum(0)

    def _as_transformed(self, operator: Operator, heads: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends that an operator transforms, and the others."""
        # Static relations transform tails, reciprocal ones the given end.
        return (heads, tails) if self.reciprocal and operator is self.forwards else (tails, heads)

    def _operators(self, end: int | None) -> list[Operator]:
        """Return the operators that transform the given end of edges, when this end is to be found; None: both."""
        if self.backwards is None:
            return [self.forwards]
        return [self.backwards, self.forwards] if end is None else [self.forwards if end else self.backwards]

    def _transformed(self, operator: nn.Module, rows: Tensor, relation: Tensor) -> Tensor:
        """Transform all columns but the bias."""
        changed: Tensor = operator(rows[..., : self.dimension], relation)
        return torch.cat([changed, rows[..., self.dimension :]], dim=-1) if self.bias else changed
