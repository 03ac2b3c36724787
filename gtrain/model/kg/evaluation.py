"""Ranking the ends of the edges of a group of relations, among the nodes of their types or among some of them."""

from __future__ import annotations

import torch
from torch import Tensor

from gtrain.model.kg.groups import RelationGroup
from gtrain.model.kg.ranking import Candidates, Queries, rank_ends
from gtrain.model.kg.tables import EntityTables
from gtrain.model.kg.training import Edges
from gtrain.nn import Csr, select_rows


class GroupRanks:
    """Ranks edges of one group.

    Args:
        group: the group.
        tables: of all entity types.
    """

    def __init__(self, group: RelationGroup, tables: EntityTables) -> None:
        self._group, self._tables = group, tables
        self._lhs, self._rhs = group.spec.lhs, group.spec.rhs

    def ends(self, edges: Edges) -> tuple[Tensor, Tensor]:
        """Embeddings of the heads and of the tails; one lookup where they are of one type."""
        rows = self._tables.rows
        if self._lhs == self._rhs:
            heads, tails = rows[self._lhs](torch.stack([edges.head, edges.tail]))
            return heads, tails
        return rows[self._lhs](edges.head), rows[self._rhs](edges.tail)

    def among_all(self, edges: Edges, place: Tensor, known: list[Csr | None]) -> list[Tensor]:
        """Ranks of the tails and of the heads among all nodes of their types.

        Args:
            edges: by the group's own ids.
            place: ``[B]``, their places among the edges of a batch.
            known: for the edges of the batch, what else is true of tails and of heads, by the ids of all types.
        """
        heads, tails = self.ends(edges)
        lhs, rhs = self._group.ends
        sizes = {self._lhs: lhs.count, self._rhs: rhs.count}
        by_type = {end: self._candidates(end, count) for end, count in sizes.items()}
        known_tails, known_heads = (
            None if ids is None else _of_type(ids, place, end.first) for ids, end in zip(known, (rhs, lhs), strict=True)
        )
        return rank_ends(
            self._group.scores,
            (by_type[self._rhs], by_type[self._lhs]),
            tails=Queries(heads, edges.relation, edges.tail, known_tails),
            heads=Queries(tails, edges.relation, edges.head, known_heads),
        )

    def among_some(self, rows: tuple[Tensor, Tensor], relation: Tensor, others: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Ranks of edges' ends among those of all these edges and some others, unfiltered: of tails, then of heads.

        Args:
            rows: of the heads' table and of the tails', ``[B, D]`` each.
            relation: ``[B]``, numbers among the group's relations.
            others: rows ``[K, D]`` of both tables.
        """
        (heads, more_heads), (tails, more_tails) = (
            [self._tables.shifted(some, end) for some in (rows[side], others[side])]
            for side, end in enumerate((self._lhs, self._rhs))
        )
        first = torch.arange(len(heads), device=heads.device)
        if self._lhs == self._rhs:
            every = _listed(torch.cat([tails, heads, more_heads, more_tails]))
            candidates, second = (every, every), first + len(heads)
        else:
            candidates, second = (
                (_listed(torch.cat([tails, more_tails])), _listed(torch.cat([heads, more_heads]))),
                first,
            )
        sides = Queries(heads, relation, first, None), Queries(tails, relation, second, None)
        return rank_ends(self._group.scores, candidates, tails=sides[0], heads=sides[1])

    def _candidates(self, number: int, count: int) -> Candidates:
        """All nodes of a type."""
        return Candidates(lambda: self._tables.blocks(number), count)


def _listed(rows: Tensor) -> Candidates:
    """These rows alone."""
    block = torch.arange(len(rows), device=rows.device), rows
    return Candidates(lambda: iter([block]), len(rows))


def _of_type(known: Csr, place: Tensor, first: int) -> Csr:
    """What is known of some edges, by the numbers of a type's nodes."""
    found = select_rows(known, place)
    return Csr(found.ids - first, None, found.offsets)
