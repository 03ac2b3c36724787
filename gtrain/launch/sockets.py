"""Listening sockets that are bound before the processes that use them are forked. Imports the standard library only.

A server inherits the descriptor of its socket. So its address is known before it starts, no other program can take its
port, and a restarted server listens at the same address; clients that connect meanwhile wait in the queue.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

_QUEUE = 1024
_TCP_RTO_MAX_MS = 44  # linux/tcp.h; Python has no name for it
_RETRANSMIT_MILLISECONDS = 5000
_UNACKNOWLEDGED_MILLISECONDS = 3_600_000
_ANYWHERE = "192.0.2.1"  # an address for documentation (RFC 5737): reached by the default route


@dataclass
class Listener:
    """A bound, listening socket.

    Attributes:
        socket: the socket.
        address: its address in ZeroMQ's notation.
        holder: descriptor through which an unlinked Unix socket is reached; None for TCP.
    """

    socket: socket.socket
    address: str
    holder: int | None = None

    @property
    def descriptor(self) -> int:
        """The descriptor that a server inherits."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close the socket in this process."""
        self.socket.close()
        if self.holder is not None:
            os.close(self.holder)
            self.holder = None


def listen_here() -> Listener:
    """Return a Unix socket for processes of this user on this machine that leaves no file behind.

    It is bound in a folder of mode 0700, opened by path, and file and folder are deleted at once. The address leads
    through this process's open descriptor in ``/proc``, which only the same user may follow. So a killed process leaves
    no file, and the address ends with the process that made it.
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


def listen_abstract(name: str) -> Listener:
    """Return a Unix socket with a name in the machine's abstract namespace, which has no file and ends with the socket.

    For processes that know a common name, but not each other. Any user may connect or take the name first: both ends
    check the user of the other one (:mod:`gtrain.launch.links`).

    Raises:
        OSError: the name is taken.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.listen(_QUEUE)
    except OSError:
        listener.close()
        raise
    return Listener(listener, abstract_address(name))


def abstract_address(name: str) -> str:
    """Return the address, in ZeroMQ's notation, of a socket with this name in the abstract namespace."""
    return f"ipc://@{name}"


def listen_tcp(host: str, port: int = 0) -> Listener:
    """Return a listening TCP socket at an address of this machine; port 0 lets the kernel choose.

    Raises:
        OSError: the host is not this machine, or the port is taken.
    """
    family, socket_type, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket_type, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a job that has just ended
        limit_retransmission(listener)  # accepted connections inherit it
        listener.bind(address)
        listener.listen(_QUEUE)
    except OSError:
        listener.close()
        raise
    name, number = listener.getsockname()[:2]
    return Listener(listener, f"tcp://[{name}]:{number}" if ":" in name else f"tcp://{name}:{number}")


def wait_readable(descriptors: Iterable[int], seconds: float) -> set[int]:
    """Wait until one of the descriptors can be read or, of a process, has ended; return those of which this is true.

    select() cannot wait for descriptors above 1023, which a process with many connections has.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


def limit_retransmission(connection: socket.socket) -> None:
    """Have the kernel send unacknowledged data again every five seconds at least, and for an hour.

    It doubles the time between its attempts, up to two minutes: after an outage of a minute, a link that is up again
    would stay idle for most of another one. Linux has this option since 6.15; older kernels keep their limit. The
    kernel derives from it how long it tries, which would be one minute, so that time is set too.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RETRANSMIT_MILLISECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MILLISECONDS)


def own_address(host: str, port: int) -> str:
    """Return this machine's address on the network interface that leads to ``host``, without sending anything.

    A machine often resolves its own name to a loopback address; other machines then need that of the default route.
    """
    address = _interface(host, port)
    if address is not None and not (is_loopback(address) and not is_loopback(host)):
        return address
    return _interface(_ANYWHERE, port) or address or socket.gethostname()


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback interface."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _interface(host: str, port: int) -> str | None:
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None
