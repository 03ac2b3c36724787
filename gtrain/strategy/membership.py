"""Which of a job's workers are members of their group, once or again and again.

Most strategies need one group: all ranks are there from the beginning to the end. Where a rank may die and be started
again, or leave, the group is formed anew, each time under another number (its *incarnation*), so that nothing of the
group before can reach it. Who belongs to an incarnation is read from the job's key-value store: the list of events
("rank 2 is back", "rank 1 left") up to that number. All that read the same list form the same group.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any

from gtrain.errors import PeerLostError
from gtrain.launch.environment import say_waiting
from gtrain.launch.job_store import JobNetwork, job_store, network_of
from gtrain.launch.settings_check import CHECK_SECONDS, check_refused
from gtrain.launch.sockets import listen_here, listen_tcp
from gtrain.strategy.mesh import SAY_SECONDS, Mesh

POLL_SECONDS = 0.02
CONNECT_SECONDS = 60.0
"""How long the ranks that are all there may take to connect; one that dies meanwhile is waited for no longer."""


@dataclass(frozen=True)
class Membership:
    """A process's place in one incarnation of a group that is formed again and again.

    Attributes:
        incarnation: its number; a later group has a larger one.
        members: the job's ranks that belong to it, ascending.
        mesh: its connections with the others, or None for a group of one.
    """

    incarnation: int
    members: tuple[int, ...]
    mesh: Mesh | None


class Forming:
    """How a process comes into the group of its job's workers.

    Args:
        environment: Lightning's cluster environment of this process.
        number: which of the job's groups, and its name.
        rank: this worker.
        size: number of workers.
        timeout_seconds: how long to wait for the others.
        first: which of the job's workers is number 0 of these.
    """

    def __init__(
        self, environment: Any, number: str, rank: int, size: int, timeout_seconds: float, first: int = 0
    ) -> None:
        self._environment, self._timeout_seconds = environment, timeout_seconds
        self.rank, self._size = rank, size
        self._number, self._first = number, first
        self._job = job_store(environment)
        self._store = self._job.prefixed(f"gtrain-group-{number}")

    def come_back(self) -> None:
        """Say that this rank, restarted, wants to be a member."""
        self._tell("back")

    def leave(self) -> None:
        """Say that this rank is no member any more."""
        self._tell("left")

    def meet(self, after: int) -> Membership:
        """Wait for an incarnation later than ``after`` until all its members are here, and connect.

        Raises:
            PeerLostError: not all of them came in time.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            incarnation = self._newest(after, deadline)
            members = self._members(incarnation)
            self._store.set(f"{incarnation}/here/{self.rank}", "")
            if not self._all_here(incarnation, members, deadline):
                continue  # something has happened meanwhile
            try:
                return Membership(incarnation, members, self.connect(incarnation, members))
            except PeerLostError:  # one of them died since; it comes back, or the agent ends the job
                after = incarnation

    def connect(self, incarnation: int, members: tuple[int, ...]) -> Mesh | None:
        """Connect these ranks with each other; None for one rank alone.

        Raises:
            PeerLostError: one of them did not come in time.
        """
        if len(members) == 1:
            return None
        seconds = min(self._timeout_seconds, CONNECT_SECONDS) if incarnation else self._timeout_seconds
        network = network_of(self._environment)
        listener = listen_here() if network.own_address is None else listen_tcp(network.own_address)
        try:
            self._store.set(f"{incarnation}/address/{self.rank}", listener.address)
            mesh = Mesh(
                members.index(self.rank),
                len(members),
                self._timeout_seconds,
                lambda index: self._name_of(members[index], network),
                say_waiting,
            )
            mesh.connect(
                [listener.socket],
                network.key_file,
                None,
                f"{self._number}/{incarnation}",
                lambda index: self._address(incarnation, members[index], network, seconds),
                seconds,
            )
        finally:
            listener.close()
        return mesh

    def _address(self, incarnation: int, rank: int, network: JobNetwork, seconds: float) -> str:
        """Where a rank listens, once it has said so."""
        key, began, said = f"{incarnation}/address/{rank}", time.monotonic(), 0.0
        while True:
            with contextlib.suppress(PeerLostError):
                return self._store.get(key, min(CHECK_SECONDS, began + seconds - time.monotonic())).decode()
            check_refused(self._job, self.rank)
            waited = time.monotonic() - began
            if waited >= seconds:
                raise PeerLostError(f"{self._name_of(rank, network)} did not come within {seconds:g} s")
            if waited >= said + SAY_SECONDS:
                said = waited
                say_waiting(f"waiting for {self._name_of(rank, network)} to come, {waited:.0f} s")

    def _name_of(self, rank: int, network: JobNetwork) -> str:
        return network.name_of(self._first + rank)

    def _tell(self, what: str) -> None:
        number = self._store.add("events", 1)
        self._store.set(f"event/{number}", json.dumps([what, self.rank]))

    def _newest(self, after: int, deadline: float) -> int:
        """The number of events so far, once it is more than ``after``."""
        while (number := self._events()) <= after:
            self._pause(deadline, "no rank came back")
        return number

    def _members(self, incarnation: int) -> tuple[int, ...]:
        """Who belongs to an incarnation."""
        members = set(range(self._size))
        for number in range(1, incarnation + 1):
            what, rank = json.loads(self._store.get(f"event/{number}"))
            (members.add if what == "back" else members.discard)(rank)
        return tuple(sorted(members))

    def _all_here(self, incarnation: int, members: tuple[int, ...], deadline: float) -> bool:
        """Wait for all members; False as soon as there is a later incarnation."""
        keys = [f"{incarnation}/here/{rank}" for rank in members]
        while not self._store.check(keys):
            if self._events() != incarnation:
                return False
            self._pause(deadline, "not all ranks came")
        return True

    def _events(self) -> int:
        return self._store.add("events", 0)

    def _pause(self, deadline: float, what: str) -> None:
        check_refused(self._job, self.rank)
        if time.monotonic() > deadline:
            raise PeerLostError(f"{what} within {self._timeout_seconds:g} s to form the group anew")
        time.sleep(POLL_SECONDS)
