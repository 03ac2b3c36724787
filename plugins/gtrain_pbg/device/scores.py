"""Scores and losses of edges in plain torch, differentiable; those of :mod:`gtrain_pbg.kernels.scores`.

A masked negative has the score minus infinity, which adds nothing to any of the losses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gtrain_pbg.kernels.scores import TINY


def pairs(comparator: str, left: Tensor, right: Tensor) -> Tensor:
    """Return the score of each pair of rows: ``[..., D]`` and ``[..., D]`` to ``[...]``."""
    if comparator == "cos":
        left, right = F.normalize(left, dim=-1), F.normalize(right, dim=-1)
    if comparator in ("dot", "cos"):
        return (left * right).sum(-1)
    return _of_squares(comparator, (left - right).square().sum(-1))


def all_pairs(comparator: str, left: Tensor, right: Tensor, low: torch.dtype) -> Tensor:
    """Return the scores of all pairs of rows: ``[..., m, D]`` and ``[..., n, D]`` to ``[..., m, n]``.

    Args:
        comparator: ``model.comparator``.
        left, right: rows.
        low: dtype of the operands of the matrix product.
    """
    if comparator == "cos":
        left, right = F.normalize(left, dim=-1), F.normalize(right, dim=-1)
    product = (left.to(low) @ right.to(low).transpose(-1, -2)).to(left.dtype)
    if comparator in ("dot", "cos"):
        return product
    a, b = left.square().sum(-1).unsqueeze(-1), right.square().sum(-1).unsqueeze(-2)
    return _of_squares(comparator, a + b - 2 * product)


def _of_squares(comparator: str, squares: Tensor) -> Tensor:
    return -squares if comparator == "squared_l2" else -squares.clamp(min=TINY).sqrt()


def loss_of(name: str, true: Tensor, negative: Tensor, margin: float) -> Tensor:
    """Return the loss of each edge ``[...]`` from its score ``[...]`` and those of its negatives ``[..., n]``."""
    if name == "ranking":
        return (negative - true.unsqueeze(-1) + margin).relu().sum(-1)
    if name == "logistic":
        count = torch.isfinite(negative).sum(-1).clamp(min=1)
        return F.softplus(-true) + F.softplus(negative).sum(-1) / count
    return torch.cat([true.unsqueeze(-1), negative], dim=-1).logsumexp(-1) - true
