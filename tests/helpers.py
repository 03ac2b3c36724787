"""What tests of the repository share: its folder, and :mod:`gtrain.testing.processes`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gtrain.testing.processes import (  # noqa: F401 - for the tests, which have it from here
    LIMIT,
    alive,
    clean_environment,
    descendants,
    gtrain,
    logs,
    ok,
    only_run,
    run,
    show,
    summary,
    until,
)

REPO = Path(__file__).resolve().parents[1]


def some_slow(cases: Iterable[tuple[Any, ...]], each: int) -> list[Any]:
    """Parameters of a test, of which all but every ``each``-th are marked slow."""
    every = enumerate(cases)
    return [case if not number % each else pytest.param(*case, marks=pytest.mark.slow) for number, case in every]


@cache
def _example() -> tempfile.TemporaryDirectory[str]:
    scratch = tempfile.TemporaryDirectory(prefix="gtrain-example-")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(REPO / "plugins" / "example_backend", Path(scratch.name, "source"), ignore=ignored)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    ok(run([*pip, f"{scratch.name}/site", f"{scratch.name}/source"], cwd=Path(scratch.name)))
    return scratch


def example_site() -> Path:
    """A folder for the module search path in which pip has installed ``plugins/example_backend``."""
    return Path(_example().name) / "site"


def has_logged(run: Path) -> bool:
    """Whether a run has trained an epoch. Lists no folder, for the run may remove one meanwhile."""
    metrics = run / "metrics.csv"
    return metrics.exists() and metrics.stat().st_size > 0
