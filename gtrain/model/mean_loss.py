"""The loss of a step as a mean over rows, and of an epoch as the mean over all its rows."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MeanMetric


def loss_metric() -> MeanMetric:
    """Return the metric that :func:`log_mean_loss` updates; a loss that is no number is told, and not left out."""
    return MeanMetric(nan_strategy=float("nan"))


def log_mean_loss(module: pl.LightningModule, split: str, total: Tensor, weight: Tensor) -> Tensor:
    """Return ``total / weight``, 0 for no rows at all, and log the epoch's mean as ``<split>/loss``.

    Args:
        module: has a ``MeanMetric`` called ``<split>_loss``.
        split: ``train``, ``val`` or ``test``.
        total: loss summed over the batch's rows.
        weight: sum of the rows' weights, what the mean divides by.
    """
    loss = total / weight.clamp(min=torch.finfo(weight.dtype).tiny)
    metric: MeanMetric = getattr(module, f"{split}_loss")
    first = not metric.update_count
    if metric.dtype != torch.float64:  # which Lightning changes when it is told, and what comes is rounded to it
        metric.set_dtype(torch.float64)
    metric.update(loss.detach().double(), weight.detach().double())
    if first:  # Lightning asks the metric itself at the epoch's end; telling it again costs as much as a small step
        module.log(f"{split}/loss", metric, on_step=False, on_epoch=True, batch_size=1, prog_bar=split == "train")
    return loss
