"""A job that gets SIGTERM within an epoch saves, leaves, and resumes with the result of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked import gtrain
from helpers import ok, rest_exhaustive, summary

GRAPH = ("data.num_nodes=600", "data.num_edges=4000", "model.dropout=0.3", "trainer.max_epochs=4")
SPARSE = ("data=planted_sparse", "data.num_rows=600", "data.num_features=400", "data.batch_size=32", "model=sparse")
JOBS = {
    "single": ("strategy=single", "data.batch_size=32", *GRAPH),
    "sar": ("strategy=sar", "trainer.num_nodes=2", *GRAPH),
    "pyg": ("strategy=pyg", "trainer.num_nodes=2", "data.batch_size=32", *GRAPH),
    "ps": ("strategy=ps", "trainer.num_nodes=2", *SPARSE, "trainer.max_epochs=4"),
    "pbg": (
        *("strategy=pbg", "data=planted_kg", "model=kg", "data.num_entities=200", "data.num_triples=1500"),
        *("strategy.num_partitions=4", "trainer.devices=1", "trainer.max_epochs=4", "strategy.matmul=float32"),
    ),
}
STEPS = {"single": 12, "sar": 1, "pyg": 12, "ps": 12, "pbg": 16}
"""Steps of an epoch."""


def terminate(rank: int, epoch: int, step: int, to_agent: bool = True) -> str:
    target = f"_target_:gtrain.testing.faults.Terminate,rank:{rank},epoch:{epoch},step:{step},record:sent"
    return "+callbacks.terminate={" + f"{target},to_agent:{str(to_agent).lower()}" + "}"


def manifest(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "checkpoints" / "last.ckpt" / "manifest.json").read_text()))


def equal(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert [epoch["epoch"] for epoch in mine["history"]] == [epoch["epoch"] for epoch in theirs["history"]]
    for one, other in zip(mine["history"], theirs["history"], strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-6)
    assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "where"),
    rest_exhaustive(
        [*((strategy, "middle") for strategy in JOBS if strategy != "sar"), ("sar", "end")],
        ("pyg", "middle"),
        ("ps", "middle"),
        ("sar", "end"),
    ),
)
def test_ranks_save_after_the_same_step_and_the_job_resumes_there(strategy: str, where: str, tmp_path: Path) -> None:
    """A rank gets SIGTERM, and the agent restarts the job: losses are those of a job that got none."""
    job, steps = JOBS[strategy], STEPS[strategy]
    step = steps - 1 if where == "end" else steps // 2
    ok(gtrain(*job, "hydra.run.dir=whole", cwd=tmp_path))
    cut = (terminate(0, 1, step, to_agent=False), "cluster.max_restarts=1", "hydra.run.dir=cut")
    done = ok(gtrain(*job, *cut, cwd=tmp_path))
    line = "saved a checkpoint and ended, because a process of the job received SIGTERM; restarting the job from its"
    assert done.stderr.count(line) == 1, done.stderr
    equal(summary(tmp_path / "cut"), summary(tmp_path / "whole"))


@pytest.mark.slow
def test_the_agent_waits_for_the_checkpoint(tmp_path: Path) -> None:
    """At most the current step is lost."""
    job = (*JOBS["ps"], "hydra.run.dir=run")
    done = gtrain(*job, terminate(1, 1, 5), cwd=tmp_path)
    assert done.returncode == 143, done.stderr
    assert "gtrain: the ranks save a checkpoint after their step, for up to 20 s;" in done.stderr
    assert done.stderr.endswith("gtrain: to resume within epoch 2, run the same command with ckpt_path=last\n")
    saved = manifest(tmp_path / "run")
    assert saved["within_epoch"] and saved["epoch"] == 1
    assert saved["global_step"] - STEPS["ps"] in (6, 7), "the step in which the signal came, or the next"
