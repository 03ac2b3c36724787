"""Names of metrics, such as ``val/acc`` and ``val_acc``, and which of two values of a score is better. Light."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_LOWER = ("loss", "mean_rank", "mae", "mse", "error", "perplexity")
"""Ends of the names of scores that are better if they are lower."""
_SPLITS = ("train_", "val_", "valid_", "validation_", "test_")
_PLACES = ("epoch", "time")
"""Keys of a row of a history that are not metrics."""


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


def metric_names(history: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics of a history, in their order."""
    return list(dict.fromkeys(name for row in history for name in row if name not in _PLACES))


def measure(name: str) -> str:
    """Return what a metric measures, without its split: ``acc`` of ``val/acc``, ``val_acc`` and ``acc``."""
    _, slash, rest = name.partition("/")
    return rest if slash else next((name.removeprefix(each) for each in _SPLITS if name.startswith(each)), name)


def is_of(name: str, split: str) -> bool:
    """Whether a metric is of a split, such as ``val``."""
    return name.startswith((f"{split}/", f"{split}_"))


def is_loss(name: str) -> bool:
    """Whether a metric is a loss; Lightning appends ``_step`` and ``_epoch`` to one that is logged twice."""
    return measure(name).removesuffix("_epoch").removesuffix("_step") == "loss"


def by_split(names: Iterable[str], first: str) -> list[str]:
    """Return names in order, those of one split first."""
    return sorted(names, key=lambda name: (not is_of(name, first), name))
