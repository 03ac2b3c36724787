"""Settings of the Trainer that a strategy cannot honour, each refused in one sentence before anything runs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.data.batches.sampling import Sampling
from gtrain.errors import ConfigError


def check_world(environment: ClusterEnvironment, num_nodes: int, devices: int) -> None:
    """The processes that the Trainer expects must exist already.

    Raises:
        ConfigError: with the arithmetic.
    """
    expected = num_nodes * devices
    found = environment.world_size() if environment.creates_processes_externally else 1
    if expected != found:
        raise ConfigError(
            f"num_nodes {num_nodes} * devices {devices} = {expected} ranks were asked for, "
            f"but {found} {'was' if found == 1 else 'were'} started.",
            hint="start the ranks with gtrain.run_local(main, num_nodes=...), torchrun or srun, "
            "and give the Trainer the same numbers.",
        )


def settings_of(trainer: pl.Trainer, device: torch.device, data: pl.LightningDataModule | None) -> dict[str, Any]:
    """The settings that strategies limit, by the command's keys, as a trainer and a data module have them."""
    of_trainer = ("precision", "gradient_clip_val", "accumulate_grad_batches", "val_check_interval", "max_steps")
    of_data = ("task", "batch_size", "num_neighbors", *(field.name for field in fields(Sampling)))
    found = {f"trainer.{name}": getattr(trainer, name) for name in of_trainer if hasattr(trainer, name)}
    found |= {"trainer.accelerator": "gpu" if device.type == "cuda" else device.type}
    for owner in (data, getattr(data, "sampling", None)):
        found |= {f"data.{name}": getattr(owner, name) for name in of_data if hasattr(owner, name)}
    return found


def check_full_batch(name: str, trainer: pl.Trainer) -> None:
    """Refuse what an epoch of one batch, the whole graph, cannot do.

    Raises:
        ConfigError: names the setting.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} was set; an epoch of strategy={name} "
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
