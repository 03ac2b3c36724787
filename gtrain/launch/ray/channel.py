"""JSON messages over a socket, one per line. Imports the standard library only."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from collections.abc import Callable
from typing import Any

_PIECE = 1 << 16


class Channel:
    """Messages to and from another process; sending never blocks this one.

    Args:
        connection: a stream socket.
        selector: calls :meth:`handle` for its events.
        on_message: called with each message.
        on_close: called once, when the other end has closed the connection.
    """

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        on_message: Callable[[Channel, dict[str, Any]], None],
        on_close: Callable[[Channel], None],
    ) -> None:
        self._connection, self._selector = connection, selector
        self._on_message, self._on_close = on_message, on_close
        self._received, self._unsent, self._finished = b"", bytearray(), False
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self.handle)

    def send(self, **message: Any) -> None:
        """Send a message, later if the kernel does not accept it now."""
        self._unsent += encode(message)
        self._flush()

    def finish(self) -> None:
        """Close the connection when everything is sent."""
        self._finished = True
        self._flush()

    def handle(self, events: int) -> None:
        """Send and receive what is possible now."""
        if events & selectors.EVENT_WRITE:
            self._flush()
        if not events & selectors.EVENT_READ or self._connection.fileno() < 0:
            return
        try:
            data = self._connection.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._on_close(self)
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._on_message(self, json.loads(line))

    def close(self) -> None:
        """Close the connection."""
        if self._connection.fileno() >= 0:
            self._selector.unregister(self._connection)
            self._connection.close()

    def _flush(self) -> None:
        if self._connection.fileno() < 0:
            return
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    del self._unsent[: self._connection.send(self._unsent)]
                except BlockingIOError:
                    raise
                except OSError:  # closed by the other end; reading notices it
                    self._unsent.clear()
        if self._finished and not self._unsent:
            self.close()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._connection, events, self.handle)


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"
