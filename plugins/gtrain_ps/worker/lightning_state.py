"""Lightning's state that a restarted worker needs besides the module's metrics: logged values and loop counters."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl

from gtrain.strategy.metric_states import Metrics

LoopState = dict[str, Any]


def logged_metrics(trainer: pl.Trainer) -> Metrics:
    """Return the metrics in which Lightning accumulates logged numbers, by name."""
    logged = trainer.fit_loop.epoch_loop._results.items()
    return [(f"log/{name}", metric) for name, metric in logged if metric.is_tensor]


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
