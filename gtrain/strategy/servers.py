"""The servers of a job as its workers see them: where they are, a client for each, what they spent."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.errors import ConfigError, PeerLostError
from gtrain.launch import slot as slots
from gtrain.launch.environment import say_waiting
from gtrain.launch.job_store import job_store, network_of
from gtrain.launch.key_value import KeyValueStore
from gtrain.strategy.counters import Counters
from gtrain.strategy.mesh import SAY_SECONDS

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gtrain.wire import Client, Message, Security

START_SECONDS = 300.0
"""How long a server may at least take to come: it imports what the workers import, on a machine that may be busy."""
SAY_AGAIN_SECONDS = 30.0
FIGURES = "gtrain.figures"
"""The request by which rank 0 learns what a server spent; every server answers it."""
Traffic = dict[str, tuple[int, int]]
"""By a server's entry in the book: bytes that one worker sent to it, and received from it."""


def book(store: KeyValueStore) -> KeyValueStore:
    """The part of the job's store in which servers say where they are."""
    return store.prefixed("gtrain-servers")


def entry(role: str, rank: int) -> str:
    """The key of a server in the :func:`book`."""
    return f"{role}/{rank}"


class Servers:
    """What a worker knows of its job's servers. Clients are made when they are first asked for, one a server.

    Args:
        environment: Lightning's cluster environment of this process.
        counters: where this worker's traffic with them is counted.
        timeout_seconds: how long to wait for each answer.
    """

    def __init__(self, environment: ClusterEnvironment, counters: Counters, timeout_seconds: float) -> None:
        self._environment, self._counters, self._timeout_seconds = environment, counters, timeout_seconds
        self._roster = slots.roster()
        self._clients: dict[tuple[str, int], Client] = {}
        self._missing: set[tuple[str, int]] = set()
        self._figures: dict[tuple[str, int], dict[str, Any]] = {}  # as they were heard last
        self._before: Traffic = {}
        self.traffic: Traffic = {}  # in training epochs
        counters.meters.append(self)

    @property
    def security(self) -> Security | None:
        """The job's keys; None where it was given none."""
        from gtrain.wire import Security  # a job without servers needs no ZeroMQ

        return Security.load(self._roster.key_file) if self._roster.key_file else None

    def count(self, role: str) -> int:
        """Number of servers of a role, in the whole job; 0 for a role that it does not have."""
        return self._roster.counts.get(role, 0)

    def address(self, role: str, rank: int) -> str:
        """Where a server listens; waits until it has said so.

        Raises:
            PeerLostError: it is not there in time.
            ConfigError: it can only be reached on its own machine, and that is another one.
        """
        if role in self._roster.addresses:
            return self._roster.addresses[role][rank]
        store, seconds = book(job_store(self._environment)), max(self._timeout_seconds, START_SECONDS)
        try:
            found = json.loads(store.get(entry(role, rank), seconds))
        except PeerLostError as error:
            raise PeerLostError(f"{role} {rank} has not come within {seconds:g} s") from error
        if found["address"].startswith("ipc:") and found["machine"] != socket.gethostname():
            raise ConfigError(
                f"{role} {rank} is on the machine {found['machine']} and has no keys, so it is reached there alone.",
                hint="make keys with gtrain key cluster.key_file=job.key, and give all processes of the job the file.",
            )
        return str(found["address"])

    def name_of(self, role: str, rank: int) -> str:
        """What messages call a server: ``parameter 0 (machine 0)``."""
        return network_of(self._environment).name_of(rank, role)

    def client(self, role: str, rank: int) -> Client:
        """This worker's client of a server. It is named ``rank <r>`` there; that of a later life takes its place."""
        from gtrain.wire import Client  # a job without servers needs no ZeroMQ

        if (role, rank) not in self._clients:
            self._clients[role, rank] = Client(
                self.address(role, rank),
                peer=f"{role} {rank}",
                name=f"rank {self._environment.global_rank()}",
                security=self.security,
                timeout_seconds=self._timeout_seconds,
            )
        return self._clients[role, rank]

    def clients(self, role: str) -> list[Client]:
        """This worker's clients of all servers of a role, in rank order."""
        return [self.client(role, rank) for rank in range(self.count(role))]

    def miss(self, role: str, rank: int) -> None:
        """Go on without a server that is lost: what is asked of it fails, and its figures stay what they were last."""
        if (role, rank) not in self._missing:
            self._missing.add((role, rank))
            if (role, rank) in self._clients:
                self._clients[role, rank].close(PeerLostError(f"{role} {rank} is lost"))

    def figures(self) -> list[dict[str, Any]]:
        """What every server of the job says it spent so far, role by role, in rank order."""
        wanted = [(role, rank) for role, count in self._roster.counts.items() for rank in range(count)]
        clients = {one: self.client(*one) for one in wanted}
        asked = {one: client.submit(FIGURES) for one, client in clients.items() if one not in self._missing}
        for one, answer in asked.items():
            try:
                self._figures[one] = _answer(clients[one], answer, self.name_of(*one)).fields
            except PeerLostError:
                if one not in self._missing:
                    raise
        if unheard := [entry(*one) for one in wanted if one not in self._figures]:
            raise PeerLostError(f"{', '.join(unheard)} was lost before it was heard of")
        return [self._figures[one] for one in wanted]

    def close(self) -> None:
        """Let go of the connections."""
        for client in self._clients.values():
            client.close()
        self._clients = {}

    # ------------------------------------------------------------------------------------------ as a meter

    def start(self) -> None:
        """Note what the clients had sent and received before training goes on."""
        self._before = self._counts()

    def stop(self) -> None:
        """Count what they have since."""
        for server, (sent, received) in self._counts().items():
            before, total = self._before.get(server, (0, 0)), self.traffic.get(server, (0, 0))
            sent, received = sent - before[0], received - before[1]
            self._counters.bytes_sent += sent
            self._counters.bytes_received += received
            self.traffic[server] = total[0] + sent, total[1] + received

    def _counts(self) -> Traffic:
        return {
            entry(*server): (client.counters.bytes_sent, client.counters.bytes_received)
            for server, client in self._clients.items()
        }


