"""Parameter servers that are killed while a run trains on them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from forked import gtrain
from helpers import alive, clean_environment, logs, ok, summary, until

SMALL = (
    "strategy=ps",
    "data=planted_sparse",
    "data.num_rows=600",
    "data.num_features=200",
    "data.features_per_row=6",
    "data.batch_size=60",
    "model=sparse",
    "model.hidden_channels=8",
    "model.sparse_optimizer._target_=gtrain.nn.RowwiseAdagrad",
    "trainer.precision=64-true",
    "trainer.max_epochs=30",
    "trainer.limit_test_batches=0",
    "trainer.enable_progress_bar=false",
    "callbacks=none",
)


def process_of(log: Path, life: int) -> int:
    """The process id that a server's log names for one of its lives; 0 if it does not yet."""
    found = re.findall(r"process (\d+) serves", log.read_text()) if log.exists() else []
    return int(found[life]) if len(found) > life else 0


def epochs(run: Path) -> int:
    """Epochs that the run has recorded so far."""
    metrics = run / "metrics.csv"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def test_killed_servers_come_back_and_the_losses_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    ok(gtrain(*SMALL, "hydra.run.dir=undisturbed", cwd=tmp_path, timeout=140))
    command = [sys.executable, "-m", "gtrain", *SMALL, "hydra.run.dir=run"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        run, seen, keepers = tmp_path / "run", 0, set()
        for number, life in ((0, 0), (1, 0), (0, 1)):
            log = run / "logs" / f"parameter-{number}.log"
            server = until(lambda log=log, life=life: process_of(log, life), 120, tmp_path)
            before = seen
            seen = until(lambda before=before: epochs(run) if epochs(run) > before + 1 else 0, 120, tmp_path)
            keepers.add(int((run / f"parameter-{number}.memory").read_text().split()[0]))
            os.kill(server, signal.SIGKILL)
        _, said = job.communicate(timeout=140)
    assert job.returncode == 0, said + logs(tmp_path)
    assert said.count("was killed by SIGKILL (signal 9); it is started again") == 3
    expected, found = (summary(tmp_path / name)["history"] for name in ("undisturbed", "run"))
    assert [epoch["train/loss"] for epoch in found] == [epoch["train/loss"] for epoch in expected]
    assert [epoch["val/loss"] for epoch in found] == [epoch["val/loss"] for epoch in expected]
    assert len(keepers) == 2 and not any(map(alive, keepers)) and not list(run.glob("*.memory"))


def test_without_durability_a_killed_server_ends_the_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gtrain", *SMALL, "strategy.durability=none", "hydra.run.dir=run"]
    with subprocess.Popen(
        [*command, "trainer.max_epochs=100000"],
        cwd=tmp_path,
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        log = tmp_path / "run" / "logs" / "parameter-1.log"
        server = until(lambda: process_of(log, 0), 120, tmp_path)
        os.kill(server, signal.SIGKILL)
        _, said = job.communicate(timeout=100)
    assert job.returncode != 0
    assert "parameter 1 of 2" in said and "was killed by SIGKILL (signal 9)" in said
