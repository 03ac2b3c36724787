"""Optimizers and schedulers of the built-in LightningModules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

MakeOptimizer = Callable[..., torch.optim.Optimizer]
_FUSED = (torch.optim.Adam, torch.optim.AdamW)


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
    optimizer = optimizer_of(make_optimizer, trained)
    if make_scheduler is None:
        return optimizer
    scheduler = {"scheduler": make_scheduler(optimizer), "interval": "epoch", "monitor": monitor}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def optimizer_of(make_optimizer: MakeOptimizer | None, parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
    """An optimizer of some parameters; None: Adam with lr 0.01.

    Adam of parameters on the CPU takes its step in one kernel, unless it is told how to take it: torch's default there
    is a dozen kernels for each parameter, which cost a small network more than its backward pass.
    """
    optimizer = (make_optimizer or partial(torch.optim.Adam, lr=0.01))(parameters)
    plain = all(p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) for p in parameters)
    if type(optimizer) in _FUSED and plain:
        for group in (optimizer.defaults, *optimizer.param_groups):
            told = group["fused"] is not None or group["foreach"] is not None
            if not (told or group["capturable"] or group["differentiable"]):
                group["fused"] = True
    return optimizer
