"""A key-value store for the processes of a job: one process serves it, all connect."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgpack

from gtrain.errors import PeerLostError
from gtrain.launch import links

_LENGTH = struct.Struct("!I")
_LONGEST = 16 << 20
_ANSWER_SECONDS = 60.0
"""How long the server may take for an answer that does not wait for a key."""
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
        timeout_seconds: how long to try to connect, and the default time to wait for a key.

    Raises:
        RefusedConnectionError: the server belongs to another job.
        PeerLostError: nothing answers at the address.
    """

    def __init__(self, address: str, key_file: str | None, timeout_seconds: float) -> None:
        self.address, self._timeout_seconds = address, timeout_seconds
        self._line = links.connect(address, key_file, timeout_seconds)
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
        deadline = time.monotonic() + (self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        while True:
            left = deadline - time.monotonic()
            (value,) = self._request("get", [self._prefix + key], max(0.0, min(_SLICE_SECONDS, left)))
            if value is not None:
                return bytes(value)
            if left <= 0:
                raise PeerLostError(
                    f"the job's key-value store has no key {self._prefix + key}: it was not set in time"
                )

    def _request(self, *request: Any) -> Any:
        with self._lock:
            try:
                self._line.settimeout(_ANSWER_SECONDS)
                _send(self._line, request)
                return _receive(self._line)
            except OSError as error:
                self._line.close()  # a late reply would be taken for the next one
                reason = error.strerror or error
                raise PeerLostError(f"the job's key-value store at {self.address} is gone: {reason}") from error


def await_end(address: str, key_file: str | None) -> PeerLostError | None:
    """Block until a job's store is gone; return the error if the connection broke.

    Args:
        address: address of the store.
        key_file: path of the job's key file.
    """
    try:
        with links.connect(address, key_file, _ANSWER_SECONDS, listens=True) as connection:
            connection.recv(1)
    except PeerLostError as error:
        return error
    except OSError as error:
        return PeerLostError(str(error.strerror or error))
    return None


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _send(connection: socket.socket, message: Any) -> None:
    content = msgpack.packb(message)
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket) -> Any:
    head = bytearray(_LENGTH.size)
    links.receive_into(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > _LONGEST:
        raise ConnectionAbortedError(f"a message of {length} bytes")
    content = bytearray(length)
    links.receive_into(connection, memoryview(content))
    return msgpack.unpackb(content)
