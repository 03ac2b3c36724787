"""Classification of rows of sparse features: a wide first layer and a perceptron on top."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.resolver import activation_resolver

from gtrain.errors import ConfigError
from gtrain.model.classification import Classifier
from gtrain.model.kinds import SPARSE
from gtrain.model.metrics import NAMES
from gtrain.model.optimizers import MakeOptimizer
from gtrain.nn import Csr, SparseLinear, select_rows


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
    return x[batch.seeds] if x.layout == torch.strided else select_rows(x, batch.seeds)


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
