"""The job's key-value store: its address, the process that serves it, and connections to it.

Processes find each other through the store before they form a group. Under the agent, a process that the agent chooses
serves it, on sockets that the agent bound. Under other launchers, the first process of the job serves it.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.errors import PeerLostError
from gtrain.launch import launchers
from gtrain.launch import slot as slots
from gtrain.launch.children import stop_event
from gtrain.launch.environment import AgentEnvironment, WaitReport, find_environment
from gtrain.launch.job import machine_of_server
from gtrain.launch.key_value import KeyValueServer, KeyValueStore, await_end
from gtrain.launch.slot import WORKER, Slot
from gtrain.launch.sockets import Listener, is_loopback, own_address

TIMEOUT_SECONDS = 300.0
"""How long to wait for ranks that other launchers start, and for rank 0 to publish the run's folder."""
POLL_SECONDS = 1.0
"""How often a process that waits for another reports it."""
_store: KeyValueStore | None = None
_inherited: list[KeyValueStore] = []
"""Connections of the process that forked this one; they stay open, because both processes have them."""
_address: str | None = None
_served: list[Any] = []
"""Listeners and servers of the store in the process that serves it; they close when they are collected."""
_broadcasts: Counter[int] = Counter()
"""Calls of :func:`broadcast_text` so far, by job: the key of the next one, equal on all ranks."""


@dataclass(frozen=True)
class JobNetwork:
    """The machines of a job: which processes run where, and how machines reach each other.

    Attributes:
        key_file: path of the job's key file; None for a job on one machine.
        own_address: this machine's address for other machines; None for a job on one machine.
        ranks_of_machine: number of ranks per machine.
        machines: number of machines.
    """

    key_file: str | None
    own_address: str | None
    ranks_of_machine: int
    machines: int = 1

    @property
    def spans_hosts(self) -> bool:
        """Whether the machines are different hosts, which may have no shared folder; one host can simulate several."""
        return self.machines > 1 and self.own_address is not None

    def machine_of(self, rank: int, role: str = WORKER) -> int | None:
        """Return the machine of a rank or server; None for a server that was started by hand."""
        roster = slots.roster()
        if role == WORKER:
            return rank // self.ranks_of_machine
        count = 0 if role in roster.standalone else roster.counts.get(role, 0)
        return machine_of_server(rank, count, self.machines) if count else None

    def name_of(self, rank: int, role: str = WORKER) -> str:
        """Return the name of a rank or server in messages: ``rank 2 (machine 1)``."""
        machine = self.machine_of(rank, role)
        label = Slot(role, rank, 0, 0).label
        return label if machine is None else f"{label} (machine {machine})"

    def kill_silent(self, rank: int, role: str, seconds: float) -> bool:
        """Have this process's agent kill a silent process, which is then restarted like one that died.

        Args:
            rank: rank of the silent process within its role.
            role: role of the silent process.
            seconds: how long this process has waited for it.

        Returns:
            Whether this process's agent started the silent process.
        """
        context, machine = slots.current(), self.machine_of(rank, role)
        if context is None or machine is None or not (context.simulated or machine == context.slot.node):
            return False
        slots.report("silent", label=Slot(role, rank, machine, 0).label, seconds=seconds)
        return True


def job_network(environment: ClusterEnvironment) -> JobNetwork:
    """Return the network of this process's job."""
    key_file = slots.roster().key_file
    if isinstance(environment, AgentEnvironment):
        job = environment.context
        own = None if is_loopback(job.route) else own_address(job.route, 1)
        return JobNetwork(key_file, own, job.devices, job.num_nodes)
    rank_info = launchers.detect().rank_info()
    if rank_info is None:  # a single process without a launcher
        return JobNetwork(key_file, None, 1)
    own = None if rank_info.machines == 1 else own_address(environment.main_address, 1)
    return JobNetwork(key_file, own, rank_info.local_size, rank_info.machines)


