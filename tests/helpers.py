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


def some_slow(cases: Iterable[Any], each: int, *kept: Any) -> list[Any]:
    """Parameters of a test, of which all but every ``each``-th are slow.

    Of the slow ones all but those in ``kept`` are exhaustive too, if any is named.
    """
    cases = list(cases)
    rest = rest_exhaustive(cases, *kept) if kept else cases
    return [case if not number % each else _marked(rest[number], pytest.mark.slow) for number, case in enumerate(cases)]


def rest_exhaustive(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a slow test, of which all but those in ``kept`` are exhaustive too."""
    cases = list(cases)
    assert set(kept) < set(cases), f"{kept} are not some of {cases}"
    return [case if case in kept else _marked(case, pytest.mark.exhaustive) for case in cases]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    values, marks = (case.values, case.marks) if hasattr(case, "marks") else (case, ())
    return pytest.param(*(values if isinstance(values, tuple) else (values,)), marks=[*marks, mark])


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
