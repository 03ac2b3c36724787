"""Normalisations that look at more than one rank's nodes: symmetric degrees and batch statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch_geometric.utils import add_remaining_self_loops, scatter

from gtrain.strategy.group import Group
from gtrain_sar.constants import Constants
from gtrain_sar.halo import HaloExchange, halo_rows


class GcnNorm:
    """``torch_geometric``'s ``gcn_norm`` over a shard: degrees of halo sources come from their owners.

    D^-1/2 (A + I) D^-1/2 of Kipf and Welling (2017), equation 2. The result for constant weights is kept, so that one
    exchange serves all layers and epochs.
    """

    def __init__(self, exchange: HaloExchange, constants: Constants) -> None:
        self._exchange, self._constants = exchange, constants
        self._known: list[tuple[tuple[Any, ...], tuple[Tensor, Tensor]]] = []

    def __call__(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The edges [2, E'] with self-loops and their weights [E']; arguments as PyG's."""
        key = (edge_index, edge_weight, improved, add_self_loops, dtype)
        for known, result in self._known:
            if all(a is b for a, b in zip(known[:2], key[:2], strict=True)) and known[2:] == key[2:]:
                return result
        result = self._compute(edge_index, edge_weight, 2.0 if improved else 1.0, add_self_loops, dtype)
        constant = edge_index in self._constants and (edge_weight is None or edge_weight in self._constants)
        if constant and not torch.is_inference_mode_enabled():  # autograd could not use it later
            self._known.append((key, result))
            self._constants.add(result)
        return result

    def _compute(
        self, edge_index: Tensor, weight: Tensor | None, fill: float, add_self_loops: bool, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        num_local = self._exchange.shard.num_local
        if add_self_loops:  # a self-loop has equal local ids at both ends, a halo source never has its target's
            edge_index, weight = add_remaining_self_loops(edge_index, weight, fill, num_local)
        if weight is None:
            weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
        degree = scatter(weight, edge_index[1], dim=0, dim_size=num_local, reduce="sum")
        scale = degree.pow(-0.5)
        scale = scale.masked_fill(scale == float("inf"), 0.0)
        (of_all,) = halo_rows([(self._exchange, scale)])
        return edge_index, of_all[edge_index[0]] * weight * scale[edge_index[1]]


def synchronised_batch_norm(norm: nn.BatchNorm1d, group: Group, x: Tensor) -> Tensor:
    """``norm(x)`` with the statistics of all ranks' rows; ``x`` is [n, C], n may differ between ranks."""
    if not (norm.training or norm.running_mean is None):
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
    count, mean, m2 = _global_moments(group, x.detach())
    if norm.training and norm.track_running_stats:
        _update_running(norm, count, mean, m2)
    normalised: Tensor = _Normalise.apply(group, x, mean.to(x), (m2 / count).to(x), count, norm.eps)
    return normalised if norm.weight is None else normalised * norm.weight + norm.bias


def _global_moments(group: Group, x: Tensor) -> tuple[float, Tensor, Tensor]:
    """Rows, mean and sum of squared deviations over all ranks.

    Merged pairwise (Chan, Golub and LeVeque 1979): E[x^2] - E[x]^2 would lose the variance where the mean is large.
    """
    wide = x.double()
    mean = wide.sum(0) / max(len(x), 1)
    packed = torch.cat([wide.new_tensor([float(len(x))]), mean, (wide - mean).square().sum(0)])
    count, channels = 0.0, x.size(1)
    mean, m2 = torch.zeros_like(mean), torch.zeros_like(mean)
    for part in group.all_gather(packed):
        other = float(part[0])
        if other == 0:  # a rank without rows, as of a node type that has fewer nodes than there are ranks
            continue
        delta = part[1 : 1 + channels] - mean
        total = count + other
        m2 = m2 + part[1 + channels :] + delta.square() * (count * other / total)
        mean = mean + delta * (other / total)
        count = total
    return count, mean, m2


def _update_running(norm: nn.BatchNorm1d, count: float, mean: Tensor, m2: Tensor) -> None:
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    momentum = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean), momentum)
    norm.running_var.lerp_((m2 / max(count - 1, 1)).to(norm.running_var), momentum)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps), the statistics being functions of every rank's x."""

    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, mean: Tensor, var: Tensor, count: float, eps: float) -> Tensor:  # type: ignore[override]
        scale = (var + eps).rsqrt()
        out = (x - mean) * scale
        ctx.group, ctx.count = group, count
        ctx.save_for_backward(out, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        out, scale = ctx.saved_tensors
        sums = torch.stack([gradient.sum(0), (gradient * out).sum(0)])
        ctx.group.all_reduce(sums)
        sums = sums / ctx.count
        return None, scale * (gradient - sums[0] - out * sums[1]), None, None, None, None
