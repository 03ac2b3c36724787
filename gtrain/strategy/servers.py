"""The servers of a job as its workers see them: their addresses, a client for each, and their counters."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.errors import ConfigError, PeerLostError
from gtrain.launch import slot as slots
from gtrain.launch.environment import WaitReport
from gtrain.launch.job_store import POLL_SECONDS, await_key, job_network, job_store
from gtrain.launch.key_value import KeyValueStore
from gtrain.strategy.counters import Counters

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gtrain.wire import Client, Message, Security

START_SECONDS = 300.0
"""The least time that a server may take to start: it imports as much as a worker, perhaps on a busy machine."""
FIGURES = "gtrain.figures"
"""The request for a server's counters; every server answers it."""
RECORD = "gtrain.record"
"""The request for what a server wrote for reports, unless its machine has the folder of ``first``."""
Traffic = dict[str, tuple[int, int]]
"""Bytes that one worker sent to a server and received from it, by the server's key in the directory."""


def server_directory(store: KeyValueStore) -> KeyValueStore:
    """Return the part of the job's key-value store in which servers register their addresses."""
    return store.prefixed("gtrain-servers")


def server_key(role: str, rank: int) -> str:
    """Return the key of a server in the :func:`server_directory`."""
    return f"{role}/{rank}"


class Servers:
    """A worker's view of its job's servers, with one client per server, opened on first use.

    Args:
        environment: Lightning's cluster environment of this process.
        counters: counts this worker's traffic with them.
        timeout_seconds: how long to wait for a reply.
    """

    def __init__(self, environment: ClusterEnvironment, counters: Counters, timeout_seconds: float) -> None:
        self._environment, self._counters, self._timeout_seconds = environment, counters, timeout_seconds
        self._roster = slots.roster()
        self._clients: dict[tuple[str, int], Client] = {}
        self._lost: set[tuple[str, int]] = set()
        self._figures: dict[tuple[str, int], dict[str, Any]] = {}  # the last ones of each server
        self._before: Traffic = {}
        self.traffic: Traffic = {}  # in training epochs
        counters.meters.append(self)

    @property
    def security(self) -> Security | None:
        """The job's keys; None for a job without a key file."""
        # A job without servers needs no ZeroMQ.
        from gtrain.wire import Security

        return Security.load(self._roster.key_file) if self._roster.key_file else None

    def count(self, role: str) -> int:
        """Return the number of servers of a role in the whole job; 0 for a role that it does not have."""
        return self._roster.counts.get(role, 0)

    def address(self, role: str, rank: int) -> str:
        """Wait for a server's address, and return it.

        Raises:
            PeerLostError: the server did not start in time.
            ConfigError: it can only be reached on its own machine, which is another one.
        """
        if role in self._roster.addresses:
            return self._roster.addresses[role][rank]
        store, seconds = server_directory(job_store(self._environment)), max(self._timeout_seconds, START_SECONDS)
        location = json.loads(await_key(store, server_key(role, rank), self.name_of(role, rank), seconds))
        if location["address"].startswith("ipc:") and location["machine"] != socket.gethostname():
            raise ConfigError(
                f"{role} {rank} is on machine {location['machine']} and has no key, so only that machine can reach it.",
                hint="make keys with gtrain key cluster.key_file=job.key, and give all processes of the job the file.",
            )
        return str(location["address"])

    def name_of(self, role: str, rank: int) -> str:
        """Return the name of a server in messages: ``parameter 0 (machine 0)``."""
        return job_network(self._environment).name_of(rank, role)

    def client(self, role: str, rank: int) -> Client:
        """Return this worker's client of a server. Its name there is ``rank <r>``; a restarted rank replaces it."""
        # A job without servers needs no ZeroMQ.
        from gtrain.wire import Client

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
        """Return this worker's clients of all servers of a role, in rank order."""
        return [self.client(role, rank) for rank in range(self.count(role))]

    def mark_lost(self, role: str, rank: int) -> None:
        """Continue without a lost server: requests to it fail, and :meth:`figures` repeats its last counters."""
        if (role, rank) not in self._lost:
            self._lost.add((role, rank))
            if (role, rank) in self._clients:
                self._clients[role, rank].close(PeerLostError(f"{role} {rank} is lost"))

    def figures(self) -> list[dict[str, Any]]:
        """Return the counters of every server of the job, role by role, in rank order."""
        for server, reply in self._ask_all(FIGURES).items():
            self._figures[server] = reply.fields
        servers = self._all()
        if unknown := [server_key(*server) for server in servers if server not in self._figures]:
            raise PeerLostError(f"{', '.join(unknown)} was lost before it replied")
        return [self._figures[server] for server in servers]

    def records(self, first: str) -> list[dict[str, bytes]]:
        """Return the files that each server wrote for reports to a folder that rank 0 does not see.

        Args:
            first: the identity of rank 0's folder, see :mod:`gtrain.record.collecting`.
        """
        replies = self._ask_all(RECORD, {"first": first}).values()
        return [
            {name: tensor.numpy().tobytes() for name, tensor in zip(reply.fields["names"], reply.tensors, strict=True)}
            for reply in replies
        ]

    def _all(self) -> list[tuple[str, int]]:
        """Return role and rank of every server of the job."""
        return [(role, rank) for role, count in self._roster.counts.items() for rank in range(count)]

    def _ask_all(self, method: str, fields: dict[str, Any] | None = None) -> dict[tuple[str, int], Message]:
        """Send a request to every server that is not lost, and return the replies; repeatable requests only."""
        clients = {server: self.client(*server) for server in self._all()}
        replies = {s: client.submit(method, fields) for s, client in clients.items() if s not in self._lost}
        received = {}
        # All requests were sent above, so that the servers reply at the same time.
        for server, reply in replies.items():
            again = partial(clients[server].submit, method, fields)
            try:
                received[server] = _wait_for_reply(again, reply, self.name_of(*server))
            except PeerLostError:
                if server not in self._lost:
                    raise
        return received

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()
        self._clients = {}

    # ------------------------------------------------------------------------------------------ as a meter

    def start(self) -> None:
        """Training starts or continues: remember what the clients have sent and received so far."""
        self._before = self._counts()

    def stop(self) -> None:
        """Count the traffic since :meth:`start`."""
        for server, (sent, received) in self._counts().items():
            before, total = self._before.get(server, (0, 0)), self.traffic.get(server, (0, 0))
            sent, received = sent - before[0], received - before[1]
            self._counters.bytes_sent += sent
            self._counters.bytes_received += received
            self.traffic[server] = total[0] + sent, total[1] + received

    def _counts(self) -> Traffic:
        return {
            server_key(*server): (client.counters.bytes_sent, client.counters.bytes_received)
            for server, client in self._clients.items()
        }


