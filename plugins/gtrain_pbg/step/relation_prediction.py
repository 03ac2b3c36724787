"""Relation prediction: the cross-entropy of an edge's relation among all, and its gradients.

Chen et al. 2021, *Relation Prediction as an Auxiliary Training Objective for Improving Multi-Relational Graph
Representations*, equation 3. The operators are linear in their parameters, so that the scores of B edges with all R
relations are the product of a matrix ``[B, K]`` (:func:`pairs_of`) with their parameters ``[R, K]``, up to a number
that all relations share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gtrain_pbg.step.relations import RelationOperator


def pairs_of(operator: str, rows: Tensor, others: Tensor) -> Tensor:
    """Return ``[B, K]``, whose inner products with parameters of relations are the scores with all relations.

    Args:
        operator: ``translation``, ``diagonal`` or ``complex_diagonal``.
        rows: ``[B, D]``, which the operator transforms.
        others: ``[B, D]``, with which they are compared.
    """
    if operator == "translation":
        return others
    if operator == "diagonal":
        return rows * others
    # Re(v x conj(y)), with v = a + ib, is a Re(conj(x) y) + b Im(conj(x) y).
    (x, y), (z, w) = rows.chunk(2, dim=-1), others.chunk(2, dim=-1)
    return torch.cat([x * z + y * w, x * w - y * z], dim=-1)


def pairs_backward(
    operator: str, by_pairs: Tensor, rows: Tensor, others: Tensor, by_rows: Tensor, by_others: Tensor
) -> None:
    """Add the gradients by the rows and by the others to ``by_rows`` and ``by_others``."""
    if operator == "translation":
        by_others.add_(by_pairs)
        return
    if operator == "diagonal":
        by_rows.addcmul_(by_pairs, others)
        by_others.addcmul_(by_pairs, rows)
        return
    (p, q), (x, y), (z, w) = (tensor.chunk(2, dim=-1) for tensor in (by_pairs, rows, others))
    by_x, by_y = by_rows.chunk(2, dim=-1)
    by_z, by_w = by_others.chunk(2, dim=-1)
    by_x.addcmul_(p, z).addcmul_(q, w)
    by_y.addcmul_(p, w).addcmul_(q, z, value=-1)
    by_z.addcmul_(p, x).addcmul_(q, y, value=-1)
    by_w.addcmul_(p, y).addcmul_(q, x)


def predict_relations(
    operator: RelationOperator,
    ends: tuple[Tensor, Tensor],
    by_ends: tuple[Tensor, Tensor],
    relation: Tensor,
    weight: Tensor,
) -> float:
    """Return the weighted loss of one direction, and add its gradients.

    Args:
        operator: of the direction.
        ends: rows that it transforms, and rows with which they are compared, ``[B, D]`` each.
        by_ends: the gradients by them.
        relation: int64 ``[B]``.
        weight: ``[B]``, of each edge's loss.
    """
    weights = list(operator.weights.values())
    parameters = torch.cat([each.value for each in weights], dim=-1)
    pairs = pairs_of(operator.name, *ends)
    scores = pairs @ parameters.T
    true = relation.unsqueeze(1)
    total = scores.logsumexp(1, keepdim=True)
    lost = float((total - scores.gather(1, true)).squeeze(1) @ weight)
    by_scores = scores.sub_(total).exp_().mul_(weight.unsqueeze(1))
    by_scores.scatter_add_(1, true, -weight.unsqueeze(1))
    pairs_backward(operator.name, by_scores @ parameters, *ends, *by_ends)
    by_parameters = by_scores.T @ pairs
    for each, gradient in zip(weights, by_parameters.chunk(len(weights), dim=-1), strict=True):
        each.gradient.add_(gradient)
    return lost
