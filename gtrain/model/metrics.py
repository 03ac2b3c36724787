"""Metrics of node classification, by task."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelAUROC,
    MultilabelF1Score,
)
from torchmetrics.utilities import dim_zero_cat

NAMES = ("acc", "f1", "auc")
_NO_LABEL = -1
_OPTIONS: dict[str, Any] = {"ignore_index": _NO_LABEL, "validate_args": False}
_UNDEFINED = {"zero_division": math.nan, **_OPTIONS}


def classification_metrics(num_classes: int, multilabel: bool, names: tuple[str, ...], prefix: str) -> MetricCollection:
    """Return metrics over logits and labels.

    Two classes: accuracy, F1 of class 1, area under the ROC curve. More classes: accuracy (micro), F1 (macro), one
    against rest AUC (macro). Several labels per node: accuracy and F1 (micro) over all labels, AUC (macro).

    Undefined metrics are NaN: an AUC without positives or without negatives, and F1 if no row is positive or predicted
    positive. A macro AUC is the mean over the classes for which it is defined.

    Args:
        num_classes: classes, or labels if a node may carry several.
        multilabel: whether labels are a 0/1 matrix [N, num_classes].
        names: which of :data:`NAMES`.
        prefix: prefix of each name, such as ``val/``.

    Shapes:
        see :func:`update`.
    """
    metrics: dict[str, Metric]
    if multilabel:
        metrics = {
            "acc": MultilabelAccuracy(num_classes, average="micro", **_OPTIONS),
            "f1": MultilabelF1Score(num_classes, average="micro", **_UNDEFINED),
            "auc": _MultilabelAuc(num_classes, average="none", **_OPTIONS),
        }
    elif num_classes == 2:
        metrics = {
            "acc": BinaryAccuracy(**_OPTIONS),
            "f1": BinaryF1Score(**_UNDEFINED),
            "auc": _BinaryAuc(**_OPTIONS),
        }
    else:
        metrics = {
            "acc": MulticlassAccuracy(num_classes, average="micro", **_OPTIONS),
            "f1": MulticlassF1Score(num_classes, average="macro", **_OPTIONS),
            "auc": _MulticlassAuc(num_classes, average="none", **_OPTIONS),
        }
    return MetricCollection({name: metrics[name] for name in names}, prefix=prefix, compute_groups=False)


class _BinaryAuc(BinaryAUROC):
    """NaN without positives or without negatives, where torchmetrics' AUROC is 0."""

    def compute(self) -> Tensor:  # type: ignore[override]
        positive = dim_zero_cat(self.target) == 1
        return _defined_mean(self, super().compute, positive.sum().view(1), positive.numel())


class _MulticlassAuc(MulticlassAUROC):
    """Mean over the classes for which it is defined; torchmetrics counts a class without positives as 0."""

    def compute(self) -> Tensor:  # type: ignore[override]
        labels = dim_zero_cat(self.target)
        return _defined_mean(self, super().compute, labels.bincount(minlength=self.num_classes), labels.numel())


class _MultilabelAuc(MultilabelAUROC):
    """Mean over the labels for which it is defined."""

    def compute(self) -> Tensor:  # type: ignore[override]
        labels = dim_zero_cat(self.target)
        known = labels[(labels >= 0).all(dim=1)]  # ignored rows have negative labels
        return _defined_mean(self, super().compute, known.sum(dim=0), len(known))


def _defined_mean(metric: Metric, compute: Callable[[], Tensor], positives: Tensor, total: int) -> Tensor:
    """Return the mean AUC over the classes that have positives and negatives; NaN without such a class.

    Shapes:
        positives int64 ``[C]``: the rows of each class, of ``total``.
    """
    defined = (positives > 0) & (positives < total)
    if not defined.any():
        return torch.full((), math.nan, device=metric.device)
    with warnings.catch_warnings():  # about the undefined classes
        warnings.filterwarnings("ignore", message="No (positive|negative) samples in targets")
        values = compute()
    return values.reshape(-1)[defined].mean()


def update(metrics: MetricCollection, scores: Tensor, labels: Tensor, multilabel: bool) -> None:
    """Update metrics with a batch, which may have no seeds.

    A rank without seeds must update them too: a metric without state is not gathered, and the other ranks would hang.
    Torchmetrics rejects empty batches, so such a rank adds one row that is ignored.

    Shapes:
        scores [S, C], labels int64 [S], or 0/1 [S, C] for several labels per node.
    """
    if not len(scores):
        scores = scores.new_zeros(1, scores.size(1))
        labels = labels.new_full((1, *labels.shape[1:]), _NO_LABEL)
    if multilabel:
        metrics.update(scores.sigmoid(), labels.long())
        return
    probabilities = scores.softmax(dim=-1)
    metrics.update(probabilities[:, 1] if scores.size(1) == 2 else probabilities, labels.long())
