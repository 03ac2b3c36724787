"""Membership of the group of a job's workers, which may be formed several times.

Most strategies need one group of all ranks. If a rank may be restarted or may leave, the group is formed again under
another number, its *incarnation*, so that no message of an earlier group can reach it. The members of an incarnation
follow from a list of events in the job's key-value store ("rank 2 is back", "rank 1 left") up to that number: all ranks
that read the same list form the same group.
"""

from __future__ import annotations

import json
import time
from typing import Any

from gtrain.errors import PeerLostError
from gtrain.launch.environment import WaitReport, say_gone, say_waiting
from gtrain.launch.job_store import await_key, job_network, job_store
from gtrain.launch.settings_check import check_refused
from gtrain.launch.sockets import listen_here, listen_tcp
from gtrain.strategy.mesh import Mesh

POLL_SECONDS = 0.02


class GroupFormation:
    """Forms the group of a job's workers, once or again after a rank died or left.

    Args:
        environment: Lightning's cluster environment of this process.
        number: number and name of the group in the job.
        rank: this worker's index in the group.
        size: number of workers in the group.
        timeout_seconds: how long to wait for the others.
        first: the job's rank of the group's first worker.
    """

    def __init__(
        self, environment: Any, number: str, rank: int, size: int, timeout_seconds: float, first: int = 0
    ) -> None:
        self._network, self.timeout_seconds = job_network(environment), timeout_seconds
        self.rank, self._size = rank, size
        self._number, self._first = number, first
        self._job = job_store(environment)
        self._store = self._job.prefixed(f"gtrain-group-{number}")

    def announce(self, what: str) -> None:
        """Announce that this rank joins the group after its restart (``back``), or leaves it (``left``)."""
        # The counter orders events of several ranks; the event itself follows under its number.
        number = self._store.add("events", 1)
        self._store.set(f"event/{number}", json.dumps([what, self.rank]))

    def meet(self, after: int) -> tuple[int, tuple[int, ...], Mesh | None]:
        """Wait for an incarnation later than ``after``, wait for all its members, and connect to them.

        Returns:
            The incarnation's number, its members (the job's ranks, ascending), and the connections to the others; None
            for a group of one.

        Raises:
            PeerLostError: a member did not join in time.
        """
        wait = _FormationWait(self)
        while True:
            self._store.set(f"{after}/left/{self.rank}", "")
            while (incarnation := self._store.add("events", 0)) <= after:
                wait.pause("left", after)
            members = self._members(incarnation)
            self._store.set(f"{incarnation}/here/{self.rank}", "")
            if not self._all_here(incarnation, members, wait):
                continue  # there is a later incarnation
            try:
                return incarnation, members, self.connect(incarnation, members)
            except PeerLostError:
                # A member died meanwhile: it is restarted, or the agent ends the job.
                after = incarnation

    def connect(self, incarnation: int, members: tuple[int, ...]) -> Mesh | None:
        """Connect to the other members; return None for a group of one.

        Raises:
            PeerLostError: a member did not join in time.
        """
        if len(members) == 1:
            return None
        listener = listen_here() if self._network.own_address is None else listen_tcp(self._network.own_address)
        try:
            self._store.set(f"{incarnation}/address/{self.rank}", listener.address)
            mesh = Mesh(
                members.index(self.rank),
                len(members),
                self.timeout_seconds,
                lambda index: self.name_of(members[index]),
                say_waiting,
                say_gone,
            )
            mesh.connect(
                [listener.socket],
                self._network.key_file,
                None,
                f"{self._number}/{incarnation}",
                lambda index: self._address(incarnation, members[index]),
                self.timeout_seconds,
                lambda: self._check(incarnation),
            )
        finally:
            listener.close()
        return mesh

    def name_of(self, rank: int) -> str:
        """Return the name of a worker of the group in messages."""
        return self._network.name_of(self._first + rank)

    def missing(self, what: str, incarnation: int) -> list[int]:
        """Return the members of an incarnation that have not yet left it (``left``) or come to it (``here``)."""
        members = self._members(incarnation)
        return [rank for rank in members if not self._store.check([f"{incarnation}/{what}/{rank}"])]

    def _address(self, incarnation: int, rank: int) -> str:
        """Wait for a rank's address, and return it."""
        key, seconds = f"{incarnation}/address/{rank}", self.timeout_seconds
        return await_key(self._store, key, self.name_of(rank), seconds, lambda: self._check(incarnation)).decode()

    def _check(self, incarnation: int) -> None:
        """End the forming of an incarnation if another one has started, or if a rank was refused."""
        self.check_refused()
        if self._store.add("events", 0) != incarnation:
            raise PeerLostError("a member died or returned while the group was formed")

    def check_refused(self) -> None:
        """Raise the error of a rank whose settings differ."""
        check_refused(self._job, self._first + self.rank)

    def _members(self, incarnation: int) -> tuple[int, ...]:
        """Return the members of an incarnation."""
        members = set(range(self._size))
        for number in range(1, incarnation + 1):
            what, rank = json.loads(self._store.get(f"event/{number}"))
            (members.add if what == "back" else members.discard)(rank)
        return tuple(sorted(members))

    def _all_here(self, incarnation: int, members: tuple[int, ...], wait: _FormationWait) -> bool:
        """Wait for all members; return False as soon as there is a later incarnation."""
        while not self._store.check([f"{incarnation}/here/{rank}" for rank in members]):
            if self._store.add("events", 0) != incarnation:
                return False
            wait.pause("here", incarnation)
        return True


class _FormationWait:
    """The wait of one rank for the others to form the group again: reports the missing ones, and ends after a while."""

    def __init__(self, formation: GroupFormation) -> None:
        self._formation = formation
        self._report = WaitReport("", self._say)
        self._awaited = "", 0

    def pause(self, what: str, incarnation: int) -> None:
        """Wait a moment; see :meth:`GroupFormation.missing` for the arguments.

        Raises:
            PeerLostError: a member did not join in time.
        """
        formation, self._awaited = self._formation, (what, incarnation)
        formation.check_refused()
        if self._report() > formation.timeout_seconds:
            names = ", ".join(map(formation.name_of, formation.missing(*self._awaited))) or "no rank"
            raise PeerLostError(f"{names} did not join within {formation.timeout_seconds:g} s to form the group again")
        time.sleep(POLL_SECONDS)

    def _say(self, _: str, seconds: float) -> None:
        for rank in self._formation.missing(*self._awaited):
            say_waiting(f"{self._formation.name_of(rank)} to join", seconds)
