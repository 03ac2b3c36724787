"""The parts that a rank reads itself, and arrays that the ranks of a machine share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gtrain.graph.sampling.scratch import read_only
from gtrain.strategy.group import Group
from gtrain.wire import SharedTensors
from gtrain.wire.shared import SharedDirectory
from gtrain_pyg.ranks.parts import Array

WAIT_SECONDS = 600.0
"""Time limit for arrays that another rank of the machine computes."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Hosting:
    """The location of a job's parts, as one rank sees it. Rank p serves part p.

    Attributes:
        rank: this rank.
        machines: for each rank the lowest rank of its machine. The simulated machines of one computer count as one.
        parts: the parts whose files this rank reads itself, ascending, with its own; it requests all others.
        complete: whether every rank hosts every part, so that no rank sends requests.
        loopback: whether all ranks reach each other at the loopback address.
    """

    rank: int
    machines: tuple[int, ...]
    parts: tuple[int, ...]
    complete: bool
    loopback: bool

    @property
    def world(self) -> int:
        """Return the number of ranks, and of parts."""
        return len(self.machines)


def detect_hosting(group: Group, transport: str = "auto") -> Hosting:
    """Exchange the ranks' machines; collective.

    Args:
        group: the job's ranks.
        transport: ``shm`` or ``auto``: ranks host the parts of all ranks of their machine; ``tcp``: their own part.
    """
    identities = group.all_gather_object(_machine_identity())
    machines = [identity[:2] for identity in identities]
    lowest = tuple(machines.index(machine) for machine in machines)
    local = tuple(rank for rank, machine in enumerate(lowest) if machine == lowest[group.rank])
    return Hosting(
        rank=group.rank,
        machines=lowest,
        parts=(group.rank,) if transport == "tcp" else local,
        complete=group.size == 1 or (transport != "tcp" and len(set(lowest)) == 1),
        loopback=len(set(identities)) == 1,
    )


def _machine_identity() -> tuple[str, str, str]:
    """Return the host name and the boot id, which identify the machine, and the network namespace within it."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    network = os.readlink(_NETWORK) if _NETWORK.exists() else ""
    return socket.gethostname(), boot, network


class SharedArrays:
    """Arrays that one rank of a machine computes and all its ranks read.

    Args:
        rank: this rank.
        directory: name of the machine's directory of shared memory; None shares nothing.
        created: the directory, in the rank that created it.
    """

    def __init__(self, rank: int, directory: str | None = None, created: SharedDirectory | None = None) -> None:
        self._rank, self._directory, self._created = rank, directory, created
        self._memory: list[SharedTensors] = []
        self._arrays: dict[str, dict[str, Array]] = {}

    @classmethod
    def create(cls, group: Group, hosting: Hosting) -> SharedArrays:
        """Agree on a directory with the other ranks of the machine; collective.

        Ranks that host one part each share nothing, as if they were on different machines.
        """
        creates = hosting.machines[hosting.rank] == hosting.rank and len(hosting.parts) > 1
        created = SharedDirectory() if creates else None
        names = group.all_gather_object(None if created is None else created.name)
        return cls(hosting.rank, names[hosting.machines[hosting.rank]], created)

    def arrays(self, name: str, maker: int, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        """Return read-only arrays that rank ``maker`` computes once and the other ranks of its machine read.

        Args:
            name: a name of letters, digits and dashes.
            maker: the rank that computes them, which has to call this too. Without sharing every rank computes them.
            make: computes them.

        Raises:
            DeadlineError: the other rank did not compute them in time.
        """
        if name not in self._arrays:
            self._arrays[name] = self._open(name, maker, make)
        return self._arrays[name]

    def _open(self, name: str, maker: int, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        if self._directory is None:
            return {key: read_only(array) for key, array in make().items()}
        if maker == self._rank:
            tensors = {key: torch.from_numpy(array) for key, array in make().items()}
            shared = SharedTensors.create(self._directory, name, tensors)
        else:
            shared = SharedTensors.attach(self._directory, name, WAIT_SECONDS)
        self._memory.append(shared)
        return {key: read_only(tensor.numpy()) for key, tensor in shared.items()}

    def close(self) -> None:
        """Release the memory. Arrays that are referenced stay valid; other ranks cannot attach to them any more."""
        for shared in self._memory:
            shared.close()
        self._memory, self._arrays = [], {}
        if self._created is not None:
            self._created.close()
