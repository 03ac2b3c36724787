"""A user's own LightningModule in a user's own Trainer."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
from helpers import REPO, ok

PROGRAM = REPO / "tests" / "assets" / "own_module.py"


def losses(output: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(output.rsplit("RESULT ", 1)[1].splitlines()[0])
    return found


@pytest.mark.slow
def test_own_module_trains_the_same_under_every_launcher(tmp_path: Path) -> None:
    results = [
        losses(ok(forked.python(str(PROGRAM), *arguments, cwd=tmp_path)).stdout)
        for arguments in (["single", "1"], ["sar", "3"])
    ]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", str(PROGRAM), "sar", "2"]
    results.append(losses(ok(forked.python(*torchrun, cwd=tmp_path)).stdout))
    single, *others = results
    for other in others:
        assert other["loss_epoch"] == pytest.approx(single["loss_epoch"], rel=1e-10)
        assert other["acc"] == pytest.approx(single["acc"])


def test_lightnings_own_strategy_takes_the_data_module_as_well(tmp_path: Path) -> None:
    ours = losses(ok(forked.python(str(PROGRAM), "single", "1", cwd=tmp_path)).stdout)
    lightning = losses(ok(forked.python(str(PROGRAM), "lightning", "1", cwd=tmp_path)).stdout)
    assert lightning["loss_epoch"] == pytest.approx(ours["loss_epoch"], rel=1e-5)  # in single precision


def test_ranks_that_nobody_started_are_asked_for(tmp_path: Path) -> None:
    done = forked.python(str(PROGRAM), "sar", "2", "--alone", cwd=tmp_path)
    assert done.returncode != 0
    assert "num_nodes 2 * devices 1 = 2 ranks were set, but 1 was started" in done.stderr
    assert "gtrain.run_local" in done.stderr


def test_accumulated_gradients_are_summed_over_ranks_once(tmp_path: Path) -> None:
    program = PROGRAM.parent / "loops" / "accumulate.py"
    done = ok(forked.python(str(program), cwd=tmp_path))
    assert float(done.stdout.rsplit("RESULT ", 1)[1]) < 1e-6  # printed parameters are compared in single precision


@pytest.mark.parametrize("strategy", ["sar", pytest.param("pyg", marks=pytest.mark.slow)])
def test_manual_optimization_is_that_of_one_process(strategy: str, tmp_path: Path) -> None:
    """Gradients of several backward passes are clipped and divided among two optimizers."""
    program = PROGRAM.parent / "loops" / "manual.py"
    done = ok(forked.python(str(program), strategy, cwd=tmp_path))
    difference, change = json.loads(done.stdout.rsplit("RESULT ", 1)[1])
    assert difference < 1e-10 and change > 0.1
