"""Checks of the Trainer's settings that a strategy cannot honour, or only slowly, made before the run starts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.nn import Module
from torch_geometric.nn import Linear, MessagePassing

from gtrain.data.batches.sampling import Sampling
from gtrain.engine.precision import cpu_multiplies_bfloat16
from gtrain.errors import ConfigError


def check_world(environment: ClusterEnvironment, num_nodes: int, devices: int) -> None:
    """Check that the launcher started as many processes as the Trainer expects.

    Raises:
        ConfigError: the numbers differ; the message shows the arithmetic.
    """
    expected = num_nodes * devices
    started = environment.world_size() if environment.creates_processes_externally else 1
    if expected != started:
        raise ConfigError(
            f"num_nodes {num_nodes} * devices {devices} = {expected} ranks were set, "
            f"but {started} {'was' if started == 1 else 'were'} started.",
            hint="start the ranks with gtrain.run_local(main, num_nodes=...), torchrun or srun, "
            "and give the Trainer the same numbers.",
        )


def settings_of(trainer: pl.Trainer, device: torch.device, data: pl.LightningDataModule | None) -> dict[str, Any]:
    """Return the settings of a trainer and a data module that strategies may limit, by configuration key."""
    of_trainer = ("precision", "gradient_clip_val", "accumulate_grad_batches", "val_check_interval", "max_steps")
    of_data = ("task", "batch_size", "num_neighbors", *(field.name for field in fields(Sampling)))
    settings = {f"trainer.{name}": getattr(trainer, name) for name in of_trainer if hasattr(trainer, name)}
    settings["trainer.accumulate_grad_batches"] = _most_accumulated(trainer)
    settings["trainer.accelerator"] = "gpu" if device.type == "cuda" else device.type
    for owner in (data, getattr(data, "sampling", None)):
        settings |= {f"data.{name}": getattr(owner, name) for name in of_data if hasattr(owner, name)}
    return settings


def _most_accumulated(trainer: pl.Trainer) -> int:
    """Return the most batches whose gradients a step sums, in any epoch: a callback may change their number."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    schedulers = [each for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    factors = [factor for scheduler in schedulers for factor in scheduler.scheduling.values()]
    return max([trainer.accumulate_grad_batches, *factors])


def check_full_batch(name: str, trainer: pl.Trainer) -> None:
    """Check the Trainer's settings for full-batch training, where an epoch is one batch.

    Raises:
        ConfigError: gradient accumulation, or a fraction of an epoch's batches, is set.
    """
    if (accumulated := _most_accumulated(trainer)) != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={accumulated} was set; an epoch of strategy={name} "
            "is one batch, the whole graph, so there is nothing to accumulate.",
            hint="leave trainer.accumulate_grad_batches=1.",
        )
    for split in ("train", "val", "test"):
        value = getattr(trainer, f"limit_{split}_batches")
        if isinstance(value, float) and 0.0 < value < 1.0:
            raise ConfigError(
                f"trainer.limit_{split}_batches={value} was set; an epoch of strategy={name} is one batch, the whole "
                "graph, and cannot be cut into a fraction.",
                hint=f"set trainer.limit_{split}_batches to 1 or to 0.",
            )


def slow_precision(precision: str, device: torch.device, module: Module) -> str | None:
    """Return a warning if layers compute in bfloat16 on a CPU that has no instructions for it; None if they do not.

    Args:
        precision: ``trainer.precision``.
        device: of the parameters.
        module: to be trained. Products outside of its layers may be in another precision.
    """
    if not precision.startswith("bf16") or device.type != "cpu" or cpu_multiplies_bfloat16():
        return None
    if not any(isinstance(layer, (torch.nn.Linear, Linear, MessagePassing)) for layer in module.modules()):
        return None
    return (
        f"trainer.precision={precision}: this CPU has no instructions for bfloat16 (AVX512-BF16, AMX or Arm's), so "
        "that matrix products take several times as long as with trainer.precision=32-true"
    )
