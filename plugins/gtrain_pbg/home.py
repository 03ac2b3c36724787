"""What the module sees of a table in partitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.nn import Csr, RemoteHome
from gtrain.nn.rules import Rule, Settings
from gtrain_pbg.tables import PartitionedTable


class PartitionedHome(RemoteHome):
    """Rows for evaluation and export. Training goes around it: the strategy's step changes partitions themselves.

    Args:
        rows: the table.
    """

    def __init__(self, rows: PartitionedTable) -> None:
        super().__init__(rows.spec)
        self.rows = rows

    def fetch(self, ids: Tensor) -> Tensor:
        return self.rows.fetch(ids)

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        raise ConfigError(
            "the module asked for gradients of the table by autograd; strategy=pbg trains by the module's recipe().",
            hint="set strategy=single or ps for a training step of your own.",
        )

    def multiply(self, rows: Csr) -> tuple[Tensor, Any]:
        raise ConfigError("strategy=pbg serves tables of embeddings, not products.", hint="set strategy=single or ps.")

    def push_product(self, ticket: Any, gradient: Tensor) -> None:
        raise AssertionError("there is no product")

    def update(self, rule: Rule, settings: Settings) -> None:
        """Nothing: rows were updated when they were trained."""

    def zero_grad(self) -> None:
        """Nothing: no gradient is kept."""

    def read(self, begin: int, end: int) -> Tensor:
        return self.rows.fetch(torch.arange(begin, end))

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.rows.blocks()

    def state(self) -> dict[str, Any]:
        return {}  # partitions are files of the checkpoint

    def load_state(self, state: dict[str, Any]) -> None:
        assert not state
