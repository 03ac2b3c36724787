"""The metrics of node classification, by task."""

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
    """Metrics over logits and labels.

    Two classes: accuracy, F1 of class 1, area under the ROC curve. More classes: accuracy (micro), F1 (macro), one
    against rest AUC (macro). Several labels a node: accuracy and F1 (micro) over all labels, AUC (macro).

    What is not defined is NaN: an AUC without positives or without negatives, and F1 where nothing is positive and
    nothing predicted to be. A macro AUC is the mean over the classes for which it is defined.

    Args:
        num_classes: classes, or labels where a node may carry several.
        multilabel: whether labels are a [N, num_classes] matrix of 0 and 1.
        names: which of :data:`NAMES`.
        prefix: put before each name, such as ``val/``.

    Shapes:
        see :func:`update`.
    """
    if multilabel:
        made = {
            "acc": MultilabelAccuracy(num_classes, average="micro", **_OPTIONS),
            "f1": MultilabelF1Score(num_classes, average="micro", **_UNDEFINED),
            "auc": _MultilabelAuc(num_classes, average="none", **_OPTIONS),
        }
    elif num_classes == 2:
        made = {
            "acc": BinaryAccuracy(**_OPTIONS),
            "f1": BinaryF1Score(**_UNDEFINED),
            "auc": _BinaryAuc(**_OPTIONS),
        }
    else:
        made = {
            "acc": MulticlassAccuracy(num_classes, average="micro", **_OPTIONS),
            "f1": MulticlassF1Score(num_classes, average="macro", **_OPTIONS),
            "auc": _MulticlassAuc(num_classes, average="none", **_OPTIONS),
        }
    return MetricCollection({name: made[name] for name in names}, prefix=prefix, compute_groups=False)


class _BinaryAuc(BinaryAUROC):
    """Unlike torchmetrics' AUROC, NaN and not 0 without positives or without negatives."""

    def compute(self) -> Tensor:  # type: ignore[override]
        positive = dim_zero_cat(self.target) == 1
        return _defined_mean(self, super().compute, positive.sum().view(1), positive.numel())


class _MulticlassAuc(MulticlassAUROC):
    """The mean over classes; torchmetrics counts a class without positives as 0."""

    def compute(self) -> Tensor:  # type: ignore[override]
        labels = dim_zero_cat(self.target)
        return _defined_mean(self, super().compute, labels.bincount(minlength=self.num_classes), labels.numel())


class _MultilabelAuc(MultilabelAUROC):
    """The mean over labels; likewise."""

    def compute(self) -> Tensor:  # type: ignore[override]
        labels = dim_zero_cat(self.target)
        known = labels[(labels >= 0).all(dim=1)]  # a row that is ignored has negative numbers
        return _defined_mean(self, super().compute, known.sum(dim=0), len(known))


def _defined_mean(metric: Metric, each: Callable[[], Tensor], positives: Tensor, total: int) -> Tensor:
    """The mean of an AUC for each class, over the classes that have positives and negatives; NaN without such a class.

    Shapes:
        positives ``[C]``: how many of ``total`` rows are of each class.
    """
    defined = (positives > 0) & (positives < total)
    if not defined.any():
        return torch.full((), math.nan, device=metric.device)
    with warnings.catch_warnings():  # about the classes that are left out
        warnings.filterwarnings("ignore", message="No (positive|negative) samples in targets")
        values = each()
    return values.reshape(-1)[defined].mean()


def update(metrics: MetricCollection, scores: Tensor, labels: Tensor, multilabel: bool) -> None:
    """Take in a batch, perhaps one without any seed.

    A rank without seeds must still update: a metric that never was has no state to gather, and the other ranks would
    wait for it. Torchmetrics takes no empty batch, so such a rank adds one row that is ignored.

    Shapes:
        scores [S, C], labels int64 [S], or [S, C] of 0 and 1 for several labels a node.
    """
    if not len(scores):
        scores = scores.new_zeros(1, scores.size(1))
        labels = labels.new_full((1, *labels.shape[1:]), _NO_LABEL)
    if multilabel:
        metrics.update(scores.sigmoid(), labels.long())
        return
    probabilities = scores.softmax(dim=-1)
    metrics.update(probabilities[:, 1] if scores.size(1) == 2 else probabilities, labels.long())
