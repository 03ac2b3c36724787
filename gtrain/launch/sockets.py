"""Listening sockets that are bound before any process that needs them exists. Imports the standard library only.

A server adopts the descriptor of such a socket. Its address is known before it starts, no port can be lost to another
program, and a server that is restarted listens at the same address; who connects meanwhile waits in the queue.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from dataclasses import dataclass

_QUEUE = 1024
_ANYWHERE = "192.0.2.1"  # of the block that documentation uses (RFC 5737): the default route leads there


@dataclass
class Listener:
    """A bound, listening socket.

    Attributes:
        socket: the socket.
        address: what to connect to, in ZeroMQ's notation.
        holder: descriptor that keeps a socket without a file reachable; None for TCP.
    """

    socket: socket.socket
    address: str
    holder: int | None = None

    @property
    def descriptor(self) -> int:
        """What a server adopts."""
        return self.socket.fileno()

    def close(self) -> None:
        """Let go of the socket in this process."""
        self.socket.close()
        if self.holder is not None:
            os.close(self.holder)
            self.holder = None


def listen_here() -> Listener:
    """A Unix socket that this machine's processes of this user can reach, and that leaves nothing behind.

    It is bound in a folder of mode 0700, opened by path, and file and folder are deleted at once. The address leads
    through this process's open descriptor in ``/proc``, which the kernel shows to the same user alone. So there is no
    file that a killed process could leave, and the address ends with the process that made it.
    """
    listener = socket.socket(socket.AF_UNIX)
    with tempfile.TemporaryDirectory(prefix="gtrain-") as folder:
        directory = os.open(folder, os.O_PATH)  # through it the path is short, whatever the temporary folder's is
        path = f"/proc/self/fd/{directory}/gtrain-{os.getpid()}"
        listener.bind(path)
        listener.listen(_QUEUE)
        holder = os.open(path, os.O_PATH)
        os.close(directory)
    return Listener(listener, f"ipc:///proc/{os.getpid()}/fd/{holder}", holder)


def listen_tcp(host: str, port: int = 0) -> Listener:
    """A TCP socket at an address of this machine; the kernel chooses the port unless it is given.

    Raises:
        OSError: the host is not of this machine, or the port is taken.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a job that has just ended
        listener.bind(place)
        listener.listen(_QUEUE)
    except OSError:
        listener.close()
        raise
    name, number = listener.getsockname()[:2]
    return Listener(listener, f"tcp://[{name}]:{number}" if ":" in name else f"tcp://{name}:{number}")


def own_address(host: str, port: int) -> str:
    """This machine's address on the network interface that leads to ``host``; sends nothing.

    A machine often knows its own name as a loopback address; others need that of the default route then.
    """
    found = _interface(host, port)
    if found is not None and not (is_loopback(found) and not is_loopback(host)):
        return found
    return _interface(_ANYWHERE, port) or found or socket.gethostname()


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _interface(host: str, port: int) -> str | None:
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    return None
