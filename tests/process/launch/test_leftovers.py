"""What a command leaves behind: nothing in the temporary folder, and no warning that a user could not act on."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import pytest
from helpers import gtrain, has_logged, ok, until

SMALL = ["data.num_nodes=300", "data.num_edges=2000"]
TRAININGS = {
    "pyg": ["strategy=pyg", "model=gin", "trainer.num_nodes=2", "data.batch_size=64", *SMALL],
    "ps": ["strategy=ps", "data=planted_sparse", "model=sparse", "data.num_rows=500"],
    "pbg": ["strategy=pbg", "data=planted_kg", "model=kg"],
}


def check(folder: Path, *said: str) -> None:
    """No file is in the temporary folder; neither terminal nor logs have a warning."""
    assert [path.name for path in (folder / "tmp").iterdir()] == []
    for text in (*said, *(path.read_text() for path in folder.glob("run*/logs/*.log"))):
        assert "warn" not in text.lower() and "srun" not in text, text


@pytest.fixture
def temporary(tmp_path: Path) -> dict[str, str]:
    """An environment with an empty temporary folder, on a machine that has SLURM's commands."""
    for folder in ("tmp", "bin"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "srun").chmod(0o755)
    return {"TMPDIR": str(tmp_path / "tmp"), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.slow
def test_a_command_of_its_own_leaves_nothing(tmp_path: Path, temporary: dict[str, str]) -> None:
    """It trains with two kinds of convolutions' generated code, validates every second epoch and tests."""
    every = ["trainer.check_val_every_n_epoch=2", "trainer.max_epochs=3", "trainer.num_nodes=2", *SMALL]
    done = ok(gtrain("model=gat", *every, "hydra.run.dir=run", cwd=tmp_path, env=temporary))
    check(tmp_path, done.stdout, done.stderr)
    checkpoint = f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt"
    for verb in ("test", "predict"):  # by another number of ranks
        arguments = [verb, "model=gat", *SMALL, "data.num_parts=2", "strategy=single", checkpoint]
        done = forked.gtrain(*arguments, f"hydra.run.dir=run-{verb}", cwd=tmp_path, env=temporary)
        check(tmp_path, ok(done).stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_leave_nothing(name: str, tmp_path: Path, temporary: dict[str, str]) -> None:
    arguments = [*TRAININGS[name], "trainer.max_epochs=1", "hydra.run.dir=run"]
    done = ok(forked.gtrain(*arguments, cwd=tmp_path, env=temporary))
    check(tmp_path, done.stdout, done.stderr)


@pytest.mark.parametrize("name", ["pbg", "pyg"])
def test_a_job_that_is_killed_has_nothing_in_the_temporary_folder(
    name: str, tmp_path: Path, temporary: dict[str, str]
) -> None:
    """What ranks of a machine share is in no file system while they train, so that nobody has to remove it."""
    small = ["data.num_entities=200", "data.num_triples=2000", "trainer.limit_val_batches=0"] if name == "pbg" else []
    more = [*small, "trainer.num_nodes=1", "trainer.devices=2", "trainer.max_epochs=100000", "hydra.run.dir=run"]
    job = forked.Program("-m", "gtrain", *TRAININGS[name], *more, cwd=tmp_path, env=temporary)
    try:
        until(lambda: has_logged(tmp_path / "run"), tmp_path)
        assert [path.name for path in (tmp_path / "tmp").iterdir()] == []
    finally:
        job.kill()
        job.end()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == []
