"""Synchronisation of replicated layers: the sum of gradients and the mean of running statistics."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase

from gtrain.strategy.group import Group, flatten, unflatten_into


def sum_gradients(group: Group, parameters: Iterable[Parameter]) -> None:
    """All-reduce the gradients of all parameters, in one flat message per dtype.

    A parameter without a gradient on every rank keeps None, so that optimizers skip it as in a single process. If only
    some ranks have a gradient, it counts as zero on the others. A sparse gradient of a replicated table is sent dense,
    because ranks have different rows.
    """
    if group.size == 1:
        return
    trainable = [p for p in parameters if p.requires_grad]
    # Sorted, because all ranks must send their messages in the same order and sets have none.
    for dtype in sorted({p.dtype for p in trainable}, key=str):
        bucket = [p for p in trainable if p.dtype == dtype]
        # The flags travel in front of the gradients: no second message, and the sum counts the ranks that have a
        # gradient.
        present = torch.tensor([p.grad is not None for p in bucket], dtype=dtype, device=bucket[0].device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in bucket]
        flat = group.all_reduce(flatten([present, *grads]))
        unflatten_into(flat, [present, *grads])
        for parameter, grad, count in zip(bucket, grads, present.tolist(), strict=True):
            parameter.grad = grad if count else None


def average_statistics(group: Group, module: Module) -> None:
    """Average running means and variances over the ranks.

    Evaluation and checkpoints then do not depend on the rank. (``DistributedDataParallel`` broadcasts those of rank 0
    instead.) A module without such layers needs no message.
    """
    if group.size == 1:
        return
    layers = [layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.training]
    statistics = [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var)]
    tensors = [tensor for tensor in statistics if tensor is not None]
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        bucket = [tensor for tensor in tensors if tensor.dtype == dtype]
        unflatten_into(group.all_reduce(flatten(bucket), "mean"), bucket)
