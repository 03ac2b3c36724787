"""Who of a job was heard of when: ranks and servers, by their names on the wire."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

ENDED = "has ended"


class Pulses:
    """When members were heard of last, and whether their processes have ended, where these are on this machine.

    Args:
        lease_seconds: a member that is silent for longer is lost.
        here: where process ids mean what they mean to this process; see :func:`~gtrain_pbg.machines.heart.place`.
        clock: seconds.
    """

    def __init__(self, lease_seconds: float, here: str, clock: Callable[[], float]) -> None:
        self._lease_seconds, self._here, self._clock = lease_seconds, here, clock
        self._heard: dict[str, float] = {}
        self._processes: dict[str, int] = {}  # descriptors
        self._joined: dict[str, tuple[str, int]] = {}  # place and process id
        self._late: set[str] = set()  # members of which it was said that they are silent

    def join(self, name: str, place: str, pid: int) -> None:
        """A member is there, perhaps started again.

        Args:
            name: of the member.
            place: where its process id is one.
            pid: its process id.
        """
        self.forget(name)
        self._joined[name] = place, pid
        self.beat(name)
        if place == self._here:
            try:
                self._processes[name] = os.pidfd_open(pid)
            except OSError:
                return  # it is gone already, which its silence will tell

    def beat(self, name: str) -> None:
        """A member is still there."""
        self._heard[name] = self._clock()

    def forget(self, name: str) -> None:
        """Look for a member no more."""
        self._heard.pop(name, None)
        self._joined.pop(name, None)
        self._late.discard(name)
        self.await_return(name)

    def state(self) -> dict[str, tuple[str, int]]:
        """Members with their places and process ids."""
        return dict(self._joined)

    def restore(self, state: dict[str, tuple[str, int]]) -> None:
        """Go on from what :meth:`state` returned: members were heard of just now."""
        for name, (place, pid) in state.items():
            self.join(name, place, pid)

    def forgive(self, seconds: float) -> None:
        """The lock server itself stood still for so long, and could hear of nobody."""
        self._heard = {name: heard + seconds for name, heard in self._heard.items()}

    def watches(self, name: str) -> bool:
        """Whether a member's process can be watched, so that its end would be known at once."""
        return name in self._processes

    def silence(self, name: str) -> float:
        """Seconds since a member was heard of."""
        return self._clock() - self._heard[name]

    def late(self, seconds: float) -> tuple[list[str], list[str]]:
        """Members that have become silent for so long, and those that are not any more; each is returned once."""
        limit = self._clock() - seconds
        silent = {name for name, heard in self._heard.items() if heard < limit}
        new, back = silent - self._late, self._late - silent
        self._late = silent
        return sorted(new), sorted(back)

    def await_return(self, name: str) -> None:
        """Do not look at a member's process, but wait to hear of it."""
        process = self._processes.pop(name, None)
        if process is not None:
            os.close(process)

    def gone(self) -> dict[str, str]:
        """Members that are lost, and how that shows; servers come before ranks, for their loss weighs more."""
        ended = select.select(list(self._processes.values()), [], [], 0)[0] if self._processes else []
        found = {name: ENDED for name, process in self._processes.items() if process in ended}
        limit = self._clock() - self._lease_seconds
        silent = {name for name, heard in self._heard.items() if heard < limit} - found.keys()
        found |= dict.fromkeys(silent, f"was not heard of for {self._lease_seconds:g} s")
        return dict(sorted(found.items(), key=lambda item: (is_rank(item[0]), item[0])))


def is_rank(name: str) -> bool:
    """Whether a member is a worker, and no server."""
    return name.startswith("rank ")
