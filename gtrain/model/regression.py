"""Regression of nodes: a network with one output predicts a number of each node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from gtrain.errors import ConfigError, DataError
from gtrain.model.inputs import input_names, run_network
from gtrain.model.module import MakeOptimizer, MeanLoss, OptimizedModule, log_mean_loss
from gtrain.model.outputs import NumberScores
from gtrain.model.regression_metrics import regression_metrics

LOSSES: dict[str, Callable[..., Tensor]] = {"l1": F.l1_loss, "l2": F.mse_loss, "huber": F.huber_loss}
"""The losses by their names: absolute; squared; squared up to an error of 1, a standard deviation, then absolute."""


class NodeRegressor(OptimizedModule):
    """Predicts a number of each node with any network, trained on standardised numbers.

    The network's output z stands for the number ``mean + deviation * z``. The loss is that of z; metrics and
    predictions have the unit of the labels.

    Args:
        network: maps ``x``, ``edge_index`` and further entries of the batch that its ``forward`` names to [N, 1], by
            node type if it takes ``x_dict``. For a sampled batch it may return the rows of the seeds only; see
            :mod:`gtrain.model.inputs`.
        mean: of the training labels.
        deviation: standard deviation of the training labels.
        encoder: makes the network's input features; None: the graph's features.
        loss: one of :data:`LOSSES`.
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for the encoder's tables; None: ``optimizer`` updates them too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once per epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler monitors.

    Shapes:
        batch.x [N, num_features], batch.edge_index [2, E], batch.y float [N] in the unit of the labels, batch.seeds
        [S]; the first three by type in a heterogeneous batch, with seeds of the node type ``batch.target``.

    Raises:
        ConfigError: the loss is unknown.
    """

    edge_data: frozenset[str] = frozenset()
    """Edge data that it reads in addition to its network; see :func:`~gtrain.model.inputs.edge_data_read`."""

    def __init__(
        self,
        network: nn.Module,
        mean: float = 0.0,
        deviation: float = 1.0,
        *,
        encoder: nn.Module | None = None,
        loss: str = "l1",
        optimizer: MakeOptimizer | None = None,
        sparse_optimizer: MakeOptimizer | None = None,
        scheduler: Callable[..., Any] | None = None,
        monitor: str = "val/loss",
    ) -> None:
        super().__init__()
        if loss not in LOSSES:
            raise ConfigError(f"model.regression_loss={loss} was set.", hint=f"the losses are {', '.join(LOSSES)}.")
        self.encoder, self.network = encoder, network
        self.mean, self.deviation = mean, deviation
        self._inputs, self._loss_of = input_names(network), LOSSES[loss]
        self._set_optimizers(optimizer, sparse_optimizer, scheduler, monitor)
        self.train_loss, self.val_loss, self.test_loss = MeanLoss(), MeanLoss(), MeanLoss()
        self.val_scores, self.test_scores = regression_metrics("val/"), regression_metrics("test/")

    def forward(self, batch: Data | HeteroData) -> Tensor:
        """Return the standardised predictions [N, 1] of the batch's nodes, of the target type if it has several.

        For a sampled batch the rows may be those of the first nodes only, the seeds.
        """
        outputs = run_network(self.network, self._inputs, self.encoder, batch)
        return outputs[batch.target] if isinstance(outputs, dict) else outputs

    def training_step(self, batch: Data | HeteroData, batch_idx: int) -> dict[str, Tensor]:
        loss, weight, _, _ = self._step(batch, "train")
        return {"loss": loss, "weight": weight}

    def validation_step(self, batch: Data | HeteroData, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Data | HeteroData, batch_idx: int) -> NumberScores:  # type: ignore[override]
        return self._evaluate(batch, "test")

    def predict_step(self, batch: Data | HeteroData, batch_idx: int) -> Tensor:
        """Return the predictions of the seeds, [S, 1], in the unit of the labels."""
        return self(batch)[batch.seeds].double() * self.deviation + self.mean

    def _evaluate(self, batch: Data | HeteroData, split: str) -> NumberScores:
        _, _, outputs, targets = self._step(batch, split)
        metrics = self.val_scores if split == "val" else self.test_scores
        predicted, labels = outputs.double() * self.deviation, targets * self.deviation
        metrics.update(predicted - labels, labels)
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1)
        return NumberScores(predicted + self.mean, labels + self.mean, self.deviation)

    def _step(self, batch: Data | HeteroData, split: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the mean loss over the seeds, which may be none, their number, their outputs and their targets.

        Outputs and targets (float64) are standardised, [S].
        """
        nodes = batch[batch.target] if isinstance(batch, HeteroData) else batch
        if "y" not in nodes:
            raise DataError(
                "this graph has no labels to learn from.",
                hint="name a column of labels, or predict edges: model=link_sage or kg.",
            )
        outputs = self(batch)[batch.seeds].squeeze(1)
        # A loss of bfloat16 would have two digits, and its weight would not count beyond 256.
        outputs = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        targets = (nodes.y[batch.seeds].double() - self.mean) / self.deviation
        total = self._loss_of(outputs, targets.to(outputs.dtype), reduction="sum")
        weight = outputs.new_full((), targets.numel())
        return log_mean_loss(self, split, total, weight), weight, outputs, targets
