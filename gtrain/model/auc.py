"""The area under the ROC curve of scores of any size."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class Auc(Metric):
    """How often a true edge scores higher than a false one, ties counted as a half; NaN without edges of both kinds.

    Torchmetrics' own turns scores into probabilities batch by batch, and only where a batch has scores beyond 0 .. 1,
    so that scores of different batches or ranks are not compared alike.

    Shapes:
        update takes scores of true edges ``[A]`` and of false ones ``[B]``, perhaps none: a rank without any must call
        it too, for the others gather its scores.
    """

    full_state_update = False
    true: list[Tensor]
    false: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("true", [], dist_reduce_fx="cat")
        self.add_state("false", [], dist_reduce_fx="cat")

    def update(self, true: Tensor, false: Tensor) -> None:
        self.true.append(true.detach().double())
        self.false.append(false.detach().double())

    def compute(self) -> Tensor:
        true, false = dim_zero_cat(self.true).contiguous(), dim_zero_cat(self.false).sort().values
        below = torch.searchsorted(false, true) + torch.searchsorted(false, true, right=True)
        return below.double().sum() / (2 * true.numel() * false.numel())  # 0 / 0 is NaN
