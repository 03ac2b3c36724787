"""Optimizers and schedulers of the built-in LightningModules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter

MakeOptimizer = Callable[..., torch.optim.Optimizer]


def configured(
    parameters: Iterable[Parameter],
    make_optimizer: MakeOptimizer | None,
    make_scheduler: Callable[..., Any] | None,
    monitor: str,
) -> Any:
    """Return what ``configure_optimizers`` returns.

    Args:
        parameters: those that need a gradient are optimised.
        make_optimizer: makes the optimizer from them; None: Adam with lr 0.01.
        make_scheduler: makes a scheduler from the optimizer, stepped once an epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler looks at.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01) if make_optimizer is None else make_optimizer(trained)
    if make_scheduler is None:
        return optimizer
    scheduler = {"scheduler": make_scheduler(optimizer), "interval": "epoch", "monitor": monitor}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}
