"""Running statistics of normalisation layers, which each rank sees batches of its own for."""

from __future__ import annotations

from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from gtrain.strategy.group import Group, flatten, unflatten_into


def average_statistics(group: Group, module: Module) -> None:
    """Average running means and variances over the ranks, so that they are those of no rank in particular.

    Evaluation and checkpoints then do not depend on who evaluates or saves. (``DistributedDataParallel`` gives all
    ranks those of rank 0 instead.) Nothing is sent for a module without such layers.
    """
    if group.size == 1:
        return
    layers = [layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.training]
    found = [(layer.running_mean, layer.running_var) for layer in layers]
    tensors = [tensor for pair in found for tensor in pair if tensor is not None]
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        bucket = [tensor for tensor in tensors if tensor.dtype == dtype]
        unflatten_into(group.all_reduce(flatten(bucket), "mean"), bucket)
