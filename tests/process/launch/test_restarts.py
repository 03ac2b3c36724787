"""A job whose rank or server is killed restarts from its last checkpoint and ends like an undisturbed one."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from forked import gtrain
from helpers import ok, some_slow, summary

TINY = ("data.num_nodes=600", "data.num_edges=4000", "trainer.max_epochs=5")
JOBS = {
    "single": ("strategy=single", *TINY),
    "sar": ("strategy=sar", "trainer.num_nodes=2", *TINY),
    "pyg": ("strategy=pyg", "trainer.num_nodes=2", "data.batch_size=32", *TINY),
    "ps": (
        *("strategy=ps", "trainer.num_nodes=2", "strategy.max_restarts=0", "data=planted_sparse", "data.num_rows=600"),
        *("model=sparse", "data.num_features=400", "data.batch_size=32", "trainer.max_epochs=5"),
    ),
    "pbg": (
        *("strategy=pbg", "data=planted_kg", "model=kg", "data.num_entities=200", "data.num_triples=1500"),
        *("strategy.num_partitions=4", "trainer.devices=1", "trainer.max_epochs=5"),
    ),
}


def kill(rank: int, epoch: int) -> str:
    target = f"_target_:gtrain.testing.faults.KillRank,rank:{rank},epoch:{epoch},record:dead"
    return "+callbacks.kill={" + target + ",once:true}"


def metrics(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("strategy", "epoch"),
    some_slow([*((name, 2) for name in ("sar", "ps", "single", "pyg", "pbg")), ("sar", 5)], 6, ("ps", 2), ("pbg", 2)),
)
def test_a_job_restarts_from_its_last_checkpoint(strategy: str, epoch: int, tmp_path: Path) -> None:
    """Epoch 5 is the test."""
    job = JOBS[strategy]
    ok(gtrain(*job, "hydra.run.dir=undisturbed", cwd=tmp_path))
    done = ok(gtrain(*job, kill(0, epoch), "cluster.max_restarts=1", "hydra.run.dir=killed", cwd=tmp_path))
    assert "was killed by SIGKILL; restarting the job from its last checkpoint (1/1)" in done.stderr
    whole, restarted = summary(tmp_path / "undisturbed"), summary(tmp_path / "killed")
    assert [epoch["epoch"] for epoch in restarted["history"]] == [0, 1, 2, 3, 4]
    for mine, theirs in zip(restarted["history"], whole["history"], strict=True):
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-6)
    assert restarted["metrics"] == pytest.approx(whole["metrics"], rel=1e-6)
    rows, expected = metrics(tmp_path / "killed"), metrics(tmp_path / "undisturbed")
    assert [(row["epoch"], row["step"]) for row in rows] == [(row["epoch"], row["step"]) for row in expected]


def test_a_job_that_fails_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    done = ok(gtrain(*JOBS["sar"], kill(1, 0), "cluster.max_restarts=2", "hydra.run.dir=run", cwd=tmp_path))
    assert "restarting the job from the start (1/2)" in done.stderr and "(2/2)" not in done.stderr
    assert len(summary(tmp_path / "run")["history"]) == 5


def test_restarts_end_at_their_limit_and_name_the_culprit(tmp_path: Path) -> None:
    always = "+callbacks.kill={_target_:gtrain.testing.faults.KillRank,rank:1,epoch:2,record:dead}"
    done = gtrain(*JOBS["sar"], always, "cluster.max_restarts=1", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("restarting the job") == 1
    assert "gtrain: rank 1 of 2 (machine 1) was killed by SIGKILL." in done.stderr
    assert "to resume after epoch 2" in done.stderr


def test_an_error_of_the_job_itself_is_not_repeated(tmp_path: Path) -> None:
    done = gtrain(*JOBS["sar"], "model.optimizer.lr=1e30", "cluster.max_restarts=3", cwd=tmp_path)
    assert done.returncode == 1 and "restarting" not in done.stderr


def test_jobs_started_by_hand_are_not_restarted(tmp_path: Path) -> None:
    done = gtrain("cluster=manual", "cluster.rank=0", "cluster.max_restarts=1", cwd=tmp_path)
    assert done.returncode == 1 and "cluster.max_restarts=1 was set; with cluster=manual gtrain does not" in done.stderr
