"""Lightning's state that a restarted worker needs besides the module's metrics: logged values and loop counters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from gtrain.errors import ConfigError
from gtrain.protocols import data_of
from gtrain.strategy.metric_states import Metrics

LoopState = dict[str, Any]


def logged_metrics(trainer: pl.Trainer) -> Metrics:
    """Return the metrics in which Lightning accumulates logged numbers, by name."""
    logged = trainer.fit_loop.epoch_loop._results.items()
    return [(f"log/{name}", metric) for name, metric in logged if metric.is_tensor]


def as_checkpoint(
    epoch: int, step: int, layers: dict[str, Any], loops: LoopState, callbacks: dict[str, Any], schedulers: list[Any]
) -> dict[str, Any]:
    """Return Lightning's entries of a checkpoint.

    Args:
        epoch: of the checkpoint.
        step: ``trainer.global_step``.
        layers: ``module`` and ``optimizers``, the states of these.
        loops: counters of the training loop.
        callbacks: their states, by key.
        schedulers: their states.
    """
    return {
        "epoch": epoch,
        "global_step": step,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": layers["module"],
        "optimizer_states": layers["optimizers"],
        "loops": {"fit_loop": loops},
        "callbacks": callbacks,
        "lr_schedulers": schedulers,
    }


def added_by_hooks(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return what the data module, the callbacks and the module add to a checkpoint, and read from it.

    Args:
        trainer: the run's trainer.
        checkpoint: Lightning's entries of a checkpoint.

    Raises:
        ConfigError: a hook replaces one of these entries.
    """
    module, data = trainer.lightning_module, data_of(trainer)
    # Hooks may take entries out of a state dictionary.
    given = {name: dict(value) if isinstance(value, dict) else value for name, value in checkpoint.items()}
    content, hooks = dict(given), list[tuple[Any, Callable[[], None]]]()
    if data is not None and (state := data.state_dict()):
        content[type(data).__qualname__] = state
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if reads_checkpoints(callback):
            hooks.append((callback, partial(callback.on_save_checkpoint, trainer, module, content)))
    if reads_checkpoints(module):
        hooks.append((module, partial(module.on_save_checkpoint, content)))
    for owner, hook in hooks:
        hook()
        replaced = [name for name, value in given.items() if content.get(name) is not value]
        if replaced:
            raise ConfigError(
                f"{type(owner).__name__}.on_save_checkpoint replaces {replaced[0]!r} in a checkpoint, which "
                "strategy=ps cannot keep for a worker that is restarted.",
                hint="set strategy.max_restarts=0, or add entries with other names.",
            )
    return {name: value for name, value in content.items() if name not in given}


def reads_checkpoints(owner: pl.LightningModule | pl.Callback) -> bool:
    """Whether the module, or a callback, has state that its hooks write to a checkpoint and read from it."""
    return is_overridden("on_save_checkpoint", owner) and is_overridden("on_load_checkpoint", owner)


def global_step(loops: LoopState) -> int:
    """Return ``trainer.global_step`` of a training loop's counters."""
    progress = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    return int(progress["step"]["total"]["completed"])


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
