"""Ranks of answers among candidates, by scores that are computed and compared a tile at a time.

A rank costs one score for each candidate, which a matrix product computes. Comparing takes little beside it while the
scores are in the core's cache, and longer than the product if they were written to memory first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

TILE = 1 << 10
"""Queries of a tile, and its candidates: 4 MiB of float32."""
CHUNK = 1 << 24
"""Scores that exist at a time on a device, where starting an operation takes longer than reading them again."""

Chosen = slice | Tensor
"""Candidates: a range of their numbers, or int64 ``[n]``."""


def queries_at_once(candidates: int, device: torch.device) -> int:
    """Return how many queries :class:`Tiles` should have for this number of candidates."""
    scores = TILE * TILE if device.type == "cpu" else CHUNK
    return max(1, scores // max(1, _width(candidates, device)))


def _width(candidates: int, device: torch.device) -> int:
    return min(candidates, TILE) if device.type == "cpu" else candidates


class Tiles:
    """The scores of B queries and N candidates.

    All tiles have as many candidates, so that products of equal rows are rounded alike wherever the rows are, and tie.

    Args:
        score: returns the scores ``[B, n]`` of some candidates.
        candidates: N.
        device: of the scores.
    """

    def __init__(self, score: Callable[[Chosen], Tensor], candidates: int, device: torch.device) -> None:
        self._score, self._count, self._width = score, candidates, _width(candidates, device)
        self._only: Tensor | None = None

    def of(self, answer: Tensor) -> Tensor:
        """Return the score of one candidate for each query, ``[B]``.

        Args:
            answer: int64 ``[B]``. B is at most :func:`queries_at_once`.
        """
        if self._count == 0:  # of what another rank has
            return self._score(slice(0, 0)).new_zeros(len(answer))
        if self._count == self._width:
            return self._tile(0).gather(1, answer.unsqueeze(1)).squeeze(1)
        chosen = answer.new_zeros(max(self._width, len(answer)))
        chosen[: len(answer)] = answer
        return self._score(chosen).diagonal().clone()

    def compare(self, own: Tensor, left_out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Count the candidates that score better than each query's answer, and those that score the same.

        NaN counts as better than the answer.

        Args:
            own: ``[B]``, the scores of the answers.
            left_out: query and candidate of each pair that does not count, int64 ``[Z]`` each; pairs may be repeated.

        Returns:
            int64 ``[B]`` each.
        """
        better, equal = torch.zeros_like(own, dtype=torch.int64), torch.zeros_like(own, dtype=torch.int64)
        pairs = torch.unique(left_out[1] * len(own) + left_out[0])  # by candidate
        candidate, query = pairs // max(1, len(own)), pairs % max(1, len(own))
        starts = torch.arange(0, self._count, max(1, self._width), device=own.device)
        ends = torch.searchsorted(candidate, starts + self._width).tolist()
        begin = 0
        for start, end in zip(starts.tolist(), ends, strict=True):
            low = min(start, self._count - self._width)
            scores = self._tile(low)
            _add(scores, start - low, own, better, equal)
            queries, columns = query[begin:end], candidate[begin:end] - low
            _subtract(scores[queries, columns], queries, own, better, equal)
            begin = end
        return better, equal

    def _tile(self, low: int) -> Tensor:
        """Return the scores of the candidates from ``low`` on; a single tile is kept."""
        if self._count > self._width:
            return self._score(slice(low, low + self._width))
        if self._only is None:
            self._only = self._score(slice(0, self._count))
        return self._only


def _add(scores: Tensor, first: int, own: Tensor, better: Tensor, equal: Tensor) -> None:
    if scores.device.type != "cpu":
        own = own.unsqueeze(1)
        better += (~(scores[:, first:] <= own)).count_nonzero(1)  # sum would copy to int64
        equal += (scores[:, first:] == own).count_nonzero(1)
        return
    from gtrain.model.rank_kernels import add_counts

    wide = scores.dtype if scores.dtype in (torch.float32, torch.float64) else torch.float32
    add_counts(scores.detach().to(wide).contiguous(), first, own.detach().to(wide), better, equal)


def _subtract(scores: Tensor, queries: Tensor, own: Tensor, better: Tensor, equal: Tensor) -> None:
    """Take pairs ``[Z]`` out of the counts."""
    better.index_add_(0, queries, (~(scores <= own[queries])).long(), alpha=-1)
    equal.index_add_(0, queries, (scores == own[queries]).long(), alpha=-1)


def ranks(
    score: Callable[[slice, Chosen], Tensor],
    answer: Tensor,
    known_ptr: Tensor | None,
    known: Tensor | None,
    candidates: int,
) -> Tensor:
    """Return the rank of each query's answer among the candidates, 1 for the best.

    Candidates that are true answers of the query as well are left out (the filtered setting of Bordes et al. 2013).
    An answer that ties with other candidates gets the mean of the ranks that they share.

    Args:
        score: scores ``[b, n]`` of a range of the queries and of some candidates.
        answer: the candidate that is each query's answer.
        known_ptr: start of each query's known answers in ``known``; None ranks unfiltered.
        known: candidates known to be true.
        candidates: number of candidates.

    Shapes:
        answer int64 ``[B]``, known_ptr int64 ``[B + 1]``, known int64 ``[K]``; result float64 ``[B]``.
    """
    total, step = answer.numel(), queries_at_once(candidates, answer.device)
    blocks = [answer.new_zeros(0, dtype=torch.float64)]
    for start in range(0, total, step):
        rows = slice(start, min(start + step, total))
        tiles = Tiles(partial(score, rows), candidates, answer.device)
        own = tiles.of(answer[rows])
        blocks.append(rank(*tiles.compare(own, left_out(answer[rows], *known_of(rows, known_ptr, known)))))
    return torch.cat(blocks)


def left_out(answer: Tensor, row: Tensor | None, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what :meth:`Tiles.compare` leaves out: the answers, and known answers by their rows."""
    rows = torch.arange(len(answer), device=answer.device)
    if row is None or known is None:
        return rows, answer
    return torch.cat([rows, row]), torch.cat([answer, known])


def rank(better: Tensor, equal: Tensor) -> Tensor:
    """Return the ranks of answers by the numbers of better and of equal candidates, float64 ``[B]``."""
    return 1 + better.double() + equal.double() / 2


def known_of(rows: slice, known_ptr: Tensor | None, known: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the row and the candidate of each known answer of a slice of the queries."""
    if known_ptr is None or known is None:
        return None, None
    pointer = known_ptr[rows.start : rows.stop + 1]
    row = torch.repeat_interleave(torch.arange(pointer.numel() - 1, device=pointer.device), pointer.diff())
    return row, known[int(pointer[0]) : int(pointer[-1])]
