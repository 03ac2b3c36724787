"""Servers beside the workers: started, restarted, named when they fail, and never left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import jsonschema
import pytest
import torch
from forked import Program, command, gtrain, python
from helpers import REPO, alive, descendants, ok, rest_exhaustive, summary, until

from gtrain.wire import Security

ASSETS = REPO / "tests" / "assets"
FOUND = {"PYTHONPATH": str(ASSETS / "counting")}
SMALL = (
    "strategy=counting",
    "data.num_nodes=300",
    "data.num_edges=2400",
    "data.num_features=16",
    "data.num_classes=4",
    "model.dropout=0",
    "model.optimizer._target_=torch.optim.SGD",
    "trainer.precision=64-true",
    "trainer.max_epochs=4",
)
ROUNDS = 12
NOTHING: dict[str, list[str]] = {"processes": [], "sockets": [], "shared memory": [], "files": []}


def program(*arguments: str, cwd: Path) -> str:
    """Run tests/assets/roles_program.py and return what it printed."""
    (cwd / "tmp").mkdir()
    env = {**FOUND, "TMPDIR": str(cwd / "tmp")}
    return ok(python(str(ASSETS / "roles_program.py"), *arguments, cwd=cwd, env=env)).stdout


def left(said: str) -> list[dict[str, list[str]]]:
    """What each job of the program has left."""
    return [json.loads(line) for line in re.findall(r"LEFT (.+)", said)]


def counted(run_dir: Path) -> dict[str, int]:
    """What all counters of a run have counted."""
    found: dict[str, int] = {}
    for path in run_dir.glob("counted-*.json"):
        found |= json.loads(path.read_text())
    return found


def losses(run_dir: Path) -> list[float]:
    """Of the validation of each epoch that rank 0 knows of, and the test's."""
    content = summary(run_dir)
    return [epoch["val/loss"] for epoch in content["history"]] + [content["metrics"]["test/loss"]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that take 20 and 30 steps an epoch, and two counters."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ok(gtrain(*SMALL, "strategy.steps=[20,30]", "strategy.servers=2", "hydra.run.dir=run", cwd=folder, env=FOUND))
    return folder / "run"


# ------------------------------------------------------------------------------------------------- the agent


def test_the_killed_process_is_named_every_time_and_nothing_is_left(tmp_path: Path) -> None:
    """Workers fail by their deadlines at once when a server dies; they are its echoes."""
    said = program("victims", str(ROUNDS), cwd=tmp_path)
    blamed = re.findall(r"BLAMED (\S+) \| (.+)", said)
    assert len(blamed) == ROUNDS and left(said) == [NOTHING] * ROUNDS
    for victim, message in blamed:
        role, _, rank = victim.partition("-")
        assert message == f"{role} {rank} of 2 (machine {rank}) was killed by SIGKILL."


def test_a_killed_agent_leaves_no_process_socket_or_memory(tmp_path: Path) -> None:
    assert left(program("agents", str(ROUNDS), cwd=tmp_path)) == [NOTHING] * ROUNDS


def test_a_server_is_started_again_at_the_same_address_as_often_as_its_role_says(tmp_path: Path) -> None:
    said = program("restart", cwd=tmp_path)
    survived = json.loads(re.findall(r"SURVIVED (.+)", said)[0])
    assert survived == {"counts": [1, 2, 3, 4, 5, 6], "raised": "PeerRestartedError", "life": 1}
    assert "BLAMED counter 0 of 1 (machine 0) was killed by SIGKILL." in said
    log = (tmp_path / "r1" / "logs" / "counter-0.log").read_text()
    assert 'counted {"a": 6} in life 1' in log, "it was asked to end and came to its end"


# ------------------------------------------------------------------------------------------------- runs


def test_servers_have_their_place_in_the_run(undisturbed: Path) -> None:
    content = summary(undisturbed)
    jsonschema.validate(content, json.loads((REPO / "docs" / "summary.schema.json").read_text()))
    assert content["world_size"] == 2
    places = [(rank["role"], rank["rank"]) for rank in content["ranks"]]
    assert places == [("worker", 0), ("worker", 1), ("counter", 0), ("counter", 1)]
    assert {path.name for path in (undisturbed / "logs").iterdir()} == {
        *("rank-0.log", "rank-1.log", "counter-0.log", "counter-1.log")
    }
    for worker, server in zip(content["ranks"][:2], content["ranks"][2:], strict=True):
        steps = 4 * (20, 30)[worker["rank"]]
        assert steps * 4000 < worker["bytes_sent"] == server["bytes_received"] < steps * 4000 * 1.1
        assert 0 < worker["bytes_received"] == server["bytes_sent"] < worker["bytes_sent"]
        assert server["peak_rss_bytes"] >= server["baseline_rss_bytes"] > 50e6
        assert server["cpu_seconds"] > 0


def test_ranks_take_unequal_numbers_of_steps_without_waiting_for_each_other(undisturbed: Path) -> None:
    assert counted(undisturbed) == {"rank 0": 4 * 20, "rank 1": 4 * 30}
    manifest = json.loads((undisturbed / "checkpoints" / "last.ckpt" / "manifest.json").read_text())
    assert (manifest["epoch"], manifest["global_step"]) == (3, 80)
    own = torch.load(undisturbed / "checkpoints" / "last.ckpt" / "rank-1.pt", weights_only=True)["shard"]["own"]
    assert own["global_step"] == 120
    assert len(summary(undisturbed)["history"]) == 4


def test_early_stopping_stops_ranks_of_unequal_steps_together(tmp_path: Path) -> None:
    stop = ("callbacks=early_stopping", "callbacks.early_stopping.patience=2", "model.optimizer.lr=0")
    more = ("trainer.max_epochs=50", "strategy.steps=[3,1]", "strategy.servers=0", "hydra.run.dir=run")
    ok(gtrain(*SMALL, *stop, *more, cwd=tmp_path, env=FOUND))
    assert summary(tmp_path / "run")["epochs"] == 3  # the first, and two that are no better


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_comes_back_and_the_result_is_the_same(rank: int, undisturbed: Path, tmp_path: Path) -> None:
    killed = (f"strategy.die_at=[{rank},2,7]", "strategy.worker_restarts=1", "hydra.run.dir=run")
    done = ok(gtrain(*SMALL, "strategy.steps=[20,30]", "strategy.servers=2", *killed, cwd=tmp_path, env=FOUND))
    assert f"rank {rank} of 2 (machine {rank}) was killed by SIGKILL; restarting it" in done.stderr
    found, expected = losses(tmp_path / "run"), losses(undisturbed)
    assert found == pytest.approx(expected[-len(found) :], rel=1e-12)
    assert len(found) == (3 if rank == 0 else 5)  # what rank 0 saw before it died is in the metrics file alone
    again = 20 * 4 + 7 if rank == 0 else 30 * 4 + 7  # the epoch's first 7 steps were taken twice
    assert counted(tmp_path / "run")[f"rank {rank}"] == again


# ------------------------------------------------------------------------------------------------- other launchers


def torchrun(*arguments: str) -> list[str]:
    return ["-m", "torch.distributed.run", *arguments]


def quick(folder: Path) -> list[str]:
    """The command as torchrun starts it, without the imports of a process of its own."""
    return ["--no-python", str(command(folder))]


@pytest.mark.slow
def test_under_torchrun_local_rank_0_starts_the_servers(undisturbed: Path, tmp_path: Path) -> None:
    arguments = ("strategy.steps=[20,30]", "strategy.servers=2", "hydra.run.dir=run")
    ok(python(*torchrun("--nproc-per-node=2", *quick(tmp_path), *SMALL, *arguments), cwd=tmp_path, env=FOUND))
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed), rel=1e-12)
    assert counted(tmp_path / "run") == counted(undisturbed)
    assert 'counted {"rank 1": 120} in life 0' in (tmp_path / "run" / "logs" / "counter-1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("victim", rest_exhaustive(["counter", "torchrun"], "counter"))
def test_what_is_killed_under_torchrun_takes_the_servers_with_it(victim: str, tmp_path: Path) -> None:
    forever = ("trainer.max_epochs=100000", "strategy.timeout_seconds=30", "hydra.run.dir=run")
    job = Program(*torchrun("--nproc-per-node=2", "-m", "gtrain", *SMALL, *forever), cwd=tmp_path, env=FOUND)
    until(lambda: counted_at_all(tmp_path / "run"), tmp_path)
    server = int((tmp_path / "run" / "counter-0.pid").read_text())
    family = descendants(job.pid)
    assert server in family and len(family) == 4  # two ranks, the keeper, the counter
    os.kill({"counter": server, "torchrun": job.pid}[victim], signal.SIGKILL)
    done = job.end()
    assert done.returncode != 0
    if victim == "counter":
        assert "gtrain: counter 0 of 1 (machine 0) was killed by SIGKILL." in done.stderr
    until(lambda: not any(map(alive, family)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", rest_exhaustive(["cluster.key_file=job.key", "cluster.isolated=true"], "cluster.key_file=job.key")
)
def test_two_machines_of_torchrun_know_each_other_by_keys(keys: str, undisturbed: Path, tmp_path: Path) -> None:
    """The second counter is on the second machine, and its address is not local."""
    Security.create().save(tmp_path / "job.key")
    meet = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    machine = torchrun(*meet, *quick(tmp_path), *SMALL)
    more = ("strategy.steps=[20,30]", "strategy.servers=2", "hydra.run.dir=run", "trainer.num_nodes=2")
    said = together([[*machine, *more, keys]] * 2, tmp_path)
    assert all(("gtrain: cluster.isolated=true: no key protects" in one) == ("isolated" in keys) for one in said)
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed), rel=1e-12)
    for rank in range(2):
        assert "in life 0" in (tmp_path / "run" / "logs" / f"counter-{rank}.log").read_text()


