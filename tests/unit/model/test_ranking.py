"""Ranks against a plain loop, filtered and with ties, and their means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gtrain.model import candidate_ranks as ranking
from gtrain.model.candidate_ranks import Chosen, ranks
from gtrain.model.edge_model import Ranking


def by_hand(scores: Tensor, answer: Tensor, known: list[list[int]]) -> list[float]:
    """Ranks of answers one query after the other."""
    found = []
    for row, own, others in zip(scores.tolist(), answer.tolist(), known, strict=True):
        kept = [s for candidate, s in enumerate(row) if candidate == own or candidate not in others]
        found.append(1 + sum(s > row[own] for s in kept) + (sum(s == row[own] for s in kept) - 1) / 2)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tile", [1, 7, 1 << 10])
def test_ranks_agree_with_a_loop(tile: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "TILE", tile)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (30, 20), generator=generator).to(dtype)  # many ties
    answer = torch.randint(0, 20, (30,), generator=generator)
    known = [[int(own), *torch.randint(0, 20, (i % 4,), generator=generator).tolist()] for i, own in enumerate(answer)]
    pointer = torch.tensor([0, *(len(ids) for ids in known)]).cumsum(0)
    flat = torch.tensor([candidate for ids in known for candidate in ids])
    filtered = ranks(lambda rows, some: scores[rows][:, some], answer, pointer, flat, 20)
    assert filtered.tolist() == by_hand(scores, answer, known)
    unfiltered = ranks(lambda rows, some: scores[rows][:, some], answer, None, None, 20)
    assert unfiltered.tolist() == by_hand(scores, answer, [[]] * 30)
    assert (filtered <= unfiltered).all() and (filtered < unfiltered).any()


def test_no_more_scores_than_a_tile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "TILE", 6)
    sizes = []

    def score(rows: slice, some: Chosen) -> Tensor:
        scores = torch.zeros(20, 20)[rows][:, some]
        sizes.append(scores.shape)
        return scores

    assert ranks(score, torch.zeros(8, dtype=torch.int64), None, None, 20).tolist() == [10.5] * 8
    assert sizes == [(6, 6)] * 5 + [(2, 6)] * 5  # of the answers, and four for 20 candidates


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_model_that_diverged_is_not_the_best(value: float) -> None:
    scores = torch.full((3, 2000), value)
    pointer, known = torch.tensor([0, 1, 2, 3]), torch.tensor([5, 5, 1500])
    found = ranks(lambda rows, some: scores[rows][:, some], torch.tensor([0, 1900, 1500]), pointer, known, 2000)
    among = torch.tensor([1999.0, 1999.0, 2000.0])  # without the known one, unless it is the answer
    assert torch.equal(found, (among if value != value else (among + 1) / 2).double())


def test_equal_rows_tie_wherever_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    row, queries = torch.randn(1, 100, generator=generator), torch.randn(1500, 100, generator=generator)
    nodes = row.expand(2500, 100).contiguous()
    answer = torch.randint(0, 2500, (1500,), generator=generator)
    found = ranks(lambda rows, some: queries[rows] @ nodes[some].T, answer, None, None, 2500)
    assert (found == 1250.5).all()


def test_means_of_ranks() -> None:
    found = {name: Ranking(name) for name in ("mrr", "hits@1", "hits@10")}
    for metric in found.values():
        metric.update(torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64))
        metric.update(torch.tensor([], dtype=torch.float64))
        metric.update(torch.tensor([20.0], dtype=torch.float64))
    assert float(found["mrr"].compute()) == pytest.approx((1 + 0.5 + 0.1 + 0.05) / 4)
    assert float(found["hits@1"].compute()) == 0.25
    assert float(found["hits@10"].compute()) == 0.75
