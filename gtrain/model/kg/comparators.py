"""Comparators: how alike two embeddings are, of single pairs and of all pairs of two sets.

They are those of PyTorch-BigGraph (Lerer et al. 2019, section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from gtrain.errors import ConfigError

TINY = 1e-30
"""Least squared distance: keeps the root's gradient finite where two rows are equal."""


class Comparator(ABC):
    """Scores pairs of rows; higher is more alike."""

    @abstractmethod
    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the score of each pair: ``[..., D]`` and ``[..., D]`` to ``[...]``."""

    @abstractmethod
    def all_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the scores of all pairs: ``[..., m, D]`` and ``[..., n, D]`` to ``[..., m, n]``."""


class Dot(Comparator):
    """The inner product."""

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(-1)

    def all_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right.transpose(-1, -2)


class Cosine(Dot):
    """The cosine of the angle."""

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return super().pairs(F.normalize(left, dim=-1), F.normalize(right, dim=-1))

    def all_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return super().all_pairs(F.normalize(left, dim=-1), F.normalize(right, dim=-1))


class SquaredL2(Comparator):
    """Minus the squared Euclidean distance; of all pairs as ``2 a.b - a.a - b.b``, which needs no ``[m, n, D]``."""

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return -(left - right).square().sum(-1)

    def all_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = left.square().sum(-1).unsqueeze(-1), right.square().sum(-1).unsqueeze(-2)
        return 2 * (left @ right.transpose(-1, -2)) - a - b


class L2(SquaredL2):
    """Minus the Euclidean distance."""

    def pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return _minus_root(super().pairs(left, right))

    def all_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        return _minus_root(super().all_pairs(left, right))


def _minus_root(negative: Tensor) -> Tensor:
    return -torch.sqrt((-negative).clamp(min=TINY))


COMPARATORS: dict[str, type[Comparator]] = {"dot": Dot, "cos": Cosine, "l2": L2, "squared_l2": SquaredL2}


def make_comparator(name: str) -> Comparator:
    """Return the comparator of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in COMPARATORS:
        raise ConfigError(f"model.comparator={name} was set.", hint=f"the comparators are {', '.join(COMPARATORS)}.")
    return COMPARATORS[name]()
