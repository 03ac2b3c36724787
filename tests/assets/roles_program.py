"""Jobs of two workers and two counters, killed in one way or another; run by tests/process/launch/test_roles.py.

roles_program.py victims ROUNDS      a worker and a server in turn: prints who was killed and who is blamed
roles_program.py agents ROUNDS       the agent: prints what is left of it
roles_program.py restart             a server dies and comes back at the same address
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gtrain.backends import RolePlan
from gtrain.errors import GtrainError
from gtrain.launch import (
    preload,  # noqa: F401 - once, for all the jobs below
    slot,
)
from gtrain.launch.environment import find_environment
from gtrain.launch.job_store import job_store
from gtrain.launch.launchers.local import run_local
from gtrain.strategy.counters import Counters
from gtrain.strategy.servers import Servers
from gtrain.wire import PeerRestartedError

COUNTERS = "gtrain_counting.server:main"
KILLED = Path("killed")
"""Exists once the victim was killed: deadlines that pass from then on are echoes."""


def pids() -> dict[str, int]:
    """The processes of the job that runs now, once all of them have said who they are."""
    while True:
        found = {path.stem: path.read_text() for path in Path().glob("*.pid")}
        if len(found) == 4 and all(found.values()):
            return {name: int(text) for name, text in found.items()}
        time.sleep(0.005)


def ask(victim: str | None) -> None:
    """A worker: asks both counters all the time; rank 0 kills the victim."""
    rank = slot.current().slot.rank
    servers = Servers(find_environment(), Counters(), timeout_seconds=60.0)
    clients = servers.clients("counter")
    for client in clients:
        client.request("echo")
    Path(f"rank-{rank}.pid").write_text(str(os.getpid()))
    store = job_store(find_environment())
    store.add("asking", 1)
    while store.add("asking", 0) < 2:
        time.sleep(0.005)
    if rank == 0 and victim is not None:
        os.kill(pids()[victim], signal.SIGKILL)
        KILLED.touch()
    while True:
        for client in clients:
            client.request("echo", timeout_seconds=0.3 if KILLED.exists() else 60.0)  # late before: a busy machine


def left(agent: int, processes: dict[str, int]) -> dict[str, list[str]]:
    """What a job has left on this machine: processes, sockets, shared memory, temporary files."""
    bound = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    numbers = [str(pid) for pid in (agent, *processes.values())]
    return {
        "processes": [name for name, pid in processes.items() if runs(pid)],
        "sockets": [name for name in bound if name.endswith(f"gtrain-{agent}")],
        "shared memory": [name for name in os.listdir("/dev/shm") if any(number in name for number in numbers)],
        "files": [str(path) for path in Path(os.environ["TMPDIR"]).glob("gtrain*")],
    }


def runs(pid: int) -> bool:
    """Whether the process is there and is no zombie that its new parent has yet to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def job(victim: str | None) -> None:
    for path in (*Path().glob("*.pid"), KILLED):
        path.unlink(missing_ok=True)
    plan = RolePlan("counter", COUNTERS, count=2, stop_seconds=2.0)
    run_local(ask, victim, num_nodes=2, roles=[plan], log_dir="logs")


def kill_victims(rounds: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(rounds):
        victim = ("rank-1", "counter-1", "counter-0")[number % 3]
        try:
            job(victim)
        except GtrainError as error:
            print("BLAMED", victim, "|", error.message, flush=True)
        print("LEFT", json.dumps(left(os.getpid(), pids())), flush=True)
    assert len(os.listdir("/proc/self/fd")) == descriptors, "descriptors are left open"


def kill_agents(rounds: int) -> None:
    for _ in range(rounds):
        for path in Path().glob("*.pid"):
            path.unlink()
        agent = os.fork()
        if agent == 0:
            job(None)
        processes = pids()
        there = left(agent, processes)
        assert len(there["processes"]) == 4 and len(there["sockets"]) >= 2, there
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
        deadline = time.monotonic() + 600  # the kernel kills at once; a thread may take its time to be gone
        while any(left(agent, processes).values()) and time.monotonic() < deadline:
            time.sleep(0.005)
        print("LEFT", json.dumps(left(agent, processes)), flush=True)


def survive() -> dict[str, Any]:
    """A worker of :func:`restart`: counts, has the server killed, counts on."""
    client = Servers(find_environment(), Counters(), timeout_seconds=600.0).client("counter", 0)
    counts = [client.request("count", {"name": "a"}).fields["count"] for _ in range(3)]
    try:
        client.request("die")
        raised = "nothing"
    except PeerRestartedError as error:
        raised = type(error).__name__
    counts += [client.request("count", {"name": "a"}).fields["count"] for _ in range(3)]
    return {"counts": counts, "raised": raised, "life": client.request("gtrain.figures").fields["incarnation"]}


def restart() -> None:
    for restarts in (1, 0):
        plan = RolePlan("counter", COUNTERS, count=1, restarts=restarts)
        try:
            print("SURVIVED", json.dumps(run_local(survive, roles=[plan], log_dir=f"r{restarts}/logs")), flush=True)
        except GtrainError as error:
            print("BLAMED", error.message, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "restart":
        restart()
    else:
        {"victims": kill_victims, "agents": kill_agents}[sys.argv[1]](int(sys.argv[2]))
