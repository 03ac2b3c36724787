"""Losses of embeddings: true edges against false ones.

They are those of PyTorch-BigGraph (Lerer et al. 2019, section 3), before it sums over the edges. A false edge that
does not count has the score minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gtrain.errors import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]
"""Scores of true edges ``[...]`` and of each one's false edges ``[..., n]`` to a loss for each true edge ``[...]``."""


def ranking(margin: float) -> Loss:
    """Return the sum over false edges of ``max(0, margin - true + false)``."""

    def loss(true: Tensor, false: Tensor) -> Tensor:
        return (false - true.unsqueeze(-1) + margin).relu().sum(-1)

    return loss


def logistic(true: Tensor, false: Tensor) -> Tensor:
    """Return the logistic loss of the true edge plus the mean one of its false edges."""
    count = torch.isfinite(false).sum(-1).clamp(min=1)
    return F.softplus(-true) + F.softplus(false).sum(-1) / count


def softmax(true: Tensor, false: Tensor) -> Tensor:
    """Return the cross-entropy of picking the true edge among itself and its false ones."""
    return torch.cat([true.unsqueeze(-1), false], dim=-1).logsumexp(-1) - true


LOSSES = ("ranking", "logistic", "softmax")


def make_loss(name: str, margin: float) -> Loss:
    """Return the loss of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in LOSSES:
        raise ConfigError(f"model.loss={name} was set.", hint=f"the losses are {', '.join(LOSSES)}.")
    return ranking(margin) if name == "ranking" else logistic if name == "logistic" else softmax
