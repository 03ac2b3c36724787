"""The states of torchmetrics' metrics within an epoch, which a resumed rank continues to accumulate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

METRICS = "@meters"
"""Key of the metrics in a rank's state of a checkpoint."""
Metrics = list[tuple[str, Metric]]


def module_metrics(module: Module) -> Metrics:
    """Return a module's metrics, by name."""
    return [(f"module/{name}", layer) for name, layer in module.named_modules() if isinstance(layer, Metric)]


def metric_states(metrics: Metrics) -> dict[str, Any]:
    """Return copies of the states of all metrics that were updated."""
    return {
        name: [{key: _copy(getattr(metric, key)) for key in metric._defaults}, metric._update_count]
        for name, metric in metrics
        if metric._update_count > 0
    }


def restore_metrics(metrics: Metrics, states: dict[str, Any], updated: bool = True) -> None:
    """Set the states of metrics.

    Args:
        metrics: the metrics.
        states: by name.
        updated: whether the metrics count as updated. In the middle of an epoch they must not: Lightning registers a
            metric at its first update.
    """
    for name, metric in metrics:
        if name in states:
            values, count = states[name]
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dtype == torch.float64 != metric.dtype:
                    metric.set_dtype(torch.float64)
                setattr(metric, key, _copy(value, metric.device))
            metric._update_count, metric._computed = count if updated else 0, None


def _copy(value: Any, device: torch.device | None = None) -> Any:
    """Return a copy of a tensor, or of those of a list, on a device; None: on its own."""
    if isinstance(value, list):
        return [item.to(device or item.device, copy=True) for item in value]
    return value.to(device or value.device, copy=True) if isinstance(value, Tensor) else value
