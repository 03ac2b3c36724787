"""``cluster.rendezvous``: how processes that are started by hand find their job. Imports the standard library only.

The machine with ``cluster.rank=0`` listens at the rendezvous and passes the socket on to rank 0, which serves the job's
key-value store at it. ``tcp://host:port`` is the address itself; ``file:///path`` is a file on a shared disk, to which
the machine writes its address.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gtrain.errors import ConfigError
from gtrain.launch.slot import LOOPBACK
from gtrain.launch.sockets import is_loopback, listen_tcp, own_address

POLL_SECONDS = 0.1
REPORT_SECONDS = 3.0
_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):(?P<port>\d{1,5})/?")
_FORMS = "tcp://host:port or file:///path/on/a/shared/disk"


@dataclass(frozen=True)
class Rendezvous:
    """A parsed ``cluster.rendezvous``: either host and port, or the path of a file.

    Attributes:
        text: the setting.
        host: host of ``tcp://``; empty for a file.
        port: port of ``tcp://``; 0 for a file.
        path: path of ``file://``; None for TCP.
    """

    text: str
    host: str = ""
    port: int = 0
    path: Path | None = None


@dataclass(frozen=True)
class StoreLocation:
    """The address of a job's key-value store.

    Attributes:
        host: host name for this machine's processes.
        port: port.
        route: host name for other machines.
        socket: the listening socket, on the machine that serves the store.
    """

    host: str
    port: int
    route: str
    socket: socket.socket | None = None

    @property
    def address(self) -> str:
        """The address for this machine's processes."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse(text: str | None) -> Rendezvous:
    """Parse ``cluster.rendezvous``.

    Raises:
        ConfigError: it is not set, or has neither form.
    """
    if not text:
        raise ConfigError(
            "cluster.rendezvous is not set, but processes that are started by hand need it to find each other.",
            hint=f"set cluster.rendezvous={_FORMS}, the same on every machine.",
        )
    tcp = _TCP.fullmatch(text)
    if tcp and 0 < int(tcp["port"]) < 65536:
        return Rendezvous(text, tcp["host"].strip("[]"), int(tcp["port"]))
    if text.startswith("file:///") and len(text) > len("file:///"):
        return Rendezvous(text, path=Path(text.removeprefix("file://")))
    raise ConfigError(f"cluster.rendezvous={text} was set; it is not an address.", hint=f"it has the form {_FORMS}.")


@contextlib.contextmanager
def hold(rendezvous: Rendezvous, secured: bool, wait_seconds: float = 0.0) -> Iterator[StoreLocation]:
    """Listen at the rendezvous within the context, on the machine with ``cluster.rank=0``.

    Args:
        rendezvous: the rendezvous; into a file goes this machine's address, or its loopback address without a key.
        secured: whether this process has a key file.
        wait_seconds: how long to wait until the host's name is known; a cluster may publish it after the start.

    Raises:
        ConfigError: another process listens there, or this machine cannot listen there.
    """
    if rendezvous.path is None:
        _await_name(rendezvous.host, wait_seconds)
    with _bound(rendezvous, secured) as listening:
        host, port = listening.getsockname()[:2]
        if rendezvous.path is None:
            yield StoreLocation(rendezvous.host, port, rendezvous.host, listening)
            return
        written = _write(rendezvous, host, port)
        try:
            yield StoreLocation(host, port, host, listening)
        finally:
            with contextlib.suppress(OSError):
                if rendezvous.path.read_text() == written:  # a later job may have replaced it
                    rendezvous.path.unlink()


