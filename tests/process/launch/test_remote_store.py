"""``data.remote_store``: jobs that read their store from an object store, played by moto's local S3."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import gtrain
from helpers import ok, summary
from local_s3 import local_s3

GRAPH = ("data.num_nodes=600", "data.num_edges=4000", "trainer.max_epochs=3")
ADDRESS = "s3://graphs/stores/planted"


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """A bucket ``graphs`` of a local S3, as the environment variables of a client."""
    with local_s3("graphs") as variables:
        yield variables


def losses(run: Path) -> list[float]:
    return [epoch["train/loss"] for epoch in summary(run)["history"]]


@pytest.mark.slow
def test_a_job_trains_on_a_store_in_s3(s3: dict[str, str], tmp_path: Path) -> None:
    remote = f"data.remote_store={ADDRESS}"
    missing = gtrain("strategy=sar", "trainer.num_nodes=2", *GRAPH, remote, cwd=tmp_path, env=s3)
    assert missing.returncode == 1 and "Traceback" not in missing.stderr
    assert f"{ADDRESS} has no manifest.json" in missing.stderr and "gtrain partition" in missing.stderr
    written = ok(gtrain("partition", "data.num_parts=2", *GRAPH, remote, cwd=tmp_path, env=s3))
    assert f"wrote the store to {ADDRESS}" in written.stdout
    job = ("strategy=sar", "trainer.num_nodes=2", *GRAPH)
    ok(gtrain(*job, "hydra.run.dir=local", cwd=tmp_path))
    shutil.rmtree(tmp_path / "data")
    ok(gtrain(*job, remote, "hydra.run.dir=remote", cwd=tmp_path, env=s3))
    assert losses(tmp_path / "remote") == losses(tmp_path / "local")
    other = gtrain(*job, remote, "data.split=per_class", cwd=tmp_path, env=s3)
    assert other.returncode == 1 and f"data.remote_store={ADDRESS} was prepared with data.split=" in other.stderr
    parts = gtrain("strategy=sar", "trainer.num_nodes=3", *GRAPH, remote, cwd=tmp_path, env=s3)
    assert "was prepared with data.num_parts=2, and this job has data.num_parts=3." in parts.stderr
