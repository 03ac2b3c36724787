"""``strategy=pbg`` on several machines: what it learns, and what becomes of it when processes are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from forked import Program, enough, gtrain, lasting, python
from helpers import alive, logs, ok, rest_exhaustive, summary, until

from gtrain_pbg.checkpoints import EpochProgress

SMALL = ["strategy=pbg", "data=planted_kg", "model=kg", "data.num_entities=120", "data.num_positions=24",
         "data.num_triples=2400", "data.num_relations=4", "model.dimension=16", "model.init_scale=0.1",
         "data.batch_size=100", "strategy.num_partitions=4", "logger=none",
         "trainer.enable_progress_bar=false"]  # fmt: skip
TWO = ["trainer.num_nodes=2"]
EDGES = 2160
"""Edges that are trained: a tenth is held out."""
FOREVER = "trainer.max_epochs=100000"


def train(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    ok(gtrain(*SMALL, *overrides, f"hydra.run.dir={folder / name}", cwd=folder))
    return summary(folder / name)


def of_epochs(run: dict[str, Any], name: str) -> list[float]:
    return [epoch[name] for epoch in run["history"]]


def children(job: Program) -> list[int]:
    """The job's processes in the order in which they began: servers, then workers."""
    return [int(word) for word in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]


def lock_server(job: Program) -> int:
    """The process of the lock server: the one that has its log."""
    for pid in children(job):
        with contextlib.suppress(OSError):
            if any(os.readlink(f"/proc/{pid}/fd/{number}").endswith("/lock-0.log") for number in (1, 2)):
                return pid
    raise AssertionError("there is no lock server")


def begun(run: Path, machine: int, rounds: int) -> bool:
    """Whether a machine has begun to train a bucket of that epoch."""
    return f"round {rounds}: machine {machine} begins" in log_of_lock(run)


@pytest.mark.slow
def test_two_machines_learn_and_any_number_goes_on(tmp_path: Path) -> None:
    chunks = [
        "strategy.num_edge_chunks=2",
        "strategy.checkpoint_preservation_interval=4",
        "strategy.sync_interval=0.01",
    ]
    two = train(tmp_path, "two", *TWO, "trainer.devices=2", "trainer.max_epochs=7", "data.batch_size=50", *chunks)
    assert of_epochs(two, "train/edges") == [EDGES] * 7
    assert of_epochs(two, "train/buckets_again") == [0] * 7
    # of 120 edges a hundredth is chance, and four workers on 2,160 edges with operators of before spread by a tenth
    assert sum(of_epochs(two, "val/mrr")[-3:]) / 3 > 0.7  # one worker on one machine reaches 0.8
    roles = [(rank["role"], rank["rank"]) for rank in two["ranks"]]
    servers = [("lock", 0), *(("partition", n) for n in range(2)), *(("parameter", n) for n in range(2))]
    assert roles == [*(("worker", n) for n in range(4)), *servers]
    kept = tmp_path / "two" / "checkpoints" / "epoch-00004.ckpt"
    for name, shape in (("rest-1", []), ("rest-2", [*TWO, "strategy.partition_servers=0"])):
        rest = train(tmp_path, name, *shape, "trainer.max_epochs=5", f"ckpt_path={kept}")
        assert of_epochs(rest, "epoch") == [4]
        # of larger batches, with more negatives, losses are larger; a run that begins anew reads 8 in its first epoch
        assert of_epochs(rest, "train/loss")[0] < of_epochs(two, "train/loss")[1]
        assert of_epochs(rest, "val/mrr")[0] > of_epochs(two, "val/mrr")[2] - 0.05
    arguments = [
        *SMALL,
        *TWO,
        f"ckpt_path={tmp_path / 'two' / 'checkpoints' / 'best.ckpt'}",
        "strategy.partition_servers=1",
    ]
    ok(gtrain("test", *arguments, "hydra.run.dir=tested", cwd=tmp_path))
    found = summary(tmp_path / "tested")["metrics"]["test/mrr"]  # two workers deal the edges, and not four
    assert found == pytest.approx(two["metrics"]["test/mrr"], rel=1e-12)


