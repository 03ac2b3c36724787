"""Which parts a rank reads by itself, and which ranks share a machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from gtrain.strategy.group import Group

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Hosting:
    """Where the parts of a job are, as one rank sees it. Part p is served by rank p.

    Attributes:
        rank: this rank.
        machines: for each rank the lowest rank of its machine. The simulated machines of one computer count as one.
        parts: the parts whose files this rank reads by itself, ascending; its own is among them. It asks the owners of
            all others.
        complete: whether every rank hosts every part, so that nothing is ever asked.
        loopback: whether all ranks reach each other at the loopback address.
    """

    rank: int
    machines: tuple[int, ...]
    parts: tuple[int, ...]
    complete: bool
    loopback: bool

    @property
    def world(self) -> int:
        """Number of ranks, and of parts."""
        return len(self.machines)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of this rank's machine, ascending."""
        return tuple(rank for rank, machine in enumerate(self.machines) if machine == self.machines[self.rank])


def host(group: Group, transport: str = "auto") -> Hosting:
    """Find out who is where; every rank of the group calls it.

    Args:
        group: the job's ranks.
        transport: ``shm``, or ``auto`` for it: ranks host the parts of all ranks of their machine; ``tcp``: their own.
    """
    found = group.all_gather_object(_place())
    machines = [place[:2] for place in found]
    lowest = tuple(machines.index(machine) for machine in machines)
    own = lowest[group.rank]
    parts = tuple(rank for rank, machine in enumerate(lowest) if machine == own)
    return Hosting(
        rank=group.rank,
        machines=lowest,
        parts=(group.rank,) if transport == "tcp" else parts,
        complete=group.size == 1 or (transport != "tcp" and len(set(lowest)) == 1),
        loopback=len(set(found)) == 1,
    )


def _place() -> tuple[str, str, str]:
    """The machine by its name and by its kernel's start, and the network within it."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    network = os.readlink(_NETWORK) if _NETWORK.exists() else ""
    return socket.gethostname(), boot, network
