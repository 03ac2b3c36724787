"""Drawing the node pairs of a planted graph: distinct, weighted, an exact number inside and between classes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WEIGHTED_ROUNDS = 30
"""After so many rounds ends are drawn evenly: heavy nodes may have met all of their class by then."""


def draw_pairs(classes: Ints, weights: Floats, inside: int, between: int, rng: np.random.Generator) -> Ints:
    """Return distinct pairs of distinct nodes.

    Args:
        classes: class of each node, ``0 .. k-1``, each of them in use.
        weights: weight of each node; within a class an end falls on a node in proportion to it.
        inside: number of pairs in one class, the class drawn evenly.
        between: number of pairs in two classes, the two drawn evenly.
        rng: the source of randomness.

    Shapes:
        classes ``[N]``, weights ``[N]``, the result ``[2, inside + between]`` with the smaller id in row 0.
    """
    sampler = ClassSampler(classes, weights)
    groups = [
        _distinct(inside, True, sampler.inside, classes, weights, rng),
        _distinct(between, False, sampler.between, classes, weights, rng),
    ]
    keys = np.concatenate(groups)
    return np.stack([keys // classes.size, keys % classes.size])


class ClassSampler:
    """Draws nodes of given classes by weight, by inverting one cumulative sum over nodes ordered by class."""

    def __init__(self, classes: Ints, weights: Floats) -> None:
        self.order = np.argsort(classes, kind="stable")
        self.ends = np.cumsum(np.bincount(classes))
        self.weighted = np.cumsum(weights[self.order])
        self.even = np.arange(1, classes.size + 1, dtype=np.float64)

    def inside(self, count: int, even: bool, rng: np.random.Generator) -> tuple[Ints, Ints]:
        classes = rng.integers(0, self.ends.size, count)
        return self.nodes(classes, even, rng), self.nodes(classes, even, rng)

    def between(self, count: int, even: bool, rng: np.random.Generator) -> tuple[Ints, Ints]:
        k = self.ends.size
        first = rng.integers(0, k, count)
        second = (first + rng.integers(1, k, count)) % k
        return self.nodes(first, even, rng), self.nodes(second, even, rng)

    def nodes(self, classes: Ints, even: bool, rng: np.random.Generator) -> Ints:
        """Draw one node of each of the given classes."""
        total = self.even if even else self.weighted
        last = self.ends - 1
        high = total[last]
        low = np.concatenate([[0.0], high[:-1]])
        place = np.searchsorted(total, low[classes] + rng.random(classes.size) * (high - low)[classes], side="right")
        # Rounding may carry a draw over the end of its class.
        first = np.concatenate([[0], self.ends[:-1]])
        nodes: Ints = self.order[np.clip(place, first[classes], last[classes])]
        return nodes


Draw = Callable[[int, bool, np.random.Generator], tuple[Ints, Ints]]


def _distinct(wanted: int, same: bool, draw: Draw, classes: Ints, weights: Floats, rng: np.random.Generator) -> Ints:
    """Return the keys ``low * N + high`` of distinct pairs: drawn until there are enough, or picked from all."""
    if wanted == 0:
        return np.empty(0, dtype=np.int64)
    if 4 * wanted > _room(classes, same):
        return _pick_from_all(wanted, same, classes, weights, rng)
    known, turn = np.empty(0, dtype=np.int64), 0  # ascending
    groups: list[Ints] = []
    while missing := wanted - known.size:
        one, other = draw(missing + missing // 8 + 16, turn >= WEIGHTED_ROUNDS, rng)
        low, high = np.minimum(one, other), np.maximum(one, other)
        fresh = _unknown(np.unique((low * classes.size + high)[low != high]), known)
        groups.append(rng.permutation(fresh)[:missing])
        known = _merge(known, np.sort(groups[-1]))
        turn += 1
    return np.concatenate(groups)


def _unknown(keys: Ints, known: Ints) -> Ints:
    """Return the keys that are not among the known ones, which ascend."""
    if not known.size:
        return keys
    place = np.minimum(np.searchsorted(known, keys), known.size - 1)
    return keys[known[place] != keys]


def _merge(known: Ints, fresh: Ints) -> Ints:
    """Return the union of two ascending arrays without common elements, ascending."""
    return np.insert(known, np.searchsorted(known, fresh), fresh)


def _room(classes: Ints, same: bool) -> int:
    """Return how many pairs there are inside classes, or between them."""
    inside = sum(n * (n - 1) // 2 for n in np.bincount(classes).tolist())
    return inside if same else math.comb(classes.size, 2) - inside


def _pick_from_all(wanted: int, same: bool, classes: Ints, weights: Floats, rng: np.random.Generator) -> Ints:
    """Pick from the list of all pairs, by weight and without replacement (Efraimidis and Spirakis 2006, A-ES)."""
    low, high = _all_inside(classes) if same else _all_between(classes)
    order = rng.exponential(size=low.size) / (weights[low] * weights[high])
    picked = np.argpartition(order, wanted - 1)[:wanted]
    return low[picked] * classes.size + high[picked]


def _all_inside(classes: Ints) -> tuple[Ints, Ints]:
    low, high = [], []
    for label in range(int(classes.max()) + 1):
        members = np.flatnonzero(classes == label)
        one, other = np.triu_indices(members.size, k=1)
        low.append(members[one])
        high.append(members[other])
    return np.concatenate(low), np.concatenate(high)


def _all_between(classes: Ints) -> tuple[Ints, Ints]:
    low, high = np.triu_indices(classes.size, k=1)
    apart = classes[low] != classes[high]
    return low[apart], high[apart]


def draw_between(
    sources: tuple[Ints, Floats], targets: tuple[Ints, Floats], inside: int, outside: int, rng: np.random.Generator
) -> Ints:
    """Return distinct pairs (source, target).

    Args:
        sources: class (``0 .. k-1``, each of them in use) and weight of each source.
        targets: the same of each target.
        inside: number of pairs in one class, the class drawn evenly; at most half of all such pairs.
        outside: number of pairs in two classes, the two drawn evenly; at most half of all such pairs.
        rng: the source of randomness.

    Shapes:
        classes and weights ``[Ns]`` and ``[Nt]``, the result ``[2, inside + outside]``.
    """
    drawer = _Drawer(ClassSampler(*sources), ClassSampler(*targets), targets[0].size)
    keys = np.concatenate([drawer.distinct(inside, True, rng), drawer.distinct(outside, False, rng)])
    return np.stack([keys // drawer.width, keys % drawer.width])


def room_between(sources: Ints, targets: Ints) -> tuple[int, int]:
    """Return how many pairs there are in one class, and in two, given the nodes of each class on both sides."""
    inside = int(sources @ targets)
    return inside, int(sources.sum()) * int(targets.sum()) - inside


class _Drawer:
    """Draws pairs of one class, or of two."""

    def __init__(self, sources: ClassSampler, targets: ClassSampler, width: int) -> None:
        self.sources = sources
        self.targets = targets
        self.width = width

    def distinct(self, wanted: int, same: bool, rng: np.random.Generator) -> Ints:
        """Return that many different keys ``source * width + target``."""
        keys, turn = np.empty(0, dtype=np.int64), 0
        while missing := wanted - keys.size:
            fresh = self._draw(missing + missing // 8 + 16, same, turn >= WEIGHTED_ROUNDS, rng)
            fresh = np.setdiff1d(fresh, keys)
            keys = np.concatenate([keys, rng.permutation(fresh)[:missing]])
            turn += 1
        return keys

    def _draw(self, count: int, same: bool, even: bool, rng: np.random.Generator) -> Ints:
        k = self.sources.ends.size
        first = rng.integers(0, k, count)
        second = first if same else (first + rng.integers(1, k, count)) % k
        return self.sources.nodes(first, even, rng) * self.width + self.targets.nodes(second, even, rng)
