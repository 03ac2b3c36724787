"""Ranks in network namespaces of their own, for bench_sar.py: how much of the transfer hides behind the computation.

Needs root, ``ip`` and ``tc``. Each rank has an interface that sends at a limited rate (``tc tbf``); a bridge in one
more namespace joins them. Measured alone: an epoch without the limit (t_compute); a plain TCP transfer at the limit,
both directions at once, and from it the time that an epoch's bytes need (t_transfer). Then an epoch at the limit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sar_readings import MODELS
from sar_runs import QUIET, Bench, Row, environment

PORT = 29500  # namespaces are empty: every port is free
KEYS = "cluster.isolated=true"  # encrypted all the same, by a key that everybody knows
PROBE_BYTES = 50_000_000


@dataclass(frozen=True)
class Overlap:
    """Seconds of an epoch; :attr:`share` is 1 where all of the shorter one is hidden behind the longer."""

    name: str
    compute: float
    transfer: float
    epoch: float

    @property
    def share(self) -> float:
        return (self.compute + self.transfer - self.epoch) / min(self.compute, self.transfer)


def impossible() -> str | None:
    """Why namespaces cannot be made; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found" if missing else None


class Network:
    """One namespace a rank, ``10.77.0.<rank + 1>`` on ``eth0``."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.names = [f"gtrain-{os.getpid()}-{rank}" for rank in range(ranks)]
        self.hub = f"gtrain-{os.getpid()}-hub"

    def make(self) -> None:
        call(f"ip netns add {self.hub}")
        call(f"ip -n {self.hub} link add bridge type bridge")
        call(f"ip -n {self.hub} link set bridge up")
        for rank, name in enumerate(self.names):
            call(f"ip netns add {name}")
            call(f"ip -n {name} link add eth0 type veth peer name port{rank} netns {self.hub}")
            call(f"ip -n {name} addr add {address(rank)}/24 dev eth0")
            for where, link in ((name, "eth0"), (name, "lo"), (self.hub, f"port{rank}")):
                call(f"ip -n {where} link set {link} up")
            call(f"ip -n {self.hub} link set port{rank} master bridge")

    def limit(self, mbit: int) -> None:
        """Let every rank send at this rate from now on."""
        for name in self.names:
            call(f"tc -n {name} qdisc add dev eth0 root tbf rate {mbit}mbit burst 256kb latency 200ms")

    def remove(self) -> None:
        for name in (*self.names, self.hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def run(self, commands: list[list[str]], folder: Path) -> list[str]:
        """Run one command in each namespace, and return what they printed."""
        env = environment()
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name, command in zip(self.names, commands, strict=True)
        ]
        printed = [process.communicate()[0] for process in started]
        for process, text in zip(started, printed, strict=True):
            if process.returncode:
                sys.exit(text)
        return printed


@contextmanager
def network(ranks: int) -> Iterator[Network]:
    """Namespaces that are gone afterwards."""
    made = Network(ranks)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def measure(bench: Bench, model: str, mode: int, ranks: int, mbit: int, settings: list[str]) -> Overlap:
    """The four times of one configuration."""
    name = f"overlap {model} mode {mode} x {ranks}"
    with network(ranks) as net:
        free = train(bench, net, f"{name} free", model, mode, settings)
        net.limit(mbit)
        rate = raw_rate(bench, net)
        limited = train(bench, net, f"{name} limited", model, mode, settings)
    return Overlap(name, free.wall, limited.per_rank / rate, limited.wall)


def train(bench: Bench, net: Network, name: str, model: str, mode: int, settings: list[str]) -> Row:
    """A run whose ranks are started by hand, each in its namespace."""
    run = bench.folder / "runs" / re.sub(r"\W+", "-", name)
    common = [sys.executable, "-m", "gtrain", "strategy=sar", f"mode={mode}", *MODELS[model], *settings, *QUIET]
    common += [*bench.probe(run), f"trainer.num_nodes={net.ranks}", "trainer.devices=1", "cluster=manual", KEYS]
    common += [f"cluster.rendezvous=tcp://{address(0)}:{PORT}"]
    # each machine of a job by hand has a folder of its own for logs; results are in that of the first
    folders = [run if rank == 0 else Path(f"{run}-{rank}") for rank in range(net.ranks)]
    net.run(
        [[*common, f"cluster.rank={rank}", f"hydra.run.dir={folder}"] for rank, folder in enumerate(folders)],
        bench.folder,
    )
    return bench.read(name, run)


def raw_rate(bench: Bench, net: Network) -> float:
    """Bytes a second from one rank to the next while as many come back, of the slower direction."""
    commands = [[sys.executable, __file__, str(rank)] for rank in range(2)]
    both = Network(2)
    both.names = net.names[:2]
    return min(json.loads(text) for text in both.run(commands, bench.folder))


def transfer(rank: int) -> float:
    """Send and receive at once between rank 0 and 1; bytes received a second."""
    connection = _connect(rank)
    sender = threading.Thread(target=lambda: connection.sendall(bytes(PROBE_BYTES)))
    began, left = time.perf_counter(), PROBE_BYTES
    sender.start()
    while left:
        left -= len(connection.recv(min(left, 1 << 20)))
    seconds = time.perf_counter() - began
    sender.join()
    connection.close()
    return PROBE_BYTES / seconds


def _connect(rank: int) -> socket.socket:
    if rank == 0:
        with socket.create_server((address(0), PORT)) as server:
            return server.accept()[0]
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address(0), PORT))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def address(rank: int) -> str:
    """Where a rank is reached."""
    return f"10.77.0.{rank + 1}"


def call(command: str) -> None:
    """Run a command of ``ip`` or ``tc``."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"$ {command}\n{done.stderr}")


if __name__ == "__main__":
    print(transfer(int(sys.argv[1])))
