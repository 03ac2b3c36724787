"""The metrics of node classification, by task."""

from __future__ import annotations

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
        update(preds, target) takes preds [S] (two classes: the probability of class 1), [S, C] (logits) and
        target [S], or [S, C] for several labels a node; S may be 0.
    """
    if multilabel:
        made = {
            "acc": MultilabelAccuracy(num_classes, average="micro", validate_args=False),
            "f1": MultilabelF1Score(num_classes, average="micro", validate_args=False),
            "auc": MultilabelAUROC(num_classes, validate_args=False),
        }
    elif num_classes == 2:
        made = {
            "acc": BinaryAccuracy(validate_args=False),
            "f1": BinaryF1Score(validate_args=False),
            "auc": BinaryAUROC(validate_args=False),
        }
    else:
        made = {
            "acc": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
            "f1": MulticlassF1Score(num_classes, average="macro", validate_args=False),
            "auc": MulticlassAUROC(num_classes, validate_args=False),
        }
    return MetricCollection({name: made[name] for name in names}, prefix=prefix, compute_groups=False)
