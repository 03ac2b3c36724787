"""Every convolution of PyG over 1 to 4 ranks and in every mode, beside PyG itself on the whole graph.

Over each number of ranks in another mode; ``GTRAIN_ALL=1`` has nearly all of both.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from forked import python
from helpers import REPO, ok

PROGRAM = REPO / "tests" / "assets" / "sar_conv_program.py"
CASES = "all" if os.environ.get("GTRAIN_ALL") else "turns"
EXACT = 1e-10
TOLERANCES = {"finite difference": 1e-6, "std": 1e-3, "running_mean": 1e-6, "running_var": 1e-6}
"""What is not compared in double precision with PyG."""

Results = dict[int, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By world size and case: the worst relative differences of each mode, or what was raised."""
    folder = tmp_path_factory.mktemp("convs")
    done = ok(python(str(PROGRAM), str(folder), "--cases", CASES, cwd=folder))
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {int(size): json.loads(body) for _, size, body in lines}


def faults(case: dict[str, Any]) -> list[str]:
    """What is not as it should be in the result of a case."""
    found = []
    for key, value in case.items():
        figures = value if isinstance(value, dict) else {str(value): float("inf")}
        found += [f"{key}: {what} {x:.1e}" for what, x in figures.items() if not x <= TOLERANCES.get(what, EXACT)]
    return found


def is_refused(case: dict[str, Any]) -> bool:
    """Whether all ranks said in one sentence that they do not serve it."""
    return bool(case) and all(key == "refused" or str(value).startswith("ConfigError") for key, value in case.items())


def report(results: Results, wanted: Any) -> list[str]:
    """One line for each case that is wrong; prints the worst figure of those that are right."""
    lines = []
    for size, cases in results.items():
        for name, case in cases.items():
            if wanted(name) and not (is_beyond(name) and is_refused(case)):
                wrong = faults(case)
                lines += [f"{size} ranks, {name}: {'; '.join(wrong)}"] if wrong else []
                if not wrong:
                    print(f"{size} ranks, {name}: worst {max(max(v.values()) for v in case.values()):.0e}")
    return lines


def is_beyond(name: str) -> bool:
    sys.path.insert(0, str(PROGRAM.parent))
    from sar_conv_cases import BEYOND

    return name.removesuffix(" (silent)") in BEYOND


@pytest.mark.slow
def test_the_convolutions_that_sar_promises_are_exact(results: Results) -> None:
    assert sorted(results) == [1, 2, 3, 4]
    assert not report(results, lambda name: not is_beyond(name) and ": " not in name)
    for name in results[1]:
        met = [
            mode for cases in results.values() for mode in {**cases.get(name, {}), **cases.get(f"{name} (silent)", {})}
        ]
        assert {"mode 1", "mode 2", "mode 3"} <= set(met) and len(met) >= 4, name


@pytest.mark.slow
def test_other_convolutions_are_exact_or_refused_and_never_wrong(results: Results) -> None:
    assert not report(results, is_beyond)


@pytest.mark.slow
def test_dropout_replays_traffic_is_the_halo_once_each_way_and_batch_norm_is_stable(results: Results) -> None:
    checks = {name for cases in results.values() for name in cases if ": " in name or name == "batch norm"}
    assert len(checks) > 15
    assert not report(results, lambda name: name in checks)
