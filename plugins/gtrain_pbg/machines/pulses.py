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

    def join(self, name: str, place: str, pid: int) -> None:
        """A member is there, perhaps started again.

        Args:
            name: of the member.
            place: where its process id is one.
            pid: its process id.
        """
        self.forget(name)
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
        self.await_return(name)

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
