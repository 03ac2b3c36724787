"""Classifiers: loss, metrics and optimizers over the seeds of a batch, which a network or a wide layer scores.

:class:`NodeClassifier` takes any network that maps node features and edges to one row of scores per node,
:class:`SparseClassifier` rows of sparse features: a wide first layer and a perceptron on top.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.resolver import activation_resolver

from gtrain.errors import ConfigError, DataError
from gtrain.model.inputs import input_names, run_network
from gtrain.model.kinds import SPARSE
from gtrain.model.metrics import NAMES, classification_metrics, update
from gtrain.model.module import MakeOptimizer, MeanLoss, OptimizedModule, log_mean_loss
from gtrain.model.outputs import ClassScores
from gtrain.nn import Csr, SparseLinear, select_rows

UNBALANCED = 1 / 3
"""Two classes are unbalanced if the smaller has less than this share of the training labels."""


def default_score(module: pl.LightningModule, facts: dict[str, Any]) -> str:
    """Return the metric that selects the best checkpoint of a node task, unless ``model.score`` names one.

    For numbers to predict it is the mean absolute error. With several labels per row, of which most are
    0, or two unbalanced classes it is the AUC: predicting no label, or the larger class, has a high accuracy.

    Args:
        module: the model; the AUC is that of gtrain's classifiers.
        facts: of the store; ``train_classes`` has the training labels of each class, ``label_scale`` the scale of
            numbers to predict.
    """
    if facts.get("label_scale") is not None:
        return "val/mae"
    if not isinstance(module, Classifier):
        return "val/acc"
    counts = facts.get("train_classes") or []
    unbalanced = len(counts) == 2 and min(counts) < UNBALANCED * sum(counts)
    return "val/auc" if module.multilabel or unbalanced else "val/acc"


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
        label_smoothing: share of the training target spread evenly over the classes (Szegedy et al. 2016, section 7);
            over 0 and 1 of each label if a seed may carry several. Validation and test have the plain loss.
        test_metrics: the metrics of the test among acc, f1 and auc; validation skips auc for more than two classes,
            since it sorts the scores of each class.

    Raises:
        ConfigError: the number of class weights is not that of the classes, ``label_smoothing`` is not a share, or
            ``test_metrics`` has another name.
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
        label_smoothing: float = 0.0,
        test_metrics: Sequence[str] = NAMES,
    ) -> None:
        super().__init__()
        if unknown := [name for name in test_metrics if name not in NAMES]:
            raise ConfigError(
                f"model.test_metrics has {', '.join(map(str, unknown))}, which is not a metric of classes.",
                hint=f"choose among {', '.join(NAMES)}.",
            )
        if not 0 <= label_smoothing < 1:
            raise ConfigError(
                f"model.label_smoothing={label_smoothing} was set; it must be at least 0 and below 1.",
                hint="0 switches it off.",
            )
        self.num_classes, self.multilabel, self.label_smoothing = num_classes, multilabel, label_smoothing
        self._set_optimizers(optimizer, sparse_optimizer, scheduler, monitor)
        if class_weights is not None and len(class_weights) != num_classes:
            raise ConfigError(
                f"model.class_weights has {len(class_weights)} numbers, but the graph has {num_classes} classes.",
                hint="give one number per class.",
            )
        weights = None
        if class_weights is not None:
            _check_weights(class_weights)
            weights = torch.tensor(list(class_weights), dtype=torch.get_default_dtype())
        self._ignores_classes = weights is not None and bool((weights == 0).any())
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

    def test_step(self, batch: Data | HeteroData, batch_idx: int) -> ClassScores:  # type: ignore[override]
        return self._evaluate(batch, "test")

    def predict_step(self, batch: Data | HeteroData, batch_idx: int) -> Tensor:
        return self.seed_scores(batch)

    def _evaluate(self, batch: Data | HeteroData, split: str) -> ClassScores:
        _, _, scores, labels = self._loss(batch, split)
        metrics = self.val_scores if split == "val" else self.test_scores
        update(metrics, scores, labels, self.multilabel)
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1)
        return ClassScores(scores, labels, self.multilabel)

    def _loss(self, batch: Data | HeteroData, split: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the mean loss over the seeds, which may be none, its weight, and the seeds' scores and labels."""
        nodes = batch[batch.target] if isinstance(batch, HeteroData) else batch
        if "y" not in nodes:
            raise DataError(
                "this graph has no labels to classify by.",
                hint="give the source labels (data.labels; of data=tables data.nodes.label), or predict edges: "
                "model=link_sage or kg.",
            )
        scores, labels = self.seed_scores(batch), nodes.y[batch.seeds]
        # A loss of bfloat16 would have two digits, and its weight would not count beyond 256.
        scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
        total, weight = self._summed(scores, labels, self.label_smoothing if split == "train" else 0.0)
        return log_mean_loss(self, split, total, weight), weight, scores, labels

    def _summed(self, scores: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """Return the loss summed over the seeds, and the sum of their weights."""
        class_weights = None if self.class_weights is None else self.class_weights.to(scores.dtype)
        if self.multilabel:
            targets = labels.to(scores) * (1 - smoothing) + smoothing / 2
            total = F.binary_cross_entropy_with_logits(scores, targets, class_weights, reduction="sum")
            return total, scores.new_full((), scores.numel())
        if smoothing and self._ignores_classes and class_weights is not None:
            # Smoothing gives also these seeds a loss, of the other classes, and they have no weight to divide it by.
            counted = class_weights[labels] > 0
            scores, labels = scores[counted], labels[counted]
        total = F.cross_entropy(scores, labels, weight=class_weights, reduction="sum", label_smoothing=smoothing)
        if class_weights is None:
            return total, scores.new_full((), labels.numel())
        return total, class_weights[labels].sum()


def _check_weights(weights: Sequence[Any]) -> None:
    """Raise ConfigError unless the weights of classes are finite numbers, none below 0 and one above."""
    numbers = [weight for weight in weights if isinstance(weight, (int, float)) and not isinstance(weight, bool)]
    if len(numbers) < len(weights) or not all(0 <= weight < math.inf for weight in numbers) or not any(numbers):
        raise ConfigError(
            f"model.class_weights={list(weights)} was set; the weights must be numbers of at least 0, and one above.",
            hint="a larger number gives a class more weight; a class of weight 0 is not learned.",
        )


class NodeClassifier(Classifier):
    """Cross-entropy over the seeds of a batch; binary cross-entropy if a node may carry several labels.

    Args:
        network: called with the batch's attributes that its ``forward`` names (``x``, ``edge_index``,
            ``edge_weight``, ``edge_attr``, ``edge_type``; by type ``x_dict``, ``edge_index_dict`` ...); returns
            [N, num_classes] scores, by node type if it takes ``x_dict``. For a sampled batch it may return the rows of
            the seeds only; see :mod:`gtrain.model.inputs`.
        num_classes: classes, or labels if a node may carry several.
        encoder: makes the network's input features; None: the graph's features.
        multilabel: whether ``batch.y`` is a 0/1 matrix [N, num_classes].
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for the encoder's tables; None: ``optimizer`` updates them too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once per epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler monitors.
        class_weights: weight of each class in the loss; None: all 1. ``gtrain.run.task`` replaces
            ``model.class_weights=balanced`` by numbers.
        label_smoothing: share of the training target spread evenly over the classes (Szegedy et al. 2016, section 7);
            over 0 and 1 of each label if a seed may carry several. Validation and test have the plain loss.
        test_metrics: the metrics of the test among acc, f1 and auc; validation skips auc for more than two classes,
            since it sorts the scores of each class.

    Shapes:
        batch.x [N, num_features], batch.edge_index [2, E], batch.y [N] or [N, num_classes], batch.seeds [S]; the
        first three by type in a heterogeneous batch, with seeds of the node type ``batch.target``.
    """

    edge_data: frozenset[str] = frozenset()
    """Edge data that it reads in addition to its network; see :func:`~gtrain.model.inputs.edge_data_read`."""

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        *,
        encoder: nn.Module | None = None,
        multilabel: bool = False,
        optimizer: MakeOptimizer | None = None,
        sparse_optimizer: MakeOptimizer | None = None,
        scheduler: Callable[..., Any] | None = None,
        monitor: str = "val/loss",
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        test_metrics: Sequence[str] = NAMES,
    ) -> None:
        super().__init__(
            num_classes,
            multilabel=multilabel,
            optimizer=optimizer,
            sparse_optimizer=sparse_optimizer,
            scheduler=scheduler,
            monitor=monitor,
            class_weights=class_weights,
            label_smoothing=label_smoothing,
            test_metrics=test_metrics,
        )
        self.encoder, self.network = encoder, network
        self._inputs = input_names(network)

    def forward(self, batch: Data | HeteroData) -> Tensor:
        """Return scores [N, num_classes] of the batch's nodes, of the target type if it has several.

        For a sampled batch the rows may be those of the first nodes only, the seeds.
        """
        scores = run_network(self.network, self._inputs, self.encoder, batch)
        return scores[batch.target] if isinstance(scores, dict) else scores

    def seed_scores(self, batch: Data | HeteroData) -> Tensor:
        """Return the scores of the seeds, [S, num_classes]."""
        scores: Tensor = self(batch)
        return scores[batch.seeds]


