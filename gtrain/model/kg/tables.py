"""The embeddings of all entity types, as the rest of a model reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from gtrain.model.kg.schema import EntitySpec
from gtrain.model.kg.training import RowLookup
from gtrain.nn import Csr, Embedding, mean_rows
from gtrain.nn.table import BLOCK_ROWS


class EntityTables(nn.Module):
    """A table for each entity type, and what all embeddings of a type have in common.

    Args:
        entities: the types.
        bias: whether a row has one more column, the bias.
        init_scale: standard deviation of the initial rows.
        sparse: for each type, whether the gradient of its table is sparse.
        max_norm: longer vectors are scaled to this length when training reads them; None: never.
        bags: for each type its entities' features and their number, where an embedding is the mean of features' rows;
            else None.
        shared: whether all embeddings of a type have a learned vector in common, which is added to each.

    Attributes:
        tables: by type; of the features of a featurized one.
        bags: by type, the features of each entity; None: an entity has a row of its own.
        shifts: ``[1, D]`` by type; None without ``shared``.
        rows: by type, what looks up rows ``[..., D]`` of ids ``[...]``, which count from 0 in each type.
        trained_rows: the same in training, which applies ``max_norm``.
    """

    def __init__(
        self,
        entities: Sequence[EntitySpec],
        *,
        bias: bool,
        init_scale: float,
        sparse: Sequence[bool],
        bags: Sequence[tuple[Csr, int] | None],
        max_norm: float | None,
        shared: bool,
    ) -> None:
        super().__init__()
        self._entities, self._max_norm = entities, max_norm
        self.bags = [None if found is None else found[0] for found in bags]
        rows = [spec.count if found is None else found[1] for spec, found in zip(entities, bags, strict=True)]
        self.tables = nn.ModuleList(
            Embedding(count, spec.dimension + bias, node_type=spec.name, init_std=init_scale, sparse=own)
            for spec, own, count in zip(entities, sparse, rows, strict=True)
        )
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(1, s.dimension)) for s in entities) if shared else None
        self.rows: list[RowLookup] = [self._reader(number, False) for number in range(len(entities))]
        self.trained_rows: list[RowLookup] = [self._reader(number, True) for number in range(len(entities))]

    def __len__(self) -> int:
        return len(self._entities)

    def __getitem__(self, number: int) -> Embedding:
        """The table of a type."""
        return self.tables[number]  # type: ignore[return-value]

    def shift(self, number: int) -> nn.Parameter:
        """What all embeddings of a type have in common."""
        assert self.shifts is not None
        return self.shifts[number]

    def shifted(self, rows: Tensor, number: int) -> Tensor:
        """Rows of a type's table as they are compared: with what all have in common, and the bias last."""
        if self.shifts is None:
            return rows
        d = self._entities[number].dimension
        return torch.cat([rows[..., :d] + self.shifts[number].view(-1), rows[..., d:]], dim=-1)

    def of_nodes(self, ids: Tensor) -> Tensor:
        """Embeddings ``[..., D]`` of nodes of all types, without biases; NaN in columns that a type does not have."""
        found = self[0].weight.new_full((len(ids), max(spec.dimension for spec in self._entities)), torch.nan)
        for number, spec in enumerate(self._entities):
            here = ((ids >= spec.first) & (ids < spec.first + spec.count)).nonzero().flatten()
            if len(here):
                found[here, : spec.dimension] = self.rows[number](ids[here] - spec.first)[:, : spec.dimension]
        return found

    def blocks(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the ids and embeddings of all nodes of a type, as the table's home has them."""
        if self.bags[number] is None:
            for ids, rows in self[number].home.blocks():
                yield ids, self.shifted(rows, number)
            return
        for ids in torch.arange(self._entities[number].count, device=self[number].weight.device).split(BLOCK_ROWS):
            yield ids, self.rows[number](ids).detach()

    def _reader(self, number: int, training: bool) -> RowLookup:
        """What looks rows up; in training those that are too long are made shorter where they lie."""
        columns, most, bags = self._entities[number].dimension, self._max_norm, self.bags[number]

        def table(ids: Tensor) -> Tensor:
            if training and most is not None:
                self[number].clip(ids, columns, most)
            found: Tensor = self[number](ids)
            return found

        return lambda ids: self.shifted(table(ids) if bags is None else mean_rows(bags, ids, table), number)