MIXED_CPUS = """
import os, sys
from pathlib import Path
import gtrain_pbg.strategy
from gtrain.cli import main
from gtrain.launch.environment import find_environment
from gtrain_pbg.training import BucketTraining

formats = os.environ["TEST_FORMATS"].split(",")
gtrain_pbg.strategy.fastest_format = lambda: formats[find_environment().node_rank()]
train = BucketTraining.train

def recorded(self, batches, visit, following):
    work = self._steps[0].work
    used = "int8" if work.rounded else "bfloat16" if work.low else "float32"
    with open(f"{os.environ['TEST_USED']}-{find_environment().node_rank()}", "a") as lines:
        lines.write(used + chr(10))
    return train(self, batches, visit, following)

BucketTraining.train = recorded
main()
"""
"""gtrain on machines whose CPUs differ: TEST_FORMATS has the fastest format of each, TEST_USED-<machine> those used."""


@pytest.mark.slow
def test_machines_with_different_cpus_multiply_in_one_format_and_keep_it(tmp_path: Path) -> None:
    program = tmp_path / "mixed_cpus.py"
    program.write_text(MIXED_CPUS)

    def train_on(formats: str, name: str, *overrides: str) -> tuple[str, str, set[str]]:
        """The format in summary.json, that in the last checkpoint, and those that the machines' steps used."""
        env = {"TEST_FORMATS": formats, "TEST_USED": str(tmp_path / f"used-{name}")}
        arguments = [*SMALL, *TWO, "model.dimension=32", f"hydra.run.dir={tmp_path / name}", *overrides]
        ok(python(str(program), *arguments, cwd=tmp_path, env=env))
        checkpoint = json.loads((tmp_path / name / "checkpoints" / "last.ckpt" / "pbg.json").read_text())
        used = [set((tmp_path / f"used-{name}-{machine}").read_text().split()) for machine in (0, 1)]
        assert all(used)
        return summary(tmp_path / name)["resolved"]["strategy.matmul"], checkpoint["matmul"], used[0] | used[1]

    first = train_on("int8,bfloat16", "first", "trainer.max_epochs=1")
    assert first == ("bfloat16", "bfloat16", {"bfloat16"})  # the slower machine's
    resumed = ["trainer.max_epochs=2", f"ckpt_path={tmp_path / 'first' / 'checkpoints' / 'last.ckpt'}"]
    for formats in ("int8,int8", "int8,float32"):  # alone, these machines would take int8 and float32
        assert train_on(formats, formats.replace(",", "-"), *resumed) == first
    warning = "Not all CPUs of this run have fast instructions for it. HINT: strategy.matmul=float32 is faster here"
    assert warning in (tmp_path / "int8-float32" / "logs" / "rank-0.log").read_text()


@pytest.mark.slow
def test_a_killed_trainer_is_named_and_others_train_its_buckets(tmp_path: Path) -> None:
    heavy = [
        "data.num_entities=2000",
        "data.num_triples=40000",
        "model.dimension=64",
        "strategy.num_partitions=8",
    ]  # with room to read ahead
    job = lasting(tmp_path, *SMALL, *heavy, *TWO, "trainer.devices=2")
    until(lambda: begun(tmp_path / "run", 1, 2), tmp_path)
    ranks = children(job)[-4:]
    os.kill(ranks[2], signal.SIGKILL)
    until(lambda: "the job goes on without machine 1" in job.errors(), tmp_path)
    enough(tmp_path)
    done = ok(job.end())
    assert "rank 2 of 4 (machine 1) was killed by SIGKILL; the job goes on without machine 1" in done.stderr
    run = summary(tmp_path / "run")
    assert set(of_epochs(run, "train/edges")) == {36000}  # no edge was left out
    assert of_epochs(run, "train/buckets_again")[0] == 0
    assert sum(of_epochs(run, "train/buckets_again")) == buckets_again(done.stderr)
    assert run["world_size"] == 2 and not any(map(alive, ranks))
    assert of_epochs(run, "train/loss")[-1] < of_epochs(run, "train/loss")[0]


