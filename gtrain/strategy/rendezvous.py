"""Where the processes of a job meet before they are a group: its key-value store, and who serves it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment

from gtrain.errors import PeerLostError
from gtrain.launch import cluster
from gtrain.launch import slot as slots
from gtrain.launch.environment import AgentEnvironment, find_environment
from gtrain.launch.sockets import Listener, is_loopback, listen_here, listen_tcp, own_address
from gtrain.strategy.key_value import KeyValueServer, KeyValueStore, await_end
from gtrain.strategy.stopping import stop_event

TIMEOUT_SECONDS = 1800.0
"""How long ranks that other launchers start may take to come, and rank 0 to agree with them on the run's folder."""
_ADDRESS = "gtrain/store"
_store: KeyValueStore | None = None
_address: str | None = None
_served: list[Any] = []
_agreed = 0


@dataclass(frozen=True)
class Meeting:
    """How the processes of a job reach each other.

    Attributes:
        key_file: of the job; None where all of them are on this machine.
        own_address: this machine's address for the others; None where all of them are on this machine.
        ranks_of_machine: number of ranks of each machine.
    """

    key_file: str | None
    own_address: str | None
    ranks_of_machine: int


def meeting_of(environment: ClusterEnvironment) -> Meeting:
    """How the processes of this process's job reach each other."""
    key_file = slots.roster().key_file
    if isinstance(environment, AgentEnvironment):
        job = environment.context
        own = None if is_loopback(job.route) else own_address(job.route, 1)
        return Meeting(key_file, own, job.devices)
    if isinstance(environment, LightningEnvironment):  # one process, which no launcher started
        return Meeting(key_file, None, 1)
    place = cluster.external_place(cluster.detect())
    own = None if place.machines == 1 else own_address(environment.main_address, 1)
    return Meeting(key_file, own, place.local_size)


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
    """Return once this job's store is gone; see :func:`gtrain.strategy.key_value.await_end`."""
    return await_end(address, slots.roster().key_file)


def store_address(environment: ClusterEnvironment) -> str:
    """Where the job's store is; serves it if this process is to, and does not yet."""
    global _address
    if _address is None:
        _address = _find_store(environment)
    return _address


def _find_store(environment: ClusterEnvironment) -> str:
    if isinstance(environment, AgentEnvironment):
        job = environment.context
        if job.store_fds:
            pointer = job.store_address if job.store_address.startswith("ipc://") else None
            _serve([socket.socket(fileno=descriptor) for descriptor in job.store_fds], pointer)
        return job.store_address
    meeting = meeting_of(environment)
    if isinstance(environment, LightningEnvironment):
        return _serve_at(listen_here())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _beside_torchrun(environment, meeting)
    if environment.global_rank() == 0:
        doors = [listen_here()] if meeting.own_address is None else []
        doors.append(listen_tcp(environment.main_address, environment.main_port))
        _served.extend(doors)
        _serve([door.socket for door in doors], doors[0].address)
        return doors[0].address
    return f"tcp://{environment.main_address}:{environment.main_port}"


def _beside_torchrun(environment: ClusterEnvironment, meeting: Meeting) -> str:
    """Have rank 0 say in torchrun's own store where it serves the job's: anybody may write to torchrun's."""
    from torch.distributed import PrefixStore, TCPStore

    place = environment.main_address, environment.main_port
    try:
        whole = TCPStore(*place, None, False, timedelta(seconds=TIMEOUT_SECONDS), wait_for_workers=False)
        # torchrun keeps its store when it starts the ranks again: what the ranks before left there is not for these
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        board = PrefixStore(f"gtrain-attempt-{attempt}", whole)
        if environment.global_rank() != 0:
            return board.get(_ADDRESS).decode()
        address = _serve_at(listen_here() if meeting.own_address is None else listen_tcp(meeting.own_address))
        board.set(_ADDRESS, address)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerLostError(f"torchrun's store at {place[0]}:{place[1]} does not answer: {reason}") from error
    return address


def _serve_at(listener: Listener) -> str:
    _served.append(listener)  # its address ends with it
    _serve([listener.socket], None)
    return listener.address


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
