"""A worker's side of the parameter servers: what is asked of all of them, and for which step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gtrain.wire import Client, Message, PeerRestartedError

log = logging.getLogger("gtrain")
LOOK_SECONDS = 0.5
"""A worker that waits looks this often whether the server is still the one that it asked."""
TELL_LOOKS = 6
"""After so many looks a worker says for whom it waits."""


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

    def _await(self) -> Message:
        """The answer; where servers come back, a TimeoutError if it takes long."""
        seconds = LOOK_SECONDS if self._servers.lasting else None
        return self._servers.clients[self._server].result(self._future, seconds)

    def result(self) -> Message:
        """The answer, as soon as it is there."""
        looks = 0
        while True:
            try:
                answer = self._await()
            except TimeoutError:
                looks += 1
                self._servers.look_at_all()
                if looks == TELL_LOOKS:
                    self._servers.tell(self._server, self._asked[0])
            except PeerRestartedError:
                if not self._servers.lasting:
                    raise
                self._servers.look(self._server)
                self._future = self._submit()
            else:
                self._servers.answered(self._server, answer)
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

    Attributes:
        step: steps that this worker has committed.
    """

    def __init__(self, clients: Sequence[Client], lasting: bool = False) -> None:
        self.clients, self.lasting = list(clients), lasting
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
        """Every worker's tensor in rank order; the first server passes them on. See :mod:`gtrain_ps.server.gathers`."""
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
            client.leave()
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

    def tell(self, server: int, method: str) -> None:
        """Say for what this worker waits, and for which other worker as far as the server knows it."""
        log.warning("step %d: parameter %d has not answered %s for a while", self.step, server, method)

        def name(answer: Future[Message]) -> None:
            if answer.exception() is None:
                for worker in answer.result().fields["workers"]:
                    log.warning("step %d: parameter %d waits for worker %d", self.step, server, worker)

        self.clients[server].submit("waiting").add_done_callback(name)

    def _remember(self, server: int, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        with self._lock:
            if method == "commit":
                self._sent[server].setdefault(fields["step"], _Sent()).commit = fields, tensors
            elif fields["call"] is not None:
                self._sent[server].setdefault(fields["step"], _Sent()).products[fields["call"]] = fields, tensors
