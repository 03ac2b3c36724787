"""Metrics of regression, in the unit of the labels."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from gtrain.model.module import sum_in_float64


def regression_metrics(prefix: str) -> MetricCollection:
    """Return the mean absolute error ``mae``, the root mean squared error ``rmse`` and the coefficient ``r2``.

    ``r2`` is 1 - (sum of squared errors) / (sum of squared differences of the labels from their mean): 1 for perfect
    predictions, 0 for those of the labels' mean, NaN if all labels are equal. All are NaN without rows.

    Args:
        prefix: prefix of each name, such as ``val/``.

    Shapes:
        ``update(errors, labels)``: both ``[S]``. Errors are predictions minus labels. Labels may have any offset; one
        near their mean keeps the digits of ``r2``.
    """
    metrics: dict[str, Metric | MetricCollection] = {
        "mae": _MeanAbsoluteError(),
        "rmse": _RootMeanSquaredError(),
        "r2": _Determination(),
    }
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)


class _Sums(Metric):
    """Sums over rows in float64, which ranks add up: the metric does not depend on how rows are divided."""

    higher_is_better = False
    full_state_update = False
    sums: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(count, dtype=torch.float64), dist_reduce_fx="sum")

    def add(self, *totals: Tensor | int) -> None:
        """Add the sums over the rows of a batch, which may be none."""
        sum_in_float64(self, self.sums)
        self.sums += torch.stack([torch.as_tensor(total).to(self.sums) for total in totals])


class _MeanAbsoluteError(_Sums):
    def __init__(self) -> None:
        super().__init__(2)

    def update(self, errors: Tensor, labels: Tensor) -> None:
        self.add(errors.numel(), errors.double().abs().sum())

    def compute(self) -> Tensor:
        count, total = self.sums
        return total / count


class _RootMeanSquaredError(_Sums):
    def __init__(self) -> None:
        super().__init__(2)

    def update(self, errors: Tensor, labels: Tensor) -> None:
        self.add(errors.numel(), errors.double().square().sum())

    def compute(self) -> Tensor:
        count, total = self.sums
        return (total / count).sqrt()


class _Determination(_Sums):
    higher_is_better = True

    def __init__(self) -> None:
        super().__init__(4)

    def update(self, errors: Tensor, labels: Tensor) -> None:
        labels = labels.double()
        self.add(labels.numel(), errors.double().square().sum(), labels.sum(), labels.square().sum())

    def compute(self) -> Tensor:
        count, unexplained, total, squares = self.sums
        spread = squares - total * total / count
        rounding = torch.finfo(torch.float64).eps * count * squares
        return torch.where(spread > rounding, 1 - unexplained / spread, math.nan)
