"""Where the processes of a job meet before they are a group: its key-value store, and who serves it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.errors import PeerLostError
from gtrain.launch import launchers
from gtrain.launch import slot as slots
from gtrain.launch.children import stop_event
from gtrain.launch.environment import AgentEnvironment, find_environment
from gtrain.launch.key_value import KeyValueServer, KeyValueStore, await_end
from gtrain.launch.roles import machine_of_server
from gtrain.launch.slot import WORKER, Slot
from gtrain.launch.sockets import Listener, is_loopback, own_address

TIMEOUT_SECONDS = 1800.0
"""How long ranks that other launchers start may take to come, and rank 0 to agree with them on the run's folder."""
_store: KeyValueStore | None = None
_address: str | None = None
_served: list[Any] = []
_agreed = 0


@dataclass(frozen=True)
class JobNetwork:
    """How the processes of a job reach each other.

    Attributes:
        key_file: of the job; None where all of them are on this machine.
        own_address: this machine's address for the others; None where all of them are on this machine.
        ranks_of_machine: number of ranks of each machine.
        machines: number of machines.
    """

    key_file: str | None
    own_address: str | None
    ranks_of_machine: int
    machines: int = 1

    def machine_of(self, rank: int, role: str = WORKER) -> int | None:
        """Machine of a rank, or of a server of the job; None for a server that was started by hand."""
        roster = slots.roster()
        if role == WORKER:
            return rank // self.ranks_of_machine
        count = 0 if role in roster.standalone else roster.counts.get(role, 0)
        return machine_of_server(rank, count, self.machines) if count else None

    def name_of(self, rank: int, role: str = WORKER) -> str:
        """What messages call a rank, or a server of the job: ``rank 2 (machine 1)``."""
        machine = self.machine_of(rank, role)
        label = Slot(role, rank, 0, 0).label
        return label if machine is None else f"{label} (machine {machine})"

    def end_silent(self, rank: int, role: str, seconds: float) -> bool:
        """Have this process's agent kill a process that has given no sign of life; it is restarted as one that died.

        Args:
            rank: of the process, within its role.
            role: of the process.
            seconds: how long it was waited for.

        Returns:
            whether it is a process of this agent's.
        """
        context, machine = slots.current(), self.machine_of(rank, role)
        if context is None or machine is None or not (context.simulated or machine == context.slot.node):
            return False
        slots.report("silent", label=Slot(role, rank, machine, 0).label, seconds=seconds)
        return True


def network_of(environment: ClusterEnvironment) -> JobNetwork:
    """How the processes of this process's job reach each other."""
    key_file = slots.roster().key_file
    if isinstance(environment, AgentEnvironment):
        job = environment.context
        own = None if is_loopback(job.route) else own_address(job.route, 1)
        return JobNetwork(key_file, own, job.devices, job.num_nodes)
    rank_info = launchers.detect().rank_info()
    if rank_info is None:  # one process, which no launcher started
        return JobNetwork(key_file, None, 1)
    own = None if rank_info.machines == 1 else own_address(environment.main_address, 1)
    return JobNetwork(key_file, own, rank_info.local_size, rank_info.machines)


def job_store(environment: ClusterEnvironment) -> KeyValueStore:
    """This process's connection to the job's store, made once; rank 0 serves it unless another process does.

    Raises:
        PeerLostError: nothing answers there.
        RefusedConnectionError: what answers there is of another job.
    """
    global _store
    if _store is None:
        address = store_address(environment)
        _store = KeyValueStore(address, slots.roster().key_file, TIMEOUT_SECONDS)
    return _store


def await_end_of_store(address: str) -> PeerLostError | None:
    """Return once this job's store is gone; see :func:`gtrain.launch.key_value.await_end`."""
    return await_end(address, slots.roster().key_file)


def store_address(environment: ClusterEnvironment) -> str:
    """Where the job's store is; serves it if this process is to, and does not yet."""
    global _address
    if _address is None:
        _address = _find_store(environment)
    return _address


def _find_store(environment: ClusterEnvironment) -> str:
    if not isinstance(environment, AgentEnvironment):
        own = network_of(environment).own_address
        return launchers.detect().store_address(environment, own, _serve_at)
    job = environment.context
    if job.store_fds:
        pointer = job.store_address if job.store_address.startswith("ipc://") else None
        _serve([socket.socket(fileno=descriptor) for descriptor in job.store_fds], pointer)
    return job.store_address


def _serve_at(listeners: Sequence[Listener]) -> str:
    _served.extend(listeners)  # their addresses end with them
    _serve([listener.socket for listener in listeners], listeners[0].address)
    return listeners[0].address


def _serve(sockets: list[socket.socket], pointer: str | None) -> None:
    _served.append((KeyValueServer(sockets, slots.roster().key_file, pointer), sockets))


def agree(environment: ClusterEnvironment, text: str) -> str:
    """Rank 0's text, on every rank; all ranks call it the same number of times, in the same order."""
    global _agreed
    _agreed += 1
    store = job_store(environment).prefixed("gtrain-agreed")
    if environment.global_rank() == 0:
        store.set(str(_agreed), text)
    return store.get(str(_agreed)).decode()


def serve() -> None:
    """Serve the store until the agent asks this process to end: of a job whose rank 0 may die and come back."""
    stop = stop_event()
    assert slots.current() is not None
    job_store(find_environment())
    stop.wait()
