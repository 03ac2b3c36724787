"""Modules that parameter servers cannot train for exactly."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import nn

from gtrain.errors import ConfigError


def check_training(module: pl.LightningModule, workers: int) -> None:
    """Refuse what would be trained otherwise than in one process.

    Args:
        module: what is trained.
        workers: K.

    Raises:
        ConfigError: in one sentence, with the layer and the reason.
    """
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} optimises by hand; strategy=ps sends the gradients of a step where Lightning "
            "takes it.",
            hint="use automatic optimisation.",
        )
    norms = [name for name, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    if norms and workers > 1:
        raise ConfigError(
            f"{norms[0]} is a batch norm, whose statistics strategy=ps would take over one worker's share.",
            hint="set model.norm=layer or null, or trainer.num_nodes=1.",
        )
