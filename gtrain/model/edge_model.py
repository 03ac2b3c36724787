"""Base of the models that predict edges: loss, ranks and area under the ROC curve."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from gtrain.model.mean_loss import MeanLoss, log_mean_loss
from gtrain.model.optimizers import OptimizedModule
from gtrain.model.ranking import NAMES, Ranking


class Auc(Metric):
    """Probability that a true edge scores higher than a false one, ties counted as 1/2; NaN if either is missing.

    Torchmetrics' AUROC applies a sigmoid per batch, and only to batches with scores outside 0 .. 1, so that scores of
    different batches or ranks are not comparable.

    Shapes:
        ``update`` takes scores of true edges ``[A]`` and of false ones ``[B]``. A and B may be 0: each rank must call
        it, since the scores of all ranks are gathered.
    """

    full_state_update = False
    true: list[Tensor]
    false: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("true", [], dist_reduce_fx="cat")
        self.add_state("false", [], dist_reduce_fx="cat")

    def update(self, true: Tensor, false: Tensor) -> None:
        self.true.append(true.detach().double())
        self.false.append(false.detach().double())

    def compute(self) -> Tensor:
        true, false = dim_zero_cat(self.true).contiguous(), dim_zero_cat(self.false).sort().values
        below = torch.searchsorted(false, true) + torch.searchsorted(false, true, right=True)
        return below.double().sum() / (2 * true.numel() * false.numel())  # 0 / 0 is NaN


class EdgeModel(OptimizedModule):
    """Base of the LightningModules whose seeds are edges; logs ``loss``, ``mrr``, ``hits@k`` and ``auc``."""

    rank_names: ClassVar[tuple[str, ...]] = NAMES
    """The metrics of ranks that it logs; see :class:`~gtrain.model.ranking.Ranking`."""

    def __init__(self) -> None:
        super().__init__()
        self.train_loss, self.val_loss, self.test_loss = MeanLoss(), MeanLoss(), MeanLoss()
        self.val_ranks, self.test_ranks = (
            MetricCollection({n: Ranking(n) for n in self.rank_names}, prefix=f"{split}/", compute_groups=False)
            for split in ("val", "test")
        )
        self.val_auc, self.test_auc = Auc(), Auc()

    @abstractmethod
    def _evaluate(self, batch: Any, split: str) -> None:
        """Log the loss and the scores of a batch of ``val`` or ``test``."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def embed(self, batch: Any) -> Tensor:
        """Return the seeds' embeddings, which ``predict_step`` returns."""
        embeddings: Tensor = self.predict_step(batch, 0)
        return embeddings

    def _mean(self, each: Tensor, weight: Tensor | None, split: str) -> tuple[Tensor, Tensor]:
        """Return the weighted mean of the edges' losses ``[B]``, and its weight; B may be 0."""
        weight = torch.ones_like(each) if weight is None else weight.to(each)
        total = weight.sum()
        return log_mean_loss(self, split, (each * weight).sum(), total), total

    def _log_scores(self, split: str, ranks: Iterable[Tensor], true: Tensor, false: Tensor) -> None:
        """Update the metrics with ranks, and with scores of true and of false edges; each may be empty."""
        auc: Auc = getattr(self, f"{split}_auc")
        auc.update(true, false)
        collection: MetricCollection = getattr(self, f"{split}_ranks")
        for values in ranks:
            collection.update(values)
        self.log_dict(collection, on_step=False, on_epoch=True, batch_size=1)
        self.log(f"{split}/auc", auc, on_step=False, on_epoch=True, batch_size=1)
