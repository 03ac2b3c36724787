"""Drawing the edges between two node types of a planted graph: distinct, weighted, an exact number within classes."""

from __future__ import annotations

import numpy as np

from gtrain.data.planted.pairs import WEIGHTED_ROUNDS, ClassSampler, Floats, Ints


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
