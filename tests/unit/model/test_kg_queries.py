"""Training by query: steps that find one end of edges, whose queries are scored once, against steps of whole edges."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import gtrain
from helpers import ok
from torch import Tensor

from gtrain.data.batches.edge_seeds import EdgeSeeds
from gtrain.engine import precision
from gtrain.errors import ConfigError
from gtrain.model.kg import training
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.model.kg.queries import Queries
from gtrain.model.kg.training import Triples

N, R, EDGES = 12, 3, 60


def edges() -> Triples:
    generator = torch.Generator().manual_seed(0)
    head, tail = torch.randint(N, (2, EDGES), generator=generator)
    weight = torch.rand(EDGES, generator=generator, dtype=torch.float64)
    return Triples(head, torch.randint(R, (EDGES,), generator=generator), tail, weight)


def module(**settings: Any) -> KGEmbedding:
    """A model with parameters far from their initial values, in double precision."""
    torch.manual_seed(0)
    made = KGEmbedding(N, R, **{"dimension": 6, "all_negs": True, "by_query": True, **settings}).double()
    for parameter in made.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return made


def steps(size: int | None, seed: int | None) -> list[tuple[int, Tensor]]:
    all_edges = edges()
    index = torch.stack([all_edges.head, all_edges.tail])
    seeds = EdgeSeeds(index, {"type": all_edges.relation}, None, None, torch.arange(EDGES))
    return seeds.query_steps(size, seed)


def test_products_in_bfloat16_have_few_shapes_and_padding_changes_no_loss() -> None:
    torch.manual_seed(0)
    every, table = edges(), torch.randn(N, 6, requires_grad=True)
    queries, shapes = Queries(every.relation, every.head, every.tail, R), set()
    rows = torch.randn(len(queries.given), 6, requires_grad=True)

    def score(some: Tensor) -> Tensor:
        shapes.add(len(some))
        return some @ table.T

    with torch.autocast("cpu", torch.bfloat16):
        losses = queries.losses(score, rows, 20)
    assert shapes == {64}
    losses.sum().backward()
    gradient, table.grad = table.grad, None
    exact = queries.losses(score, rows, 20)
    assert shapes == {64, 20, len(rows) % 20}
    exact.sum().backward()
    torch.testing.assert_close(losses, exact, rtol=0.02, atol=0.02)
    torch.testing.assert_close(gradient, table.grad, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("per_block", [None, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n3": 0.1, "relation_prediction": 0.5},
        {"dura": 0.3, "bias": True},
        {"bias": True, "comparator": "cos"},
        {"operator": "affine", "comparator": "squared_l2"},
        {"operator": "rotation", "n3": 0.1},
        {"operator": "translation", "n3": 0.2, "comparator": "l2"},
        {"relations": [{"name": "a"}, {"name": "b", "operator": "diagonal"}, {"name": "c"}], "n3": 0.1},
    ],
)
def test_both_ends_together_are_the_loss_of_the_edges(
    settings: dict[str, Any], per_block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if per_block is not None:
        monkeypatch.setattr(training, "LIMIT", per_block * N)
    if "relations" in settings:
        settings = {**settings, "relation_names": ["a", "b", "c"]}
    whole, model, every = module(**settings, by_query=False), module(**settings), edges()
    weight = every.weight
    assert weight is not None
    expected = whole.losses(every)
    (weight * expected).sum().backward()
    found = torch.zeros(EDGES, dtype=torch.float64)
    for end, positions in steps(17, 5):
        losses = model.losses(replace(every.select(positions), end=end))
        # An edge's loss is the mean of those of its ends.
        (weight[positions] * losses / 2).sum().backward()
        found[positions] += losses.detach() / 2
    torch.testing.assert_close(found, expected.detach(), atol=1e-12, rtol=1e-12)
    for mine, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("operator", ["complex_diagonal", "linear"])
def test_a_cpu_that_lacks_bfloat16_multiplies_in_single_precision(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, every = module(operator=operator).float(), replace(edges(), end=1)
    parameters = [model.entities[0].weight, *model.groups[0].scores.forwards.parameters()]

    def step(low: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            losses = model.losses(every)
        return [losses, *torch.autograd.grad(losses.sum(), parameters)]

    exact = step(low=False)
    for fast in (False, True):
        monkeypatch.setattr(precision, "cpu_multiplies_bfloat16", lambda fast=fast: fast)
        equal = [torch.equal(mine, wanted) for mine, wanted in zip(step(low=True), exact, strict=True)]
        assert not any(equal) if fast else all(equal)


def test_scores_in_bfloat16_are_summed_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "cpu_multiplies_bfloat16", lambda: True)
    model, all_edges = module(by_query=True).float(), replace(edges(), end=1)
    exact = model.losses(all_edges)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.losses(all_edges)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0.02)
    rounded.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("size", [None, 7, EDGES, 1000])
@pytest.mark.parametrize("seed", [None, 3])
def test_an_epoch_has_each_edge_once_for_each_end(size: int | None, seed: int | None) -> None:
    all_edges = edges()
    for end in (0, 1):
        positions = torch.cat([some for found, some in steps(size, None) if found == end])
        assert sorted(positions.tolist()) == list(range(EDGES))
        given = (all_edges.tail, all_edges.head)[end][positions]
        keys = torch.stack([given, all_edges.relation[positions]], 1)
        runs = keys.unique_consecutive(dim=0)
        assert len(runs) == len(keys.unique(dim=0))  # the edges of a query follow each other
    assert all(len(some) <= (size or EDGES) for _, some in steps(size, seed))
    assert sum(len(some) for _, some in steps(size, seed)) == 2 * EDGES


def test_the_order_depends_on_the_seed_alone() -> None:
    def order(seed: int) -> list[list[int]]:
        return [[end, *some.tolist()] for end, some in steps(7, seed)]

    assert order(1) == order(1) != order(2)
    assert {end for end, _ in steps(7, 1)[:9]} == {0, 1}  # steps of both ends take turns


def test_a_graph_without_relations_or_edges() -> None:
    seeds = EdgeSeeds(torch.tensor([[0, 1, 0], [2, 2, 1]]), {}, None, None, torch.arange(3))
    assert [(end, some.tolist()) for end, some in seeds.query_steps(None, None)] == [(0, [2, 0, 1]), (1, [0, 2, 1])]
    nothing = EdgeSeeds(torch.empty(2, 0, dtype=torch.int64), {}, None, None, torch.arange(0))
    assert sum(len(some) for _, some in nothing.query_steps(4, 0)) == 0


@pytest.mark.parametrize(
    "settings",
    [{"all_negs": False}, {"loss": "ranking"}, {"reciprocal": False}, {"head_negs": False}],
)
def test_other_losses_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"model\.by_query=true was set"):
        module(**settings)


JOB = ("strategy=single", "data=planted_kg", "data.num_entities=200", "data.num_triples=600", "model=kg",
       "model.dimension=8", "model.all_negs=true", "model.by_query=true", "data.batch_size=100",
       "trainer.max_epochs=3")  # fmt: skip


def test_a_run_takes_twice_the_steps_and_resumes(tmp_path: Path) -> None:
    def losses(folder: Path) -> list[float]:
        history = json.loads((folder / "summary.json").read_text())["history"]
        return [epoch["train/loss"] for epoch in history if "train/loss" in epoch]

    ok(gtrain(*JOB, "hydra.run.dir=whole", cwd=tmp_path))
    ok(gtrain(*JOB, "hydra.run.dir=part", "trainer.max_epochs=1", cwd=tmp_path))
    ok(gtrain(*JOB, "hydra.run.dir=part", "ckpt_path=last", cwd=tmp_path))
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "part")[-2:] == whole[-2:]
    assert whole[-1] < whole[0]


@pytest.mark.parametrize("strategy", ["pbg", "ps"])
def test_strategies_that_train_both_ends_at_once_say_so(strategy: str, tmp_path: Path) -> None:
    result = gtrain(*JOB, f"strategy={strategy}", cwd=tmp_path)
    assert result.returncode != 0
    assert "model.by_query=true" in result.stderr
    assert "trains both ends of an edge in one step" in result.stderr


@pytest.mark.parametrize("by_query", [True, False])
def test_a_run_in_bfloat16_ranks_in_single_precision(by_query: bool, tmp_path: Path) -> None:
    changed = f"model.by_query={str(by_query).lower()}"
    for number in ("32-true", "bf16-mixed"):
        ok(gtrain(*JOB, changed, f"trainer.precision={number}", f"hydra.run.dir={number}", cwd=tmp_path))
    exact, rounded = (
        json.loads((tmp_path / name / "summary.json").read_text())["metrics"] for name in ("32-true", "bf16-mixed")
    )
    assert rounded["test/mrr"] == pytest.approx(exact["test/mrr"], rel=0.1)
    assert rounded["train/loss"] == pytest.approx(exact["train/loss"], rel=0.01)
