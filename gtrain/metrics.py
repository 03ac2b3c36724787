"""The metrics of node classification, by task."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics import MetricCollection
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

NAMES = ("acc", "f1", "auc")
_NO_LABEL = -1
_OPTIONS: dict[str, Any] = {"ignore_index": _NO_LABEL, "validate_args": False}


def classification_metrics(num_classes: int, multilabel: bool, names: tuple[str, ...], prefix: str) -> MetricCollection:
    """Metrics over logits and labels.

    Two classes: accuracy, F1 of class 1, area under the ROC curve. More classes: accuracy (micro), F1 (macro), one
    against rest AUC (macro). Several labels a node: accuracy and F1 (micro) over all labels, AUC (macro).

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
            "f1": MultilabelF1Score(num_classes, average="micro", **_OPTIONS),
            "auc": MultilabelAUROC(num_classes, **_OPTIONS),
        }
    elif num_classes == 2:
        made = {
            "acc": BinaryAccuracy(**_OPTIONS),
            "f1": BinaryF1Score(**_OPTIONS),
            "auc": BinaryAUROC(**_OPTIONS),
        }
    else:
        made = {
            "acc": MulticlassAccuracy(num_classes, average="micro", **_OPTIONS),
            "f1": MulticlassF1Score(num_classes, average="macro", **_OPTIONS),
            "auc": MulticlassAUROC(num_classes, **_OPTIONS),
        }
    return MetricCollection({name: made[name] for name in names}, prefix=prefix, compute_groups=False)


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
