"""SLURM on one host: ``GTRAIN_TEST_SLURM=1`` runs these tests, as root, with Debian's packages slurm-wlm and munge."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from helpers import LIMIT, clean_environment, ok, only_run, run, summary, until

from gtrain.run.runs import last_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("GTRAIN_TEST_SLURM") != "1", reason="GTRAIN_TEST_SLURM=1 is not set"),
]
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
JOB = ("strategy=sar", "data.num_nodes=600", "data.num_edges=4000")
SCRIPT = """#!/bin/bash
#SBATCH --ntasks=2 --requeue --open-mode=append --output=said
exec srun {python} -m gtrain {arguments}
"""


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return int(one.getsockname()[1]), int(two.getsockname()[1])


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The variables of a cluster of one host, whose daemons end with the tests."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        controller, node = free_ports()
        text = CONFIGURATION.format(host=socket.gethostname(), folder=folder, controller=controller, node=node)
        (folder / "slurm.conf").write_text(text)
        environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        files = {option: f"--{option}-file={folder}/munge.{option}" for option in ("key", "pid", "log", "seed")}
        commands = [
            ["munged", "--force", "--foreground", f"--socket={folder}/munge.socket", *files.values()],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ]
        daemons = []
        try:
            for command in commands:
                program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")
                assert program is not None, f"apt-get install slurm-wlm munge: {command[0]} is missing"
                with open(folder / f"{command[0]}.log", "w") as log:
                    daemons.append(
                        subprocess.Popen(
                            [program, *command[1:]], env=clean_environment(environment), stdout=log, stderr=log
                        )
                    )
                if command[0] == "munged":
                    until((folder / "munge.socket").exists, folder)
            until(lambda: "idle" in run(["sinfo", "-h", "-o", "%t"], cwd=folder, env=environment).stdout, folder)
            yield environment
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(30)
                daemon.kill()


def losses(run_dir: Path) -> list[float]:
    return [epoch["train/loss"] for epoch in summary(run_dir)["history"]]


@pytest.mark.parametrize("strategy", ["sar", "ps"])
def test_losses_equal_those_of_local_ranks(strategy: str, slurm: dict[str, str], tmp_path: Path) -> None:
    sparse = ("data=planted_sparse", "data.num_rows=600", "data.num_features=400", "model=sparse")
    job = (*(JOB if strategy == "sar" else ("strategy=ps", *sparse)), "trainer.max_epochs=3")
    ok(forked.gtrain(*job, "trainer.devices=2", "trainer.num_nodes=1", "hydra.run.dir=local", cwd=tmp_path))
    command = ["srun", "-n", "2", sys.executable, "-m", "gtrain", *job, "hydra.run.dir=slurm"]
    ok(run(command, cwd=tmp_path, env=slurm))
    assert losses(tmp_path / "slurm") == pytest.approx(losses(tmp_path / "local"), rel=1e-6)


def test_pbg_trains_like_local_ranks(slurm: dict[str, str], tmp_path: Path) -> None:
    """One worker, whose steps have an order, and two, which train at the same time."""
    size = ("data=planted_kg", "data.num_entities=200", "data.num_triples=1500", "data.batch_size=100")
    job = ("strategy=pbg", "strategy.num_partitions=4", *size, "model=kg", "model.dimension=8", "trainer.max_epochs=3")
    ok(forked.gtrain(*job, "trainer.devices=1", "trainer.num_nodes=1", "hydra.run.dir=local", cwd=tmp_path))
    for workers in ("1", "2"):
        command = ["srun", "-n", workers, sys.executable, "-m", "gtrain", *job, f"hydra.run.dir={workers}"]
        ok(run(command, cwd=tmp_path, env=slurm))
        assert summary(tmp_path / workers)["world_size"] == int(workers)
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "local"), rel=1e-6)
    assert losses(tmp_path / "2")[-1] < 0.9 * losses(tmp_path / "2")[0]


def test_a_job_that_is_requeued_resumes_from_its_last_checkpoint(slurm: dict[str, str], tmp_path: Path) -> None:
    """As after a preemption: SLURM ends the job by SIGTERM, and starts it again under the same number."""

    def state() -> str:
        return run(["squeue", "-h", "-j", job, "-o", "%T"], cwd=tmp_path, env=slurm).stdout.strip()

    def checkpoint() -> bool:
        return any(last_checkpoint(path.parent) for path in (tmp_path / "runs").glob("2*/*/checkpoints"))

    stop = f"+callbacks.until={{_target_:train_until.TrainUntil,folder:{tmp_path}/until}}"
    arguments = " ".join(f"'{argument}'" for argument in (*JOB, stop, "trainer.max_epochs=100000"))
    (tmp_path / "job").write_text(SCRIPT.format(python=sys.executable, arguments=arguments))
    assets = str(Path(forked.__file__).with_name("assets"))
    job = ok(run(["sbatch", "--parsable", "job"], cwd=tmp_path, env={**slurm, "PYTHONPATH": assets})).stdout.strip()
    try:
        until(checkpoint, tmp_path)
        ok(run(["scontrol", "requeue", job], cwd=tmp_path, env=slurm))
        restarted = "gtrain: restarting the job from its last checkpoint in"
        until(lambda: restarted in (tmp_path / "said").read_text(), tmp_path)
        (tmp_path / "until" / "enough").touch()
        until(lambda: state() in ("", "COMPLETED"), tmp_path)
    finally:
        run(["scancel", job], cwd=tmp_path, env=slurm, timeout=LIMIT)
    said = (tmp_path / "said").read_text()
    assert said.count(restarted) == 1 and "to resume after epoch" in said.partition(restarted)[0]
    mine = losses(only_run(tmp_path / "runs"))
    whole = (*JOB, f"trainer.max_epochs={len(mine)}", "trainer.num_nodes=1", "trainer.devices=2")
    ok(forked.gtrain(*whole, "hydra.run.dir=undisturbed", cwd=tmp_path))
    assert mine == pytest.approx(losses(tmp_path / "undisturbed"), rel=1e-6)
