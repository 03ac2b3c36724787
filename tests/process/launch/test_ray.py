"""Jobs on a Ray cluster: one that the command starts, and one that exists. Results equal those of local jobs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from helpers import (
    LIMIT,
    REPO,
    clean_environment,
    gtrain,
    has_logged,
    logs,
    ok,
    rest_exhaustive,
    run,
    show,
    summary,
    until,
)

pytest.importorskip("ray")

ASSETS = REPO / "tests" / "assets"
SAR = ("strategy=sar", "trainer.num_nodes=2", "data.num_nodes=600", "data.num_edges=4000", "trainer.max_epochs=4")
PS = (
    "strategy=ps",
    "trainer.num_nodes=2",
    "data=planted_sparse",
    "data.num_rows=600",
    "data.num_features=200",
    "data.features_per_row=6",
    "data.batch_size=60",
    "model=sparse",
    "model.hidden_channels=8",
    "trainer.precision=64-true",
)
"""Two workers and two servers, whose results do not depend on restarts."""
LONG = pytest.mark.skipif(
    os.environ.get("GTRAIN_TEST_RAY") != "1",
    reason="ten minutes and more: GTRAIN_TEST_RAY=1 runs the long tests of Ray",
)


OWN = """
import os
from pathlib import Path
import lightning.pytorch as pl