def _wait_for_reply(again: Callable[[], Future[Message]], reply: Future[Message], name: str) -> Message:
    """Wait for the reply to a request, which is repeated if the server was restarted."""
    from gtrain.wire import PeerRestartedError

    report = WaitReport(name)
    while True:
        try:
            return reply.result(POLL_SECONDS)
        except TimeoutError:
            report()
        except PeerRestartedError:
            reply = again()


class ServerMeter:
    """Measures the traffic and CPU time of servers during training, on rank 0, for ``ranks`` in ``summary.json``.

    A server's bytes are counted by the workers, each in its own training epochs: these differ between workers, and the
    server does not know them. Its CPU seconds are those during the training epochs of rank 0.

    Args:
        servers: the servers of the job.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._before: list[dict[str, Any]] = []
        self._cpu_seconds: list[float] = []

    def start(self) -> None:
        """Training starts or continues."""
        self._before = self._servers.figures()
        self._cpu_seconds = self._cpu_seconds or [0.0] * len(self._before)

    def stop(self) -> None:
        """Training stops or pauses."""
        for index, (before, now) in enumerate(zip(self._before, self._servers.figures(), strict=True)):
            restarted = before["incarnation"] != now["incarnation"]  # then it counts from 0
            self._cpu_seconds[index] += now["cpu_seconds"] - (0.0 if restarted else before["cpu_seconds"])

    def ranks(self, figures: list[dict[str, Any]], traffic: list[Traffic]) -> list[dict[str, Any]]:
        """Return an entry for each server.

        Args:
            figures: the servers' last counters; see :meth:`Servers.figures`.
            traffic: the workers' counters; see :attr:`Servers.traffic`.
        """
        entries = []
        for index, figure in enumerate(figures):
            counts = [worker.get(server_key(figure["role"], figure["rank"]), (0, 0)) for worker in traffic]
            spent = {
                # What the workers received is what the server sent.
                "bytes_sent": sum(received for _, received in counts),
                "bytes_received": sum(sent for sent, _ in counts),
                "cpu_seconds": self._cpu_seconds[index] if self._cpu_seconds else 0.0,
            }
            entries.append({name: value for name, value in figure.items() if name != "incarnation"} | spent)
        return entries
