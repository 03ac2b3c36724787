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
from gtrain.model.optimizers import MakeOptimizer, configured, with_tables
from gtrain.nn import Csr, SparseLinear, select_rows


class SparseClassifier(Classifier):
    """A :class:`~gtrain.nn.SparseLinear` and linear layers over its result; one layer is logistic regression.

    Args:
        num_features: columns of ``batch.x``, F.
        num_classes: classes, or labels where a row may carry several.
        hidden_channels: width of hidden layers.
        num_layers: linear layers, the wide one included.
        dropout: after each hidden layer.
        act: activation after each hidden layer.
        multilabel: whether ``batch.y`` is a [N, num_classes] matrix of 0 and 1.
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for the wide layer's matrix, whose gradient is then sparse: of the features that
            occur in the batch; None: ``optimizer`` has it too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once an epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler looks at.
        class_weights: weight of each class in the loss; None: all 1.
        test_metrics: which of acc, f1 and auc the test computes.

    Shapes:
        batch.x [N, F], sparse CSR or dense, or a Csr of the S rows of the seeds alone; batch.y [N] or
        [N, num_classes]; batch.seeds [S].

    Raises:
        ConfigError: the data has no features, or no labels, or several node types.
    """

    kind = SPARSE
    edge_data: frozenset[str] = frozenset()
    row_table = "wide"
    """The table that multiplies the rows of a batch's seeds: a strategy may have sent them to it beforehand."""

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
            scheduler=scheduler,
            monitor=monitor,
            class_weights=class_weights,
            test_metrics=test_metrics,
        )
        self._make_sparse = sparse_optimizer
        widths = [*[hidden_channels] * (num_layers - 1), classes]
        self.wide = SparseLinear(features, widths[0], sparse=sparse_optimizer is not None)
        self.rest = nn.Sequential()
        for before, after in zip(widths[:-1], widths[1:], strict=True):
            self.rest.extend([activation_resolver(act), nn.Dropout(dropout), nn.Linear(before, after)])

    def forward(self, rows: Tensor | Csr) -> Tensor:
        """Scores of sparse or dense rows [m, F]: [m, num_classes]."""
        scores: Tensor = self.rest(self.wide(rows))
        return scores

    def seed_scores(self, batch: Data | HeteroData) -> Tensor:
        """Scores of the seeds, [S, num_classes]; only their rows are read."""
        scores: Tensor = self(_rows(batch))
        return scores

    def embed(self, batch: Data | HeteroData) -> Tensor:
        """What the last layer reads of the seeds, [S, hidden_channels]."""
        if not len(self.rest):
            raise ConfigError(
                "embeddings=true was set, and a model with model.num_layers=1 has no hidden layer.",
                hint="leave embeddings=false: scores are then written.",
            )
        hidden: Tensor = self.rest[:-1](self.wide(_rows(batch)))
        return hidden

    def configure_optimizers(self) -> Any:
        make = with_tables(self, self._make_sparse, self._make_optimizer)
        return configured(self.parameters(), make, self._make_scheduler, self._monitor)


def _rows(batch: Data | HeteroData) -> Tensor | Csr:
    x: Tensor | Csr = batch.x
    if isinstance(x, Csr):
        return x
    return x[batch.seeds] if x.layout == torch.strided else select_rows(x, batch.seeds)


def _sizes(num_features: object, num_classes: int | None) -> tuple[int, int]:
    """Check what the graph has."""
    if isinstance(num_features, dict):
        raise ConfigError(
            f"model=sparse classifies rows of one kind; this graph has the node types {', '.join(num_features)}.",
            hint="set model to hetero_sage or hgt.",
        )
    if not isinstance(num_features, int):
        raise ConfigError(
            "the data has no features, and model=sparse reads nothing else.",
            hint="set data to libsvm, parquet or planted_sparse, or model to one that learns from edges.",
        )
    if num_classes is None:
        raise ConfigError("the data has no labels, and a classifier needs them.", hint="set data.labels.")
    return num_features, num_classes
