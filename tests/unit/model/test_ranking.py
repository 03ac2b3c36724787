"""Ranks against a plain loop, filtered and with ties, and their means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gtrain.model import edge_model as ranking
from gtrain.model.edge_model import Ranking, ranks


def by_hand(scores: Tensor, answer: Tensor, known: list[list[int]]) -> list[float]:
    """Ranks of answers one query after the other."""
    found = []
    for row, own, others in zip(scores.tolist(), answer.tolist(), known, strict=True):
        kept = [s for candidate, s in enumerate(row) if candidate == own or candidate not in others]
        found.append(1 + sum(s > row[own] for s in kept) + (sum(s == row[own] for s in kept) - 1) / 2)
    return found


@pytest.mark.parametrize("chunk", [1, 40, 1 << 24])
def test_ranks_agree_with_a_loop(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (30, 20), generator=generator).float()  # many ties
    answer = torch.randint(0, 20, (30,), generator=generator)
    known = [[int(own), *torch.randint(0, 20, (i % 4,), generator=generator).tolist()] for i, own in enumerate(answer)]
    pointer = torch.tensor([0, *(len(ids) for ids in known)]).cumsum(0)
    flat = torch.tensor([candidate for ids in known for candidate in ids])
    filtered = ranks(lambda rows: scores[rows], answer, pointer, flat, 20)
    assert filtered.tolist() == by_hand(scores, answer, known)
    unfiltered = ranks(lambda rows: scores[rows], answer, None, None, 20)
    assert unfiltered.tolist() == by_hand(scores, answer, [[]] * 30)
    assert (filtered <= unfiltered).all() and (filtered < unfiltered).any()


def test_no_more_scores_than_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "CHUNK", 45)
    sizes = []

    def score(rows: slice) -> Tensor:
        sizes.append(rows.stop - rows.start)
        return torch.zeros(rows.stop - rows.start, 20)

    assert ranks(score, torch.zeros(5, dtype=torch.int64), None, None, 20).tolist() == [10.5] * 5
    assert sizes == [2, 2, 1]


def test_means_of_ranks() -> None:
    found = {name: Ranking(name) for name in ("mrr", "hits@1", "hits@10")}
    for metric in found.values():
        metric.update(torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64))
        metric.update(torch.tensor([], dtype=torch.float64))
        metric.update(torch.tensor([20.0], dtype=torch.float64))
    assert float(found["mrr"].compute()) == pytest.approx((1 + 0.5 + 0.1 + 0.05) / 4)
    assert float(found["hits@1"].compute()) == 0.25
    assert float(found["hits@10"].compute()) == 0.75
