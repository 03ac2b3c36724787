"""What a step trains on: the tables that edges refer to, and a batch of edges."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gtrain.nn import Csr, mean_rows


@dataclass
class PartitionRows:
    """The rows that one end of the edges refers to: a partition of the table.

    Attributes:
        value: ``[n, D]``, or ``[n, D + 1]`` with the bias; may be shared with other processes.
        state: ``[n, s]``, the optimizer's.
        head: int32 ``[n]``, all -1 between steps; of this process.
        bags: rows of the table of each entity, whose mean is its embedding; None: an entity has a row.
    """

    value: Tensor
    state: Tensor
    head: Tensor
    bags: Csr | None = None

    @property
    def count(self) -> int:
        """Entities."""
        return len(self.value) if self.bags is None else self.bags.num_rows

    def read(self, ids: Tensor) -> Tensor:
        """Rows of entities."""
        return (
            self.value[ids] if self.bags is None else mean_rows(self.bags, ids, lambda features: self.value[features])
        )


@dataclass
class EdgeBatch:
    """B edges, of one relation if relations are static.

    Attributes:
        heads, tails: int64 ``[B]``, rows of their partitions.
        relation: int64 ``[B]``.
        weight: float ``[B]``; None: all 1.
        drawn: int64 ``[C * u]`` for heads and for tails: rows drawn as negatives; None where all nodes are.
    """

    heads: Tensor
    relation: Tensor
    tails: Tensor
    weight: Tensor | None
    drawn: tuple[Tensor, Tensor]

    def __len__(self) -> int:
        return self.heads.numel()
