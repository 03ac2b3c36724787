"""Who takes part in a job: processes that have its key; and who does not: other keys, other users, silent ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from forked import Program, enough, gtrain, lasting, python
from helpers import LIMIT, REPO, ok, rest_exhaustive, run, summary, until

from gtrain.wire import Security

OTHER_RELEASE = REPO / "tests" / "assets" / "other_release.py"
SMALL = ("strategy=sar", "data.num_nodes=600", "data.num_edges=4000", "model.dropout=0", "trainer.max_epochs=4")


def train(*arguments: str, cwd: Path) -> Program:
    return Program("-m", "gtrain", *SMALL, *arguments, cwd=cwd)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def losses(run: Path) -> list[float]:
    return [epoch["train/loss"] for epoch in summary(run)["history"]]


def machine(rank: int, port: int, *more: str, cwd: Path) -> Program:
    """One machine of a job of two that is started by hand, with the rendezvous at the loopback address."""
    place = f"cluster.rendezvous=tcp://127.0.0.1:{port}"
    return train("trainer.num_nodes=2", "cluster=manual", f"cluster.rank={rank}", place, *more, cwd=cwd)


def test_who_lacks_the_key_is_refused_at_once_and_the_job_goes_on(tmp_path: Path) -> None:
    ok(gtrain(*SMALL, "trainer.num_nodes=2", "hydra.run.dir=local", cwd=tmp_path))
    for name in ("job", "other"):
        Security.create().save(tmp_path / f"{name}.key")
    port = free_port()
    first = machine(0, port, "cluster.key_file=job.key", "hydra.run.dir=run", cwd=tmp_path)
    for wrong in (("cluster.key_file=other.key",), ()):
        stranger = machine(1, port, *wrong, f"cluster.timeout_seconds={LIMIT}", cwd=tmp_path).end()
        assert stranger.returncode == 1 and "Traceback" not in stranger.stderr
        assert "has another key, or only one of both has a key" in stranger.stderr
        assert "HINT: give all processes of the job the same cluster.key_file." in stranger.stderr
    refused = "the job's key-value store refused a connection from 127.0.0.1: it lacks the job's key"
    until(lambda: refused in first.errors(), tmp_path)
    second = machine(1, port, "cluster.key_file=job.key", cwd=tmp_path).end()
    done = first.end()
    assert (done.returncode, second.returncode) == (0, 0), done.stderr + second.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "local")


@pytest.mark.slow
def test_a_wrong_key_is_named_on_both_sides_where_the_store_has_a_process_of_its_own(tmp_path: Path) -> None:
    """As with ps, whose workers may be restarted."""
    for name in ("job", "other"):
        Security.create().save(tmp_path / f"{name}.key")
    place = f"cluster.rendezvous=tcp://127.0.0.1:{free_port()}"
    command = ["-m", "gtrain", "strategy=ps", "data=planted_sparse", "data.num_rows=600", "model=sparse",
               "cluster=manual", "trainer.num_nodes=2", place]  # fmt: skip
    first = Program(*command, "cluster.rank=0", "cluster.key_file=job.key", cwd=tmp_path)
    try:
        stranger = python(*command, "cluster.rank=1", "cluster.key_file=other.key", cwd=tmp_path)
        assert stranger.returncode == 1 and "has another key, or only one of both has a key" in stranger.stderr
        refused = "gtrain: the job's key-value store refused a connection from 127.0.0.1: it lacks the job's key"
        until(lambda: refused in first.errors().splitlines(), tmp_path)
    finally:
        first.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_machines_of_other_settings_are_refused_in_one_line(first: int, tmp_path: Path) -> None:
    """Whichever comes first; paths and folders may differ."""
    port = free_port()
    own = [("model.optimizer.lr=0.02", "hydra.run.dir=zero"), ("model.optimizer.lr=0.5", f"data.root={tmp_path}/one")]
    jobs = {rank: machine(rank, port, *own[rank], cwd=tmp_path) for rank in (first, 1 - first)}
    for rank in (0, 1):
        done = jobs[rank].end()
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        assert "gtrain: machine 1 has model.optimizer.lr=0.5, and machine 0 has model.optimizer.lr=0.02." in lines
        assert "HINT: give all machines of a job the same settings" in done.stderr and "Traceback" not in done.stderr


def test_a_machine_with_another_release_is_refused_in_one_line(tmp_path: Path) -> None:
    port = free_port()
    mine = machine(0, port, "hydra.run.dir=run", cwd=tmp_path)
    until(lambda: (tmp_path / "run" / "logs" / "rank-0.log").exists(), tmp_path)
    place = f"cluster.rendezvous=tcp://127.0.0.1:{port}"
    arguments = (*SMALL, "trainer.num_nodes=2", "cluster=manual", "cluster.rank=1", place)
    other = run([sys.executable, str(OTHER_RELEASE), "9.9", *arguments], cwd=tmp_path)
    for done in (other, mine.end()):
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert re.search(
            r"^gtrain: machine 1 has gtrain=9.9, and machine 0 has gtrain=\S+\.$", done.stderr, re.MULTILINE
        )


@pytest.mark.slow
def test_ranks_of_other_settings_under_torchrun_are_refused_in_one_line(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "gtrain"]
    done = python(*torchrun, *SMALL, "model.optimizer.lr='${oc.decode:${oc.env:RANK}}'", cwd=tmp_path)
    assert done.returncode == 1
    assert "gtrain: rank 1 has model.optimizer.lr=1, and rank 0 has model.optimizer.lr=0." in done.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(("sar",), id="sar"),
        pytest.param(("pyg", "data.batch_size=64"), id="pyg"),
        pytest.param(
            ("pyg", "data.batch_size=64", "strategy.transport=tcp"), id="pyg over sockets", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_stopped_rank_is_named_and_waited_for(strategy: tuple[str, ...], tmp_path: Path) -> None:
    more = (f"strategy={strategy[0]}", *strategy[1:], "trainer.num_nodes=3")
    job = lasting(tmp_path, *SMALL, *more)
    until(lambda: (tmp_path / "run" / "checkpoints" / "last.ckpt").exists(), tmp_path)
    victim = children(job.pid)[1]
    os.kill(victim, signal.SIGSTOP)
    until(lambda: re.search(r"gtrain: waiting for rank 1 \(machine 1\), \d+ s", job.errors()), tmp_path)
    os.kill(victim, signal.SIGCONT)
    enough(tmp_path)
    done = job.end()
    assert done.returncode == 0, done.stderr
    assert "waiting for rank 0" not in done.stderr and "waiting for rank 2" not in done.stderr
    of_the_run = losses(tmp_path / "run")
    epochs = f"trainer.max_epochs={len(of_the_run)}"
    ok(gtrain(*SMALL, *more, epochs, "hydra.run.dir=undisturbed", cwd=tmp_path))
    assert of_the_run == losses(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("victim", rest_exhaustive([0, 2], 2))
def test_a_rank_that_stays_stopped_is_named_when_the_job_ends(victim: int, tmp_path: Path) -> None:
    more = ("trainer.num_nodes=3", "trainer.max_epochs=100000", "strategy.timeout_seconds=10")
    job = train(*more, "hydra.run.dir=run", cwd=tmp_path)
    until(lambda: (tmp_path / "run" / "checkpoints" / "last.ckpt").exists(), tmp_path)
    os.kill(children(job.pid)[victim], signal.SIGSTOP)
    done = job.end()
    assert done.returncode == 1
    assert re.search(rf"rank {victim} \(machine {victim}\) has sent no heartbeat for \d+ s", done.stderr)
    assert "gloo" not in done.stderr and "Traceback" not in done.stderr


def test_ranks_on_several_machines_need_keys(tmp_path: Path) -> None:
    """As torchrun's environment says that they are; nothing is started."""
    place = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "head", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}
    machines = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}
    done = gtrain(*SMALL, cwd=tmp_path, env=place | machines)
    assert done.returncode == 1
    assert "torchrun started ranks on 2 machines, and cluster.key_file is not set." in done.stderr
    assert "cluster.isolated=true" in done.stderr
