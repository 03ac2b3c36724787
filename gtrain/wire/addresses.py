"""Addresses of servers, and the private folder for the sockets of one machine."""

from __future__ import annotations

import atexit
import ipaddress
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from gtrain.errors import ConfigError

MAX_IPC_PATH = 107
"""The kernel's limit for the path of a Unix socket, in bytes."""
# a shell redirects a background job's stdin to /dev/null, hence descriptor 3
_GUARD = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$1") >/dev/null 2>&1 &'


def is_local(address: str) -> bool:
    """Whether messages to an address stay on this machine: ``ipc://``, or ``tcp://`` with a loopback host.

    Raises:
        ConfigError: the address is malformed, or its ipc path is too long for a socket.
    """
    scheme, rest = _split(address)
    host = rest.rpartition(":")[0].strip("[]")
    if scheme == "ipc" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A host name may resolve to any address.
        return False


def require_keys(address: str, secured: bool) -> None:
    """Refuse an address that other machines can reach if no keys were given.

    Raises:
        ConfigError: other machines can reach the address and ``secured`` is False, or the address is malformed.
    """
    if not is_local(address) and not secured:
        raise ConfigError(
            f"{address} can be reached from other machines, and no keys were given",
            hint="give all processes of the job its key file, made by Security.create().save(FILE)",
        )


def reachable(endpoint: str) -> str:
    """Return the address to connect to for a bound endpoint: the machine's name in place of a wildcard."""
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:"):
        if endpoint.startswith(wildcard):
            return f"tcp://{socket.gethostname()}:{endpoint.rpartition(':')[2]}"
    return endpoint


def bound_address(descriptor: int) -> str:
    """Return the address that a socket is bound to.

    Raises:
        ConfigError: the descriptor is not a socket, or the socket is not bound.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as bound:
            name, family = bound.getsockname(), bound.family
    except OSError as err:
        raise ConfigError(
            f"descriptor {descriptor} is not a socket: {err.strerror}", hint="bind a stream socket before the fork"
        ) from err
    if family == socket.AF_UNIX and isinstance(name, str) and name:
        return f"ipc://{name}"
    if family in (socket.AF_INET, socket.AF_INET6) and name[1]:
        return f"tcp://[{name[0]}]:{name[1]}" if ":" in name[0] else f"tcp://{name[0]}:{name[1]}"
    raise ConfigError(f"descriptor {descriptor} is a socket that is not bound", hint="bind it before the fork")


def _split(address: str) -> tuple[str, str]:
    """Return the scheme and the rest of an address, checked."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise ConfigError(
            f"{address!r} is not the address of a server",
            hint="write tcp://HOST:PORT, or ipc:///FOLDER/NAME within a machine",
        )
    host, _, port = rest.rpartition(":")
    if scheme == "ipc" and len(os.fsencode(rest)) > MAX_IPC_PATH:
        raise ConfigError(
            f"the socket's path has {len(os.fsencode(rest))} bytes, Unix sockets take {MAX_IPC_PATH}: {rest}",
            hint="use a folder with a shorter path, such as the one that ipc_folder() makes below /tmp",
        )
    if scheme == "tcp" and not (host and (port == "*" or (port.isdecimal() and int(port) <= 65535))):
        raise ConfigError(f"{address!r} lacks a host or a port", hint="write tcp://HOST:PORT, PORT from 0 to 65535")
    return scheme, rest


class IpcFolder:
    """A folder for the sockets of one machine that only this user may enter; removed when its creator is gone.

    The creator removes the folder, at exit if not before. A guard process outside the creator's process group holds
    the other end of a pipe: it removes the folder once the creator and all its forked children are gone, even if they
    were killed.

    Args:
        parent: the folder to create it in; the default has a short path.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="gtrain-", dir=parent or _short_parent())).absolute()  # mode 0700
        self._pid = os.getpid()
        self._pipe: int | None = _start_guard(self.path)
        self._at_exit: Callable[[], None] = self.remove
        atexit.register(self._at_exit)

    def address(self, name: str) -> str:
        """Return the address of a socket in the folder.

        Args:
            name: file name of the socket.

        Raises:
            ConfigError: the path is too long.
        """
        address = f"ipc://{self.path / name}"
        _split(address)
        return address

    def remove(self) -> None:
        """Remove the folder and its content; does nothing in a forked child."""
        if os.getpid() != self._pid or self._pipe is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._pipe)
        self._pipe = None
        atexit.unregister(self._at_exit)

    def __enter__(self) -> IpcFolder:
        """Return the folder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self.remove()


ipc_folder = IpcFolder
"""Creates a private folder for sockets."""


def _short_parent() -> str:
    """Return the folder of temporary files, or /tmp if that path leaves no room for a socket's name."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= MAX_IPC_PATH // 2 else "/tmp"


def _start_guard(folder: Path) -> int:
    """Start the process that removes a folder once the pipe's last writing end is closed; return that end.

    The guard is a grandchild, so that no launcher waits for it as for a child.
    """
    reader, writer = os.pipe()
    try:
        subprocess.run(
            ["/bin/sh", "-c", _GUARD, "gtrain-guard", str(folder)],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            check=True,
        )
    finally:
        os.close(reader)
    return writer
