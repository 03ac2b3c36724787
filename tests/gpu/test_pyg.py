"""strategy=pyg on a GPU: batches and losses of a CPU, whatever the device caches and how far copies run ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked import gtrain, python, sweep
from helpers import REPO, ok, summary

GRAPH = ["data.num_nodes=600", "data.num_edges=6000", "data.num_features=12", "data.num_classes=4"]
RUN = ["strategy=pyg", *GRAPH, "data.batch_size=64", "data.num_neighbors=[4,3]", "trainer.max_epochs=2"]
QUIET = ["callbacks=none", "logger=none", "trainer.limit_test_batches=0"]
SECONDS = 110


def losses(run: dict[str, Any]) -> list[float]:
    """Training and validation loss of each epoch."""
    return [entry[name] for entry in run["history"] for name in ("train/loss", "val/loss")]


def test_batches_are_those_of_a_cpu_to_the_last_bit(tmp_path: Path) -> None:
    """Also while the device lags behind: memory is not reused early. And the host never waits for the device."""
    done = ok(python(str(REPO / "tests/assets/devices/pyg_batches.py"), "cuda", cwd=tmp_path, timeout=SECONDS))
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 11
    assert [case for case, equal in results.items() if not equal] == []


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_losses_are_those_of_a_cpu(model: str, tmp_path: Path) -> None:
    """With all rows cached on the device, with some, with none; with dropout."""
    shared = [*RUN, *QUIET, f"model={model}", "trainer.precision=64-true", "model.dropout=0.5"]
    (expected,) = sweep(tmp_path / "cpu", *shared, timeout=SECONDS)
    sizes = "auto,20000,0" if model == "sage" else "20000"
    runs = sweep(
        tmp_path / "gpu", *shared, "trainer.accelerator=gpu", f"strategy.device_cache={sizes}", timeout=SECONDS
    )
    for run in runs:
        assert losses(run) == pytest.approx(losses(expected), rel=1e-10)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_two_ranks_that_share_a_device(transport: str, tmp_path: Path) -> None:
    """Remote rows that the device holds are not requested again."""
    shared = [*RUN, *QUIET, "model=sage", "trainer.precision=64-true", "trainer.num_nodes=2"]
    shared += [f"strategy.transport={transport}", "data.num_features=200", "model.hidden_channels=4"]
    (expected,) = sweep(tmp_path / "cpu", *shared, timeout=SECONDS)
    sizes = "strategy.device_cache=auto,0"
    runs = sweep(tmp_path / "gpu", *shared, "trainer.accelerator=gpu", sizes, timeout=SECONDS)
    for run in runs:
        assert losses(run) == pytest.approx(losses(expected), rel=1e-10)
    received = [sum(rank["bytes_received"] for rank in run["ranks"]) for run in runs]
    assert received[0] < 0.7 * received[1] or transport == "shm"


def test_bfloat16(tmp_path: Path) -> None:
    """Losses to the two digits that bfloat16 has, with and without cached rows."""
    shared = [*RUN, *QUIET, "model=sage", "trainer.accelerator=gpu"]
    precisions = "trainer.precision=32-true,bf16-mixed,bf16-true"
    runs = sweep(tmp_path / "runs", *shared, precisions, "strategy.device_cache=auto,0", timeout=SECONDS)
    assert len(runs) == 6
    for run in runs[1:]:
        assert losses(run) == pytest.approx(losses(runs[0]), rel=0.05)


def test_links(tmp_path: Path) -> None:
    shared = ["strategy=pyg", *GRAPH, *QUIET, "model=link_sage", "data.batch_size=512", "trainer.precision=64-true"]
    shared += ["trainer.max_epochs=1", "data.num_neighbors=[4,3]"]
    (expected,) = sweep(tmp_path / "cpu", *shared, timeout=SECONDS)
    (run,) = sweep(tmp_path / "gpu", *shared, "trainer.accelerator=gpu", timeout=SECONDS)
    assert losses(run) == pytest.approx(losses(expected), rel=1e-10)


def test_what_was_chosen_is_in_the_summary(tmp_path: Path) -> None:
    settings = [*RUN, *QUIET, "model=sage", "trainer.accelerator=gpu", "hydra.run.dir=run"]
    ok(gtrain(*settings, cwd=tmp_path, timeout=SECONDS))
    resolved = summary(tmp_path / "run")["resolved"]
    assert resolved["strategy.device_cache"] >= 600 * 12 * 4 and resolved["strategy.threads"] >= 1
