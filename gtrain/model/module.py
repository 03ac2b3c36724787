"""Base of the built-in LightningModules: mean loss, optimizers and learning-rate schedulers.

Tables may have a separate optimizer, beside that of all other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torchmetrics import MeanMetric, Metric

from gtrain.errors import ConfigError
from gtrain.nn import JointOptimizer, RowOptimizer, tables
from gtrain.protocols import trainer_of

MakeOptimizer = Callable[..., torch.optim.Optimizer]
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_SPARSE = (RowOptimizer, JointOptimizer, torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
"""Optimizers that accept sparse gradients."""


class MeanLoss(MeanMetric):
    """Mean loss over all rows, updated with each batch's sum; unlike in ``MeanMetric``, NaN is not dropped."""

    def update(self, total: Tensor, weight: Tensor) -> None:  # type: ignore[override]
        """Add a batch: the loss summed over its rows, and the sum of their weights, both float64 and 0-dimensional."""
        self.mean_value.add_(total)
        self.weight.add_(weight)


def sum_in_float64(metric: Metric, state: Tensor) -> None:
    """Have a metric sum in float64 from its next update on, given one of its states.

    Lightning casts metrics to the run's precision, which would round sums.
    """
    if state.dtype != torch.float64:
        metric.set_dtype(torch.float64)


def log_mean_loss(module: pl.LightningModule, split: str, total: Tensor, weight: Tensor) -> Tensor:
    """Return ``total / weight``, 0 without rows, and log the epoch's mean as ``<split>/loss``.

    Args:
        module: has a :class:`MeanLoss` named ``<split>_loss``.
        split: ``train``, ``val`` or ``test``.
        total: loss summed over the batch's rows.
        weight: sum of the rows' weights.
    """
    # 0 / tiny is 0, the loss of a batch without rows.
    loss = total / weight.clamp(min=torch.finfo(weight.dtype).tiny)
    metric: MeanLoss = getattr(module, f"{split}_loss")
    first = not metric.update_count  # of the epoch
    sum_in_float64(metric, metric.mean_value)
    metric.update(total.detach().double(), weight.detach().double())
    if first:
        # Lightning computes it at the epoch's end; logging it each time costs as much as a small step.
        module.log(f"{split}/loss", metric, on_step=False, on_epoch=True, batch_size=1, prog_bar=split == "train")
    return loss


class OptimizedModule(pl.LightningModule):
    """Base of the LightningModules whose optimizers and scheduler are settings."""

    _make_optimizer: MakeOptimizer | None = None
    _make_sparse: MakeOptimizer | None = None
    _make_scheduler: Callable[..., Any] | None = None
    _monitor = "val/loss"

    def _set_optimizers(
        self,
        optimizer: MakeOptimizer | None,
        sparse_optimizer: MakeOptimizer | None,
        scheduler: Callable[..., Any] | None,
        monitor: str,
    ) -> None:
        """Store the settings.

        Args:
            optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
            sparse_optimizer: the same for tables; None: ``optimizer`` updates them too.
            scheduler: makes a learning-rate scheduler from the optimizer, stepped once per epoch; None: none.
            monitor: the logged value that a ``ReduceLROnPlateau`` scheduler monitors.
        """
        self._make_optimizer, self._make_sparse = optimizer, sparse_optimizer
        self._make_scheduler, self._monitor = scheduler, monitor

    def check_clipping(self, clip: float | None) -> None:
        """Refuse to clip the gradients of tables that ``model.sparse_optimizer`` updates, which are sparse.

        Args:
            clip: ``trainer.gradient_clip_val``.

        Raises:
            ConfigError: torch cannot clip them.
        """
        if clip and self._make_sparse is not None and any(table.sparse for _, table in tables(self)):
            raise ConfigError(
                f"trainer.gradient_clip_val={clip} with model.sparse_optimizer: sparse gradients cannot be clipped.",
                hint="set model.sparse_optimizer=null, or trainer.gradient_clip_val=null.",
            )

    def configure_optimizers(self) -> Any:
        trainer = trainer_of(self)
        self.check_clipping(None if trainer is None else trainer.gradient_clip_val)
        make = with_tables(self, self._make_sparse, self._make_optimizer)
        optimizer = optimizer_of(make, [parameter for parameter in self.parameters() if parameter.requires_grad])
        if self._make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self._make_scheduler(optimizer), "interval": "epoch", "monitor": self._monitor}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def optimizer_of(make_optimizer: MakeOptimizer | None, parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of some parameters; None: Adam with lr 0.01.

    Adam becomes fused, unless its settings choose an implementation: torch's default runs a dozen kernels per parameter
    on the CPU, and as many for all of them on a GPU, which take longer than the backward pass of a small network.
    """
    optimizer = (make_optimizer or partial(torch.optim.Adam, lr=0.01))(parameters)
    devices = {p.device.type for p in parameters}
    fusable = devices in ({"cpu"}, {"cuda"}) and all(p.dtype in (torch.float32, torch.float64) for p in parameters)
    if type(optimizer) in _FUSED and fusable:
        for group in (optimizer.defaults, *optimizer.param_groups):
            chosen = group["fused"] is not None or group["foreach"] is not None
            if not (chosen or group["capturable"] or group["differentiable"]):
                group["fused"] = True
    return optimizer


def with_tables(
    module: nn.Module, make_sparse: MakeOptimizer | None, make_optimizer: MakeOptimizer | None
) -> MakeOptimizer | None:
    """Return a function that makes the optimizer of all parameters.

    Args:
        module: the model, with tables (:mod:`gtrain.nn.table`).
        make_sparse: makes the optimizer of the tables; None: ``make_optimizer`` makes the only one.
        make_optimizer: makes the optimizer of all other parameters; None: Adam with lr 0.01.

    Raises:
        ConfigError: when the function is called, the tables' optimizer does not accept sparse gradients.
    """
    if make_sparse is None:
        return make_optimizer
    layers = [table for _, table in tables(module)]
    weights = {id(table.weight) for table in layers}

    def make(parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        in_tables = [p for p in parameters if id(p) in weights]
        others = [p for p in parameters if id(p) not in weights]
        optimizers = []
        if in_tables:
            optimizers.append(make_sparse(in_tables))
            if any(table.sparse for table in layers) and not isinstance(optimizers[0], _SPARSE):
                raise ConfigError(
                    f"model.sparse_optimizer made a {type(optimizers[0]).__name__}, which does not accept sparse "
                    "gradients.",
                    hint="set model.sparse_optimizer._target_=gtrain.nn.RowwiseAdagrad (or Adagrad, SGD, LazyAdam), or "
                    "model.sparse_optimizer=null to give model.optimizer everything.",
                )
        if others:
            optimizers.append(optimizer_of(make_optimizer, others))
        return optimizers[0] if len(optimizers) == 1 else JointOptimizer(optimizers)

    return make
