"""The loss of a step as a mean over rows, and of an epoch as the mean over all its rows."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MeanMetric


class MeanLoss(MeanMetric):
    """The mean over rows of a loss that comes as a sum over some of them; a loss that is not a number shows in it."""

    def update(self, total: Tensor, weight: Tensor) -> None:  # type: ignore[override]
        """Take in a step: the sum over its rows, and the sum of their weights, both float64 and 0-dimensional."""
        self.mean_value.add_(total)
        self.weight.add_(weight)


def log_mean_loss(module: pl.LightningModule, split: str, total: Tensor, weight: Tensor) -> Tensor:
    """Return ``total / weight``, 0 for no rows at all, and log the epoch's mean as ``<split>/loss``.

    Args:
        module: has a :class:`MeanLoss` called ``<split>_loss``.
        split: ``train``, ``val`` or ``test``.
        total: loss summed over the batch's rows.
        weight: sum of the rows' weights, what the mean divides by.
    """
    loss = total / weight.clamp(min=torch.finfo(weight.dtype).tiny)
    metric: MeanLoss = getattr(module, f"{split}_loss")
    first = not metric.update_count
    if metric.dtype != torch.float64:  # which Lightning changes when it is told, and what comes is rounded to it
        metric.set_dtype(torch.float64)
    metric.update(total.detach().double(), weight.detach().double())
    if first:  # Lightning asks the metric itself at the epoch's end; telling it again costs as much as a small step
        module.log(f"{split}/loss", metric, on_step=False, on_epoch=True, batch_size=1, prog_bar=split == "train")
    return loss
