"""Draw the edges of a planted graph: distinct weighted node pairs, an exact number within and between classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from gtrain.data.planted.common import Floats, Ints

WEIGHTED_ROUNDS = 30
"""Rounds after which nodes are drawn uniformly: by then, heavy nodes may be paired with their whole class."""


def draw_pairs(classes: Ints, weights: Floats, inside: int, between: int, rng: np.random.Generator) -> Ints:
    """Return distinct pairs of distinct nodes.

    Args:
        classes: class of each node, ``0 .. k-1``; each class must occur.
        weights: weight of each node; within a class, a node is drawn with probability proportional to it.
        inside: number of pairs within a class; the class is drawn uniformly.
        between: number of pairs between two classes; the classes are drawn uniformly.
        rng: the random generator.

    Shapes:
        classes ``[N]``, weights ``[N]``, the result ``[2, inside + between]`` with the smaller id in row 0.
    """
    sampler, keys = ClassSampler(classes, weights), []
    for count, same in ((inside, True), (between, False)):
        if 4 * count > _num_pairs(classes, same):
            # Dense: rejection of duplicates would take too many rounds.
            keys.append(_pick_from_all(count, same, classes, weights, rng))
        else:
            keys.append(_distinct(count, partial(_undirected, sampler, same, rng), rng))
    joined = np.concatenate(keys)
    return np.stack([joined // classes.size, joined % classes.size])


class ClassSampler:
    """Draws nodes of given classes by weight, by inverting one cumulative sum over nodes ordered by class."""

    def __init__(self, classes: Ints, weights: Floats) -> None:
        self.order = np.argsort(classes, kind="stable")
        self.ends = np.cumsum(np.bincount(classes))
        self.weighted = np.cumsum(weights[self.order])
        self.uniform = np.arange(1, classes.size + 1, dtype=np.float64)

    def nodes(self, classes: Ints, uniform: bool, rng: np.random.Generator) -> Ints:
        """Draw one node of each class in ``classes``, which may repeat."""
        total = self.uniform if uniform else self.weighted
        last = self.ends - 1
        high = total[last]
        low = np.concatenate([[0.0], high[:-1]])
        position = np.searchsorted(total, low[classes] + rng.random(classes.size) * (high - low)[classes], side="right")
        # Rounding may move a draw past the end of its class.
        first = np.concatenate([[0], self.ends[:-1]])
        return self.order[np.clip(position, first[classes], last[classes])]


def _draw_ends(
    sources: ClassSampler, targets: ClassSampler, same: bool, rng: np.random.Generator, count: int, uniform: bool
) -> tuple[Ints, Ints]:
    """Draw ``count`` pairs of nodes of one class, or of two classes; pairs may repeat."""
    k = sources.ends.size
    first = rng.integers(0, k, count)
    second = first if same else (first + rng.integers(1, k, count)) % k
    return sources.nodes(first, uniform, rng), targets.nodes(second, uniform, rng)


def _undirected(sampler: ClassSampler, same: bool, rng: np.random.Generator, count: int, uniform: bool) -> Ints:
    """Draw pairs as keys ``low * N + high``, without pairs of a node with itself."""
    one, other = _draw_ends(sampler, sampler, same, rng, count, uniform)
    low, high = np.minimum(one, other), np.maximum(one, other)
    return (low * sampler.order.size + high)[low != high]


def _directed(
    sources: ClassSampler, targets: ClassSampler, same: bool, rng: np.random.Generator, count: int, uniform: bool
) -> Ints:
    """Draw pairs as keys ``source * num_targets + target``."""
    source, target = _draw_ends(sources, targets, same, rng, count, uniform)
    return source * targets.order.size + target


def _distinct(total: int, draw: Callable[[int, bool], Ints], rng: np.random.Generator) -> Ints:
    """Return ``total`` distinct keys; ``draw(count, uniform)`` draws keys, which may repeat."""
    known, rounds = np.empty(0, dtype=np.int64), 0  # ascending
    groups = [known]
    while missing := total - known.size:
        keys = _ascending(draw(missing + missing // 8 + 16, rounds >= WEIGHTED_ROUNDS))
        if known.size:
            position = np.minimum(np.searchsorted(known, keys), known.size - 1)
            keys = keys[known[position] != keys]
        groups.append(rng.permutation(keys)[:missing])
        added = np.sort(groups[-1])
        known = np.insert(known, np.searchsorted(known, added), added)
        rounds += 1
    return np.concatenate(groups)


def _ascending(keys: Ints) -> Ints:
    """Return the distinct keys in ascending order: numpy's ``unique`` hashes them first, which takes much longer."""
    keys.sort()
    return keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if keys.size else keys


def _num_pairs(classes: Ints, same: bool) -> int:
    """Return the number of all pairs within classes, or between them."""
    inside = sum(n * (n - 1) // 2 for n in np.bincount(classes).tolist())
    return inside if same else math.comb(classes.size, 2) - inside


def _pick_from_all(count: int, same: bool, classes: Ints, weights: Floats, rng: np.random.Generator) -> Ints:
    """Pick from the list of all pairs, by weight and without replacement (Efraimidis and Spirakis 2006, A-ES)."""
    if same:
        members = [np.flatnonzero(classes == label) for label in range(int(classes.max()) + 1)]
        pairs = [nodes[np.stack(np.triu_indices(nodes.size, k=1))] for nodes in members]
        low, high = np.concatenate(pairs, axis=1)
    else:
        low, high = np.triu_indices(classes.size, k=1)
        apart = classes[low] != classes[high]
        low, high = low[apart], high[apart]
    order = rng.exponential(size=low.size) / (weights[low] * weights[high])
    picked = np.argpartition(order, count - 1)[:count]
    return low[picked] * classes.size + high[picked]


def draw_between(
    sources: tuple[Ints, Floats], targets: tuple[Ints, Floats], inside: int, outside: int, rng: np.random.Generator
) -> Ints:
    """Return distinct pairs (source, target).

    Args:
        sources: class (``0 .. k-1``; each must occur) and weight of each source.
        targets: class and weight of each target.
        inside: number of pairs within a class, drawn uniformly; at most half of all such pairs.
        outside: number of pairs between two classes, drawn uniformly; at most half of all such pairs.
        rng: the random generator.

    Shapes:
        classes and weights ``[Ns]`` and ``[Nt]``, the result ``[2, inside + outside]``.
    """
    samplers, num_targets = (ClassSampler(*sources), ClassSampler(*targets)), targets[0].size
    groups = [
        _distinct(n, partial(_directed, *samplers, same, rng), rng) for n, same in ((inside, True), (outside, False))
    ]
    keys = np.concatenate(groups)
    return np.stack([keys // num_targets, keys % num_targets])


def room_between(sources: Ints, targets: Ints) -> tuple[int, int]:
    """Return the numbers of all pairs within and between classes, given the class sizes ``[k]`` of both sides."""
    inside = int(sources @ targets)
    return inside, int(sources.sum()) * int(targets.sum()) - inside
