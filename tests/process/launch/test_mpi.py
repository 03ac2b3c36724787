"""The same results under mpirun as under the agent, with Open MPI and with MPICH; what is killed leaves nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from subprocess import CompletedProcess

import forked
import pytest
from helpers import LIMIT, alive, clean_environment, descendants, has_logged, ok, rest_exhaustive, run, summary, until

from gtrain.run.runs import last_checkpoint
from gtrain.testing.processes import of_session
from gtrain.wire import Security

ENGINES = {
    "open-mpi": ("prterun", "--personality", "ompi", "--map-by", ":oversubscribe", "--bind-to", "none"),
    "mpich": ("mpiexec.hydra",),
}
"""The commands behind ``mpirun``, whose names differ: both engines install an ``mpirun``."""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
TINY = ("data.num_nodes=600", "data.num_edges=4000", "trainer.max_epochs=3")
SPARSE = ("data=planted_sparse", "data.num_rows=600", "data.num_features=400", "data.batch_size=32", "model=sparse")
JOBS = {
    "sar": ("strategy=sar", *TINY),
    "pyg": ("strategy=pyg", "data.batch_size=32", *TINY),
    "ps": ("strategy=ps", *SPARSE, "trainer.max_epochs=3"),
    "pbg": (
        *("strategy=pbg", "data=planted_kg", "model=kg", "data.num_entities=200", "data.num_triples=1500"),
        *("strategy.num_partitions=4", "trainer.max_epochs=5"),
    ),
}
FAKE_SSH = """#!/bin/sh
# runs the command of a remote shell here: ssh [options] HOST COMMAND
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec /bin/sh -c "$*"
"""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The command of an engine that is installed."""
    program, *options = ENGINES[request.param]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (found := shutil.which(program, path=path)) is None:
        pytest.skip(f"{program} is not installed: pip install {request.param.replace('-', '')}")
    return (found, *options)


def environment(engine: tuple[str, ...]) -> dict[str, str]:
    """Variables for the engine: ``mpirun`` would set Open MPI's folders, where its messages are."""
    prefix = str(Path(engine[0]).parent.parent)
    return AS_ROOT | dict.fromkeys(("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX"), prefix)


def ranks(number: int, *arguments: str) -> tuple[str, ...]:
    return ("-n", str(number), sys.executable, "-m", "gtrain", *arguments)


def mpirun(engine: tuple[str, ...], *arguments: str, cwd: Path) -> CompletedProcess[str]:
    return run([*engine, *arguments], cwd=cwd, env=environment(engine))


def losses(run_dir: Path) -> list[float]:
    return [epoch["train/loss"] for epoch in summary(run_dir)["history"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "engine"),
    rest_exhaustive(
        [("sar", "open-mpi"), ("sar", "mpich"), ("pyg", "mpich"), ("ps", "open-mpi"), ("pbg", "mpich")],
        ("sar", "mpich"),
        ("ps", "open-mpi"),
    ),
    indirect=["engine"],
)
def test_losses_equal_those_of_local_ranks(strategy: str, engine: tuple[str, ...], tmp_path: Path) -> None:
    """Two ranks; with pbg, whose workers update shared tables without locks, one."""
    job, number = JOBS[strategy], 1 if strategy == "pbg" else 2
    ok(forked.gtrain(*job, "trainer.num_nodes=1", f"trainer.devices={number}", "hydra.run.dir=local", cwd=tmp_path))
    ok(mpirun(engine, *ranks(number, *job, "hydra.run.dir=mpi"), cwd=tmp_path))
    ours, theirs = summary(tmp_path / "local"), summary(tmp_path / "mpi")
    assert losses(tmp_path / "mpi") == pytest.approx(losses(tmp_path / "local"), rel=1e-6)
    assert theirs["metrics"] == pytest.approx(ours["metrics"], rel=1e-6)
    places = [[(rank["role"], rank["rank"]) for rank in content["ranks"]] for content in (ours, theirs)]
    assert places[0] == places[1]


