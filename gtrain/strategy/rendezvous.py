"""The job's key-value store: where ranks and servers meet before they are a group, and find each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from lightning.fabric.plugins.environments import ClusterEnvironment
from torch.distributed import PrefixStore, Store, TCPStore

from gtrain.errors import PeerLostError
from gtrain.launch import slot as slots
from gtrain.launch.environment import AgentEnvironment, find_environment
from gtrain.strategy.stopping import stop_event

TIMEOUT = timedelta(minutes=30)
_store: Store | None = None
_agreed = 0


def job_store(environment: ClusterEnvironment, timeout: timedelta = TIMEOUT) -> Store:
    """This process's connection to the job's store, made once; rank 0 serves it unless someone else does already.

    Raises:
        PeerLostError: nothing answers there.
    """
    global _store
    if _store is None:
        if isinstance(environment, AgentEnvironment):
            descriptor = environment.context.store_fd
            served_here = descriptor is not None
        else:
            launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            descriptor, served_here = None, environment.global_rank() == 0 and not launcher_serves
        _store = connect(environment.main_address, environment.main_port, timeout, served_here, descriptor)
    return _store


def connect(
    host: str, port: int, timeout: timedelta = TIMEOUT, serve_it: bool = False, descriptor: int | None = None
) -> Store:
    """A new connection to a job's store.

    Args:
        host: where it is.
        port: its port.
        timeout: how long to wait for it, and later for a key.
        serve_it: whether this process serves it.
        descriptor: a listening socket to serve it at.

    Raises:
        PeerLostError: nothing answers there.
    """
    try:
        store: Store = TCPStore(
            host, port, None, serve_it, timeout, wait_for_workers=False, master_listen_fd=descriptor
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerLostError(f"the job's key-value store at {host}:{port} does not answer: {reason}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    # torchrun keeps its store when it starts the ranks again: what the ranks before left there is not for these
    return store if attempt is None else PrefixStore(f"gtrain-attempt-{attempt}", store)


def await_end(host: str, port: int) -> OSError | None:
    """Return once a job's store is gone, which ends with rank 0; with the error, where that was how it showed.

    Args:
        host: where it is.
        port: its port.
    """
    try:
        with socket.create_connection((host, port)) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # its machine may go without a word
            line.settimeout(None)
            line.recv(1)
    except OSError as error:
        return error
    return None


def agree(environment: ClusterEnvironment, text: str) -> str:
    """Rank 0's text, on every rank; all ranks call it the same number of times, in the same order."""
    global _agreed
    _agreed += 1
    store = PrefixStore("gtrain-agreed", job_store(environment))
    if environment.global_rank() == 0:
        store.set(str(_agreed), text)
    return store.get(str(_agreed)).decode()


def serve() -> None:
    """Serve the store until the agent asks this process to end: of a job whose rank 0 may die and come back."""
    stop = stop_event()
    assert slots.current() is not None
    job_store(find_environment())
    stop.wait()
