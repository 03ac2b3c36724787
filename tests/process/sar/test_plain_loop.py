"""``gtrain.shard`` in a loop without Lightning, against PyG on the whole graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked
import pytest
from helpers import REPO, ok

PROGRAM = REPO / "tests" / "assets" / "loops" / "plain_loop.py"


def trained(ranks: int, folder: Path) -> dict[str, Any]:
    said = ok(forked.python(str(PROGRAM), str(ranks), cwd=folder)).stdout
    result: dict[str, Any] = json.loads(said.rsplit("RESULT ", 1)[1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_losses_and_gradients_are_those_of_pyg(ranks: int, tmp_path: Path) -> None:
    expected, found = trained(0, tmp_path), trained(ranks, tmp_path)
    assert len(found["steps"]) == 4
    for one, other in zip(expected["steps"], found["steps"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert other["gradients"] == pytest.approx(one["gradients"], abs=1e-10)
    assert found["mean"] == pytest.approx(expected["mean"], abs=1e-10)
