"""The optimizers and schedulers of the built-in LightningModules: one for tables, one for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from gtrain.errors import ConfigError
from gtrain.nn import JointOptimizer, RowOptimizer, tables
from gtrain.protocols import trainer_of

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


_SPARSE = (RowOptimizer, JointOptimizer, torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
"""Optimizers that take sparse gradients."""


def with_tables(
    module: nn.Module, make_sparse: MakeOptimizer | None, make_optimizer: MakeOptimizer | None
) -> MakeOptimizer | None:
    """Return what makes the optimizer of all parameters.

    Args:
        module: whose tables (:mod:`gtrain.nn.table`) have an optimizer of their own.
        make_sparse: makes it; None: everything has ``make_optimizer``'s.
        make_optimizer: makes the optimizer of all other parameters; None: Adam with lr 0.01.

    Raises:
        ConfigError: when it is called: the tables' optimizer does not take the sparse gradients of a table, or the
            trainer is to clip them, which torch does not.
    """
    if make_sparse is None:
        return make_optimizer
    layers = [table for _, table in tables(module)]
    weights = {id(table.weight) for table in layers}

    trainer = trainer_of(module)
    clip = None if trainer is None else trainer.gradient_clip_val
    if clip and any(table.sparse for table in layers):
        raise ConfigError(
            f"trainer.gradient_clip_val={clip} with model.sparse_optimizer: sparse gradients cannot be clipped.",
            hint="set model.sparse_optimizer=null, or trainer.gradient_clip_val=null.",
        )

    def make(parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        every = list(parameters)
        wide, rest = [p for p in every if id(p) in weights], [p for p in every if id(p) not in weights]
        made = []
        if wide:
            made.append(make_sparse(wide))
            if any(table.sparse for table in layers) and not isinstance(made[0], _SPARSE):
                raise ConfigError(
                    f"model.sparse_optimizer made a {type(made[0]).__name__}, which takes no sparse gradients.",
                    hint="set model.sparse_optimizer._target_=gtrain.nn.RowwiseAdagrad (or Adagrad, SGD, LazyAdam), or "
                    "model.sparse_optimizer=null to give model.optimizer everything.",
                )
        if rest:
            made.append(optimizer_of(make_optimizer, rest))
        return made[0] if len(made) == 1 else JointOptimizer(made)

    return make
