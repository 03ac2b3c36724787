"""Mean loss over the rows of a step, and over the rows of an epoch."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MeanMetric


class MeanLoss(MeanMetric):
    """Mean over rows, updated with sums over some of them; unlike in ``MeanMetric``, NaN is not dropped."""

    def update(self, total: Tensor, weight: Tensor) -> None:  # type: ignore[override]
        """Add a step: the sum over its rows, and the sum of their weights, both float64 and 0-dimensional."""
        self.mean_value.add_(total)
        self.weight.add_(weight)


def log_mean_loss(module: pl.LightningModule, split: str, total: Tensor, weight: Tensor) -> Tensor:
    """Return ``total / weight``, 0 without rows, and log the epoch's mean as ``<split>/loss``.

    Args:
        module: has a :class:`MeanLoss` named ``<split>_loss``.
        split: ``train``, ``val`` or ``test``.
        total: loss summed over the batch's rows.
        weight: sum of the rows' weights.
    """
    loss = total / weight.clamp(min=torch.finfo(weight.dtype).tiny)
    metric: MeanLoss = getattr(module, f"{split}_loss")
    first = not metric.update_count
    if metric.dtype != torch.float64:  # Lightning casts metrics to the run's precision, which would round sums
        metric.set_dtype(torch.float64)
    metric.update(total.detach().double(), weight.detach().double())
    if first:  # Lightning computes it at the epoch's end; logging it each time costs as much as a small step
        module.log(f"{split}/loss", metric, on_step=False, on_epoch=True, batch_size=1, prog_bar=split == "train")
    return loss
