"""Settings of the Trainer that a strategy cannot honour, each refused in one sentence before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment

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


def check_cpu(name: str, device: torch.device) -> None:
    """Refuse to train elsewhere than on CPUs.

    Raises:
        ConfigError: names the setting.
    """
    if device.type != "cpu":
        raise ConfigError(
            f"trainer.accelerator={device.type} was set; strategy={name} trains on CPUs.",
            hint="set trainer.accelerator=cpu.",
        )


def check_trainer(name: str, trainer: pl.Trainer, precisions: Sequence[str] | None, full_batch: bool) -> None:
    """Refuse what would train something else than the single process does.

    Args:
        name: the strategy, for messages.
        trainer: its settings.
        precisions: values of ``trainer.precision`` that the strategy computes exactly with; None for all.
        full_batch: whether an epoch is one batch.

    Raises:
        ConfigError: names the setting.
    """
    precision = trainer.precision
    if precisions is not None and precision not in precisions:
        raise ConfigError(
            f"trainer.precision={precision} was set; strategy={name} serves {' and '.join(precisions)}.",
            hint="choose one of these, or strategy=single.",
        )
    if full_batch:
        _check_full_batch(name, trainer)


def check_unequal_steps(name: str, trainer: pl.Trainer) -> None:
    """Refuse what makes ranks meet after a number of steps, for a strategy whose ranks take unequal numbers of them.

    Raises:
        ConfigError: names the setting.
    """
    found = {"val_check_interval": trainer.val_check_interval, "max_steps": trainer.max_steps}
    for key, met_at_the_end in (("val_check_interval", 1.0), ("max_steps", -1)):
        if found[key] not in (None, met_at_the_end):
            raise ConfigError(
                f"trainer.{key}={found[key]} was set; ranks of strategy={name} take unequal numbers of steps and meet "
                "at the ends of epochs.",
                hint="use trainer.check_val_every_n_epoch and trainer.max_epochs.",
            )


def _check_full_batch(name: str, trainer: pl.Trainer) -> None:
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