def buckets_again(said: str) -> int:
    """Buckets that a lost machine held, as the job says it: none where it was waiting for the others."""
    lost = re.search(r"machine 1 is lost \(.*\); the job goes on without it(?:; its (\d* ?)buckets? )?", said)
    return 0 if lost is None or lost[1] is None else int(lost[1] or 1)


@pytest.mark.parametrize(
    ("setting", "victim", "name"),
    [
        ("strategy.on_trainer_loss=stop", -1, "rank 1 of 2 (machine 1)"),
        ("strategy.max_restarts=0", 0, "lock 0 of 1 (machine 0)"),
    ],
)
def test_what_the_job_cannot_go_on_without_ends_it(setting: str, victim: int, name: str, tmp_path: Path) -> None:
    job = Program("-m", "gtrain", *SMALL, *TWO, FOREVER, setting, "hydra.run.dir=run", cwd=tmp_path)
    until(lambda: begun(tmp_path / "run", 1, 3), tmp_path)
    os.kill(children(job)[victim], signal.SIGKILL)
    done = job.end()
    assert done.returncode != 0
    assert f"gtrain: {name} was killed by SIGKILL." in done.stderr


def test_a_killed_lock_server_is_restarted_and_every_bucket_is_trained_once(tmp_path: Path) -> None:
    job = lasting(tmp_path, *SMALL, *TWO, "callbacks=none")
    run = tmp_path / "run"
    for number in range(3):
        until(lambda number=number: rounds(run) > 2 * number or not alive(job.pid), tmp_path)
        os.kill(lock_server(job), signal.SIGKILL)
        until(lambda number=number: log_of_lock(run).count("restarted") > number or not alive(job.pid), tmp_path)
    enough(tmp_path)
    done = ok(job.end())
    assert done.stderr.count("lock 0 of 1 (machine 0) was killed by SIGKILL; restarting it") == 3
    found = summary(run)
    assert set(of_epochs(found, "train/edges")) == {EDGES}
    assert set(of_epochs(found, "train/buckets_again")) == {0}
    assert "is lost" not in done.stderr  # a rank may end before the others


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_rank_killed_before_the_first_epoch_is_restarted_or_missed(has_joined: bool, tmp_path: Path) -> None:
    """Before it has met the others, another process takes its place; later the job goes on without its machine."""
    stand_still = [f"+callbacks.still={{_target_:stand_still.StandStill,rank:1,folder:{tmp_path}}}"]
    job = lasting(tmp_path, *SMALL, *TWO, *([] if has_joined else stand_still))
    run = tmp_path / "run"
    if has_joined:
        until(lambda: "rank 1 has joined" in log_of_lock(run), tmp_path)
    else:
        until((tmp_path / "standing").exists, tmp_path)
    os.kill(children(job)[-1], signal.SIGKILL)
    until(lambda: "rank 1 of 2 (machine 1) was killed" in job.errors(), tmp_path)
    until(lambda: begun(run, 0, 1), tmp_path)
    enough(tmp_path)
    done = ok(job.end())
    killed = "rank 1 of 2 (machine 1) was killed by SIGKILL; "
    assert killed + ("the job goes on without machine 1" if has_joined else "restarting it (1/3)") in done.stderr
    assert ("machine 1 is lost (rank 1 has ended); the job goes on without it" in done.stderr) == has_joined
    found = summary(run)
    assert found["world_size"] == (1 if has_joined else 2)
    assert set(of_epochs(found, "train/edges")) == {EDGES}


