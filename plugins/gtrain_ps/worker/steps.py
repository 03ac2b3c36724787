"""A worker's part of a step: the gradients of products, and those of the layers that are on the workers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gtrain.strategy.group import flatten
from gtrain_ps.worker.progress import ReplayEntries
from gtrain_ps.worker.served_table import ServedTable
from gtrain_ps.worker.servers import ParameterServers, Request


def send_step(
    servers: ParameterServers,
    homes: Iterable[ServedTable],
    rules: Mapping[str, tuple[str, dict[str, Any]]],
    weight: tuple[float, float],
    rest: Tensor | None,
    kept: ReplayEntries | None = None,
) -> list[Request]:
    """Send every server its part of a step, and go on to the next one.

    Args:
        servers: where to.
        homes: the tables, with the gradients of their products.
        rules: each table's rule, and its numbers.
        weight: of this worker's batch, and what its loss was divided by, which is the same for all workers.
        rest: the other layers' gradients in one row, of which each server sums a piece; None: the workers sum them.
        kept: what each server is to keep for a later life of a worker; None: nothing.

    Returns:
        for each server what is answered by the sum of its pieces over the workers.
    """
    calls: list[list[int]] = [[] for _ in servers.clients]
    tensors: list[list[Tensor]] = [[] for _ in servers.clients]
    for home in homes:
        for ticket, gradient in home.take():
            assert ticket.call is not None
            for server, piece in home.pieces(ticket, gradient):
                calls[server].append(ticket.call)
                tensors[server].append(piece)
    said = {"step": servers.step, "weight": weight[0], "scale": weight[1], "rules": json.dumps(rules)}
    pieces = None if rest is None else rest.tensor_split(len(servers))
    sent = []
    for server in range(len(servers)):
        keep = {} if kept is None else kept[server]
        more = [*keep.values(), *([] if pieces is None else [pieces[server]])]
        fields = {**said, "calls": calls[server], "kept": list(keep)}
        sent.append(servers.submit(server, "commit", fields, [*tensors[server], *more]))
    servers.committed()
    return sent


def flat(parameters: list[Parameter]) -> Tensor:
    """Which parameters have a gradient, and the gradients, in one row."""
    if not parameters:
        return torch.empty(0)
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    present = torch.tensor([float(p.grad is not None) for p in parameters], dtype=dtype)
    grads = [torch.zeros_like(p, dtype=dtype) if p.grad is None else p.grad.to_dense().to(dtype) for p in parameters]
    return flatten([present, *grads])


def take_flat(sums: Tensor, parameters: list[Parameter]) -> None:
    """Put the sums back, as views of their memory; a parameter that has a gradient on no worker keeps none."""
    present = sums[: len(parameters)].tolist()
    pieces = sums[len(parameters) :].split([parameter.numel() for parameter in parameters])
    for parameter, piece, count in zip(parameters, pieces, present, strict=True):
        parameter.grad = piece.view(parameter.shape).to(parameter.dtype) if count else None
