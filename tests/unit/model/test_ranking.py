"""Ranks against a plain loop, filtered and with ties, and their means."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gtrain.model import candidate_ranks as ranking
from gtrain.model.candidate_ranks import Chosen, ranks
from gtrain.model.edge_model import AveragePrecision, Ranking


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


def test_sums_of_ranks_are_in_double_precision_in_every_precision_of_a_run() -> None:
    metric = Ranking("mean_rank").to(torch.bfloat16).set_dtype(torch.bfloat16)
    for number in range(600):
        metric.update(torch.full((7,), float(number), dtype=torch.float64))
    assert float(metric.compute()) == 299.5


def precision_by_hand(scores: Tensor, answers: list[list[int]], k: int) -> float:
    """MAP@k as RelBench computes it: from the k best candidates of each question that has answers."""
    found = []
    for row, wanted in zip(scores, answers, strict=True):
        hits = [candidate in wanted for candidate in row.topk(k).indices.tolist()]
        shares = [sum(hits[: place + 1]) / (place + 1) for place in range(k) if hits[place]]
        if wanted:
            found.append(sum(shares) / min(len(wanted), k))
    return sum(found) / len(found)


@pytest.mark.parametrize("k", [1, 5, 10])
@pytest.mark.parametrize("filtered", [True, False])
def test_average_precision_of_recommendations(filtered: bool, k: int) -> None:
    """Each source asks at two times; its answers come in any order, in several batches."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(40, 30, generator=generator, dtype=torch.float64)
    answers = [torch.randperm(30, generator=generator)[: number % 14].tolist() for number in range(40)]
    question = torch.tensor([number for number, wanted in enumerate(answers) for _ in wanted])
    answer = torch.tensor([candidate for wanted in answers for candidate in wanted])
    known = [[c for c in answers[number] if filtered] for number in question.tolist()]
    ranks = torch.tensor(by_hand(scores[question], answer, known), dtype=torch.float64)
    metric = AveragePrecision(k, filtered)
    for rows in torch.randperm(len(question), generator=generator).split(37):
        metric.update(question[rows] % 20, 2**61 + question[rows] // 20, ranks[rows])
    metric.update(question[:0], question[:0], ranks[:0])
    assert float(metric.compute()) == pytest.approx(precision_by_hand(scores, answers, k), abs=1e-12)


def test_average_precision_of_nothing() -> None:
    metric, nothing = AveragePrecision(10, filtered=True), torch.empty(0, dtype=torch.int64)
    metric.update(nothing, nothing, nothing.double())
    assert math.isnan(float(metric.compute()))
