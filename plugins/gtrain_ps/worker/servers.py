"""A worker's requests to the parameter servers, repeated to a restarted server, and the step that the worker is in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gtrain.backends import WORKER
from gtrain.errors import SilentRankError
from gtrain.launch.environment import REPORT_SECONDS, SAY_SECONDS, say_waiting
from gtrain.launch.job_store import JobNetwork
from gtrain.strategy.counters import Counters
from gtrain.wire import Client, DeadlineError, Message, PeerRestartedError

log = logging.getLogger("gtrain")
CHECK_SECONDS = 0.5
"""A waiting worker checks this often whether a server was restarted."""
LOG_SECONDS = 3.0
"""A worker logs a request without a reply after this time."""
_REPLY_SECONDS = 3.0
"""A server that does not reply to a query within this time counts as silent."""


class ServerRequest:
    """A request to one server; it is repeated if the server is restarted.

    Executing a request twice has no effect: products and steps are numbered.

    Args:
        servers: the servers.
        server: number of the server.
        method, fields, tensors: see :meth:`gtrain.wire.Client.submit`.
    """

    def __init__(
        self, servers: ParameterServers, server: int, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> None:
        self._servers, self._server = servers, server
        self._message = method, fields, tensors
        self._future = self._submit()

    def _submit(self) -> Future[Message]:
        self._posted = time.perf_counter()
        future = self._servers.clients[self._server].submit(*self._message, attended=True)
        self._servers.counters.handed_over(self._posted)
        return future

    def result(self) -> Message:
        """Wait for the reply; after a while, print the names of the processes that keep this worker waiting.

        A process that sends no heartbeat in time is killed if this worker's agent started it. It is then restarted
        and the request repeated, or the job ends.

        Raises:
            SilentRankError: no reply in time; names the silent servers, or else the workers that are missing.
        """
        start = time.perf_counter()
        reply = self._await_reply()
        self._servers.counters.waited(self._posted, start)
        return reply

    def _await_reply(self) -> Message:
        servers, client = self._servers, self._servers.clients[self._server]
        start = time.monotonic()
        has_logged, report_at = False, SAY_SECONDS
        queries: list[Future[Message]] = []
        while True:
            try:
                reply = client.result(self._future, CHECK_SECONDS)
            except TimeoutError:
                servers.check_all()
                waited = time.monotonic() - start
                if waited >= LOG_SECONDS and not has_logged:
                    has_logged = True
                    log.warning(
                        "step %d: no reply to %s from parameter %d for %.0f s",
                        servers.step, self._message[0], self._server, waited,
                    )  # fmt: skip
                if waited >= report_at - _REPLY_SECONDS and not queries:
                    queries = servers.query_waiting()
                if waited >= report_at:
                    for process in servers.missing(queries):
                        say_waiting(servers.name_of(*process), waited)
                    queries, report_at = [], REPORT_SECONDS * (waited // REPORT_SECONDS + 1)
            except PeerRestartedError:
                if not servers.restartable:
                    raise
                servers.resend_if_restarted(self._server)
                self._future = self._submit()
            except DeadlineError as error:
                queries = servers.query_waiting()
                wait(queries, _REPLY_SECONDS)
                missing = servers.missing(queries)
                if not missing:
                    raise
                if servers.kill_silent(missing, error.seconds):
                    queries, self._future = [], self._submit()
                    continue
                names = ", ".join(servers.name_of(*process) for process in missing)
                raise SilentRankError(
                    f"waited {error.seconds:g} s for {names}",
                    hint="check whether it is stopped, or its machine is unreachable; strategy.timeout_seconds="
                    f"{error.seconds:g} limits the wait.",
                ) from error
            else:
                servers.handle_reply(self._server, reply)
                return reply


@dataclass
class _SentStep:
    """A step's requests to one server: products by call, and the commit."""

    products: dict[int, tuple[Mapping[str, Any], Sequence[Tensor]]] = field(default_factory=dict)
    commit: tuple[Mapping[str, Any], Sequence[Tensor]] | None = None


