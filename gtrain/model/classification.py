"""Base of the classifiers: loss, metrics and optimizers over the seeds of a batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.errors import ConfigError, DataError
from gtrain.model.mean_loss import MeanLoss, log_mean_loss
from gtrain.model.metrics import NAMES, classification_metrics, update
from gtrain.model.optimizers import MakeOptimizer, OptimizedModule

UNBALANCED = 1 / 3
"""Two classes are unbalanced if the smaller has less than this share of the training labels."""


def default_score(module: pl.LightningModule, facts: dict[str, Any]) -> str:
    """Return the metric that selects the best checkpoint of a node task, unless ``model.score`` names one.

    With two unbalanced classes it is the AUC, since always predicting the larger class has a high accuracy.

    Args:
        module: the model; the AUC is that of gtrain's classifiers.
        facts: of the store; ``train_classes`` has the training labels of each class.
    """
    counts = facts.get("train_classes") or [1, 1]
    unbalanced = isinstance(module, Classifier) and min(counts) < UNBALANCED * sum(counts)
    return "val/auc" if unbalanced else "val/acc"


class Classifier(OptimizedModule):
    """Cross-entropy over the seeds of a batch; binary cross-entropy if a seed may carry several labels.

    A subclass scores the seeds (:meth:`seed_scores`).

    Args:
        num_classes: classes, or labels if a seed may carry several.
        multilabel: whether ``batch.y`` is a 0/1 matrix [N, num_classes].
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for tables; None: ``optimizer`` updates them too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once per epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler monitors.
        class_weights: weight of each class in the loss; None: all 1.
        test_metrics: the metrics of the test among acc, f1 and auc; validation skips auc for more than two classes,
            since it sorts the scores of each class.

    Raises:
        ConfigError: the number of class weights is not that of the classes.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        multilabel: bool = False,
        optimizer: MakeOptimizer | None = None,
        sparse_optimizer: MakeOptimizer | None = None,
        scheduler: Callable[..., Any] | None = None,
        monitor: str = "val/loss",
        class_weights: Sequence[float] | None = None,
        test_metrics: Sequence[str] = NAMES,
    ) -> None:
        super().__init__()
        self.num_classes, self.multilabel = num_classes, multilabel
        self._set_optimizers(optimizer, sparse_optimizer, scheduler, monitor)
        if class_weights is not None and len(class_weights) != num_classes:
            raise ConfigError(
                f"model.class_weights has {len(class_weights)} numbers, but the graph has {num_classes} classes.",
                hint="give one number per class.",
            )
        weights = None if class_weights is None else torch.tensor(list(class_weights), dtype=torch.get_default_dtype())
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", weights, persistent=False)
        val_metrics = NAMES if multilabel or num_classes == 2 else ("acc", "f1")
        self.train_loss, self.val_loss, self.test_loss = MeanLoss(), MeanLoss(), MeanLoss()
        self.val_scores = classification_metrics(num_classes, multilabel, val_metrics, "val/")
        self.test_scores = classification_metrics(num_classes, multilabel, tuple(test_metrics), "test/")

    @abstractmethod
    def seed_scores(self, batch: Data | HeteroData) -> Tensor:
        """Return the scores of the batch's seeds, [S, num_classes]."""

    def training_step(self, batch: Data | HeteroData, batch_idx: int) -> dict[str, Tensor]:
        loss, weight, _, _ = self._loss(batch, "train")
        return {"loss": loss, "weight": weight}

    def validation_step(self, batch: Data | HeteroData, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Data | HeteroData, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Data | HeteroData, batch_idx: int) -> Tensor:
        return self.seed_scores(batch)

    def _evaluate(self, batch: Data | HeteroData, split: str) -> None:
        _, _, scores, labels = self._loss(batch, split)
        metrics = self.val_scores if split == "val" else self.test_scores
        update(metrics, scores, labels, self.multilabel)
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1)

    def _loss(self, batch: Data | HeteroData, split: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the mean loss over the seeds, which may be none, its weight, and the seeds' scores and labels."""
        nodes = batch[batch.target] if isinstance(batch, HeteroData) else batch
        if "y" not in nodes:
            raise DataError(
                "this graph has no labels to classify by.",
                hint="give the source labels (data.labels), or predict edges: model=link_sage or kg.",
            )
        scores, labels = self.seed_scores(batch), nodes.y[batch.seeds]
        total, weight = self._summed(scores, labels)
        return log_mean_loss(self, split, total, weight), weight, scores, labels

    def _summed(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss summed over the seeds, and the sum of their weights."""
        if self.multilabel:
            total = F.binary_cross_entropy_with_logits(scores, labels.to(scores), self.class_weights, reduction="sum")
            return total, scores.new_tensor(float(scores.numel()))
        total = F.cross_entropy(scores, labels, weight=self.class_weights, reduction="sum")
        if self.class_weights is None:
            return total, scores.new_tensor(float(labels.numel()))
        return total, self.class_weights[labels].sum()