def _answer(client: Client, answer: Future[Message], name: str) -> Message:
    """The answer to a request that may be made again: the server may have been restarted meanwhile."""
    from gtrain.wire import PeerRestartedError

    began, say_at = time.monotonic(), SAY_SECONDS
    while True:
        try:
            return answer.result(max(0.0, began + say_at - time.monotonic()))
        except TimeoutError:
            waited = time.monotonic() - began
            say_at = waited + SAY_AGAIN_SECONDS
            say_waiting(f"waiting for {name}, {waited:.0f} s")
        except PeerRestartedError:
            answer = client.submit(FIGURES)


class ServerMeter:
    """The servers' entries of ``summary.json``'s ``ranks``, as rank 0 makes them.

    A server's bytes are what the workers count in their training epochs: they begin and end these at different times,
    and the server cannot know when. Its CPU seconds are those between rank 0's beginning and end of each.

    Args:
        servers: those of the job.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._before: list[dict[str, Any]] = []
        self._cpu_seconds: list[float] = []

    def start(self) -> None:
        """Training goes on."""
        self._before = self._servers.figures()
        self._cpu_seconds = self._cpu_seconds or [0.0] * len(self._before)

    def stop(self) -> None:
        """Training stands still."""
        for index, (before, now) in enumerate(zip(self._before, self._servers.figures(), strict=True)):
            again = before["incarnation"] != now["incarnation"]  # it was restarted and counts from 0
            self._cpu_seconds[index] += now["cpu_seconds"] - (0.0 if again else before["cpu_seconds"])

    def ranks(self, figures: list[dict[str, Any]], traffic: list[Traffic]) -> list[dict[str, Any]]:
        """The entries.

        Args:
            figures: what the servers said last; see :meth:`Servers.figures`.
            traffic: what each worker counted; see :attr:`Servers.traffic`.
        """
        entries = []
        for index, said in enumerate(figures):
            counts = [worker.get(entry(said["role"], said["rank"]), (0, 0)) for worker in traffic]
            spent = {
                "bytes_sent": sum(received for _, received in counts),
                "bytes_received": sum(sent for sent, _ in counts),
                "cpu_seconds": self._cpu_seconds[index] if self._cpu_seconds else 0.0,
            }
            entries.append({name: value for name, value in said.items() if name != "incarnation"} | spent)
        return entries