def test_a_refused_job_is_refused_once(engine: tuple[str, ...], tmp_path: Path) -> None:
    done = mpirun(engine, *ranks(3, "trainer.num_nodes=2", *JOBS["sar"]), cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("trainer.num_nodes 2 * trainer.devices 1 = 2 ranks were set, but mpi started 3.") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "engine"),
    rest_exhaustive(
        [
            *((victim, "open-mpi") for victim in ("rank 0", "rank 1", "mpirun", "server")),
            *((victim, "mpich") for victim in ("rank 1", "mpirun")),
        ],
        ("rank 1", "open-mpi"),
        ("server", "open-mpi"),
        ("mpirun", "mpich"),
    ),
    indirect=["engine"],
)
def test_who_is_killed_is_named_and_nothing_is_left(victim: str, engine: tuple[str, ...], tmp_path: Path) -> None:
    """After a rank or a server was killed, the same command resumes the job."""
    job = (*JOBS["sar"], "hydra.run.dir=run")
    if victim == "server":
        job = (*JOBS["ps"], "strategy.durability=none", "hydra.run.dir=run")
    command = [*engine, *ranks(2, *job, "trainer.max_epochs=100000")]
    shared = set(os.listdir("/dev/shm"))
    with open(tmp_path / "said", "w") as said:
        mpi = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=clean_environment(environment(engine)),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    family: list[int] = []
    try:
        until(lambda: (tmp_path / "run" / "checkpoints" / "last.ckpt" / "manifest.json").exists(), tmp_path)
        family = descendants(mpi.pid)
        logs = {of_log(pid): pid for pid in family}
        pid = mpi.pid if victim == "mpirun" else logs["parameter-0" if victim == "server" else victim.replace(" ", "-")]
        os.kill(pid, signal.SIGKILL)
        assert mpi.wait(LIMIT) != 0
        until(lambda: not any(map(alive, family)), tmp_path)
    finally:
        for each in (*family, *of_session(mpi.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
    text = (tmp_path / "said").read_text()
    if victim == "server":
        assert "gtrain: parameter 0 of 2 (machine 0) was killed by SIGKILL." in text
    elif victim != "mpirun" and "hydra" in engine[0]:  # MPICH names a process, which need not be the first that died
        assert re.search(r"PID \d+ RUNNING AT \S+\s[\s\S]+EXIT CODE: 9", text), text
        assert f"gtrain: {victim} (machine 0) has died\n" in text, text
    elif victim != "mpirun":
        assert re.search(rf"process {victim} with PID {pid} on node \S+ exited on\ssignal 9", text), text
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert log.startswith(f"rank 1 of 2 is process {logs['rank-1']} on {socket.gethostname()}\n")
    until(lambda: not sockets_of((mpi.pid, *family)), tmp_path)  # threads of a dead process may hold them for a moment
    until(lambda: set(os.listdir("/dev/shm")) <= shared, tmp_path)  # jobs of other tests may have files there meanwhile
    if victim not in ("rank 1", "server"):
        return
    epoch = epochs_done(tmp_path / "run")
    ok(mpirun(engine, *ranks(2, *job, f"trainer.max_epochs={epoch + 2}", "ckpt_path=last"), cwd=tmp_path))
    whole = (*job[:-1], f"trainer.max_epochs={epoch + 2}", "trainer.devices=2", "trainer.num_nodes=1")
    ok(forked.gtrain(*whole, "hydra.run.dir=undisturbed", cwd=tmp_path))
    assert losses(tmp_path / "run")[-1] == pytest.approx(losses(tmp_path / "undisturbed")[-1], rel=1e-6)


def sockets_of(pids: Iterable[int]) -> list[str]:
    """Names of sockets of a job, which contain the process id of mpirun or of its daemon."""
    names = re.findall(r"@gtrain-store/.*", Path("/proc/net/unix").read_text())
    return [name for name in names if any(str(pid) in re.findall(r"\d+", name) for pid in pids)]


def of_log(pid: int) -> str:
    """The name of the log that a process holds open, such as ``rank-0``."""
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            if name := re.search(r"logs/([a-z]+-\d+)\.log$", os.readlink(f"/proc/{pid}/fd/{number}")):
                return name[1]
    return ""


def epochs_done(run_dir: Path) -> int:
    checkpoint = last_checkpoint(run_dir)
    assert checkpoint is not None
    return checkpoint.epochs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "keys", "engine"),
    [("ps", "cluster.key_file=job.key", "mpich"), ("pbg", "cluster.isolated=true", "open-mpi")],
    indirect=["engine"],
)
def test_two_machines_meet_at_the_rendezvous(strategy: str, keys: str, engine: tuple[str, ...], tmp_path: Path) -> None:
    """Two names of this machine, which mpirun reaches with a remote shell that runs its command here."""
    Security.create().save(tmp_path / "job.key")
    shell = tmp_path / "ssh"
    shell.write_text(FAKE_SSH)
    shell.chmod(0o755)
    hosts = ("--host", "127.0.0.2:1,127.0.0.3:1", "--prtemca", "plm_ssh_agent", str(shell))
    if "hydra" in engine[0]:
        hosts = ("-launcher", "ssh", "-launcher-exec", str(shell), "-hosts", "127.0.0.2,127.0.0.3")
    job = (*JOBS[strategy], keys, f"cluster.rendezvous=file://{tmp_path}/meet")
    ok(forked.gtrain(*JOBS[strategy], "trainer.num_nodes=2", "hydra.run.dir=local", cwd=tmp_path))
    ok(mpirun(engine, *hosts, *ranks(2, *job, "hydra.run.dir=mpi"), cwd=tmp_path))
    tolerance = 1e-6 if strategy == "ps" else 0.2  # the machines of pbg take buckets in the order in which they come
    assert losses(tmp_path / "mpi") == pytest.approx(losses(tmp_path / "local"), rel=tolerance)
    assert has_logged(tmp_path / "mpi") and not (tmp_path / "meet").exists()
    places = [[(rank["role"], rank["rank"]) for rank in summary(tmp_path / run)["ranks"]] for run in ("local", "mpi")]
    assert places[0] == places[1]


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


@pytest.mark.parametrize(
    ("environment", "arguments", "answer"),
    [
        ({}, (), "mpirun started ranks on 3 machines, and cluster.rendezvous is not set."),
        pytest.param(  # it waits for the machine's other rank, which does not come
            *({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (), "mpi started 3 ranks on 2 machines, and rank 0 is local rank 0"),
            marks=pytest.mark.slow,
        ),
        ({}, ("cluster.rendezvous=tcp://head:1",), "can be reached by other machines, and cluster.key_file is not set"),
        ({}, ("cluster.rendezvous=file:///meet",), "mpi started ranks on 3 machines, and cluster.key_file is not set."),
        ({}, ("cluster.rank=1",), "cluster.rank=1 was set; mpirun numbers the ranks."),
        ({}, ("cluster.max_restarts=1",), "with cluster=mpi gtrain does not restart the job."),
    ],
)
def test_refusals(environment: dict[str, str], arguments: tuple[str, ...], answer: str, tmp_path: Path) -> None:
    done = forked.gtrain(*JOBS["sar"], *arguments, cwd=tmp_path, env=OPEN_MPI | environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert answer in done.stderr and "HINT: " in done.stderr
