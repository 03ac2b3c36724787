"""The authenticator of a server with keys: a ZAP handler (ZeroMQ RFC 27)."""

from __future__ import annotations

import threading
from typing import Any

import zmq
from zmq.utils import z85

from gtrain.wire.logs import RefusalLog
from gtrain.wire.zeromq.security import Security


class Authenticator:
    """Accepts or refuses the CURVE key of each new connection.

    Runs in a thread, so that handshakes proceed while a handler of the server computes. The thread ends with the
    context.

    Args:
        context: the server's context: zmq sends the requests of all its sockets to one handler per context.
        security: has the list of the job's keys.
        name: name of the server, which becomes part of the thread's name.
        refusals: counts and logs refused keys.
    """

    def __init__(self, context: zmq.Context[Any], security: Security, name: str, refusals: RefusalLog) -> None:
        self._security, self._refusals = security, refusals
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        threading.Thread(target=self._run, name=f"gtrain-zap-{name}", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._reply(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _reply(self, request: list[bytes]) -> list[bytes]:
        """Return the reply to one request: accept (200) or refuse (400) a key."""
        if len(request) < 6 or request[0] != b"1.0":
            return [b"1.0", request[1] if len(request) > 1 else b"", b"500", b"not ZAP 1.0", b"", b""]
        # RFC 27: version, request id, domain, address, identity, mechanism, credentials (for CURVE the client's key).
        # The reply: version, request id, status code, status text, user id, metadata.
        number, address, mechanism = request[1], request[3].decode(errors="replace"), request[5]
        key = z85.encode(request[6]).decode() if mechanism == b"CURVE" and len(request[6:]) == 1 else ""
        if self._security.admits(key):
            return [b"1.0", number, b"200", b"OK", key.encode(), b""]
        self._refusals.count()
        self._refusals.report(address, f"its key {key} does not belong to this job")
        return [b"1.0", number, b"400", b"this key does not belong to this job", b"", b""]
