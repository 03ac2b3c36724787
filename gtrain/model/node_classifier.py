"""Node classification with any network that maps node features and edges to one row of scores a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from gtrain.model.classification import Classifier
from gtrain.model.inputs import input_names, run_network
from gtrain.model.metrics import NAMES
from gtrain.model.optimizers import MakeOptimizer, configured, with_tables


class NodeClassifier(Classifier):
    """Cross-entropy over the seeds of a batch; binary cross-entropy where a node may carry several labels.

    Args:
        network: called with those of the batch's attributes that its ``forward`` names (``x``, ``edge_index``,
            ``edge_weight``, ``edge_attr``, ``edge_type``; by type ``x_dict``, ``edge_index_dict`` ...); returns
            [N, num_classes] scores, by node type where it takes ``x_dict``. Of a sampled batch it may leave out all
            but the seeds' rows; see :mod:`gtrain.model.trim`.
        num_classes: classes, or labels where a node may carry several.
        encoder: makes the features that the network gets; None: the graph's own.
        multilabel: whether ``batch.y`` is a [N, num_classes] matrix of 0 and 1.
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for the encoder's tables; None: ``optimizer`` has them too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once an epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler looks at.
        class_weights: weight of each class in the loss, ``balanced`` (inverse frequency among the training labels is
            the data module's to give: see ``gtrain.run.task``) resolved to numbers before it comes here; None: all 1.
        test_metrics: which of acc, f1 and auc the test computes; validation leaves auc out for more than two classes,
            where it costs a sort of every class's scores.

    Shapes:
        batch.x [N, num_features], batch.edge_index [2, E], batch.y [N] or [N, num_classes], batch.seeds [S]; the
        first three by type in a heterogeneous batch, whose seeds are nodes of the type ``batch.target``.
    """

    edge_data: frozenset[str] = frozenset()
    """Edge data that it reads besides what its network does; see :func:`~gtrain.model.inputs.edge_data_read`."""

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
            scheduler=scheduler,
            monitor=monitor,
            class_weights=class_weights,
            test_metrics=test_metrics,
        )
        self._make_sparse = sparse_optimizer
        self.encoder = encoder
        self.network = network
        self._inputs = input_names(network)

    def forward(self, batch: Data | HeteroData) -> Tensor:
        """Scores of every node of the batch, [N, num_classes], of the target type where it has several; of a sampled
        batch of the first of them, the seeds."""
        scores = run_network(self.network, self._inputs, self.encoder, batch)
        return scores[batch.target] if isinstance(scores, dict) else scores

    def configure_optimizers(self) -> Any:
        make = with_tables(self, self._make_sparse, self._make_optimizer)
        return configured(self.parameters(), make, self._make_scheduler, self._monitor)

    def seed_scores(self, batch: Data | HeteroData) -> Tensor:
        """Scores of the seeds, [S, num_classes]."""
        scores: Tensor = self(batch)
        return scores[batch.seeds]
