"""Servers of a job that strangers speak to while it trains: it learns what it learns without them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from forked import enough, gtrain, lasting
from helpers import descendants, has_logged, ok, summary, until
from strangers import attack

COMMON = ["logger=csv", "callbacks=none", "trainer.limit_test_batches=0", "trainer.enable_progress_bar=false"]
TRAININGS: dict[str, tuple[int, list[str]]] = {
    "ps": (
        2,
        ["strategy=ps", "data=planted_sparse", "data.num_rows=600", "data.num_features=200", "data.batch_size=60",
         "model=sparse", "model.hidden_channels=8", "trainer.precision=64-true"],
    ),
    "pbg": (
        5,  # a lock server, two that keep partitions and two that add up parameters
        ["strategy=pbg", "data=planted_kg", "model=kg", "data.num_entities=120", "data.num_triples=2400",
         "data.num_positions=24", "data.num_relations=4", "model.dimension=16", "data.batch_size=100",
         "strategy.num_partitions=4", "trainer.num_nodes=2"],
    ),
    "pyg": (
        2,
        ["strategy=pyg", "strategy.transport=tcp", "data.num_nodes=300", "data.num_edges=3000", "data.batch_size=64",
         "data.num_neighbors=[4,3]", "model=sage", "trainer.num_nodes=2", "trainer.precision=64-true"],
    ),
}  # fmt: skip
"""Servers, and the command."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_strangers_change_nothing(name: str, tmp_path: Path) -> None:
    servers, arguments = TRAININGS[name]
    ok(gtrain("key", "cluster.key_file=job.key", cwd=tmp_path))
    arguments = [*arguments, "cluster.key_file=job.key"]  # without, servers are at sockets that have no port
    job = lasting(tmp_path, *arguments, *COMMON)
    run = tmp_path / "run"
    try:
        until(lambda: has_logged(run), tmp_path)
        processes = descendants(job.pid)
        before = {pid: resident(pid) for pid in processes}
        assert attack(processes) == servers
        assert all(resident(pid) - before[pid] < 128 << 20 for pid in processes)
        enough(tmp_path)
        done = ok(job.end())
    finally:
        job.kill()
    assert "restarting" not in done.stderr
    said = [path.read_text() for path in (run / "logs").glob("*.log")]
    assert all(len(text) < 100_000 and "Traceback" not in text for text in said)
    history = losses(run)
    if name == "pbg":  # its workers train without locks
        assert [epoch["train/edges"] for epoch in history] == [2160] * len(history)
        return
    epochs = f"trainer.max_epochs={len(history)}"
    ok(gtrain(*arguments, *COMMON, epochs, "hydra.run.dir=undisturbed", cwd=tmp_path))
    assert history == losses(tmp_path / "undisturbed")


def losses(run: Path) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = summary(run)["history"]
    return history


def resident(pid: int) -> int:
    """Resident memory of a process, bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
