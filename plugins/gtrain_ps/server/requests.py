"""The requests of workers for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gtrain.wire import Message
from gtrain_ps.server.block import Block, SparseRows

FutureReply = Future[Message | None]
LoggedRequest = tuple[str, int, Mapping[str, Any], Sequence[Tensor]]
"""A request in the journal: method, worker, and the message's fields and tensors."""
TableRules = Mapping[str, tuple[str, Mapping[str, Any]]]
"""By a table's name: its optimizer rule, and the rule's numbers."""


@dataclass(frozen=True)
class ProductRequest:
    """A request for the product of sparse rows with a block.

    Attributes:
        worker: rank of the worker.
        step: the step that it is for.
        call: number of the product within the worker's step; None if nothing is trained from it.
        block: the block.
        rows: the rows.
        dtype: dtype of the product on the wire.
        reply: receives the product.
        message: the request as received, for the journal.
    """

    worker: int
    step: int
    call: int | None
    block: Block
    rows: SparseRows
    dtype: torch.dtype
    message: Message
    reply: FutureReply = field(default_factory=Future)


@dataclass(frozen=True)
class Commit:
    """A worker's part of a step.

    Attributes:
        worker: rank of the worker.
        step: the step.
        weight: weight of the worker's batch.
        scale: divisor of its loss and gradients, the same for all workers.
        calls: its products that have a gradient.
        gradients: of these products, ``[m, d]`` each.
        rules: of the tables.
        rest: one server's piece of the gradients of its other layers; None if the workers sum them.
        replay: what a restarted worker needs to start with this step, by name; see
            :mod:`gtrain_ps.worker.progress`.
        message: the request as received, for the journal.
    """

    worker: int
    step: int
    weight: float
    scale: float
    calls: Sequence[int]
    gradients: Sequence[Tensor]
    rules: TableRules
    rest: Tensor | None
    replay: Mapping[str, Tensor]
    message: Message


def gradient_factor(commits: Sequence[Commit]) -> float:
    """Return the factor from gradients divided by ``scale`` to those of the mean over all workers' weights."""
    scale, total = commits[0].scale, sum(commit.weight for commit in commits)
    # The common case: the workers knew the total in advance, and gradients need no multiplication.
    if scale == total:
        return 1.0
    return scale / total if total > 0 else 0.0
