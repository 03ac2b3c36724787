"""Checkpoints in an object store: written by every rank, resumed from, tested and predicted with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import gtrain
from helpers import ok, rest_exhaustive, summary
from local_s3 import local_s3

QUICK = ("data.num_nodes=300", "data.num_edges=2400", "data.num_features=16", "data.num_classes=4")
DIRPATH = "callbacks.checkpoint.dirpath"
JOBS = {
    "single": ("strategy=single", *QUICK),
    "sar": ("strategy=sar", "trainer.num_nodes=2", *QUICK),
    "pyg": ("strategy=pyg", "trainer.num_nodes=2", "data.batch_size=40", "data.num_neighbors=[5,5]", *QUICK),
    "ps": (
        *("strategy=ps", "trainer.num_nodes=2", "data=planted_sparse", "data.num_rows=400", "data.num_features=150"),
        *("data.batch_size=50", "model=sparse", "model.hidden_channels=8"),
    ),
    "pbg": (
        *("strategy=pbg", "strategy.num_partitions=4", "strategy.buffer_partitions=2", "data=planted_kg"),
        *("data.batch_size=500", "model=kg", "model.dimension=8", "strategy.checkpoint_preservation_interval=2"),
    ),
}


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with local_s3("runs") as variables:
        yield variables


def losses(run: Path) -> list[float]:
    return [epoch["train/loss"] for epoch in summary(run)["history"]]


def check(job: tuple[str, ...], address: str, folder: Path, env: dict[str, str] | None = None) -> None:
    """Interrupt a job after two of four epochs, and compare with one that was not interrupted and writes locally."""
    for name in ("whole", "first", "rest", "other"):
        (folder / name).mkdir()
    ok(gtrain(*job, "trainer.max_epochs=4", "hydra.run.dir=run", cwd=folder / "whole"))
    stores = f"paths.data={folder}/whole/data"
    job = (*job, stores)
    ok(
        gtrain(
            *job, "trainer.max_epochs=2", f"{DIRPATH}={address}/a", "hydra.run.dir=run", cwd=folder / "first", env=env
        )
    )
    pointer = json.loads((folder / "first/run/checkpoints/last.ckpt/manifest.json").read_text())
    assert pointer.pop("global_step") > 0
    assert pointer == {"address": f"{address}/a/last.ckpt", "epoch": 1, "within_epoch": False}
    resume = (*job, "trainer.max_epochs=4", f"{DIRPATH}={address}/b", f"paths.runs={folder}/first/runs")
    ok(gtrain(*resume, "ckpt_path=last", "hydra.run.dir=run", cwd=folder / "rest", env=env))
    assert losses(folder / "rest/run") == pytest.approx(losses(folder / "whole/run")[2:], rel=1e-6)
    metrics = summary(folder / "rest/run")["metrics"]
    tested = {name: value for name, value in metrics.items() if name.startswith("test/")}
    assert tested == pytest.approx({name: summary(folder / "whole/run")["metrics"][name] for name in tested}, rel=1e-5)
    # by its address, where no run's folder is
    resumed = summary(folder / "rest/run")["metrics_epoch"]["test/loss"] >= 2  # else the best is that of the first run
    best = f"ckpt_path={address}/{'b' if resumed else 'a'}/best.ckpt"
    ok(gtrain("test", *job, best, "hydra.run.dir=test", cwd=folder / "other", env=env))
    again = summary(folder / "other/test")["metrics"]
    assert tested == pytest.approx({name: again[name] for name in tested}, rel=1e-6) and tested
    left = {path.name for run in ("rest", "first") for path in (folder / run / "run").iterdir()}
    assert not [name for name in left if name.startswith("checkpoint-")], "copies and scratch folders are deleted"


@pytest.mark.slow
def test_a_run_resumes_from_an_address_and_is_tested_by_it(tmp_path: Path) -> None:
    check(JOBS["sar"], f"file://{tmp_path}/bucket", tmp_path)
    for name in ("a/last.ckpt", "a/best.ckpt", "b/last.ckpt", "b/best.ckpt"):
        files = [path.name for path in (tmp_path / "bucket" / name).iterdir() if path.is_file()]
        assert files == ["manifest.json"], "the address has complete checkpoints alone"
    predict = ("predict", *JOBS["sar"], f"paths.data={tmp_path}/whole/data", f"output={tmp_path}/scores.npy")
    ok(gtrain(*predict, f"ckpt_path=file://{tmp_path}/bucket/b/best.ckpt", cwd=tmp_path / "other"))
    assert np.load(tmp_path / "scores.npy").shape == (300, 4)


def test_an_address_that_cannot_be_served_is_refused_before_the_data_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for setting, message in {
        f"{DIRPATH}=memory://bucket": "memory:// cannot replace a checkpoint in one step",
        f"{DIRPATH}=file://{tmp_path}/file/a": f"{DIRPATH}=file://{tmp_path}/file/a was set; a file there cannot be",
        f"ckpt_path=file://{tmp_path}/lost.ckpt": "lost.ckpt was set; no such checkpoint exists.",
        "ckpt_path=nosuch://bucket/last.ckpt": "ckpt_path=nosuch://bucket/last.ckpt was set: Protocol not known",
    }.items():
        refused = gtrain(*JOBS["single"], setting, "hydra.run.dir=run", cwd=tmp_path)
        assert refused.returncode == 1 and message in refused.stderr and "HINT: " in refused.stderr
        assert "Traceback" not in refused.stderr and not (tmp_path / "data").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", rest_exhaustive(JOBS, "sar", "ps"))
def test_every_strategy_keeps_its_checkpoints_in_s3(strategy: str, s3: dict[str, str], tmp_path: Path) -> None:
    check(JOBS[strategy], f"s3://runs/{strategy}", tmp_path, s3)
    if strategy == "pbg":
        preserved = f"ckpt_path=s3://runs/{strategy}/b/epoch-00004.ckpt"
        job = (*JOBS[strategy], f"paths.data={tmp_path}/whole/data", "hydra.run.dir=preserved")
        ok(gtrain("test", *job, preserved, cwd=tmp_path, env=s3))
        warm = f"strategy.warm_start=s3://runs/{strategy}/b/last.ckpt"
        ok(gtrain(*job[:-1], warm, "trainer.max_epochs=1", "hydra.run.dir=warm", cwd=tmp_path, env=s3))
        assert losses(tmp_path / "warm")[0] < losses(tmp_path / "whole/run")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_exhaustive(["sar", "ps"], "ps"))
def test_a_job_restarts_from_an_address(name: str, s3: dict[str, str], tmp_path: Path) -> None:
    """The job of sar restarts, and the killed rank of ps."""
    job = (*JOBS[name], "trainer.max_epochs=4")
    kill = "+callbacks.kill={_target_:gtrain.testing.faults.KillRank,rank:0,epoch:2,record:dead,once:true}"
    ok(gtrain(*job, "hydra.run.dir=whole", cwd=tmp_path))
    remote = (f"{DIRPATH}=s3://runs/killed-{name}", "cluster.max_restarts=1", "hydra.run.dir=killed")
    done = ok(gtrain(*job, kill, *remote, cwd=tmp_path, env=s3))
    assert (tmp_path / "dead").exists() or (tmp_path / "killed/dead").exists()
    assert ("restarting the job from its last checkpoint (1/1)" in done.stderr) == (name == "sar")
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    metrics = [summary(tmp_path / run)["metrics"] for run in ("killed", "whole")]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)


@pytest.mark.slow
def test_a_bucket_that_is_missing_or_closed_is_refused(s3: dict[str, str], tmp_path: Path) -> None:
    closed = {**s3, "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
    for address, env, reason in (("s3://lost/a", s3, "bucket does not exist"), ("s3://runs/a", closed, "credentials")):
        refused = gtrain(*JOBS["single"], f"{DIRPATH}={address}", cwd=tmp_path, env=env)
        assert refused.returncode == 1 and "Traceback" not in refused.stderr and not (tmp_path / "data").exists()
        first = refused.stderr.splitlines()[0]
        assert f"{DIRPATH}={address} was set; a file there cannot be written: " in first and reason in first