def find(rendezvous: Rendezvous, timeout_seconds: float, secured: bool) -> StoreLocation:
    """Wait until the machine with ``cluster.rank=0`` answers at the rendezvous.

    Args:
        rendezvous: the rendezvous.
        timeout_seconds: how long to wait.
        secured: whether this process has a key file; without one it connects to its own machine only.

    Raises:
        ConfigError: nothing answered in time, or the file is not one of a gtrain job.
    """
    deadline, report_time = time.monotonic() + timeout_seconds, time.monotonic() + REPORT_SECONDS
    while True:
        host, port = rendezvous.host, rendezvous.port
        location = StoreLocation(host, port, host) if rendezvous.path is None else _read(rendezvous)
        if location is not None and not secured and not is_loopback(location.host):
            raise _unsecured(rendezvous)
        if location is not None and _answers(location):
            return location
        now = time.monotonic()
        if now > deadline:
            raise ConfigError(
                f"cluster.rendezvous={rendezvous.text} was set; nothing answered there within {timeout_seconds:g} s.",
                hint="start the command with cluster.rank=0 too, give all the same address, or raise "
                "cluster.timeout_seconds.",
            )
        if now > report_time:
            print(f"gtrain: waiting for cluster.rank=0 at {rendezvous.text}", file=sys.stderr, flush=True)
            report_time = deadline + 1  # once
        time.sleep(POLL_SECONDS)


def check_secure(rendezvous: Rendezvous, secured: bool) -> None:
    """Refuse a rendezvous across machines without a key file; the address in a file is checked when it is read.

    Raises:
        ConfigError: says how to make keys.
    """
    if not secured and rendezvous.path is None and not is_loopback(rendezvous.host):
        raise _unsecured(rendezvous)


def _unsecured(rendezvous: Rendezvous) -> ConfigError:
    """The error for a job across machines without a key file."""
    return ConfigError(
        f"cluster.rendezvous={rendezvous.text} can be reached by other machines, and cluster.key_file is not set.",
        hint="make keys with gtrain key cluster.key_file=job.key, and give all processes of the job the file; or, "
        "where nobody else can reach the network, set cluster.isolated=true.",
    )


def _bound(rendezvous: Rendezvous, secured: bool) -> socket.socket:
    if rendezvous.path is not None:
        existing = _read(rendezvous)
        if existing is not None and _answers(existing):
            raise _taken(rendezvous)
        return listen_tcp(own_address(socket.gethostname(), 1) if secured else LOOPBACK).socket
    try:
        return listen_tcp(rendezvous.host, rendezvous.port).socket
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(rendezvous) from error
        raise ConfigError(
            f"cluster.rendezvous={rendezvous.text} was set; cluster.rank=0 cannot listen there: {error.strerror}.",
            hint="start cluster.rank=0 on the machine that the address names.",
        ) from error


def _await_name(host: str, seconds: float) -> None:
    """Wait until a host's name has an address, or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(socket.gaierror):
            socket.getaddrinfo(host, None)
            return
        time.sleep(POLL_SECONDS)


def _taken(rendezvous: Rendezvous) -> ConfigError:
    return ConfigError(
        f"cluster.rank=0 was set; another process already listens at cluster.rendezvous={rendezvous.text}.",
        hint="give every machine of a job its own cluster.rank, and every job its own cluster.rendezvous.",
    )


def _write(rendezvous: Rendezvous, route: str, port: int) -> str:
    assert rendezvous.path is not None
    text = json.dumps({"gtrain": 1, "machine": socket.gethostname(), "host": route, "port": port}) + "\n"
    temporary = rendezvous.path.with_name(f"{rendezvous.path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, rendezvous.path)
    except OSError as error:
        raise ConfigError(
            f"cluster.rendezvous={rendezvous.text} was set; the file cannot be written: {error.strerror}.",
            hint="name a file in a folder that all machines of the job share and may write to.",
        ) from error
    return text


def _read(rendezvous: Rendezvous) -> StoreLocation | None:
    """Return the address in the file, or None if the file does not exist.

    Raises:
        ConfigError: it is another kind of file, which must not be overwritten.
    """
    assert rendezvous.path is not None
    try:
        content = json.loads(rendezvous.path.read_text())
        host, port = str(content["host"]), int(content["port"])
        if is_loopback(host) and content["machine"] != socket.gethostname():
            raise _unsecured(rendezvous)
        return StoreLocation(host, port, host)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cluster.rendezvous={rendezvous.text} was set; that is not a file of a gtrain job.",
            hint="name a file that does not exist: cluster.rank=0 makes it, and removes it at the end.",
        ) from error


def _answers(location: StoreLocation) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((location.host, location.port), timeout=2.0):
        return True
    return False