# ------------------------------------------------------------------------------------------------- by hand


@pytest.mark.slow
def test_workers_and_servers_by_hand_with_keys(undisturbed: Path, tmp_path: Path) -> None:
    ok(gtrain("key", "cluster.key_file=job.key", cwd=tmp_path))
    assert (tmp_path / "job.key").stat().st_mode & 0o777 == 0o600
    meet = (f"cluster.rendezvous=file://{tmp_path}/meet", "cluster.key_file=job.key", "strategy.servers=2")
    start = ["-m", "gtrain"]
    said = together(
        [[*start, "serve", "role=counter", *SMALL, *meet, f"hydra.run.dir=server-{number}"] for number in range(2)]
        + [
            [*start, *SMALL, *meet, "cluster=manual", f"cluster.rank={rank}", "cluster.standalone=[counter]"]
            + ["strategy.steps=[20,30]", f"hydra.run.dir=machine-{rank}"]
            for rank in (1, 0)
        ],
        tmp_path,
    )
    assert losses(tmp_path / "machine-0") == pytest.approx(losses(undisturbed), rel=1e-12)
    assert {path.name for path in (tmp_path / "machine-1").iterdir()} <= {"logs", "gtrain.log", ".hydra"}
    listening = sorted(re.findall(r"counter (\d) listens at (tcp://)", said[0] + said[1]))
    assert listening == [("0", "tcp://"), ("1", "tcp://")]
    assert all("the job is over" in out for out in said[:2])
    assert counted(tmp_path / "server-0") | counted(tmp_path / "server-1") == {"rank 0": 80, "rank 1": 120}
    assert not (tmp_path / "meet").exists()


# ------------------------------------------------------------------------------------------------- helpers


def together(commands: list[list[str]], cwd: Path) -> list[str]:
    """Programs that run at the same time, to their ends in success; what each has printed."""
    jobs = [Program(*command, cwd=cwd, env=FOUND) for command in commands]
    try:
        return [done.stdout for done in map(ok, (job.end() for job in jobs))]
    finally:
        for job in jobs:
            job.kill()


def counted_at_all(run_dir: Path) -> bool:
    return any(path.read_text() for path in run_dir.glob("counted-*.json"))


def free_port() -> int:
    """A port that was free a moment ago: a rendezvous has to be named before anyone listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
