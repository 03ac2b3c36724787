"""What a module's metrics and Lightning's log have taken in since their last reset."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

Metrics = list[tuple[str, Metric]]


def metrics_of(module: pl.LightningModule) -> Metrics:
    """A module's metrics, by name."""
    return [(f"module/{name}", one) for name, one in module.named_modules() if isinstance(one, Metric)]


def taken(trainer: pl.Trainer, metrics: Metrics) -> dict[str, Any]:
    """The states of all metrics that have taken in anything, as copies."""
    return {name: [_values(one), one._update_count] for name, one in [*_logged(trainer), *metrics] if _used(one)}


def put_back(trainer: pl.Trainer, metrics: Metrics, states: dict[str, Any]) -> None:
    """Give metrics their states, once each has taken in what the last of it was."""
    for name, metric in [*_logged(trainer), *metrics]:
        if name in states:
            _set(metric, *states[name])


def prepare(metrics: Metrics, states: dict[str, Any]) -> None:
    """Let a module's metrics begin with these states in the middle of an epoch.

    They count as not yet updated: Lightning is told of a metric when it is updated first.
    """
    for name, metric in metrics:
        if name in states:
            _set(metric, states[name][0], 0)


def of_module(metrics: Metrics) -> dict[str, Any]:
    """The states of those that have taken in anything, for :func:`prepare`."""
    return {name: [_values(one), one._update_count] for name, one in metrics if _used(one)}


def _logged(trainer: pl.Trainer) -> Metrics:
    """What was logged as numbers."""
    logged = trainer.fit_loop.epoch_loop._results.items()
    return [(f"log/{name}", metric) for name, metric in logged if metric.is_tensor]


def _used(metric: Metric) -> bool:
    return metric._update_count > 0


def _values(metric: Metric) -> dict[str, Any]:
    values = {name: getattr(metric, name) for name in metric._defaults}
    return {
        name: [item.clone() for item in value] if isinstance(value, list) else _copy(value)
        for name, value in values.items()
    }


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _set(metric: Metric, values: dict[str, Any], count: int) -> None:
    for name, value in values.items():
        kind = value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None
        if kind == torch.float64 and metric.dtype != kind:
            metric.set_dtype(kind)
        setattr(metric, name, [item.clone() for item in value] if isinstance(value, list) else _copy(value))
    metric._update_count, metric._computed = count, None