@pytest.mark.slow
def test_a_trainer_that_stands_still_loses_its_bucket_and_is_let_in_no_more(tmp_path: Path) -> None:
    job = lasting(tmp_path, *SMALL, *TWO, "strategy.lease_seconds=10")
    run = tmp_path / "run"
    until(lambda: begun(run, 1, 3), tmp_path)
    stopped = children(job)[-1]
    os.kill(stopped, signal.SIGSTOP)
    now = rounds(run)
    until(lambda: begun(run, 0, now + 2), tmp_path)  # another has trained what it held
    os.kill(stopped, signal.SIGCONT)
    enough(tmp_path)
    done = ok(job.end())
    assert "machine 1 is lost (rank 1 sent no heartbeat for 10 s); the job goes on without it" in done.stderr
    assert "machine 1 was declared lost: rank 1 sent no heartbeat for 10 s; the job goes on" in done.stderr
    found = summary(run)
    assert set(of_epochs(found, "train/edges")) == {EDGES}
    assert sum(of_epochs(found, "train/buckets_again")) == buckets_again(done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("lost", rest_exhaustive([0, 1], 0))
def test_a_machine_that_is_lost_with_its_servers_ends_the_job_at_once(lost: int, tmp_path: Path) -> None:
    """All that it ran is killed: its command, trainer, partition and parameter server, and the first's lock server."""
    ok(gtrain("key", "cluster.key_file=job.key", cwd=tmp_path))
    meet = [f"cluster.rendezvous=file://{tmp_path}/meet", "cluster.key_file=job.key", "cluster=manual", FOREVER]
    jobs = [
        Program("-m", "gtrain", *SMALL, *TWO, *meet, f"cluster.rank={n}", f"hydra.run.dir=machine-{n}", cwd=tmp_path)
        for n in (0, 1)
    ]
    last = tmp_path / "machine-0" / "checkpoints" / "last.ckpt"
    try:
        until(lambda: begun(tmp_path / "machine-0", 1, 3), tmp_path)
        until(lambda: (last / "manifest.json").exists(), tmp_path)
        os.kill(jobs[lost].pid, signal.SIGKILL)
        done = jobs[1 - lost].end()
    finally:
        for job in jobs:
            job.kill()
    assert done.returncode != 0 and "Traceback" not in done.stderr
    kept = "parameter 1 is lost: it has ended, and the data of partition 1 is lost with it; resume from the last "
    kept += "checkpoint"
    why = kept if lost else "machine 0 is lost"
    assert f"rank {1 - lost} of 2 (machine {1 - lost}) failed with JobEndedError: {why}" in done.stderr
    if lost == 0:  # the checkpoint is the same kind of thing in both
        epochs = rounds(tmp_path / "machine-0") + 1
        rest = train(tmp_path, "rest", f"trainer.max_epochs={epochs}", f"ckpt_path={last}")
        assert 1 <= len(rest["history"]) <= 3 and of_epochs(rest, "val/mrr")[0] > 0.1


@pytest.mark.slow
def test_partition_servers_come_back_and_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    """What they had acknowledged is on their disk; the last checkpoint, of an edge chunk, survives."""
    chunks = ["strategy.num_edge_chunks=4", "strategy.checkpoint_chunks=true"]
    job = Program("-m", "gtrain", *SMALL, *TWO, *chunks, FOREVER, "hydra.run.dir=run", cwd=tmp_path)
    run, log = tmp_path / "run", tmp_path / "run" / "logs" / "partition-1.log"
    until(lambda: begun(run, 0, 3), tmp_path)
    lives: list[int] = []
    for number in range(2):
        lives = until(lambda number=number: server_lives(log, number), tmp_path)
        os.kill(lives[-1], signal.SIGKILL) if number == 0 else None
    later = rounds(run) + 2
    until(lambda: begun(run, 0, later), tmp_path)
    until(lambda: (run / "checkpoints" / "last.ckpt" / "manifest.json").exists(), tmp_path)
    resource.prlimit(lives[-1], resource.RLIMIT_FSIZE, (1024, 1024))  # a partition has 30 * 64 bytes
    done = job.end()
    assert "partition 1 of 2 (machine 1) was killed by SIGKILL; restarting it" in done.stderr
    assert done.returncode != 0 and "could not be written: File too large" in done.stderr, logs(tmp_path)
    assert "resume from the last checkpoint" in done.stderr
    last = run / "checkpoints" / "last.ckpt"
    reached = EpochProgress.read(last)
    epochs = f"trainer.max_epochs={(rounds(run) - 1) // 4 + 2}"
    rest = train(tmp_path, "rest", *TWO, *chunks, epochs, f"ckpt_path={last}")
    first, *others = of_epochs(rest, "train/edges")
    left = 1.0 if reached is None else 1 - reached.chunk / 4
    assert first == pytest.approx(EDGES * left, abs=16)  # an edge more or less of each bucket
    assert others == [EDGES] * len(others) and len(others) <= 2


def server_lives(log: Path, number: int) -> list[int]:
    """Process ids of a partition server's lives, once there are more than ``number``."""
    found = [int(pid) for pid in re.findall(r"process (\d+) serves", log.read_text())]
    return found if len(found) > number else []


def rounds(run: Path) -> int:
    """Epochs that have begun."""
    return max((int(text) for text in re.findall(r"round (\d+):", log_of_lock(run))), default=0)


def log_of_lock(run: Path) -> str:
    """What the lock server has said so far."""
    log = run / "logs" / "lock-0.log"
    return log.read_text() if log.exists() else ""


@pytest.mark.slow
@pytest.mark.parametrize("where", rest_exhaustive(["servers", "folder"], "servers"))
def test_machines_by_hand_with_keys_go_on_without_one_that_kept_nothing(where: str, tmp_path: Path) -> None:
    """All of the second machine is killed; partitions are on a server started by hand, or in a shared folder."""
    ok(gtrain("key", "cluster.key_file=job.key", cwd=tmp_path))
    meet = [f"cluster.rendezvous=file://{tmp_path}/meet", "cluster.key_file=job.key", *TWO]
    heavy = ["data.num_entities=2000", "data.num_triples=20000"]
    command, jobs = ["-m", "gtrain"], []
    if where == "servers":
        meet += ["strategy.partition_servers=1"]
        jobs.append(Program(*command, "serve", "role=partition", *SMALL, *meet, "hydra.run.dir=server", cwd=tmp_path))
        own = ["cluster=manual", "cluster.standalone=[partition]"]
    else:
        own = ["cluster=manual", "strategy.partition_servers=0", f"strategy.partition_path={tmp_path / 'partitions'}"]
    for rank in (0, 1):
        by_hand = [*SMALL, *heavy, *meet, *own, f"cluster.rank={rank}"]
        jobs.append(lasting(tmp_path, *by_hand, run=f"machine-{rank}"))
    try:
        until(lambda: begun(tmp_path / "machine-0", 1, 2), tmp_path)
        os.kill(jobs[-1].pid, signal.SIGKILL)
        enough(tmp_path)
        done = [ok(job.end()) for job in jobs[:-1]]
    finally:
        for job in jobs:
            job.kill()
    if where == "servers":
        assert "partition 0 listens at tcp://" in done[0].stdout and "the job is over" in done[0].stdout
    said = (tmp_path / "machine-0" / "logs" / "lock-0.log").read_text()
    assert "the job goes on without parameter 1, which stored nothing: it has ended" in said
    run = summary(tmp_path / "machine-0")
    assert set(of_epochs(run, "train/edges")) == {18000}  # no edge was left out
    assert of_epochs(run, "train/loss")[-1] < of_epochs(run, "train/loss")[0]
    assert sum(rank["role"] == "worker" for rank in run["ranks"]) == 1
