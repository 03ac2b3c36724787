"""Who is let in: the ZAP handler (ZeroMQ RFC 27) of a server with keys, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from typing import Any

import zmq
from zmq.utils import z85

from gtrain.wire.counters import Counters
from gtrain.wire.zeromq.security import Security

log = logging.getLogger(__name__)
MAX_REMEMBERED = 1024
"""Refused keys and addresses that are remembered, so that each is logged once."""


class Authenticator:
    """Answers zmq's question for each connection: is this key on the list?

    A thread of its own, because handshakes go on while a handler of the server computes. It ends with the context.

    Args:
        context: the server's; zmq asks within a context.
        security: has the list.
        name: the server's, for messages.
        counters: ``refused`` is counted there.
    """

    def __init__(self, context: zmq.Context[Any], security: Security, name: str, counters: Counters) -> None:
        self._security, self._name, self._counters = security, name, counters
        self._seen: set[tuple[str, str]] = set()
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self._thread = threading.Thread(target=self._run, name=f"gtrain-zap-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to one question."""
        if len(request) < 6 or request[0] != b"1.0":
            return [b"1.0", request[1] if len(request) > 1 else b"", b"500", b"not ZAP 1.0", b"", b""]
        number, address, mechanism = request[1], request[3].decode(errors="replace"), request[5]
        key = z85.encode(request[6]).decode() if mechanism == b"CURVE" and len(request[6:]) == 1 else ""
        if self._security.admits(key):
            return [b"1.0", number, b"200", b"OK", key.encode(), b""]
        self._counters.refused += 1
        self._tell(key, address)
        return [b"1.0", number, b"400", b"this key is not of this job", b"", b""]

    def _tell(self, key: str, address: str) -> None:
        """Log a refusal, once for each key and address."""
        if (key, address) not in self._seen and len(self._seen) < MAX_REMEMBERED:
            self._seen.add((key, address))
            log.warning("%s refused a connection from %s: its key %s is not of this job", self._name, address, key)
