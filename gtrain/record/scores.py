"""Which of two values of a score is the better one. Light."""

from __future__ import annotations

_LOWER = ("loss", "mean_rank", "mae", "mse", "error", "perplexity")
"""Ends of the names of scores that are better if they are lower."""


def lower_is_better(name: str, direction: str | None = None) -> bool:
    """Return whether a lower value of a score, such as ``val/mae``, is the better one.

    Args:
        name: of the score.
        direction: of the checkpoint that selects by it, ``min`` or ``max``; None or another text: as the name tells.
    """
    return direction == "min" if direction in ("min", "max") else name.endswith(_LOWER)


def better(name: str, values: list[float], direction: str | None = None) -> float:
    """Return the best of several values of a score; ``direction`` as in :func:`lower_is_better`."""
    return min(values) if lower_is_better(name, direction) else max(values)
