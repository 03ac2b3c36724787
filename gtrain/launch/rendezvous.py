"""``cluster.rendezvous``: where processes that are started by hand find their job. Imports the standard library only.

The machine with ``cluster.rank=0`` listens there and passes the socket on to rank 0, which serves the job's key-value
store at it. ``tcp://host:port`` says where that is; ``file:///path`` is a file on a shared disk, into which it writes
where it listens.
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
TELL_SECONDS = 3.0
_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):(?P<port>\d{1,5})/?")
_FORMS = "tcp://host:port or file:///path/on/a/shared/disk"


@dataclass(frozen=True)
class Rendezvous:
    """A parsed ``cluster.rendezvous``: either host and port, or a path of a file.

    Attributes:
        text: as it was set.
        host: of ``tcp://``; empty for a file.
        port: of ``tcp://``; 0 for a file.
        path: of ``file://``; None for TCP.
    """

    text: str
    host: str = ""
    port: int = 0
    path: Path | None = None


@dataclass(frozen=True)
class StorePlace:
    """Where the key-value store of a job is.

    Attributes:
        host: how this machine reaches it.
        port: its port.
        route: how other machines reach it.
        socket: its listening socket, on the machine that serves it.
    """

    host: str
    port: int
    route: str
    socket: socket.socket | None = None

    @property
    def address(self) -> str:
        """How this machine's processes connect to it."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse(text: str | None) -> Rendezvous:
    """Read ``cluster.rendezvous``.

    Raises:
        ConfigError: it is not set, or of no known form.
    """
    if not text:
        raise ConfigError(
            "cluster.rendezvous is not set, and processes that are started by hand meet there.",
            hint=f"set cluster.rendezvous={_FORMS}, the same on every machine.",
        )
    found = _TCP.fullmatch(text)
    if found and 0 < int(found["port"]) < 65536:
        return Rendezvous(text, found["host"].strip("[]"), int(found["port"]))
    if text.startswith("file:///") and len(text) > len("file:///"):
        return Rendezvous(text, path=Path(text.removeprefix("file://")))
    raise ConfigError(f"cluster.rendezvous={text} was set; it is no address.", hint=f"it has the form {_FORMS}.")


@contextlib.contextmanager
def hold(rendezvous: Rendezvous, secured: bool) -> Iterator[StorePlace]:
    """Listen at the rendezvous, for the machine with ``cluster.rank=0``; let others find it while this lasts.

    Args:
        rendezvous: where; a file is written with this machine's address, or without keys with its loopback address.
        secured: whether this process has keys.

    Raises:
        ConfigError: someone else is there, or it cannot be there.
    """
    with _bound(rendezvous, secured) as listening:
        host, port = listening.getsockname()[:2]
        if rendezvous.path is None:
            yield StorePlace(rendezvous.host, port, rendezvous.host, listening)
            return
        written = _write(rendezvous, host, port)
        try:
            yield StorePlace(host, port, host, listening)
        finally:
            with contextlib.suppress(OSError):
                if rendezvous.path.read_text() == written:  # and not that of a later job
                    rendezvous.path.unlink()


def find(rendezvous: Rendezvous, timeout_seconds: float, secured: bool) -> StorePlace:
    """Wait until the machine with ``cluster.rank=0`` is there.

    Args:
        rendezvous: where.
        timeout_seconds: how long.
        secured: whether this process has keys; without, it speaks to its own machine alone.

    Raises:
        ConfigError: it did not come in time, or the file is of something else.
    """
    deadline, told = time.monotonic() + timeout_seconds, time.monotonic() + TELL_SECONDS
    while True:
        host, port = rendezvous.host, rendezvous.port
        place = StorePlace(host, port, host) if rendezvous.path is None else _read(rendezvous)
        if place is not None and not secured and not is_loopback(place.host):
            raise _unsecured(rendezvous)
        if place is not None and _answers(place):
            return place
        now = time.monotonic()
        if now > deadline:
            raise ConfigError(
                f"cluster.rendezvous={rendezvous.text} was set; nothing answered there within {timeout_seconds:g} s.",
                hint="start the command with cluster.rank=0 too, give all the same address, or raise "
                "cluster.timeout_seconds.",
            )
        if now > told:
            print(f"gtrain: waiting for cluster.rank=0 at {rendezvous.text}", file=sys.stderr, flush=True)
            told = deadline + 1
        time.sleep(POLL_SECONDS)


def check_secure(rendezvous: Rendezvous, secured: bool) -> None:
    """Refuse a rendezvous of several machines without keys; a file is looked into when it is there.

    Raises:
        ConfigError: says how to make keys.
    """
    if not secured and rendezvous.path is None and not is_loopback(rendezvous.host):
        raise _unsecured(rendezvous)


def _unsecured(rendezvous: Rendezvous) -> ConfigError:
    """The error of a job of several machines without keys."""
    return ConfigError(
        f"cluster.rendezvous={rendezvous.text} is not of this machine alone, and cluster.key_file is not set.",
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


def _taken(rendezvous: Rendezvous) -> ConfigError:
    return ConfigError(
        f"cluster.rank=0 was set; another process is at cluster.rendezvous={rendezvous.text} already.",
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


def _read(rendezvous: Rendezvous) -> StorePlace | None:
    """What the file says, or None if it is not there.

    Raises:
        ConfigError: it is something else, which must not be overwritten.
    """
    assert rendezvous.path is not None
    try:
        content = json.loads(rendezvous.path.read_text())
        host, port = str(content["host"]), int(content["port"])
        if is_loopback(host) and content["machine"] != socket.gethostname():
            raise _unsecured(rendezvous)
        return StorePlace(host, port, host)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cluster.rendezvous={rendezvous.text} was set; that is no file of a gtrain job.",
            hint="name a file that does not exist: cluster.rank=0 makes it, and removes it at the end.",
        ) from error


def _answers(place: StorePlace) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((place.host, place.port), timeout=2.0):
        return True
    return False
