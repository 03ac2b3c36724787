"""A job whose rank or server is killed restarts from its last checkpoint and ends like an undisturbed one."""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import pytest
from forked import gtrain
from helpers import ok, only_run, some_slow, summary

from gtrain.record.run import RunRecord
from gtrain.run import runs

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
    for process, rank in zip(RunRecord(tmp_path / "killed").ranks, restarted["ranks"], strict=False):
        assert len(process.epochs) == 5
        for key in ("bytes_sent", "bytes_received", "wait_seconds", "cpu_seconds"):
            assert rank[key] == pytest.approx(sum(row[key] for row in process.epochs)), "of all attempts"
    rows, expected = metrics(tmp_path / "killed"), metrics(tmp_path / "undisturbed")
    assert [(row["epoch"], row["step"]) for row in rows] == [(row["epoch"], row["step"]) for row in expected]


def test_checkpoints_in_another_folder_are_found_by_that_of_the_run(tmp_path: Path) -> None:
    """By a restart and by ``run``."""
    job = (*JOBS["single"], "callbacks.checkpoint.dirpath=elsewhere", "hydra.run.dir=run")
    done = ok(gtrain(*job, kill(0, 2), "cluster.max_restarts=1", cwd=tmp_path))
    assert "was killed by SIGKILL; restarting the job from its last checkpoint (1/1)" in done.stderr
    assert [epoch["epoch"] for epoch in summary(tmp_path / "run")["history"]] == [0, 1, 2, 3, 4]
    trusted = "allow_targets=[gtrain.testing.faults]"
    ok(gtrain("test", "run=run", trusted, "hydra.run.dir=test", cwd=tmp_path))
    metrics = [summary(tmp_path / run)["metrics"]["test/loss"] for run in ("run", "test")]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)
    # Whether its best epoch is its only one, or one of the run that it goes on from.
    more = (*JOBS["single"], "run=run", "trainer.max_epochs=6", "callbacks.checkpoint.dirpath=other")
    ok(gtrain(*more, trusted, "hydra.run.dir=more", cwd=tmp_path))
    assert (tmp_path / "more" / "checkpoints" / "best.ckpt").resolve() == tmp_path / "other" / "best.ckpt"


def by_torchrun(folder: Path, attempt: int) -> dict[str, str]:
    """The variables of the only rank of a job in one of its attempts."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return {**rank, "TORCHELASTIC_RUN_ID": folder.name, "TORCHELASTIC_RESTART_COUNT": str(attempt)}


def test_a_fixed_folder_keeps_the_record_of_earlier_attempts(tmp_path: Path) -> None:
    """A new job in it deletes the record."""
    job = (*JOBS["single"], kill(0, 2), "hydra.run.dir=run")
    assert gtrain(*job, cwd=tmp_path, env=by_torchrun(tmp_path, 0)).returncode == -signal.SIGKILL
    ok(gtrain(*job, cwd=tmp_path, env=by_torchrun(tmp_path, 1)))
    record = RunRecord(tmp_path / "run")
    assert [event["event"] for event in record.events] == ["start", "start", "job restarted", "end"]
    assert record.status == "complete" and [row["epoch"] for row in record.history] == [0, 1, 2, 3, 4]
    assert [row["attempt"] for row in record.ranks[0].of("process")] == [0, 1]
    ok(gtrain(*JOBS["single"], "hydra.run.dir=run", cwd=tmp_path))
    assert [event["event"] for event in RunRecord(tmp_path / "run").events] == ["start", "end"]


def test_an_attempt_whose_predecessor_ended_before_it_trained_is_in_the_index(tmp_path: Path) -> None:
    ok(gtrain(*JOBS["single"], "trainer.max_epochs=1", cwd=tmp_path, env=by_torchrun(tmp_path, 1)))
    assert [*runs.recorded(tmp_path / "runs")] == [only_run(tmp_path / "runs")]


def test_the_record_of_a_job_that_torchrun_restarts_is_that_of_its_run(tmp_path: Path) -> None:
    """Each attempt is a command, for which Hydra makes a new folder."""
    job = (*JOBS["single"], kill(0, 2))
    assert gtrain(*job, cwd=tmp_path, env=by_torchrun(tmp_path, 0)).returncode == -signal.SIGKILL
    (run,) = runs.recorded(tmp_path / "runs")
    assert RunRecord(run).status == "killed"
    done = ok(gtrain(*job, "report=true", cwd=tmp_path, env=by_torchrun(tmp_path, 1)))
    assert "gtrain: restarting the job from its last checkpoint in" in done.stderr
    assert [*runs.recorded(tmp_path / "runs")] == [run] == [each.parent for each in tmp_path.glob("runs/2*/*/record")]
    record = RunRecord(run)
    assert [event["event"] for event in record.events] == ["start", "job restarted", "end"]
    assert record.status == "complete" and len(summary(run)["history"]) == 5
    assert list(run.glob("report*"))


def test_the_metrics_of_a_restarted_rank_0_are_complete(tmp_path: Path) -> None:
    """With ps it is restarted alone."""
    job = ("strategy=ps", "trainer.num_nodes=2", "strategy.rest=server", *JOBS["ps"][3:])
    done = ok(gtrain(*job, kill(0, 2), "hydra.run.dir=run", cwd=tmp_path))
    assert "rank 0 of 2 (machine 0) was killed by SIGKILL; restarting it (1/" in done.stderr
    epochs = [int(row["epoch"]) for row in metrics(tmp_path / "run") if row["train/loss"]]
    assert epochs == [0, 1, 2, 3, 4]


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
