"""The relations of a model of embeddings that are trained alike, as a module of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gtrain.model.kg.schema import EmbeddingSchema, EntitySpec, GroupSpec
from gtrain.model.kg.scores import EdgeScores
from gtrain.model.kg.training import LossFunction, NegativeSampling, TrainingLoss, Triples


class RelationGroup(nn.Module):
    """Relations that join the same two entity types by the same operator.

    Args:
        spec: which ones.
        entities: all types.
        comparator, reciprocal, bias, init_scale: see :class:`~gtrain.model.kg.scores.EdgeScores`.
        loss: of true and false scores.
        negatives: which ones; whether all entities are is the group's own.
        n3: weight of the regulariser.

    Attributes:
        scores: of the group's edges, whose relations are numbered from 0.
        loss: of the group's edges, ids being those of their types.
    """

    def __init__(
        self,
        spec: GroupSpec,
        entities: Sequence[EntitySpec],
        *,
        comparator: str,
        reciprocal: bool,
        bias: bool,
        init_scale: float | None,
        loss: LossFunction,
        negatives: NegativeSampling,
        n3: float,
    ) -> None:
        super().__init__()
        self.spec = spec
        lhs, rhs = self.ends = entities[spec.lhs], entities[spec.rhs]
        size = len(spec.relations), lhs.dimension
        self.scores = EdgeScores(*size, spec.operator, comparator, reciprocal, bias, init_scale)
        self.loss = TrainingLoss(self.scores, loss, negatives, n3, (lhs.count, rhs.count))


class GroupedEdges(nn.Module):
    """Deals edges to the groups of their relations.

    Args:
        schema: the groups.
    """

    _group: Tensor
    _local: Tensor

    def __init__(self, schema: EmbeddingSchema) -> None:
        super().__init__()
        self._schema = schema
        of_relation, local = torch.zeros(2, schema.num_relations, dtype=torch.int64)
        for number, group in enumerate(schema.groups):
            members = torch.tensor(group.relations)
            of_relation[members], local[members] = number, torch.arange(len(members))
        self.register_buffer("_group", of_relation, persistent=False)
        self.register_buffer("_local", local, persistent=False)

    def forward(self, edges: Triples) -> list[tuple[int, Tensor, Triples]]:
        """Each group that has edges: its number, the places of its edges ``[b]``, and these by the group's own ids.

        Where no group has any, the first one is there without edges.
        """
        if len(self._schema.groups) == 1:
            return [(0, torch.arange(len(edges), device=edges.head.device), self._localized(0, edges))]
        of = self._group[edges.relation]
        found = []
        for number in of.unique().tolist() or [0]:
            places = (of == number).nonzero().flatten()
            found.append((number, places, self._localized(number, edges.select(places))))
        return found

    def _localized(self, number: int, edges: Triples) -> Triples:
        group, entities = self._schema.groups[number], self._schema.entities
        head, tail = edges.head - entities[group.lhs].first, edges.tail - entities[group.rhs].first
        return Triples(head, self._local[edges.relation], tail, edges.weight, edges.chunk)
