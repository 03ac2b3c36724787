"""What a search and the jobs of its trials agree on. Light."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.pruners import BasePruner

PRUNERS = ("median", "hyperband", "none")
PRUNED = "pruned"
"""User attribute of a trial that was ended early; its job sets it."""
REPORTER = "trial"
"""Name in the group ``callbacks`` of the callback that reports to the study."""


def make_pruner(name: str) -> BasePruner:
    """Return a pruner of Optuna by its name in :data:`PRUNERS`."""
    from optuna import pruners

    if name == "hyperband":
        return pruners.HyperbandPruner()
    return pruners.MedianPruner() if name == "median" else pruners.NopPruner()