class ParameterServers:
    """The servers, and the step that this worker is in.

    Args:
        clients: one per server, in rank order.
        restartable: whether a server's state survives it; requests that it may not have applied are then kept here, to
            be sent again.
        rank: this worker's.
        network: the job's processes and their machines.
        counters: count the time that this worker waits for replies.

    Attributes:
        step: number of steps that this worker has committed.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        restartable: bool = False,
        rank: int | None = None,
        network: JobNetwork = JobNetwork(None, None, 1),  # noqa: B008 (it is frozen)
        counters: Counters | None = None,
    ) -> None:
        self.counters = counters or Counters()
        self.clients, self.restartable = list(clients), restartable
        self._rank, self._network = rank, network
        self.name_of = network.name_of
        self.step = 0
        self._calls: dict[int, int] = {}
        self._sent: list[dict[int, _SentStep]] = [{} for _ in self.clients]
        self._incarnations: list[int | None] = [None for _ in self.clients]
        self._lock = threading.Lock()
        self._sends_ahead, self.sending_ahead = True, threading.Lock()

    def __len__(self) -> int:
        return len(self.clients)

    def submit(
        self, server: int, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()
    ) -> ServerRequest:
        """Send a request to one server."""
        if self.restartable and method in ("multiply", "commit"):
            self._remember(server, method, fields, tensors)
        return ServerRequest(self, server, method, fields, tensors)

    def request_all(self, method: str, fields: Mapping[str, Any]) -> list[Message]:
        """Send a request to all servers, and return their replies in rank order."""
        requests = [self.submit(server, method, fields) for server in range(len(self))]
        return [request.result() for request in requests]

    def has_room_ahead(self, nbytes: int, training: bool) -> bool:
        """Whether every server may be sent rows of a later batch, of this size.

        Any thread may call this. It holds ``sending_ahead`` until it has sent them.
        """
        allowed = self._sends_ahead or not training
        return allowed and all([client.has_room_ahead(nbytes) for client in self.clients])

    def hold(self) -> None:
        """Request no further products ahead of training's steps, until :meth:`go_ahead`."""
        with self.sending_ahead:
            self._sends_ahead = False

    def withdraw(self) -> None:
        """Have the servers drop the products that were requested ahead of training's steps, after :meth:`hold`.

        A client has no more than 4,096 requests above an unanswered one, and a validation or a checkpoint within an
        epoch may need more before the next step.
        """
        with self._lock:
            for sent in self._sent:
                for step in [step for step in sent if step >= self.step]:
                    del sent[step]
        self.request_all("withdraw", {})

    def go_ahead(self) -> None:
        """Allow requests ahead of the steps again."""
        self._sends_ahead = True

    def next_call(self, step: int) -> int:
        """Return the number of a product of a step. Any thread may call this."""
        with self._lock:
            number = self._calls.get(step, 0)
            self._calls[step] = number + 1
            return number

    def restart_calls(self) -> None:
        """Number the products of the steps to come from 0 again, after the batches sent ahead for them were discarded.

        The products of the batches that these steps really have replace those at the servers. A restarted worker, which
        sends no such batches, numbers its products in the same way.
        """
        with self._lock:
            self._calls.clear()

    def committed(self) -> None:
        """Go on to the next step."""
        with self._lock:
            self._calls.pop(self.step, None)
            self.step += 1

    # -------------------------------------------------------------------------------- collectives of the workers

    def gather(self, collective: int, tensor: Tensor) -> Sequence[Tensor]:
        """Return every worker's tensor in rank order, through :mod:`gtrain_ps.server.collectives` of server 0."""
        return self.submit(0, "gather", {"where": collective}, [tensor]).result().tensors

    def passed(self) -> int:
        """Return the last completed collective, plus 1."""
        return int(self.submit(0, "passed", {}).result().fields["passed"])

    # -------------------------------------------------------------------------------- restarted servers

    def resend_if_restarted(self, server: int) -> None:
        """Repeat the requests that a server may have lost, if it was restarted since the last check."""
        with self._lock:
            current, previous = self.clients[server].server_incarnation, self._incarnations[server]
            self._incarnations[server] = current
            if current is None or previous is None or current == previous:
                return
            log.warning("parameter %d was restarted; sending the steps again that it may have lost", server)
            lost = [self._sent[server][step] for step in sorted(self._sent[server])]
        for sent in lost:
            for fields, tensors in list(sent.products.values()):
                self.clients[server].submit("multiply", fields, tensors)
            if sent.commit is not None:
                self.clients[server].submit("commit", *sent.commit)

    def check_all(self) -> None:
        """Check every server for a restart: the one with the pending reply may wait for requests that another has lost.

        This thread receives from one server at a time; each client's own thread reconnects to its server meanwhile.
        """
        for server, client in enumerate(self.clients):
            client.receive_in_background()
            self.resend_if_restarted(server)

    def handle_reply(self, server: int, reply: Message) -> None:
        """Forget the requests that the server has applied."""
        if not self.restartable:
            return
        if self._incarnations[server] != self.clients[server].server_incarnation:
            self.resend_if_restarted(server)
        with self._lock:
            version = reply.fields.get("version", 0)
            for step in [step for step in self._sent[server] if step < version]:
                del self._sent[server][step]

    def query_waiting(self) -> list[Future[Message]]:
        """Ask all servers for the workers that they wait for."""
        return [client.submit("waiting") for client in self.clients]

    def missing(self, queries: Sequence[Future[Message]]) -> list[tuple[int, str]]:
        """Return rank and role of servers that do not reply to :meth:`query_waiting`; if all do, of missing workers."""
        silent = [server for server, reply in enumerate(queries) if not reply.done() or reply.exception() is not None]
        if silent:
            return [(server, "parameter") for server in silent]
        missing = {worker for reply in queries for worker in reply.result().fields["workers"]} - {self._rank}
        return [(worker, WORKER) for worker in sorted(missing)]

    def kill_silent(self, missing: Sequence[tuple[int, str]], seconds: float) -> bool:
        """Have the agent kill silent processes; return False if another agent started one of them."""
        return all([self._network.kill_silent(*process, seconds) for process in missing])

    def _remember(self, server: int, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        with self._lock:
            if method == "commit":
                self._sent[server].setdefault(fields["step"], _SentStep()).commit = fields, tensors
            elif fields["call"] is not None:
                self._sent[server].setdefault(fields["step"], _SentStep()).products[fields["call"]] = fields, tensors
