"""The embedding tables of all entity types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from gtrain.model.kg.schema import EntitySpec
from gtrain.model.kg.training import RowLookup
from gtrain.nn import Csr, Embedding, mean_rows
from gtrain.nn.table import BLOCK_ROWS


class EntityTables(nn.Module):
    """A table for each entity type, and optionally a vector that is added to all embeddings of a type.

    Args:
        entities: the types.
        bias: whether a row has one more column, the bias.
        init_scale: standard deviation of the initial rows.
        sparse: for each type, whether the gradient of its table is sparse.
        max_norm: longer vectors are scaled to this length when training reads them; None: never.
        bags: for each featurized type, whose embeddings are means of features' rows, its entities' features and their
            number; else None.
        shared: whether a learned vector is added to all embeddings of a type.

    Attributes:
        tables: by type; a featurized type has a row for each feature.
        bags: by type, the features of each entity; None: each entity has a row.
        shifts: ``[1, D]`` by type; None without ``shared``.
        rows: by type, a function that looks up rows ``[..., D]`` of ids ``[...]``, which count from 0 in each type.
        trained_rows: the same for training, which applies ``max_norm``.
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
        self._entities, self._max_norm, self._bias = entities, max_norm, bias
        self.bags = [None if featurized is None else featurized[0] for featurized in bags]
        self.tables = nn.ModuleList(
            Embedding(
                spec.count if featurized is None else featurized[1],
                spec.dimension + bias,
                node_type=spec.name,
                init_std=init_scale,
                sparse=is_sparse,
            )
            for spec, featurized, is_sparse in zip(entities, bags, sparse, strict=True)
        )
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(1, s.dimension)) for s in entities) if shared else None
        self.rows: list[RowLookup] = [self._reader(number, False) for number in range(len(entities))]
        self.trained_rows: list[RowLookup] = [self._reader(number, True) for number in range(len(entities))]

    def __len__(self) -> int:
        return len(self._entities)

    def __getitem__(self, number: int) -> Embedding:
        """Return the table of a type."""
        return self.tables[number]  # type: ignore[return-value]

    def shift(self, number: int) -> nn.Parameter:
        """Return the vector that is added to all embeddings of a type."""
        assert self.shifts is not None
        return self.shifts[number]

    def shifted(self, rows: Tensor, number: int) -> Tensor:
        """Return rows of a type's table with the common vector added, the bias last."""
        if self.shifts is None:
            return rows
        d = self._entities[number].dimension
        return torch.cat([rows[..., :d] + self.shifts[number].view(-1), rows[..., d:]], dim=-1)

    def of_nodes(self, ids: Tensor) -> Tensor:
        """Return embeddings ``[n, D]`` of nodes of all types, without biases; NaN in columns that a type lacks."""
        rows = self[0].weight.new_full((len(ids), max(spec.dimension for spec in self._entities)), torch.nan)
        for spec, members, found in self._found(ids):
            rows[members, : spec.dimension] = found[:, : spec.dimension]
        return rows

    def biases_of(self, ids: Tensor) -> Tensor | None:
        """Return the biases ``[n]`` of nodes of all types; None without ``bias``."""
        if not self._bias:
            return None
        biases = self[0].weight.new_empty(len(ids))
        for spec, members, found in self._found(ids):
            biases[members] = found[:, spec.dimension]
        return biases

    def _found(self, ids: Tensor) -> Iterator[tuple[EntitySpec, Tensor, Tensor]]:
        """Yield each type that nodes are of, the positions of its nodes, and their rows."""
        for number, spec in enumerate(self._entities):
            # The ids of a type are a range.
            members = ((ids >= spec.first) & (ids < spec.first + spec.count)).nonzero().flatten()
            if len(members):
                yield spec, members, self.rows[number](ids[members] - spec.first)

    def blocks(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the ids and embeddings of all nodes of a type, in the blocks of the table's storage."""
        if self.bags[number] is None:
            for ids, rows in self[number].storage.blocks():
                yield ids, self.shifted(rows, number)
            return
        for ids in torch.arange(self._entities[number].count, device=self[number].weight.device).split(BLOCK_ROWS):
            yield ids, self.rows[number](ids).detach()

    def _reader(self, number: int, training: bool) -> RowLookup:
        """Return a function that looks rows up; for training it clips them to ``max_norm`` in the table first."""
        columns, max_norm, bags = self._entities[number].dimension, self._max_norm, self.bags[number]

        def table(ids: Tensor) -> Tensor:
            if training and max_norm is not None:
                self[number].clip(ids, columns, max_norm)
            rows: Tensor = self[number](ids)
            return rows

        return lambda ids: self.shifted(table(ids) if bags is None else mean_rows(bags, ids, table), number)
