"""Lightning's state that a restarted worker needs: metrics, logged values and the loops' counters."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

Metrics = list[tuple[str, Metric]]
LoopState = dict[str, Any]


def module_metrics(module: pl.LightningModule) -> Metrics:
    """Return a module's metrics, by name."""
    return [(f"module/{name}", layer) for name, layer in module.named_modules() if isinstance(layer, Metric)]


def logged_metrics(trainer: pl.Trainer) -> Metrics:
    """Return the metrics in which Lightning accumulates logged numbers, by name."""
    logged = trainer.fit_loop.epoch_loop._results.items()
    return [(f"log/{name}", metric) for name, metric in logged if metric.is_tensor]


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


def shifted_loops(loops: LoopState, steps: int) -> LoopState:
    """Return the counters of a training loop that starts with a later step of the same epoch.

    Lightning counts a step when it starts and when it has ended. It recognises a run that was interrupted in the middle
    of a step only by the totals; a run between two steps would look like one that has just validated.

    Args:
        loops: ``fit_loop.state_dict()`` in the middle of a step.
        steps: by how many steps to shift; 0 for that step itself.
    """
    state = copy.deepcopy(loops)
    batches = state["epoch_loop.batch_progress"]
    total, current = batches["total"]["ready"] - 1 + steps, batches["current"]["ready"] - 1 + steps
    batches["total"] |= {"ready": total, "started": total, "processed": total - 1, "completed": total - 1}
    batches["current"] |= {"ready": current, "started": current, "processed": current, "completed": current}
    batches["is_last_batch"] = False
    state["epoch_loop.state_dict"]["_batches_that_stepped"] += steps - 1  # Lightning adds one when it resumes
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for counts in (optimizer["step"], optimizer["zero_grad"]):
        for scope in ("total", "current"):
            done = counts[scope]["completed"] + steps
            counts[scope] |= {name: done for name in counts[scope]}
    for loader in state["state_dict"].get("combined_loader", ()):
        if "done" in loader:
            loader["done"] = current
    return state
