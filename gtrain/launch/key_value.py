"""A key-value store for the processes of a job: one process serves it, all connect."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from gtrain.errors import PeerLostError
from gtrain.launch import links
from gtrain.launch.sockets import wait_readable

_LONGEST = 16 << 20  # bytes of a message
_WAIT_SECONDS = 1.0
"""How often a client that waits for an answer reports it."""
_END_SECONDS = 300.0
"""How long :func:`await_end` tries to connect."""
_SLICE_SECONDS = 0.5
"""How long the server waits for a key per request; the client repeats the request, so that its threads take turns."""


class KeyValueServer:
    """Keeps the job's keys and values in memory, and answers its processes.

    Args:
        sockets: listening sockets, Unix or TCP.
        key_file: path of the job's key file; see :class:`gtrain.launch.links.AuthenticatedListener`.
        pointer: address of the Unix socket.
    """

    def __init__(self, sockets: Sequence[socket.socket], key_file: str | None, pointer: str | None) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._door = links.AuthenticatedListener(
            sockets, key_file, pointer, self._answer_all, "the job's key-value store"
        )

    def close(self) -> None:
        """Accept no more connections."""
        self._door.close()

    def _answer_all(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            while True:
                _send(connection, self._answer(_receive(connection)))

    def _answer(self, request: list[Any]) -> Any:
        with self._changed:
            match request:
                case "set", key, value:
                    return self._put(key, value)
                case "add", key, number:
                    return int(self._put(key, str(int(self._values.get(key, b"0")) + number).encode()))
                case "compare_set", key, expected, value:
                    present = self._values.get(key, b"")
                    return self._put(key, value) if present == expected else present
                case "check", keys:
                    return all(key in self._values for key in keys)
                case "get", keys, seconds:
                    self._changed.wait_for(lambda: all(key in self._values for key in keys), seconds)
                    return [self._values.get(key) for key in keys]
        raise ValueError(request)

    def _put(self, key: str, value: bytes) -> bytes:
        self._values[key] = value
        self._changed.notify_all()
        return value


class KeyValueStore:
    """A process's connection to the job's key-value store. Threads may share it; a forked child may not.

    Values are bytes; text is encoded.

    Args:
        address: where it is served; see :func:`gtrain.launch.links.connect`.
        key_file: path of the job's key file, or None within a machine.
        timeout_seconds: how long to try to connect and to wait for an answer, and the default time to wait for a key.
        report_wait: returns a function that is called repeatedly while the server does not answer, such as a
            :class:`gtrain.launch.environment.WaitReport`.

    Raises:
        RefusedConnectionError: the server belongs to another job.
        PeerLostError: nothing answers at the address.
    """

    def __init__(
        self,
        address: str,
        key_file: str | None,
        timeout_seconds: float,
        report_wait: Callable[[], Callable[[], object]] = lambda: lambda: None,
    ) -> None:
        self.address, self._timeout_seconds, self._report_wait = address, timeout_seconds, report_wait
        self._line = links.connect(address, key_file, timeout_seconds, on_wait=report_wait())
        self._lock = threading.Lock()
        self._prefix = ""

    def prefixed(self, prefix: str) -> KeyValueStore:
        """Return the part of the store whose keys start with ``prefix/``; it shares this connection."""
        part = object.__new__(KeyValueStore)
        part.__dict__.update(self.__dict__)
        part._prefix = f"{self._prefix}{prefix}/"
        return part

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._request("set", self._prefix + key, _bytes(value))

    def add(self, key: str, number: int) -> int:
        """Add to a number, which is 0 if it is not set, and return the sum."""
        return int(self._request("add", self._prefix + key, number))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key if its value is ``expected`` (empty: if it is not set), and return its value."""
        return bytes(self._request("compare_set", self._prefix + key, _bytes(expected), _bytes(value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._request("check", [self._prefix + key for key in keys]))

    def get(self, key: str, timeout_seconds: float | None = None) -> bytes:
        """Wait until a key is set and return its value.

        Raises:
            PeerLostError: the key was not set in time, or the store is gone.
        """
        value = self.poll(key, self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        if value is None:
            raise PeerLostError(f"the job's key-value store has no key {self._prefix + key}: it was not set in time")
        return value

    def poll(self, key: str, seconds: float) -> bytes | None:
        """Wait for a key for at most ``seconds``, and return its value; None if it was not set.

        Raises:
            PeerLostError: the store is gone.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            (value,) = self._request("get", [self._prefix + key], max(0.0, min(_SLICE_SECONDS, left)))
            if value is not None:
                return bytes(value)
            if left <= 0:
                return None

    def _request(self, *request: Any) -> Any:
        with self._lock:
            try:
                self._line.settimeout(self._timeout_seconds)
                _send(self._line, request)
                self._await_answer()
                return _receive(self._line)
            except OSError as error:
                self._line.close()  # a late reply would be taken for the next one
                reason = error.strerror or error
                raise PeerLostError(f"the job's key-value store at {self.address} is gone: {reason}") from error

    def _await_answer(self) -> None:
        """Wait until the first bytes of an answer can be read, or until reading them would raise."""
        report, deadline = self._report_wait(), time.monotonic() + self._timeout_seconds
        while not (isinstance(self._line, ssl.SSLSocket) and self._line.pending()):
            left = deadline - time.monotonic()
            if wait_readable([self._line.fileno()], max(0.0, min(_WAIT_SECONDS, left))):
                return
            if left <= 0:
                raise TimeoutError(f"no answer for {self._timeout_seconds:g} s")
            report()


def await_end(address: str, key_file: str | None) -> PeerLostError | None:
    """Block until a job's store is gone; return the error if the connection broke.

    Args:
        address: address of the store.
        key_file: path of the job's key file.
    """
    try:
        with links.connect(address, key_file, _END_SECONDS, listens=True) as connection:
            connection.recv(1)
    except PeerLostError as error:
        return error
    except OSError as error:
        return PeerLostError(str(error.strerror or error))
    return None


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _send(connection: socket.socket, message: Any) -> None:
    links.send_frame(connection, msgpack.packb(message))


def _receive(connection: socket.socket) -> Any:
    return msgpack.unpackb(links.receive_frame(connection, _LONGEST))
