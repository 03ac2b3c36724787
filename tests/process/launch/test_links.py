"""Links between machines that were down for a while: the job goes on, and its results are those without the outage."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from forked import enough, gtrain
from helpers import alive, logs, ok, rest_exhaustive, show, summary, until
from namespaces import network

GRAPH = ("data.num_nodes=600", "data.num_edges=4000", "model.dropout=0.5")
STRATEGIES = {
    "sar": ("strategy=sar", *GRAPH),
    "pyg": ("strategy=pyg", "data.batch_size=64", *GRAPH),
    "ps": (
        "strategy=ps",
        "data=planted_sparse",
        "data.num_rows=600",
        "data.num_features=200",
        "data.batch_size=60",
        "model=sparse",
        "trainer.precision=64-true",
    ),
    "pbg": (
        "strategy=pbg",
        "data=planted_kg",
        "data.num_entities=120",
        "data.num_positions=24",
        "data.num_triples=2400",
        "data.num_relations=4",
        "data.batch_size=100",
        "model=kg",
        "model.dimension=16",
        "strategy.num_partitions=4",
    ),
}
SHORT, LONG = 2.0, 70.0
LIMIT_SECONDS = 90
"""Time limit of silence. A kernel doubles the time between its attempts to send: without a limit of that time, it would
try again 51 s and then 102 s after the outage began."""


def epochs(run: Path) -> int:
    path = run / "metrics.csv"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "seconds"),
    rest_exhaustive(
        [*((strategy, SHORT) for strategy in STRATEGIES), ("sar", LONG), ("ps", LONG)],  # collectives, and requests
        ("pyg", SHORT),
        ("pbg", SHORT),
        ("sar", LONG),
    ),
)
def test_a_link_that_was_down_delays_the_job_and_changes_nothing(strategy: str, seconds: float, tmp_path: Path) -> None:
    arguments, run = [*STRATEGIES[strategy], "trainer.enable_progress_bar=false"], tmp_path / "run"
    name = "lease_seconds" if strategy == "pbg" else "timeout_seconds"
    with network(2) as machines:
        limit = f"strategy.{name}={LIMIT_SECONDS}"
        jobs = [machines.start(machine, tmp_path, *arguments, limit) for machine in range(2)]

        def all_run() -> bool:
            return all(alive(job.pid) for job in jobs)

        try:
            until(lambda: epochs(run) >= 3 or not all_run(), tmp_path)
            machines.link(1, "down")
            time.sleep(seconds)  # the outage itself
            before = epochs(run)
            machines.link(1, "up")
            until(lambda: epochs(run) >= before + 3 or not all_run(), tmp_path)
            if all_run():
                enough(tmp_path)
            ended = [job.end() for job in jobs]
        finally:
            for job in jobs:
                job.kill()
    assert [done.returncode for done in ended] == [0, 0], "".join(map(show, ended)) + logs(tmp_path)
    if strategy == "pbg":  # the ranks' threads share their tables without locks: no two runs are equal
        return
    disturbed = summary(run)
    number = f"trainer.max_epochs={len(disturbed['history'])}"
    ok(gtrain(*arguments, "trainer.num_nodes=2", number, "hydra.run.dir=undisturbed", cwd=tmp_path))
    undisturbed = summary(tmp_path / "undisturbed")
    assert disturbed["history"] == undisturbed["history"]
    assert disturbed["metrics"] == undisturbed["metrics"]
