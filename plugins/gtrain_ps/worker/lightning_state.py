"""State of Lightning that a restarted worker needs: metrics and the log since their reset, and the loops' counters."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

Metrics = list[tuple[str, Metric]]
State = dict[str, Any]


def metrics_of(module: pl.LightningModule) -> Metrics:
    """A module's metrics, by name."""
    return [(f"module/{name}", one) for name, one in module.named_modules() if isinstance(one, Metric)]


def metric_states(trainer: pl.Trainer, metrics: Metrics) -> dict[str, Any]:
    """The states of all metrics that have taken in anything, as copies."""
    return {name: [_values(one), one._update_count] for name, one in [*_logged(trainer), *metrics] if _used(one)}


def restore_metrics(trainer: pl.Trainer, metrics: Metrics, states: dict[str, Any]) -> None:
    """Give metrics their states, once each has taken in what the last of it was."""
    for name, metric in [*_logged(trainer), *metrics]:
        if name in states:
            _set(metric, *states[name])


def prepare_metrics(metrics: Metrics, states: dict[str, Any]) -> None:
    """Let a module's metrics begin with these states in the middle of an epoch.

    They count as not yet updated: Lightning is told of a metric when it is updated first.
    """
    for name, metric in metrics:
        if name in states:
            _set(metric, states[name][0], 0)


def module_metric_states(metrics: Metrics) -> dict[str, Any]:
    """The states of those that have taken in anything, for :func:`prepare_metrics`."""
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


def shifted_loops(loops: State, steps: int) -> State:
    """The counters of a training loop that is to begin with a step some steps later in the same epoch.

    Lightning counts a step when it begins and when it has ended, and takes what it finds for a run that was cut off in
    the middle of a step only if the totals say so: a run between two steps would take itself for one that had just
    validated.

    Args:
        loops: what ``fit_loop.state_dict()`` said in the middle of a step.
        steps: later, 0 for that step itself.
    """
    state = copy.deepcopy(loops)
    batches = state["epoch_loop.batch_progress"]
    total, current = batches["total"]["ready"] - 1 + steps, batches["current"]["ready"] - 1 + steps
    batches["total"] |= {"ready": total, "started": total, "processed": total - 1, "completed": total - 1}
    batches["current"] |= {"ready": current, "started": current, "processed": current, "completed": current}
    batches["is_last_batch"] = False
    state["epoch_loop.state_dict"]["_batches_that_stepped"] += steps - 1  # Lightning adds one when it goes on
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for counts in (optimizer["step"], optimizer["zero_grad"]):
        for kind in ("total", "current"):
            done = counts[kind]["completed"] + steps
            counts[kind] |= {name: done for name in counts[kind]}
    for loader in state["state_dict"].get("combined_loader", ()):
        if "done" in loader:
            loader["done"] = current
    return state
