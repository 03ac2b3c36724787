"""Node classification with any network that maps node features and edges to one row of scores per node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from gtrain.model.classification import Classifier
from gtrain.model.inputs import input_names, run_network
from gtrain.model.metrics import NAMES
from gtrain.model.optimizers import MakeOptimizer


class NodeClassifier(Classifier):
    """Cross-entropy over the seeds of a batch; binary cross-entropy if a node may carry several labels.

    Args:
        network: called with the batch's attributes that its ``forward`` names (``x``, ``edge_index``,
            ``edge_weight``, ``edge_attr``, ``edge_type``; by type ``x_dict``, ``edge_index_dict`` ...); returns
            [N, num_classes] scores, by node type if it takes ``x_dict``. For a sampled batch it may return the rows of
            the seeds only; see :mod:`gtrain.model.trim`.
        num_classes: classes, or labels if a node may carry several.
        encoder: makes the network's input features; None: the graph's features.
        multilabel: whether ``batch.y`` is a 0/1 matrix [N, num_classes].
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for the encoder's tables; None: ``optimizer`` updates them too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once per epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler monitors.
        class_weights: weight of each class in the loss; None: all 1. ``gtrain.run.task`` replaces
            ``model.class_weights=balanced`` by numbers.
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