class SparseClassifier(Classifier):
    """A :class:`~gtrain.nn.SparseLinear` and linear layers over its output; with one layer this is logistic regression.

    Args:
        num_features: columns of ``batch.x``, F.
        num_classes: classes, or labels if a row may carry several.
        hidden_channels: width of hidden layers.
        num_layers: linear layers, including the wide one.
        dropout: after each hidden layer.
        act: activation after each hidden layer.
        multilabel: whether ``batch.y`` is a 0/1 matrix [N, num_classes].
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for the wide layer's matrix; its gradient is then sparse, with the rows of the
            features that occur in the batch. None: ``optimizer`` updates it too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once per epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler monitors.
        class_weights: weight of each class in the loss; None: all 1.
        label_smoothing: share of the training target spread evenly over the classes (Szegedy et al. 2016, section 7);
            over 0 and 1 of each label if a seed may carry several. Validation and test have the plain loss.
        test_metrics: the metrics of the test among acc, f1 and auc.

    Shapes:
        batch.x [N, F], sparse CSR or dense, or a Csr of the seeds' S rows only; batch.y [N] or
        [N, num_classes]; batch.seeds [S].

    Raises:
        ConfigError: the data has no features, no labels, or several node types.
    """

    kind = SPARSE
    edge_data: frozenset[str] = frozenset()
    row_table = "wide"
    """The table that multiplies the rows of a batch's seeds; a strategy may send it these rows ahead."""

    def __init__(
        self,
        num_features: int | None,
        num_classes: int | None,
        *,
        hidden_channels: int = 64,
        num_layers: int = 2,
        dropout: float = 0.0,
        act: str = "relu",
        multilabel: bool = False,
        optimizer: MakeOptimizer | None = None,
        sparse_optimizer: MakeOptimizer | None = None,
        scheduler: Callable[..., Any] | None = None,
        monitor: str = "val/loss",
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        test_metrics: Sequence[str] = NAMES,
    ) -> None:
        features, classes = _sizes(num_features, num_classes)
        super().__init__(
            classes,
            multilabel=bool(multilabel),
            optimizer=optimizer,
            sparse_optimizer=sparse_optimizer,
            scheduler=scheduler,
            monitor=monitor,
            class_weights=class_weights,
            label_smoothing=label_smoothing,
            test_metrics=test_metrics,
        )
        widths = [*[hidden_channels] * (num_layers - 1), classes]
        self.wide = SparseLinear(features, widths[0], sparse=sparse_optimizer is not None)
        self.rest = nn.Sequential()
        for before, after in zip(widths[:-1], widths[1:], strict=True):
            self.rest.extend([activation_resolver(act), nn.Dropout(dropout), nn.Linear(before, after)])

    def forward(self, rows: Tensor | Csr) -> Tensor:
        """Return the scores [m, num_classes] of sparse or dense rows [m, F]."""
        scores: Tensor = self.rest(self.wide(rows))
        return scores

    def seed_scores(self, batch: Data | HeteroData) -> Tensor:
        """Return the scores of the seeds, [S, num_classes]; only their rows are read."""
        scores: Tensor = self(_rows(batch))
        return scores

    def embed(self, batch: Data | HeteroData) -> Tensor:
        """Return the last layer's input for the seeds, [S, hidden_channels].

        Raises:
            ConfigError: the model has no hidden layer.
        """
        if not len(self.rest):
            raise ConfigError(
                "embeddings=true was set, and a model with model.num_layers=1 has no hidden layer.",
                hint="set embeddings=false to write scores.",
            )
        hidden: Tensor = self.rest[:-1](self.wide(_rows(batch)))
        return hidden


def _rows(batch: Data | HeteroData) -> Tensor | Csr:
    x: Tensor | Csr = batch.x
    if isinstance(x, Csr):
        return x
    # sparse rows may stay on the host, from which a strategy sends them
    return x[batch.seeds] if x.layout == torch.strided else select_rows(x, batch.seeds.to(x.device))


def _sizes(num_features: object, num_classes: int | None) -> tuple[int, int]:
    """Return the numbers of features and classes, or raise if the graph lacks them."""
    if isinstance(num_features, dict):
        raise ConfigError(
            f"model=sparse classifies rows of one type; this graph has the node types {', '.join(num_features)}.",
            hint="set model to hetero_sage or hgt.",
        )
    if not isinstance(num_features, int):
        raise ConfigError(
            "the data has no features, and model=sparse reads features only.",
            hint="set data to libsvm, parquet or planted_sparse, or model to one that learns from edges.",
        )
    if num_classes is None:
        raise ConfigError("the data has no labels, and a classifier needs them.", hint="set data.labels.")
    return num_features, num_classes
