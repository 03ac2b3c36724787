"""Ranking metrics: where the true answer stands among all candidates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric

NAMES = ("mrr", "hits@1", "hits@10")
CHUNK = 1 << 24  # scores held at a time


class Ranking(Metric):
    """Mean reciprocal rank, or the share of ranks up to k; NaN of no ranks.

    Args:
        name: ``mrr``, ``mean_rank`` or ``hits@<k>``.

    Shapes:
        update takes ranks ``[B]`` (from 1; a half where answers tie), perhaps none.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.limit = int(name.split("@")[1]) if "@" in name else None
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, ranks: Tensor) -> None:
        if self.limit is not None:
            values = (ranks <= self.limit).double()
        else:
            values = 1.0 / ranks if self.name == "mrr" else ranks
        self.total += values.double().sum()
        self.count += ranks.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


def ranks(
    score: Callable[[slice], Tensor], answer: Tensor, known_ptr: Tensor | None, known: Tensor | None, candidates: int
) -> Tensor:
    """Return the rank of each query's answer among the candidates, 1 for the best.

    Candidates that are true answers of the query as well are left out (the filtered setting of Bordes et al. 2013).
    Where others score the same as the answer, its rank is the mean of the places that they share.

    Args:
        score: scores ``[b, candidates]`` of a slice of the queries; called for one slice after another, so that about
            :data:`CHUNK` scores exist at a time.
        answer: the candidate that is each query's answer.
        known_ptr: start of each query's known answers in ``known``; None ranks unfiltered.
        known: candidates known to be true.
        candidates: number of candidates.

    Shapes:
        answer int64 ``[B]``, known_ptr int64 ``[B + 1]``, known int64 ``[K]``; result float64 ``[B]``.
    """
    total, step = answer.numel(), max(1, CHUNK // max(candidates, 1))
    found = [answer.new_zeros(0, dtype=torch.float64)]
    for start in range(0, total, step):
        rows = slice(start, min(start + step, total))
        found.append(_ranks_of(score(rows), answer[rows], *known_of(rows, known_ptr, known)))
    return torch.cat(found)


def known_of(rows: slice, known_ptr: Tensor | None, known: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return row and candidate of each known answer of these queries."""
    if known_ptr is None or known is None:
        return None, None
    pointer = known_ptr[rows.start : rows.stop + 1]
    row = torch.repeat_interleave(torch.arange(pointer.numel() - 1, device=pointer.device), pointer.diff())
    return row, known[int(pointer[0]) : int(pointer[-1])]


def _ranks_of(scores: Tensor, answer: Tensor, row: Tensor | None, known: Tensor | None) -> Tensor:
    own = scores.gather(1, answer.unsqueeze(1))
    if row is not None and known is not None:
        scores = scores.clone()
        scores[row, known] = -torch.inf
    better = (~(scores <= own)).sum(1)  # a score that is no number counts against the answer
    others = (scores == own).sum(1) - (scores.gather(1, answer.unsqueeze(1)) == own).flatten().long()
    return 1 + better.double() + others.double() / 2
