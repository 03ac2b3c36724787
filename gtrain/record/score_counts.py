"""Counts of scores of positives and negatives, for ROC and precision-recall curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class ScoreCounts:
    """Counts by bins of equal relative width, which is doubled while more bins than the limit are in use.

    The bin of a score is the number of its float32 in ascending order, without the last ``shift`` bits: few distinct
    scores have a bin each, however large or close together they are.

    Args:
        limit: most bins.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.shift = limit, 0
        self.bins: Integers = np.empty(0, np.int64)
        self.counts: Integers = np.empty((2, 0), np.int64)

    @property
    def positive(self) -> Integers:
        """Counts of positives, by ascending score."""
        return self.counts[0]

    @property
    def negative(self) -> Integers:
        """Counts of negatives, by ascending score."""
        return self.counts[1]

    def add(self, scores: NDArray[Any], *, positive: bool) -> None:
        """Count scores; NaN is below all others."""
        bins, counts = np.unique(_ordered(scores) >> np.uint32(self.shift), return_counts=True)
        both = np.zeros((2, len(bins)), np.int64)
        both[0 if positive else 1] = counts
        self._add(bins.astype(np.int64), both)

    def merge(self, other: ScoreCounts) -> None:
        """Add the counts of another object, which does not change."""
        shift = max(self.shift, other.shift)
        self._widen(shift)
        self._add(other.bins >> (shift - other.shift), other.counts)

    def as_dict(self) -> dict[str, Any]:
        """Return the content in the types of JSON."""
        columns = {"bins": self.bins, "positive": self.positive, "negative": self.negative}
        return {"shift": self.shift, **{name: column.tolist() for name, column in columns.items()}}

    @classmethod
    def of(cls, content: Mapping[str, Any], limit: int) -> ScoreCounts:
        """Return the counts of which :meth:`as_dict` made this content."""
        made = cls(limit)
        made.shift = int(content["shift"])
        both = np.asarray([content["positive"], content["negative"]], np.int64).reshape(2, -1)
        made._add(np.asarray(content["bins"], np.int64), both)
        return made

    def _add(self, bins: Integers, counts: Integers) -> None:
        self.bins, self.counts = _summed(np.concatenate([self.bins, bins]), np.hstack([self.counts, counts]))
        while len(self.bins) > self.limit:
            self._widen(self.shift + 1)

    def _widen(self, shift: int) -> None:
        self.bins, self.counts = _summed(self.bins >> (shift - self.shift), self.counts)
        self.shift = shift


def _ordered(scores: NDArray[Any]) -> NDArray[np.uint32]:
    """Return the numbers of float32 in ascending order; -0 and 0 have the same."""
    values = np.nan_to_num(scores.astype(np.float32), nan=-np.inf, posinf=np.inf, neginf=-np.inf) + np.float32(0)
    bits = values.view(np.uint32)
    sign = np.uint32(1 << 31)
    return np.where(bits & sign, ~bits, bits | sign)


def _summed(bins: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Return the distinct bins in order, and the sums of their counts."""
    distinct, place = np.unique(bins, return_inverse=True)
    sums = np.zeros((2, len(distinct)), np.int64)
    for total, each in zip(sums, counts, strict=True):
        np.add.at(total, place, each)
    return distinct, sums
