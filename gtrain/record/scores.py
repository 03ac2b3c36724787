"""Which of two values of a score is the better one. Light."""

from __future__ import annotations

_LOWER = ("loss", "mean_rank", "mae", "rmse")
"""Ends of the names of scores that are better if they are lower."""


def lower_is_better(name: str) -> bool:
    """Return whether a lower value of a score, such as ``val/mae``, is the better one."""
    return name.endswith(_LOWER)


def better(name: str, values: list[float]) -> float:
    """Return the best of several values of a score."""
    return min(values) if lower_is_better(name) else max(values)
