"""A worker's side of the parameter servers: what is asked of all of them, and for which step."""

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
from gtrain.launch.environment import say_waiting
from gtrain.launch.job_store import JobNetwork
from gtrain.strategy.mesh import SAY_SECONDS
from gtrain.wire import Client, DeadlineError, Message, PeerRestartedError

log = logging.getLogger("gtrain")
LOOK_SECONDS = 0.5
"""A worker that waits looks this often whether the server is still the one that it asked."""
LOG_SECONDS = 3.0
"""After so long a worker's log says which request has no reply."""
_SAY_AGAIN_SECONDS = 30.0
_REPLY_SECONDS = 3.0
"""A server that does not reply to a question within this time is taken for silent."""


class Request:
    """A request to one server, which is made again where the server was killed and restarted.

    All requests may be executed twice without harm: products and steps are numbered.

    Args:
        servers: all of them.
        server: which one.
        method, fields, tensors: see :meth:`gtrain.wire.Client.submit`.
    """

    def __init__(
        self, servers: ParameterServers, server: int, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> None:
        self._servers, self._server = servers, server
        self._asked = method, fields, tensors
        self._future = self._submit()

    def _submit(self) -> Future[Message]:
        return self._servers.clients[self._server].submit(*self._asked, attended=True)

    def result(self) -> Message:
        """Wait for the reply, and name on the terminal who keeps this worker waiting for long.

        Whoever gives no sign of life in time is killed if this worker's agent has started it: it is restarted, and the
        request made again, or the job ends.

        Raises:
            SilentRankError: no reply in time; names the silent servers, or else the workers that are missing.
        """
        servers, client = self._servers, self._servers.clients[self._server]
        began = time.monotonic()
        has_logged, say_at = False, SAY_SECONDS
        asked: list[Future[Message]] = []
        while True:
            try:
                answer = client.result(self._future, LOOK_SECONDS)
            except TimeoutError:
                servers.look_at_all()
                waited = time.monotonic() - began
                if waited >= LOG_SECONDS and not has_logged:
                    has_logged = True
                    log.warning(
                        "step %d: no reply to %s from parameter %d for %.0f s",
                        servers.step, self._asked[0], self._server, waited,
                    )  # fmt: skip
                if waited >= say_at - _REPLY_SECONDS and not asked:
                    asked = servers.ask_for_missing()
                if waited >= say_at:
                    for process in servers.missing(asked):
                        say_waiting(f"waiting for {servers.name_of(*process)}, {waited:.0f} s")
                    asked, say_at = [], _SAY_AGAIN_SECONDS * (waited // _SAY_AGAIN_SECONDS + 1)
            except PeerRestartedError:
                if not servers.lasting:
                    raise
                servers.look(self._server)
                self._future = self._submit()
            except DeadlineError as error:
                asked = servers.ask_for_missing()
                wait(asked, _REPLY_SECONDS)
                missing = servers.missing(asked)
                if not missing:
                    raise
                if servers.end_silent(missing, error.seconds):
                    asked, self._future = [], self._submit()
                    continue
                names = ", ".join(servers.name_of(*process) for process in missing)
                raise SilentRankError(
                    f"waited {error.seconds:g} s for {names}",
                    hint="see whether it is stopped, or its machine cut off; strategy.timeout_seconds="
                    f"{error.seconds:g} is the longest wait.",
                ) from error
            else:
                servers.answered(self._server, answer)
                return answer


@dataclass
class _Sent:
    """What a server got of one step: products by call, and the commit."""

    products: dict[int, tuple[Mapping[str, Any], Sequence[Tensor]]] = field(default_factory=dict)
    commit: tuple[Mapping[str, Any], Sequence[Tensor]] | None = None


class ParameterServers:
    """The servers, and the step that this worker is in.

    Args:
        clients: one for each server, in rank order.
        lasting: whether a server that was killed comes back with what it had; then everything that it may not have
            applied is kept here, to be sent again.
        rank: this worker.
        network: where the job's processes are.

    Attributes:
        step: steps that this worker has committed.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        lasting: bool = False,
        rank: int | None = None,
        network: JobNetwork = JobNetwork(None, None, 1),  # noqa: B008 (it is frozen)
    ) -> None:
        self.clients, self.lasting = list(clients), lasting
        self._rank, self._network = rank, network
        self.name_of = network.name_of
        self.step = 0
        self._calls: dict[int, int] = {}
        self._sent: list[dict[int, _Sent]] = [{} for _ in self.clients]
        self._lives: list[int | None] = [None for _ in self.clients]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.clients)

    def submit(self, server: int, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Request:
        """Ask one server."""
        if self.lasting and method in ("multiply", "commit"):
            self._remember(server, method, fields, tensors)
        return Request(self, server, method, fields, tensors)

    def everybody(self, method: str, fields: Mapping[str, Any]) -> list[Message]:
        """Ask all servers the same, and wait."""
        return [asked.result() for asked in [self.submit(server, method, fields) for server in range(len(self))]]

    def next_call(self, step: int) -> int:
        """A number for a product of a step; any thread may ask for one."""
        with self._lock:
            number = self._calls.get(step, 0)
            self._calls[step] = number + 1
            return number

    def committed(self) -> None:
        """Go on to the next step."""
        with self._lock:
            self._calls.pop(self.step, None)
            self.step += 1

    # -------------------------------------------------------------------------------- workers, among themselves

    def gather(self, where: int, tensor: Tensor) -> Sequence[Tensor]:
        """Every worker's tensor in rank order; the first server passes them on: :mod:`gtrain_ps.server.collectives`."""
        return self.submit(0, "gather", {"where": where}, [tensor]).result().tensors

    def passed(self) -> int:
        """How far all workers have come with :meth:`gather`."""
        return int(self.submit(0, "passed", {}).result().fields["passed"])

    # -------------------------------------------------------------------------------- servers that come back

    def look(self, server: int) -> None:
        """Send a server again what it may have lost, if it is another one than before."""
        with self._lock:
            life, before = self.clients[server].server_incarnation, self._lives[server]
            self._lives[server] = life
            if life is None or before is None or life == before:
                return
            log.warning("parameter %d was restarted; it gets the steps that it may have lost once more", server)
            again = [(step, self._sent[server][step]) for step in sorted(self._sent[server])]
        for _, sent in again:
            for fields, tensors in list(sent.products.values()):
                self.clients[server].submit("multiply", fields, tensors)
            if sent.commit is not None:
                self.clients[server].submit("commit", *sent.commit)

    def look_at_all(self) -> None:
        """Look at every server, for the one that is waited for may wait for what another one has lost.

        This thread receives from one server at a time; so each client's own thread meets its server meanwhile.
        """
        for server, client in enumerate(self.clients):
            client.receive_in_background()
            self.look(server)

    def answered(self, server: int, answer: Message) -> None:
        """Forget what the server has applied."""
        if not self.lasting:
            return
        if self._lives[server] != self.clients[server].server_incarnation:
            self.look(server)
        with self._lock:
            version = answer.fields.get("version", 0)
            for step in [step for step in self._sent[server] if step < version]:
                del self._sent[server][step]

    def ask_for_missing(self) -> list[Future[Message]]:
        """Ask all servers which workers they wait for."""
        return [client.submit("waiting") for client in self.clients]

    def missing(self, asked: Sequence[Future[Message]]) -> list[tuple[int, str]]:
        """Rank and role of the servers without a reply to :meth:`ask_for_missing`; without any, of missing workers."""
        silent = [server for server, reply in enumerate(asked) if not reply.done() or reply.exception() is not None]
        if silent:
            return [(server, "parameter") for server in silent]
        missing = {worker for reply in asked for worker in reply.result().fields["workers"]} - {self._rank}
        return [(worker, WORKER) for worker in sorted(missing)]

    def end_silent(self, missing: Sequence[tuple[int, str]], seconds: float) -> bool:
        """Have the agent kill processes that give no sign of life; False if one of them is not this agent's."""
        return all([self._network.end_silent(*process, seconds) for process in missing])

    def _remember(self, server: int, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        with self._lock:
            if method == "commit":
                self._sent[server].setdefault(fields["step"], _Sent()).commit = fields, tensors
            elif fields["call"] is not None:
                self._sent[server].setdefault(fields["step"], _Sent()).products[fields["call"]] = fields, tensors
