"""Node classification with any network that maps node features and edges to one row of scores a node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torchmetrics import MeanMetric

from gtrain.errors import ConfigError, DataError
from gtrain.metrics import NAMES, classification_metrics, update


class NodeClassifier(pl.LightningModule):
    """Cross-entropy over the seeds of a batch; binary cross-entropy where a node may carry several labels.

    Args:
        network: called with those of the batch's attributes that its ``forward`` names (``x``, ``edge_index``,
            ``edge_weight``, ``edge_attr`` ...); returns [N, num_classes] scores.
        num_classes: classes, or labels where a node may carry several.
        multilabel: whether ``batch.y`` is a [N, num_classes] matrix of 0 and 1.
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once an epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler looks at.
        class_weights: weight of each class in the loss, ``balanced`` (inverse frequency among the training labels is
            the data module's to give: see ``gtrain.task``) resolved to numbers before it comes here; None: all 1.
        test_metrics: which of acc, f1 and auc the test computes; validation leaves auc out for more than two classes,
            where it costs a sort of every class's scores.

    Shapes:
        batch.x [N, num_features], batch.edge_index [2, E], batch.y [N] or [N, num_classes], batch.seeds [S].
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        *,
        multilabel: bool = False,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        monitor: str = "val/loss",
        class_weights: Sequence[float] | None = None,
        test_metrics: Sequence[str] = NAMES,
    ) -> None:
        super().__init__()
        self.network = network
        self.num_classes = num_classes
        self.multilabel = multilabel
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self._monitor = monitor
        if class_weights is not None and len(class_weights) != num_classes:
            raise ConfigError(
                f"model.class_weights has {len(class_weights)} numbers, but the graph has {num_classes} classes.",
                hint="give one number a class.",
            )
        weights = None if class_weights is None else torch.tensor(list(class_weights), dtype=torch.get_default_dtype())
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", weights, persistent=False)
        quick = NAMES if multilabel or num_classes == 2 else ("acc", "f1")
        self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_scores = classification_metrics(num_classes, multilabel, quick, "val/")
        self.test_scores = classification_metrics(num_classes, multilabel, tuple(test_metrics), "test/")
        self._inputs = _input_names(network)

    def forward(self, batch: Data) -> Tensor:
        """Scores of every node of the batch, [N, num_classes]."""
        missing = [name for name in self._inputs if name not in batch and self._inputs[name]]
        if missing:
            raise DataError(
                f"{type(self.network).__name__} needs {', '.join(missing)}, which this graph does not have.",
                hint="give the graph features (data.features) or choose another model." if "x" in missing else None,
            )
        scores: Tensor = self.network(**{name: batch[name] for name in self._inputs if name in batch})
        return scores

    def training_step(self, batch: Data, batch_idx: int) -> dict[str, Tensor]:
        loss, weight, _, _ = self._loss(batch, "train")
        return {"loss": loss, "weight": weight}

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        return self(batch)[batch.seeds]

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = (
            torch.optim.Adam(parameters, lr=0.01) if self._make_optimizer is None else self._make_optimizer(parameters)
        )
        if self._make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self._make_scheduler(optimizer), "interval": "epoch", "monitor": self._monitor}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _evaluate(self, batch: Data, split: str) -> None:
        _, _, scores, labels = self._loss(batch, split)
        metrics = self.val_scores if split == "val" else self.test_scores
        update(metrics, scores, labels, self.multilabel)
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1)

    def _loss(self, batch: Data, split: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean loss over the seeds (there may be none), the weight of that mean, the seeds' scores and labels."""
        if "y" not in batch:
            raise DataError("this graph has no labels, so there is nothing to classify.", hint="set data.labels.")
        scores, labels = self(batch)[batch.seeds], batch.y[batch.seeds]
        total, weight = self._summed(scores, labels)
        loss = total / weight.clamp(min=torch.finfo(weight.dtype).tiny)
        metric: MeanMetric = getattr(self, f"{split}_loss")
        metric.set_dtype(torch.float64)
        metric.update(loss.detach().double(), weight.double())
        self.log(f"{split}/loss", metric, on_step=False, on_epoch=True, batch_size=1, prog_bar=split == "train")
        return loss, weight, scores, labels

    def _summed(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss summed over the seeds and the sum of their weights, what the mean divides by."""
        if self.multilabel:
            total = F.binary_cross_entropy_with_logits(scores, labels.to(scores), self.class_weights, reduction="sum")
            return total, scores.new_tensor(float(scores.numel()))
        total = F.cross_entropy(scores, labels, weight=self.class_weights, reduction="sum")
        if self.class_weights is None:
            return total, scores.new_tensor(float(labels.numel()))
        return total, self.class_weights[labels].sum()


def _input_names(network: nn.Module) -> dict[str, bool]:
    """Batch attributes that the network's forward takes: name -> whether it is required."""
    known = ("x", "edge_index", "edge_weight", "edge_attr")
    parameters = inspect.signature(network.forward).parameters
    names = {n: p.default is inspect.Parameter.empty for n, p in parameters.items() if n in known}
    if "x" not in names:
        raise ConfigError(
            f"model._target_={type(network).__module__}.{type(network).__qualname__} was set; its forward takes "
            f"({', '.join(parameters)}), but a node classifier's network takes x and, for message passing, edge_index.",
            hint="choose a network over node features, or give a LightningModule of your own as model._target_.",
        )
    return names