def job_store(environment: ClusterEnvironment) -> KeyValueStore:
    """Return this process's connection to the job's store, opened once; rank 0 serves it unless another process does.

    The jobs of a sweep under another launcher share the store, so each has separate keys.

    Raises:
        PeerLostError: nothing answers at its address.
        RefusedConnectionError: a process of another job answers there.
    """
    global _store
    if _store is None:
        address, server = store_address(environment), _name_of_server(environment)
        _store = KeyValueStore(address, slots.roster().key_file, TIMEOUT_SECONDS, lambda: WaitReport(server))
    number = slots.job_number()
    return _store.prefixed(f"job {number}") if number else _store


def _disconnect_child() -> None:
    """Have a forked child open another connection: it may not use that of its parent."""
    global _store
    if _store is not None:
        _inherited.append(_store)
        _store = None


os.register_at_fork(after_in_child=_disconnect_child)


def _name_of_server(environment: ClusterEnvironment) -> str:
    """Return the name of the process that serves the store."""
    label = environment.context.store_server if isinstance(environment, AgentEnvironment) else "rank 0"
    return f"{label} (machine 0)"


def await_key(
    store: KeyValueStore,
    key: str,
    process: str,
    seconds: float = TIMEOUT_SECONDS,
    check: Callable[[], object] = lambda: None,
) -> bytes:
    """Wait for a key that another process sets when it comes, and return its value; report a long wait.

    Args:
        store: the store, or a part of it.
        key: the key.
        process: name of the process.
        seconds: how long to wait.
        check: called every second; may raise.

    Raises:
        PeerLostError: the process did not join in time, or the store is gone.
    """
    report, waited = WaitReport(f"{process} to join"), 0.0
    while (value := store.poll(key, max(0.0, min(POLL_SECONDS, seconds - waited)))) is None:
        check()
        waited = report()
        if waited >= seconds:
            raise PeerLostError(f"{process} did not join within {seconds:g} s")
    return value


def await_end_of_store(address: str) -> PeerLostError | None:
    """Block until this job's store is gone; see :func:`gtrain.launch.key_value.await_end`."""
    return await_end(address, slots.roster().key_file)


def store_address(environment: ClusterEnvironment) -> str:
    """Return the address of the job's store; starts the server if this process is the one that serves it."""
    global _address
    if _address is None:
        _address = _find_store(environment)
    return _address


def _find_store(environment: ClusterEnvironment) -> str:
    if not isinstance(environment, AgentEnvironment):
        own = job_network(environment).own_address
        return launchers.detect().store_address(environment, own, _serve_at)
    job = environment.context
    if job.store_fds:
        pointer = job.store_address if job.store_address.startswith("ipc://") else None
        _serve([socket.socket(fileno=descriptor) for descriptor in job.store_fds], pointer)
    return job.store_address


def _serve_at(listeners: Sequence[Listener]) -> str:
    _served.extend(listeners)  # closing them would end their addresses
    _serve([listener.socket for listener in listeners], listeners[0].address)
    return listeners[0].address


def _serve(sockets: list[socket.socket], pointer: str | None) -> None:
    _served.append((KeyValueServer(sockets, slots.roster().key_file, pointer), sockets))


def broadcast_text(environment: ClusterEnvironment, text: str) -> str:
    """Return rank 0's text on every rank; all ranks make the same calls in the same order."""
    _broadcasts[slots.job_number()] += 1
    store, key = job_store(environment).prefixed("gtrain-agreed"), str(_broadcasts[slots.job_number()])
    if environment.global_rank() == 0:
        store.set(key, text)
    return await_key(store, key, job_network(environment).name_of(0)).decode()


def serve_store() -> None:
    """Serve the store in a process without a rank until the agent stops it, for jobs whose rank 0 may be restarted."""
    stop = stop_event()
    assert slots.current() is not None
    job_store(find_environment())
    stop.wait()
