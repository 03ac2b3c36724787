"""Membership of the group of a job's workers, which may be formed several times.

Most strategies need one group of all ranks. If a rank may be restarted or may leave, the group is formed again under
another number, its *incarnation*, so that no message of an earlier group can reach it. The members of an incarnation
follow from a list of events in the job's key-value store ("rank 2 is back", "rank 1 left") up to that number: all ranks
that read the same list form the same group.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from gtrain.errors import PeerLostError
from gtrain.launch.environment import say_waiting
from gtrain.launch.job_store import JobNetwork, job_network, job_store
from gtrain.launch.settings_check import CHECK_SECONDS, check_refused
from gtrain.launch.sockets import listen_here, listen_tcp
from gtrain.strategy.mesh import SAY_SECONDS, Mesh

POLL_SECONDS = 0.02
CONNECT_SECONDS = 60.0
"""How long ranks that are all present may take to connect; a rank that dies meanwhile ends the attempt."""


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
        self._environment, self._timeout_seconds = environment, timeout_seconds
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
            PeerLostError: a member did not come in time.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            while (incarnation := self._store.add("events", 0)) <= after:
                self._pause(deadline, "no rank returned")
            members = self._members(incarnation)
            self._store.set(f"{incarnation}/here/{self.rank}", "")
            if not self._all_here(incarnation, members, deadline):
                continue  # there is a later incarnation
            try:
                return incarnation, members, self.connect(incarnation, members)
            except PeerLostError:
                # A member died meanwhile: it is restarted, or the agent ends the job.
                after = incarnation

    def connect(self, incarnation: int, members: tuple[int, ...]) -> Mesh | None:
        """Connect to the other members; return None for a group of one.

        Raises:
            PeerLostError: a member did not come in time.
        """
        if len(members) == 1:
            return None
        # In the first formation ranks may still be importing; later all of them are present.
        seconds = min(self._timeout_seconds, CONNECT_SECONDS) if incarnation else self._timeout_seconds
        network = job_network(self._environment)
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
        """Wait for a rank's address, and return it."""
        key, start, last_report = f"{incarnation}/address/{rank}", time.monotonic(), 0.0
        while True:
            with contextlib.suppress(PeerLostError):
                return self._store.get(key, min(CHECK_SECONDS, start + seconds - time.monotonic())).decode()
            check_refused(self._job, self.rank)
            waited = time.monotonic() - start
            if waited >= seconds:
                raise PeerLostError(f"{self._name_of(rank, network)} did not come within {seconds:g} s")
            if waited >= last_report + SAY_SECONDS:
                last_report = waited
                say_waiting(f"{self._name_of(rank, network)} to come", waited)

    def _name_of(self, rank: int, network: JobNetwork) -> str:
        return network.name_of(self._first + rank)

    def _members(self, incarnation: int) -> tuple[int, ...]:
        """Return the members of an incarnation."""
        members = set(range(self._size))
        for number in range(1, incarnation + 1):
            what, rank = json.loads(self._store.get(f"event/{number}"))
            (members.add if what == "back" else members.discard)(rank)
        return tuple(sorted(members))

    def _all_here(self, incarnation: int, members: tuple[int, ...], deadline: float) -> bool:
        """Wait for all members; return False as soon as there is a later incarnation."""
        keys = [f"{incarnation}/here/{rank}" for rank in members]
        while not self._store.check(keys):
            if self._store.add("events", 0) != incarnation:
                return False
            self._pause(deadline, "not all ranks came")
        return True

    def _pause(self, deadline: float, what: str) -> None:
        check_refused(self._job, self.rank)
        if time.monotonic() > deadline:
            raise PeerLostError(f"{what} within {self._timeout_seconds:g} s to form the group again")
        time.sleep(POLL_SECONDS)
