"""Scoring and ranking edges where each rank has the embeddings of its own nodes only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gtrain.model import ranking
from gtrain.model.decoders import Decoder
from gtrain.protocols import Lists, Spread


def spread_ranks(
    decoder: Decoder,
    spread: Spread,
    ends: tuple[Tensor, Tensor],
    given: tuple[Tensor, Tensor],
    relation: Tensor | None,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    """Return the ranks of the targets and of the sources of this rank's edges among all nodes of all ranks.

    Each rank scores its own nodes for everybody's edges and counts those that are better than the answer; the counts
    are added up. All ranks call this together, a rank without edges too. A rank is what
    :func:`~gtrain.model.ranking.ranks` computes of the whole.

    Args:
        decoder: scores edges.
        spread: the batch's.
        ends: embeddings of the own nodes of the sources' type and of the targets', ``[num_own, D]``.
        given: embeddings of the sources and of the targets of the edges, ``[B, D]``.
        relation: int64 ``[B]``, or None.
        filtered: leave out what is known to be true.

    Returns:
        float64 ``[B]`` each.
    """

    def among(queries: Tensor, of: Tensor | None) -> Lists:
        return spread.known_targets(queries, of)

    heads, tails = given
    targets = _Side(decoder.tails, ends[1], spread.first[1])
    sources = _Side(decoder.heads, ends[0], spread.first[0])
    asked = _Asked(heads, spread.source, spread.target, relation, None)
    back = _Asked(tails, spread.target, spread.source, relation, spread.known_sources(relation) if filtered else None)
    return _ranks(spread, targets, asked, among if filtered else None), _ranks(spread, sources, back, None)


class _Side:
    """The candidates of one side that this rank owns."""

    def __init__(
        self, score: Callable[[Tensor, Tensor | None, Tensor], Tensor], candidates: Tensor, first: int
    ) -> None:
        self.score, self.candidates, self.first = score, candidates, first

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of candidates, and which of the ids are among them."""
        rows = ids - self.first
        return rows, (rows >= 0) & (rows < len(self.candidates))


class _Asked:
    """Queries: embeddings of the end that is given, and in the host's memory its id, the answer's, relation, and known
    answers."""

    def __init__(self, rows: Tensor, ids: Tensor, answer: Tensor, relation: Tensor | None, known: Lists | None) -> None:
        self.rows, self.ids, self.answer, self.known = rows, ids, answer, known
        self.relation = None if relation is None else relation.cpu()

    def gathered(self, spread: Spread, chosen: slice) -> tuple[list[int], _Asked]:
        """Everybody's queries of one round, and how many each rank has of them."""
        rows = spread.all_gather(self.rows[chosen])
        columns = [self.ids, self.answer] + ([] if self.relation is None else [self.relation])
        table = torch.cat(spread.all_gather(torch.stack(columns, dim=1)[chosen]))
        relation = None if self.relation is None else table[:, 2]
        known = None
        if self.known is not None:
            pointer, ids = self.known
            begin = pointer[chosen.start : chosen.stop + 1]
            counts = torch.cat(spread.all_gather(begin.diff()))
            flat = torch.cat(spread.all_gather(ids[int(begin[0]) : int(begin[-1])]))
            known = torch.cat([counts.new_zeros(1), counts.cumsum(0)]), flat
        return [len(part) for part in rows], _Asked(torch.cat(rows), table[:, 0], table[:, 1], relation, known)


def _ranks(
    spread: Spread, side: _Side, asked: _Asked, among: Callable[[Tensor, Tensor | None], Lists] | None
) -> Tensor:
    """Ranks of this rank's answers; ``among`` gives known answers among the candidates."""
    total = len(asked.ids)
    sizes = torch.stack(spread.all_gather(torch.tensor([total, len(side.candidates)])))
    step = max(1, ranking.CHUNK // max(int(sizes[:, 1].max()) * spread.size, 1))
    found = [torch.empty(0, dtype=torch.float64)]
    for start in range(0, int(sizes[:, 0].max()), step):
        here = slice(min(start, total), min(start + step, total))
        counts, everybody = asked.gathered(spread, here)
        ranks = _round(spread, side, everybody, among)
        found.append(ranks.split(counts)[spread.rank])
    return torch.cat(found)


def _round(
    spread: Spread, side: _Side, asked: _Asked, among: Callable[[Tensor, Tensor | None], Lists] | None
) -> Tensor:
    """Ranks of everybody's answers in one round."""
    device = asked.rows.device
    scores = side.score(asked.rows, None if asked.relation is None else asked.relation.to(device), side.candidates)
    row, here = side.local(asked.answer)
    query, row = here.nonzero().flatten().to(device), row[here].to(device)
    own = scores.new_zeros(len(scores))
    own[query] = scores[query, row]
    own = spread.all_reduce(own).unsqueeze(1)
    known = asked.known if among is None else among(asked.ids, asked.relation)
    if known is not None:
        of = torch.repeat_interleave(torch.arange(len(scores)), known[0].diff())
        candidate, there = side.local(known[1])
        scores = scores.clone()
        scores[of[there].to(device), candidate[there].to(device)] = -torch.inf
    better = (~(scores <= own)).sum(1)  # a score that is no number counts against the answer
    ties = (scores == own).sum(1)
    ties[query] -= (scores[query, row] == own[query, 0]).long()
    better, ties = spread.all_reduce(torch.stack([better, ties]))
    return (1 + better.double() + ties.double() / 2).cpu()
