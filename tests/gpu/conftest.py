"""Tests that need a GPU: all of this folder are marked ``gpu``, and skipped where torch finds none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RESULTS = "GTRAIN_GPU_RESULTS"
"""Variable with the file to which the outcome of each test is appended as it ends, one JSON object per line."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them without a GPU: a skipped test sets up no fixture."""
    ours = [item for item in items if HERE in item.path.parents]
    if not ours:
        return
    import torch

    reason = None if torch.cuda.is_available() else f"there is no GPU that torch {torch.__version__} can use"
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


class Recorder:
    """Appends outcomes to a file. A test is one line: its call, or the phase that skipped it or failed.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        entry = {"test": report.nodeid, "outcome": report.outcome, "phase": report.when, "seconds": report.duration}
        if not report.passed:
            entry["text"] = report.longreprtext[-4000:] or str(report.longrepr)
        with open(self._path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Record outcomes in the process that collects the reports of all workers of pytest-xdist."""
    path = os.environ.get(RESULTS)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))
