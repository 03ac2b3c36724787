"""Messages in pieces or between devices, and tensors on a device that is pretended: exact beside PyG."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import python
from helpers import REPO, ok

ASSETS = REPO / "tests" / "assets"
CASES = ["gat", "gat one head", "gat residual", "dropout: gat", "sage mean", "sage of equal width", "sage max", "gcn"]
ON_A_DEVICE = ["gat", "gatv2", "sage mean", "sage max", "gcn learned weights", "nn mean"]


@pytest.mark.slow
def test_pieces_of_a_round_come_to_the_same_as_one_message(tmp_path: Path) -> None:
    assert_exact(tmp_path, "sar_pieces_program.py", 3, CASES)


@pytest.mark.slow
def test_no_operation_mixes_tensors_of_a_device_with_others(tmp_path: Path) -> None:
    assert_exact(tmp_path, "sar_device_program.py", 2, ON_A_DEVICE)


def test_messages_between_devices_come_to_the_same(tmp_path: Path) -> None:
    """Not by NCCL, which needs a GPU for each rank, but by gloo through the same interface of torch."""
    assert_exact(tmp_path, "sar_device_program.py", 3, [*CASES, "gatv2", "nn mean"], "--links")


def assert_exact(folder: Path, program: str, ranks: int, cases: list[str], *options: str) -> None:
    """Each case comes to the same as PyG on the whole graph, in every mode."""
    arguments = [str(folder), "--world", str(ranks), "--cases", ";".join(cases), *options]
    done = ok(python(str(ASSETS / program), *arguments, cwd=folder))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"RESULT {ranks} ")]
    results = json.loads(line.removeprefix(f"RESULT {ranks} "))
    assert list(results) == cases
    for name, modes in results.items():
        assert list(modes) == ["mode 1", "mode 2", "mode 3"], modes
        for figures in modes.values():
            for what, worst in figures.items():
                assert worst <= (1e-6 if what == "finite difference" else 1e-10), f"{name}: {what}"
