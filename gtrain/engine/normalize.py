"""Normalisations over the nodes of all ranks: symmetric degrees and batch statistics."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, scatter

from gtrain.engine.halo import HaloExchange, halo_rows
from gtrain.engine.precision import LOW, sum_dtype
from gtrain.strategy.group import Group


def sharded_gcn_norm(
    exchange: HaloExchange,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """PyG's ``gcn_norm`` over a shard: D^-1/2 (A + I) D^-1/2 of Kipf and Welling (ICLR 2017), section 2.

    Degrees of halo sources come from their owners, by one exchange.

    Args:
        exchange: the halo of the sources.
        edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype: as PyG's; ``num_nodes`` and ``flow``
            are the shard's.

    Returns:
        The edges [2, E'] with self-loops, and their weights [E'].
    """
    num_local = exchange.shard.num_local
    given = dtype if edge_weight is None else edge_weight.dtype
    if given in LOW:
        # Degrees are sums: bfloat16 cannot count beyond 256.
        dtype, edge_weight = torch.float32, None if edge_weight is None else edge_weight.float()
    if add_self_loops:
        # A self-loop has equal local ids at both ends; those of a halo source and its target differ.
        fill = 2.0 if improved else 1.0
        edge_index, edge_weight = add_remaining_self_loops(edge_index, edge_weight, fill, num_local)
    if edge_weight is None:
        edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
    degree = scatter(edge_weight, edge_index[1], dim=0, dim_size=num_local, reduce="sum")
    scale = degree.pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0.0)
    (source_scale,) = halo_rows([(exchange, scale)])
    normalised = source_scale[edge_index[0]] * edge_weight * scale[edge_index[1]]
    return edge_index, normalised if given is None else normalised.to(given)


_GCN_NORM = inspect.signature(gcn_norm)


def exact_gcn_norm(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Callable[..., Any]]:
    """Return arguments, and a function of them that computes PyG's ``gcn_norm`` at least in float32.

    Args:
        args, kwargs: of ``gcn_norm``.
    """
    bound = _GCN_NORM.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, _exact_gcn_norm


def _exact_gcn_norm(edge_index: Any, edge_weight: Tensor | None, *options: Any) -> Any:
    *rest, dtype = options
    given = dtype if edge_weight is None else edge_weight.dtype
    if given not in LOW:
        return gcn_norm(edge_index, edge_weight, *options)
    exact = None if edge_weight is None else edge_weight.float()
    edge_index, weight = gcn_norm(edge_index, exact, *rest, torch.float32)
    return edge_index, weight.to(given)


def synchronised_batch_norm(norm: nn.BatchNorm1d, group: Group, x: Tensor, *, allow_single: bool = False) -> Tensor:
    """Return ``norm(x)`` with the statistics of all ranks' rows.

    Args:
        norm: the layer.
        group: the ranks.
        x: [n, C] or [n, C, L]; n may differ between ranks.
        allow_single: use the running statistics where all ranks together have at most one row, as PyG's ``BatchNorm``
            with ``allow_single_element`` does.
    """
    if x.dim() > 2:
        rows = x.movedim(1, -1)
        out = synchronised_batch_norm(norm, group, rows.flatten(0, -2), allow_single=allow_single)
        return out.view(rows.shape).movedim(-1, 1)
    if not (norm.training or norm.running_mean is None):
        return _evaluated(norm, x)
    count, mean, m2 = _global_moments(group, x.detach())
    if allow_single and count <= 1:
        return _evaluated(norm, x)
    if norm.training and norm.track_running_stats:
        _update_running(norm, count, mean, m2)
    dtype, exact = x.dtype, x.to(sum_dtype(x.dtype))
    normalised = _Normalise.apply(group, exact, mean.to(exact), (m2 / count).to(exact), count, norm.eps)
    return (normalised if norm.weight is None else normalised * norm.weight + norm.bias).to(dtype)


def _evaluated(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """Return ``norm(x)`` with the running statistics."""
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)


def _global_moments(group: Group, x: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return the number of rows, their mean and the sum of squared deviations over all ranks.

    Pairwise merging (Chan, Golub and LeVeque 1979, equation 1.5) keeps the variance precise where the mean is large,
    which E[x^2] - E[x]^2 does not.
    """
    wide = x.double()
    mean = wide.sum(0) / max(len(x), 1)
    packed = torch.cat([wide.new_tensor([float(len(x))]), mean, (wide - mean).square().sum(0)])
    count, channels = 0.0, x.size(1)
    mean, m2 = torch.zeros_like(mean), torch.zeros_like(mean)
    for part in group.all_gather(packed):
        other = float(part[0])
        if other == 0:
            # A rank without rows, of a node type with fewer nodes than ranks.
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
    """(x - mean) / sqrt(var + eps), where mean and var depend on every rank's x.

    The gradient is Ioffe and Szegedy's (2015), section 3, with both sums taken over all ranks.
    """

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
