"""A worker's part of a step: the gradients of products, and those of the layers that the workers hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gtrain.strategy.group import flatten
from gtrain_ps.worker.device import HOST, WorkerDevice
from gtrain_ps.worker.progress import ReplayEntries
from gtrain_ps.worker.served_table import ServerTableStorage
from gtrain_ps.worker.servers import ParameterServers, ServerRequest


def send_step(
    servers: ParameterServers,
    tables: Iterable[ServerTableStorage],
    rules: Mapping[str, tuple[str, dict[str, Any]]],
    weight: tuple[float, float],
    rest: Tensor | None,
    replay: ReplayEntries | None = None,
) -> list[ServerRequest]:
    """Send every server its part of a step, and go on to the next one.

    Args:
        servers: the servers.
        tables: the tables, with the gradients of their products.
        rules: each table's rule, and its numbers.
        weight: of this worker's batch, and the divisor of its loss, which is the same for all workers.
        rest: the other layers' gradients as a vector, of which each server sums a part; None if the workers sum them.
        replay: replay entries for each server; None without a replay buffer.

    Returns:
        for each server a request whose reply holds the sum of its part over the workers.
    """
    calls: list[list[int]] = [[] for _ in servers.clients]
    tensors: list[list[Tensor]] = [[] for _ in servers.clients]
    for table in tables:
        for pending, gradient in table.take_gradients():
            assert pending.call is not None
            for server, part in table.split_gradient(pending, gradient):
                calls[server].append(pending.call)
                tensors[server].append(part)
    common = {"step": servers.step, "weight": weight[0], "scale": weight[1], "rules": json.dumps(rules)}
    rests = [[] for _ in servers.clients] if rest is None else [[part] for part in rest.tensor_split(len(servers))]
    requests = []
    for server in range(len(servers)):
        entries = {} if replay is None else replay[server]
        fields = {**common, "calls": calls[server], "kept": list(entries)}
        parts = [*tensors[server], *entries.values(), *rests[server]]
        requests.append(servers.submit(server, "commit", fields, parts))
    servers.committed()
    return requests


def flat_gradients(parameters: list[Parameter], device: WorkerDevice = HOST, requested: bool = False) -> Tensor:
    """Return a vector: a request, for each parameter 1 if it has a gradient, else 0, and then the gradients.

    It is on the host. If the device is a GPU, it is complete after ``device.synchronize()``.

    Args:
        parameters: the parameters.
        device: of the parameters.
        requested: the request, 1 or 0: whether this worker received SIGTERM; see
            :class:`gtrain.strategy.interruption.Interruption`.
    """
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    present = torch.tensor([float(requested), *(float(p.grad is not None) for p in parameters)], dtype=dtype)
    if not parameters:
        return present
    grads = [torch.zeros_like(p, dtype=dtype) if p.grad is None else p.grad.to_dense().to(dtype) for p in parameters]
    if device.is_host:
        return flatten([present, *grads])
    there = flatten(grads)
    vector = device.buffer(len(present) + len(there), dtype=dtype)
    vector[: len(present)] = present
    device.copy_to_host(there, vector[len(present) :])
    return vector


def set_gradients(sums: list[Tensor], parameters: list[Parameter], device: WorkerDevice = HOST) -> float:
    """Set the gradients from the sum of the workers' vectors; None if no worker has a gradient.

    Args:
        sums: the parts of the sum, in order.
        parameters: the parameters; their gradients become views of one tensor.
        device: of the parameters.

    Returns:
        The sum of the workers' requests, perhaps scaled by a positive number.
    """
    if device.is_host:
        vector = torch.cat(sums)
    else:
        vector = torch.cat(sums, out=device.buffer(sum(map(len, sums)), dtype=sums[0].dtype))
    requests, *present = vector[: 1 + len(parameters)].tolist()
    if not parameters:
        return float(requests)
    pieces = device.to_device(vector[1 + len(parameters) :]).split([parameter.numel() for parameter in parameters])
    for parameter, piece, count in zip(parameters, pieces, present, strict=True):
        parameter.grad = piece.view(parameter.shape).to(parameter.dtype) if count else None
    return float(requests)
