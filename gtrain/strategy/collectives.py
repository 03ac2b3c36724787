"""Lightning's and torchmetrics' collectives, carried out on the strategy's group."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from gtrain.errors import ConfigError
from gtrain.strategy.group import Group


class GroupCollectives(ParallelStrategy):
    """The collectives of a Lightning strategy, without torch's default group.

    Attributes:
        group: the group of all ranks.
    """

    strategy_name: ClassVar[str]
    group: Group

    def barrier(self, name: str | None = None) -> None:
        self.group.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.group.broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        op = (reduce_op if isinstance(reduce_op, str) else getattr(reduce_op, "name", "sum")).lower()
        value = tensor.clone() if tensor.is_floating_point() else tensor.to(torch.float64)
        return self.group.all_reduce(value, op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads and self.world_size > 1:
            raise ConfigError(
                f"all_gather(sync_grads=True) is not supported by strategy={self.strategy_name}.",
                hint="gather without gradients, or let the loss be local: gradients are summed over the ranks.",
            )
        return torch.stack(self.group.all_gather(tensor))

    def _synchronise_metrics(self, module: Module) -> None:
        """Have every torchmetrics metric gather over the group instead of torch's default group."""
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.distributed_available_fn = lambda: self.world_size > 1
                metric.dist_sync_fn = lambda tensor, group=None: self.group.all_gather(tensor)
