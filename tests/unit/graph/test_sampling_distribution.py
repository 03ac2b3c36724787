"""How often each outcome of sampling occurs, by chi-square against plain references.

A graph of many targets whose columns are all alike gives independent draws in one call, since each target has a random
stream of its own. An outcome is the whole set of edges chosen for a target, so that dependence between draws shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import combinations, combinations_with_replacement, permutations
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare

from gtrain.graph.sampling import Columns, HeteroNeighborSampler, NeighborSampler, Rule, batch_key, sample_hop

TARGETS = 20_000
SIGNIFICANCE = 1e-3  # keys are fixed, so a test that passes always passes


def outcomes(degree: int, count: int, *, weight: Any = None, times: Any = None, limit: int = 0, **rule: Any) -> Counter:
    """How often each set of edges, as numbers in the column, is chosen for TARGETS columns that are alike.

    Args:
        times: of the column's edges; sources are distinct, so that they serve as times of nodes too (``by_node``).
    """
    by_node = rule.pop("by_node", False)
    columns = Columns(
        np.arange(TARGETS + 1) * degree,
        np.tile(np.arange(degree), TARGETS),
        num_sources=degree,
        weight=None if weight is None else np.tile(weight, TARGETS),
        edge_time=None if times is None or by_node else np.tile(times, TARGETS),
    )
    times_given = {} if times is None else {"subgraph": np.zeros(TARGETS, np.int64), "seed_time": [limit]}
    if by_node:
        columns = columns.timed_by_sources(times)
    found = sample_hop(columns, np.arange(TARGETS), count, key=batch_key(0, 0, 0), rule=Rule(**rule), **times_given)
    assert np.array_equal(found.column, np.repeat(np.arange(TARGETS), count))
    chosen = np.sort(found.source.reshape(TARGETS, count), axis=1)
    return Counter(map(tuple, chosen.tolist()))


def assert_fits(found: Mapping[Any, int], probability: Mapping[Any, float]) -> None:
    """Chi-square of counts against exact probabilities; rare outcomes are put together."""
    total = sum(found.values())
    assert set(found) <= {outcome for outcome, p in probability.items() if p > 0}
    assert math.isclose(sum(probability.values()), 1.0)
    common = [outcome for outcome, p in probability.items() if p * total >= 5]
    observed = [found.get(outcome, 0) for outcome in common]
    expected = [probability[outcome] * total for outcome in common]
    if total - sum(expected) >= 5:
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    expected = np.array(expected) * (sum(observed) / sum(expected))
    assert len(observed) > 1
    assert chisquare(observed, expected).pvalue > SIGNIFICANCE


def one_by_one(weight: Any, count: int) -> dict[tuple[int, ...], float]:
    """Probability of each set, if edges are drawn one after the other from what is left, in proportion to weights."""
    result: Counter = Counter()
    positive = [i for i, w in enumerate(weight) if w > 0]
    for order in permutations(positive, count):
        probability, left = 1.0, sum(weight)
        for i in order:
            probability *= weight[i] / left
            left -= weight[i]
        result[tuple(sorted(order))] += probability
    return dict(result)


def independently(weight: Any, count: int) -> dict[tuple[int, ...], float]:
    """Probability of each multiset, if every draw is from all edges."""
    result, share = {}, np.array(weight) / np.sum(weight)
    for chosen in combinations_with_replacement(range(len(weight)), count):
        ways = math.factorial(count)
        for repeats in Counter(chosen).values():
            ways //= math.factorial(repeats)
        result[chosen] = ways * float(np.prod(share[list(chosen)]))
    return result


@pytest.mark.parametrize(("degree", "count"), [(8, 3), (6, 5), (200, 1)])
def test_uniform_without_replacement(degree: int, count: int) -> None:
    sets = list(combinations(range(degree), count))
    assert_fits(outcomes(degree, count), dict.fromkeys(sets, 1 / len(sets)))


def test_uniform_without_replacement_of_many() -> None:
    """More than 32 go through a hash set; the pair that is left out is uniform."""
    found = Counter()
    for chosen, times in outcomes(42, 40).items():
        found[tuple(sorted(set(range(42)) - set(chosen)))] += times
    pairs = list(combinations(range(42), 2))
    assert_fits(found, dict.fromkeys(pairs, 1 / len(pairs)))


def test_uniform_with_replacement() -> None:
    assert_fits(outcomes(6, 3, replace=True), independently(np.ones(6), 3))


@pytest.mark.parametrize(
    ("weight", "count"),
    [
        ([1.0, 2.0, 0.0, 3.0, 0.5, 7.0], 3),  # a reservoir: few more than are asked for
        ([1.0, 2.0, 0.0, 3.0, 0.5, 7.0, 1.0, 1.0, 4.0, 0.1], 3),  # rejection
        ([5.0, 1e6, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0], 3),  # rejection gives up, a reservoir takes over
        ([1e-9, 2e-9, 4e-9, 3e-9], 2),
        ([1e200, 2e200, 4e200, 3e200], 3),
    ],
)
def test_weighted_without_replacement(weight: list[float], count: int) -> None:
    assert_fits(outcomes(len(weight), count, weight=weight), one_by_one(weight, count))


@pytest.mark.parametrize("degree", [36, 100])
def test_weighted_without_replacement_of_many(degree: int) -> None:
    """A reservoir with jumps, against drawing 33 edges one after the other."""
    rng, count, trials = np.random.default_rng(0), 33, 4000
    weight = rng.pareto(1.5, degree) + 0.01
    order = np.argsort(weight)
    left, chosen = np.tile(weight, (trials, 1)), []
    for _ in range(count):
        running = left.cumsum(axis=1)
        draw = (running > rng.random((trials, 1)) * running[:, -1:]).argmax(axis=1)
        left[np.arange(trials), draw] = 0.0
        chosen.append(draw)
    reference = np.stack(chosen, axis=1)
    found = np.array(list(outcomes(degree, count, weight=weight).elements()))
    some = order[::5]  # light and heavy; how many of them were chosen has few enough outcomes to count

    def inside(sets: np.ndarray) -> Counter:
        return Counter((sets[:, :, None] == some).any(axis=1).sum(axis=1).tolist())

    a, b = inside(reference), inside(found)
    table = np.array([[counts[i] for i in sorted(set(a) | set(b))] for counts in (a, b)])
    table = table[:, table.min(axis=0) >= 5]
    assert table.shape[1] > 2 and chi2_contingency(table).pvalue > SIGNIFICANCE
    per_edge = [np.bincount(sets.ravel(), minlength=degree) / len(sets) for sets in (reference, found)]
    error = np.sqrt(np.maximum(per_edge[1] * (1 - per_edge[1]), 1e-4) * (1 / trials + 1 / TARGETS))
    assert (np.abs(per_edge[0] - per_edge[1]) < 4.5 * error).all()


def test_weighted_with_replacement() -> None:
    weight = [1.0, 2.0, 0.0, 3.0, 0.5, 0.0]
    assert_fits(outcomes(6, 3, weight=weight, replace=True), independently(weight, 3))


TIMES = np.array([1, 2, 2, 5, 6, 6, 9, 12])


@pytest.mark.parametrize("by_node", [False, True])
def test_temporal(by_node: bool) -> None:
    """Of the six edges until time 6, whole sets are equally likely; draws with replacement independent."""
    sets = list(combinations(range(6), 3))
    limits: dict[str, Any] = {"times": TIMES, "limit": 6, "temporal": "uniform", "by_node": by_node}
    assert_fits(outcomes(8, 3, **limits), dict.fromkeys(sets, 1 / len(sets)))
    assert_fits(outcomes(8, 3, **limits, replace=True), independently(np.ones(6), 3))
    weight = np.array([1.0, 2.0, 0.5, 3.0, 1.0, 0.0, 50.0, 50.0])
    assert_fits(outcomes(8, 3, **limits, weight=weight), one_by_one(weight[:6], 3))
    last = outcomes(8, 3, **{**limits, "temporal": "last"})
    assert set(last) == {(3, 4, 5)}


def test_batches_and_hops_are_independent() -> None:
    """One node, drawn for in many batches and in both hops (a loop of two nodes with the same neighbours)."""
    columns = Columns(np.array([0, 4, 8, 8, 8, 8, 8]), np.array([1, 2, 3, 4, 2, 3, 4, 5]))
    sampler, found = NeighborSampler(columns, [2, 1]), Counter()
    for batch in range(4000):
        sample = sampler.sample([0], epoch=batch % 3, batch=batch)
        if sample.num_sampled_edges == [2, 1]:
            found[tuple(sorted(sample.edge[:2])), int(sample.edge[2])] += 1
    pairs = [(pair, last) for pair in ((0, 1), (0, 2), (0, 3)) for last in range(4, 8)]
    assert_fits(found, dict.fromkeys(pairs, 1 / len(pairs)))


def test_edge_types_are_independent() -> None:
    """Two edge types with equal columns draw differently for the same node."""
    kinds = (("a", "x", "b"), ("a", "y", "b"))
    columns = Columns(np.arange(TARGETS + 1) * 4, np.tile(np.arange(4), TARGETS), num_sources=4)
    sampler = HeteroNeighborSampler(dict.fromkeys(kinds, columns), {"a": 4, "b": TARGETS}, [1])
    sample = sampler.sample({"b": np.arange(TARGETS)})
    drawn = [columns.indices[sample.edge[kind]].tolist() for kind in kinds]
    pairs = [(i, j) for i in range(4) for j in range(4)]
    assert_fits(Counter(zip(*drawn, strict=True)), dict.fromkeys(pairs, 1 / 16))