class Note(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        seen = Path(trainer.default_root_dir, "run.json").exists()
        print(f"rank {trainer.global_rank} sees the command's folder: {seen}", flush=True)
        print(f"GPUs: {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
"""
"""A module in the folder of the command."""


def kill(rank: int, epoch: int) -> str:
    target = f"_target_:gtrain.testing.faults.KillRank,rank:{rank},epoch:{epoch},record:dead"
    return "+callbacks.kill={" + target + ",once:true}"


def marked(mark: str) -> list[int]:
    """Processes whose environment has a variable of this value: a command's, and those that it started."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"GTRAIN_MARK={mark}".encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def shared_memory() -> set[str]:
    """Files of Ray's object stores, of clusters of other tests too, which end with them."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("plasma", "ray"))}


class Cluster:
    """A Ray cluster in separate processes (``tests/assets/on_ray/cluster.py``)."""

    def __init__(self, folder: str, nodes: int, *hidden: str) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2}
        self._process = subprocess.Popen(
            [sys.executable, str(ASSETS / "on_ray" / "cluster.py"), folder, str(nodes), *hidden],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(token),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self.environment = {"RAY_ADDRESS": self.address, **token}

    def actors(self, *action: str) -> list[str]:
        """Kill actors by name, or drain the node of one; return the names of those that lived."""
        done = ok(run([sys.executable, str(ASSETS / "on_ray" / "act.py"), *action], cwd=ASSETS, env=self.environment))
        return json.loads(done.stdout.splitlines()[-1])

    def end(self) -> None:
        self._process.communicate(timeout=LIMIT)


@contextlib.contextmanager
def started(nodes: int, *hidden: str) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        cluster = Cluster(folder, nodes, *hidden)
        assert cluster.address
        try:
            yield cluster
        finally:
            cluster.end()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of two nodes; a job's machines are on different ones."""
    with started(2) as cluster:
        yield cluster


class Running:
    """A command that trains until it is told that it is enough."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str]) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        until_file = f"+callbacks.until={{_target_:train_until.TrainUntil,folder:{folder}/until}}"
        command = [sys.executable, "-m", "gtrain", "cluster=ray", *arguments, until_file, "allow_targets=[train_until]"]
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            self.process = subprocess.Popen(
                [*command, "hydra.run.dir=run", "trainer.max_epochs=100000"],
                cwd=folder,
                env=clean_environment({**env, "GTRAIN_MARK": self.mark, "PYTHONPATH": str(ASSETS)}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        try:
            until(lambda: has_logged(folder / "run") or self.process.poll() is not None, folder)
            assert self.process.poll() is None, self.errors()
        except BaseException:
            self.process.kill()
            raise

    def errors(self) -> str:
        return (self.folder / "err").read_text()

    def enough(self) -> None:
        (self.folder / "until").mkdir(exist_ok=True)
        (self.folder / "until" / "enough").touch()

    def end(self) -> int:
        try:
            return self.process.wait(LIMIT)
        finally:
            self.process.kill()

    def pid_of(self, name: str) -> int:
        """The process that has a log open."""
        for pid in marked(self.mark):
            try:
                for number in os.listdir(f"/proc/{pid}/fd"):
                    if os.readlink(f"/proc/{pid}/fd/{number}").endswith(f"logs/{name}.log"):
                        return pid
            except OSError:
                continue
        raise AssertionError(f"no process has {name}.log open")


def equal(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert len(mine["history"]) == len(theirs["history"]) > 0
    for one, other in zip(mine["history"], theirs["history"], strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-6)
    assert mine["metrics"] == pytest.approx(theirs["metrics"], rel=1e-6)


def like_local(folder: Path, *arguments: str) -> None:
    """Hold that the run in ``run`` has the history and metrics of a local one of as many epochs."""
    disturbed = summary(folder / "run")
    ok(forked.gtrain(*arguments, f"trainer.max_epochs={len(disturbed['history'])}", "hydra.run.dir=local", cwd=folder))
    equal(disturbed, summary(folder / "local"))


@pytest.mark.slow
def test_a_cluster_of_its_own_trains_like_local_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    mark, memory = uuid.uuid4().hex, shared_memory()
    with tempfile.TemporaryDirectory(prefix="r-") as temporary:  # its path is short, as Ray's sockets need it
        environment = {"TMPDIR": temporary, "GTRAIN_MARK": mark}
        done = ok(gtrain("cluster=ray", *SAR, "hydra.run.dir=run", cwd=tmp_path, env=environment))
        until(lambda: not marked(mark) and shared_memory() <= memory, tmp_path)
        assert os.listdir(temporary) == []
    like_local(tmp_path, *SAR)
    assert "store data/stores/planted" in done.stdout, "the log of rank 0"
    assert "store data/stores/planted" in (tmp_path / "run" / "gtrain.log").read_text()
    assert "epoch 4/4" in done.stdout and "epoch 4/4" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert (tmp_path / "run" / "logs" / "rank-1.log").exists()


@LONG
@pytest.mark.slow
def test_killed_actors_and_processes_of_servers_and_ranks_come_back(cluster: Cluster, tmp_path: Path) -> None:
    job = Running(tmp_path, *PS, env=cluster.environment)
    count = lambda: job.errors().count("restarting it")  # noqa: E731
    try:
        assert {"machine 0", "machine 1", "parameter 0", "parameter 1", "rank 0", "rank 1"} < {*cluster.actors()}
        for number, name in enumerate(("parameter 0", "rank 1"), start=1):
            cluster.actors(name)
            until(lambda number=number: count() == number, tmp_path)
        os.kill(job.pid_of("parameter-1"), signal.SIGKILL)
        until(lambda: count() == 3, tmp_path)
    finally:
        job.enough()
        code = job.end()
    assert code == 0, job.errors() + logs(tmp_path)
    assert "parameter 0 of 2 (machine 0) was killed by SIGKILL; restarting it (1/3)" in job.errors()
    until(lambda: not marked(job.mark) and not cluster.actors(), tmp_path)
    like_local(tmp_path, *PS)


@LONG
@pytest.mark.slow
def test_ten_kills_of_actors(cluster: Cluster, tmp_path: Path) -> None:
    job = Running(tmp_path, *PS, "strategy.max_restarts=10", env=cluster.environment)
    try:
        for number in range(10):
            cluster.actors(("parameter 0", "rank 0", "parameter 1", "rank 1")[number % 4])
            until(lambda number=number: job.errors().count("restarting it") == number + 1, tmp_path)
    finally:
        job.enough()
        code = job.end()
    assert code == 0, job.errors() + logs(tmp_path)
    like_local(tmp_path, *PS, "strategy.max_restarts=10")


@LONG
@pytest.mark.slow
@pytest.mark.parametrize("embedded", rest_exhaustive([True, False], True))
def test_the_death_of_the_command_leaves_no_process(embedded: bool, cluster: Cluster, tmp_path: Path) -> None:
    memory = shared_memory()
    job = Running(tmp_path, *PS, env={} if embedded else cluster.environment)
    assert len(marked(job.mark)) > 4
    job.process.kill()
    assert job.end() == -signal.SIGKILL
    until(lambda: not marked(job.mark), tmp_path)
    until(lambda: not cluster.actors() and shared_memory() <= memory, tmp_path)


def own_cluster(job: Running) -> int:
    """The process of the cluster that a command started, when the ranks train."""
    own: list[int] = []
    written: set[float] = set()  # when; at first with the rows from before a restart

    def ranks_train() -> bool:
        own[:] = [pid for pid in marked(job.mark) if b"own_cluster" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        logs = [path.stat().st_mtime for path in (job.folder / "run" / "metrics.csv",) if path.exists()]
        if len(own) == 1:
            written.update(time for time in logs if time > Path(f"/proc/{own[0]}").stat().st_mtime)
        return len(written) > 1

    until(ranks_train, job.folder)
    return own[0]


def child(parent: int, program: str) -> int:
    """The process of a program that another process started."""
    pids = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    (pid,) = (pid for pid in pids if program in Path(f"/proc/{pid}/cmdline").read_text())
    return pid


@pytest.mark.slow
def test_a_cluster_of_its_own_that_is_lost_is_named_and_restarted(tmp_path: Path) -> None:
    """Its process is killed, then a process of Ray in the cluster that takes its place."""
    with tempfile.TemporaryDirectory(prefix="r-") as temporary:
        job = Running(tmp_path, *SAR, "cluster.max_restarts=1", env={"TMPDIR": temporary})
        try:
            os.kill(own_cluster(job), signal.SIGKILL)
            start = time.monotonic()
            until(lambda: "restarting the job from" in job.errors(), tmp_path)
            assert "that the command started on this machine ended: its process was killed by signal 9" in job.errors()
            assert "rank" not in job.errors() and time.monotonic() - start < LIMIT / 2
            os.kill(child(own_cluster(job), "gcs_server"), signal.SIGKILL)
            code = job.end()
        finally:
            job.process.kill()
        assert code == 1 and "ended: Ray's gcs_server was killed by signal 9." in job.errors(), job.errors()
        until(lambda: not marked(job.mark), tmp_path)
        assert os.listdir(temporary) == []


@LONG
@pytest.mark.slow
@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_a_job_as_they_end_a_local_one(
    number: int, code: int, embedded: bool, cluster: Cluster, tmp_path: Path
) -> None:
    job = Running(tmp_path, *SAR, env={} if embedded else cluster.environment)
    os.killpg(job.process.pid, number)
    assert job.end() == code
    assert "to resume after epoch" in job.errors() and "Traceback" not in job.errors(), job.errors()
    until(lambda: not marked(job.mark), tmp_path)


@LONG
@pytest.mark.slow
def test_the_first_cause_is_named(cluster: Cluster, tmp_path: Path) -> None:
    command = ("cluster=ray", *SAR, "hydra.run.dir=run")
    done = gtrain(*command, kill(1, 2), cwd=tmp_path, env=cluster.environment)
    assert done.returncode == 1 and "gtrain: rank 1 of 2 (machine 1) was killed by SIGKILL." in done.stderr, show(done)
    assert f"the rank's log is {tmp_path}/run/logs/rank-1.log" in done.stderr
    done = gtrain(*command, "model.optimizer.lr=1e30", cwd=tmp_path, env=cluster.environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, show(done)


@LONG
@pytest.mark.slow
def test_a_job_restarts_from_its_last_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    """After the death of a rank, and after the death of a machine's actor, which ends all processes of the machine."""
    command = ("cluster=ray", *SAR, kill(1, 2), "cluster.max_restarts=1", "hydra.run.dir=run")
    done = ok(gtrain(*command, cwd=tmp_path, env=cluster.environment))
    assert "was killed by SIGKILL; restarting the job from its last checkpoint (1/1)" in done.stderr, show(done)
    like_local(tmp_path, *SAR)
    ok(gtrain("test", "cluster=ray", *SAR, "hydra.run.dir=test", cwd=tmp_path, env=cluster.environment))
    tested, trained = summary(tmp_path / "test")["metrics"], summary(tmp_path / "run")["metrics"]
    assert tested["test/loss"] == pytest.approx(trained["test/loss"], rel=1e-6)


@LONG
@pytest.mark.slow
def test_a_lost_machine_restarts_the_job(cluster: Cluster, tmp_path: Path) -> None:
    job = Running(tmp_path, *PS, "cluster.max_restarts=1", env=cluster.environment)
    try:
        cluster.actors("machine 1")
        until(lambda: "restarting the job from" in job.errors(), tmp_path)
    finally:
        job.enough()
        code = job.end()
    assert code == 0, job.errors() + logs(tmp_path)
    like_local(tmp_path, *PS)


@LONG
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [SAR[:-1], (*PS, "data.num_rows=12000")], ids=["sar", "ps"])
def test_a_job_saves_and_leaves_a_node_that_is_drained(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """It goes on from its checkpoint on the other node; Ray puts no actors on a node that it drains.

    An epoch of sar is one step; one of ps has 120, and the checkpoint is written within it.
    """
    with started(2) as cluster:
        settings = ("cluster.max_restarts=1", "cluster.first_machine=command")
        job = Running(tmp_path, *arguments, *settings, env=cluster.environment)
        try:
            cluster.actors("drain", "machine 1")
            until(lambda: "restarting the job from" in job.errors() or job.process.poll() is not None, tmp_path)
        finally:
            job.enough()
            code = job.end()
    assert code == 0, job.errors() + logs(tmp_path)
    assert "gtrain: Ray drains the node of machine 1; the ranks save a checkpoint after their step" in job.errors()
    assert "Ray drained the node of machine 1; restarting the job from its last checkpoint (1/1)" in job.errors()
    like_local(tmp_path, *arguments)


@LONG
@pytest.mark.slow
def test_a_job_whose_command_is_drained_saves_and_says_how_to_resume(tmp_path: Path) -> None:
    """Ray starts nothing more for a command whose node has left: a restarted job would wait for ever."""
    with started(2) as cluster:
        settings = ("cluster.max_restarts=1", "cluster.first_machine=command")
        job = Running(tmp_path, *SAR, *settings, env=cluster.environment)
        cluster.actors("drain", "machine 0")
        code = job.end()
    assert code == 1
    assert "Ray drained the node of machine 0. The node of the command leaves the Ray cluster too" in job.errors()
    assert "ckpt_path=" in job.errors() and "restarting the job" not in job.errors()
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


@LONG
@pytest.mark.slow
def test_a_node_without_the_folders_of_the_command(tmp_path: Path) -> None:
    """It gets the command's module, the store from machine 0, and sends its part of checkpoints and its logs."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("mount namespaces need root and the command unshare")
    folder = tmp_path / "command"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    job = (*SAR, "+callbacks.own={_target_:own.Note}", "allow_targets=[own]")
    ok(forked.gtrain(*job, "hydra.run.dir=local", cwd=folder))
    with started(1, str(folder)) as cluster:
        placed = ("cluster=ray", "cluster.placement=STRICT_SPREAD")
        first = (*placed, "cluster.first_machine=command", "hydra.run.dir=run")
        done = ok(gtrain(*first, *job, cwd=folder, env=cluster.environment))
    equal(summary(folder / "run"), summary(folder / "local"))
    checkpoints = [folder / name / "checkpoints" / "last.ckpt" for name in ("run", "local")]
    files = [sorted(path.name for path in checkpoint.iterdir()) for checkpoint in checkpoints]
    assert files[0] == files[1] and "Traceback" not in done.stderr
    notes = [(folder / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert "rank 0 sees the command's folder: True" in notes[0]
    assert "rank 1 sees the command's folder: False" in notes[1]


@LONG
@pytest.mark.slow
def test_ranks_of_a_machine_see_the_gpus_that_ray_assigned_to_them(cluster: Cluster, tmp_path: Path) -> None:
    """The cluster's GPUs are numbers only; which of them a rank uses, its number on the machine says."""
    (tmp_path / "own.py").write_text(OWN)
    job = (
        *SAR,
        "trainer.num_nodes=1",
        "trainer.devices=2",
        "+callbacks.own={_target_:own.Note}",
        "allow_targets=[own]",
    )
    arguments = ("cluster=ray", *job, "cluster.gpus_per_rank=1", "hydra.run.dir=run")
    ok(gtrain(*arguments, cwd=tmp_path, env=cluster.environment))
    logged = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert [line for text in logged for line in text.splitlines() if "GPUs: " in line] in (
        ["GPUs: 0,1"] * 2,
        ["GPUs: 1,0"] * 2,
    )


@LONG
@pytest.mark.slow
def test_jobs_of_a_sweep_run_side_by_side(cluster: Cluster, tmp_path: Path) -> None:
    """Each takes 4 of the cluster's 16 CPUs, so that all of them fit."""
    meeting = f"+callbacks.meeting={{_target_:meeting.Meeting,folder:{tmp_path}/meeting,jobs:2}}"
    sweep = ("--multirun", "hydra/launcher=side_by_side", "hydra.sweep.dir=sweep", "seed=3,4", "cluster=ray", *SAR)
    environment = {**cluster.environment, "PYTHONPATH": str(ASSETS)}
    arguments = (*sweep, "cluster.cpus_per_rank=2", meeting, "allow_targets=[meeting]")
    ok(gtrain(*arguments, cwd=tmp_path, env=environment))
    for number, seed in enumerate((3, 4)):
        ok(forked.gtrain(*SAR, f"seed={seed}", f"hydra.run.dir=local/{seed}", cwd=tmp_path))
        equal(summary(tmp_path / "sweep" / str(number)), summary(tmp_path / "local" / str(seed)))


@LONG
@pytest.mark.slow
def test_pbg_continues_without_a_machine_whose_worker_dies(cluster: Cluster, tmp_path: Path) -> None:
    """Its checkpoints do not wait for the files of the lost rank."""
    data = ("data=planted_kg", "model=kg", "data.num_entities=200", "data.num_triples=2000", "trainer.max_epochs=3")
    job = ("cluster=ray", "strategy=pbg", *data, "strategy.num_partitions=4", "trainer.num_nodes=2", kill(1, 1))
    done = ok(gtrain(*job, "hydra.run.dir=run", cwd=tmp_path, env=cluster.environment, timeout=300))
    assert "rank 1 of 2 (machine 1) was killed by SIGKILL; the job goes on without machine 1" in done.stderr
    assert [epoch["epoch"] for epoch in summary(tmp_path / "run")["history"]] == [0, 1, 2]
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt" / "manifest.json").exists()


@LONG
@pytest.mark.slow
def test_resources_that_the_cluster_lacks(cluster: Cluster, tmp_path: Path) -> None:
    arguments = ("cluster=ray", *SAR, "cluster.cpus_per_rank=100", "cluster.timeout_seconds=1")
    done = gtrain(*arguments, cwd=tmp_path, env=cluster.environment)
    assert (
        done.returncode == 1
        and "did not provide {CPU: 100}, {CPU: 100} within 1 s; it has {CPU: 16, GPU: 4" in done.stderr
    )
    arguments = ("cluster=ray", *SAR, "cluster.address=ray://localhost:10001")
    done = gtrain(*arguments, cwd=tmp_path)
    assert done.returncode == 1 and "it is that of a Ray client" in done.stderr
    done = gtrain("cluster=ray", *SAR, "model.nosuch=1", cwd=tmp_path, env=cluster.environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, show(done)
