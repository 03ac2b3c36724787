"""Addresses of servers, and the private folder of those that do not leave the machine."""

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
from types import TracebackType

from gtrain.errors import ConfigError

MAX_IPC_PATH = 107
"""Bytes of a unix socket's path that the kernel takes."""
# a shell gives what runs in the background /dev/null to read, hence descriptor 3
_GUARD = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$1") >/dev/null 2>&1 &'


def is_local(address: str) -> bool:
    """Whether nothing sent to an address leaves this machine: ``ipc://``, or ``tcp://`` at the loopback.

    Raises:
        ConfigError: it is no address, or its ipc path is too long for a socket.
    """
    scheme, rest = _split(address)
    if scheme == "ipc":
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name may resolve to anything
        return False


def reachable(endpoint: str) -> str:
    """The address to connect to for a bound endpoint: the machine's name in place of a wildcard."""
    for wildcard in ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:"):
        if endpoint.startswith(wildcard):
            return f"tcp://{socket.gethostname()}:{endpoint.rpartition(':')[2]}"
    return endpoint


def _split(address: str) -> tuple[str, str]:
    """Scheme and the rest of a well-formed address."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise ConfigError(
            f"{address!r} is no address of a server",
            hint="write tcp://HOST:PORT, or ipc:///FOLDER/NAME within a machine",
        )
    if scheme == "ipc" and len(os.fsencode(rest)) > MAX_IPC_PATH:
        raise ConfigError(
            f"the socket's path has {len(os.fsencode(rest))} bytes, unix sockets take {MAX_IPC_PATH}: {rest}",
            hint="use a folder with a shorter path, such as the one that ipc_folder() makes below /tmp",
        )
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not host or not (port in ("*",) or (port.isdecimal() and int(port) <= 65535)):
            raise ConfigError(f"{address!r} lacks a host or a port", hint="write tcp://HOST:PORT, PORT from 0 to 65535")
    return scheme, rest


class IpcFolder:
    """A folder that only this user may enter, for sockets within a machine; gone when its maker is.

    A guard outside of the maker's process group, which holds the other end of a pipe, removes the folder as soon as
    the maker and all that it forked are gone, whatever ended them.
    Normally the maker removes it, at exit if not before.

    Args:
        parent: folder that it is made in; the default has a short path.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        made = tempfile.mkdtemp(prefix="gtrain-", dir=parent or _short_parent())  # mkdtemp makes it 0700
        self.path = Path(made).absolute()
        self._pid = os.getpid()
        self._pipe: int | None = _guard(self.path)
        self._at_exit: Callable[[], None] = self.remove
        atexit.register(self._at_exit)

    def address(self, name: str) -> str:
        """The address of a socket in the folder.

        Args:
            name: file name of the socket.

        Raises:
            ConfigError: the path would be too long.
        """
        address = f"ipc://{self.path / name}"
        _split(address)
        return address

    def remove(self) -> None:
        """Remove the folder with all in it; in a forked child, nothing."""
        if os.getpid() != self._pid or self._pipe is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._pipe)
        self._pipe = None
        atexit.unregister(self._at_exit)

    def __enter__(self) -> IpcFolder:
        """The folder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove it."""
        self.remove()


def ipc_folder(parent: str | os.PathLike[str] | None = None) -> IpcFolder:
    """Make a private folder for sockets; see :class:`IpcFolder`."""
    return IpcFolder(parent)


def _short_parent() -> str:
    """Where temporary files go, unless that path leaves no room for a socket's name."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= MAX_IPC_PATH // 2 else "/tmp"


def _guard(folder: Path) -> int:
    """Start the process that removes a folder when the pipe's last writing end is closed; return that end.

    It is a grandchild, so that it is no child that a launcher would wait for.
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
