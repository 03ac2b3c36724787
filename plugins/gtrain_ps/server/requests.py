"""What workers ask of a server for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gtrain.wire import Message
from gtrain_ps.server.block import Block, Rows

Answer = Future[Message | None]
Request = tuple[str, int, Mapping[str, Any], Sequence[Tensor]]
"""A method, the worker that asks, and its message's fields and tensors: what is written down to be done again."""
Rules = Mapping[str, tuple[str, Mapping[str, Any]]]
"""By a table's name: its rule, and the rule's numbers."""


@dataclass(frozen=True)
class Product:
    """Rows whose product with a block is wanted.

    Attributes:
        worker: who asks.
        step: the step that it is for.
        call: number of the product within the worker's step; None where nothing will be trained from it.
        block: the block.
        rows: what it is multiplied by.
        dtype: type in which the product travels.
        answer: gets it.
        message: how it was asked for, where that is written down.
    """

    worker: int
    step: int
    call: int | None
    block: Block
    rows: Rows
    dtype: torch.dtype
    answer: Answer = field(default_factory=Future)
    message: Message | None = None

    def said(self) -> Request:
        """What is written down."""
        assert self.message is not None
        return "multiply", self.worker, self.message.fields, self.message.tensors


@dataclass(frozen=True)
class Commit:
    """What a worker has to say of one step.

    Attributes:
        worker: who says it.
        step: which step.
        weight: of its batch.
        scale: what its loss and gradients were divided by, the same for all workers.
        calls: its products that have a gradient.
        gradients: of these products, ``[m, d]`` each.
        rules: of the tables.
        rest: a piece of the gradients of its other layers; None where the workers sum them.
        kept: what a later life of a worker needs to begin with this step, by name; see
            :mod:`gtrain_ps.worker.progress`.
        message: how it was said, where that is written down.
    """

    worker: int
    step: int
    weight: float
    scale: float
    calls: Sequence[int]
    gradients: Sequence[Tensor]
    rules: Rules
    rest: Tensor | None
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    message: Message | None = None

    def said(self) -> Request:
        """What is written down."""
        assert self.message is not None
        return "commit", self.worker, self.message.fields, self.message.tensors


def factor_of(commits: Sequence[Commit]) -> float:
    """What turns gradients that were divided by ``scale`` into those of the mean over all workers' weights."""
    scale, total = commits[0].scale, sum(commit.weight for commit in commits)
    if scale == total:
        return 1.0
    return scale / total if total > 0 else 0.0
