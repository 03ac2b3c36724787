"""The server: one loop that receives requests, executes each once, and replies.

Handlers run in the loop's thread, one at a time, so they need no locks among themselves. A handler that must wait, for
other clients or for a disk, returns a future and the loop goes on; the reply is sent when the future is done.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from gtrain.errors import ConfigError, GtrainError, disk_full
from gtrain.wire import tracing
from gtrain.wire.addresses import bound_address, reachable, require_keys
from gtrain.wire.counters import Counters
from gtrain.wire.errors import FrameError, WireError
from gtrain.wire.header import EMPTY_BODY, Header, MessageType, decode_header, pack_body, pack_header
from gtrain.wire.limits import Limits
from gtrain.wire.logs import RateLimitedLog
from gtrain.wire.message import Message, from_frames
from gtrain.wire.server_session import Caller, Reply, RequestStatus, ServerSession, error_reply, result_reply
from gtrain.wire.transport import Frames, Listener, uses_unix_sockets
from gtrain.wire.unix.listener import UnixListener
from gtrain.wire.zeromq.listener import ZmqListener
from gtrain.wire.zeromq.security import Security

log = logging.getLogger(__name__)
Result = Message | None
Handler = Callable[[Message, Caller], "Result | Future[Result]"]
MAX_SESSIONS = 4096
STOP_SECONDS = 0.2
"""How often ``run`` checks its stop event."""


class Server:
    """Executes the requests of any number of clients.

    Args:
        handlers: for each method a function of the message and its caller that returns the reply, None for an empty
            one, or a future of either. An exception is raised at the client as RemoteError. Handlers that are added to
            this mapping later are served as well.
        name: for messages, such as "lock server".
        address: ``ipc://`` path or ``tcp://host:port``; port 0 takes a free one.
        descriptor: a bound stream socket to use instead, which the caller keeps: a server that is restarted adopts it
            again, and clients reach it at the same address.
        security: the job's keys; required unless the address is local.
        limits: see :class:`Limits`.

    Raises:
        ConfigError: neither or both of address and descriptor were given, the address is malformed or the socket not
            bound, or the address is not local and no keys were given.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        name: str,
        address: str | None = None,
        descriptor: int | None = None,
        security: Security | None = None,
        limits: Limits = Limits(),  # noqa: B008 (it is frozen)
    ) -> None:
        if (address is None) == (descriptor is None):
            raise ConfigError(
                "a server needs either an address or a descriptor", hint="give address= or descriptor=, not both"
            )
        self.name, self.counters = name, Counters()
        # Random, not counted: a restarted server has no memory of the numbers before it. 0 means unknown.
        self.incarnation = secrets.randbits(62) + 1
        self._handlers, self._limits = handlers, limits
        self._address = address if address is not None else bound_address(descriptor or 0)
        require_keys(self._address, security is not None)
        self._descriptor, self._security = descriptor, security
        self._listener: Listener | None = None
        self._pid = 0
        self._sessions: OrderedDict[str, ServerSession] = OrderedDict()
        self._deferred: deque[tuple[ServerSession, Header, Future[Result]]] = deque()
        self._log = RateLimitedLog(log)
        self._closing = self._running = False
        self._thread: threading.Thread | None = None
        self._loop_thread = 0

    @property
    def address(self) -> str:
        """The address for clients; binds the socket if it is not bound yet."""
        return reachable(self._bound().endpoint)

    def run(self, stop: threading.Event | None = None, work: Callable[[], bool] | None = None) -> None:
        """Serve until ``stop`` is set or :meth:`close` is called; replies that were sent still arrive.

        Args:
            stop: checked every 0.2 s.
            work: called when all requests that have arrived were received, to advance a little the work that futures
                were returned for; returns whether it did anything, and is called again before the loop sleeps. Such
                work needs no thread.
        """
        listener, self._running, self._loop_thread = self._bound(), True, threading.get_ident()
        try:
            while not self._stopped(stop):
                served = self._serve_available(listener, stop)
                if work is not None and work():
                    continue
                if not served:
                    listener.wait(STOP_SECONDS if stop is not None else 60.0)
        finally:
            listener.close()

    def start(self, work: Callable[[], bool] | None = None) -> Server:
        """Serve in a thread, unless it already does; return the server. See :meth:`run`."""
        if self._thread is None:
            self._bound()
            self._running = True
            name = f"gtrain-server-{self.name}"
            self._thread = threading.Thread(target=self.run, args=(None, work), name=name, daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving, wait for the thread of :meth:`start`, and close the socket: the loop does it, if one runs."""
        self._closing = True
        if self._listener is None or self._pid != os.getpid():
            return
        self._listener.wake()
        if not self._running:
            self._listener.close()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def __enter__(self) -> Server:
        """Start serving."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Close the server."""
        self.close()

    # ------------------------------------------------------------------------------------------------ the loop

    def _bound(self) -> Listener:
        """Return the listener, created on first use: the process may fork between creation and use of a server."""
        if self._listener is None:
            self._pid = os.getpid()
            if uses_unix_sockets(self._address, self._security is not None):
                self._listener = UnixListener(self._address, self._descriptor, self._limits, self.name, self.counters)
            else:
                self._listener = ZmqListener(
                    self._address, self._descriptor, self._security, self._limits, self.name, self.counters
                )
        elif self._pid != os.getpid():
            raise WireError(
                f"{self.name} was bound by the process that this one was forked from",
                hint="bind servers after the fork",
            )
        return self._listener

    def _stopped(self, stop: threading.Event | None) -> bool:
        return self._closing or (stop is not None and stop.is_set())

    def _serve_available(self, listener: Listener, stop: threading.Event | None) -> bool:
        """Serve all messages that have arrived; return whether there were any.

        The loop must not sleep after one: sending may have consumed zmq's signal for further input.
        """
        served = False
        while not self._stopped(stop) and self._receive_one(listener):
            served = True
            self._reply_deferred()
        listener.check_connections()
        return self._reply_deferred() or served

    def _receive_one(self, listener: Listener) -> bool:
        """Handle the next message; False if none has arrived. Returning releases the memory of its frames."""
        frames = listener.receive()
        if frames is not None:
            self._read(frames)
        return frames is not None

    def _read(self, frames: Frames) -> None:
        """Read and handle one message; a malformed request is answered if its sender can be read, else dropped."""
        routing, nbytes = bytes(frames[0]), sum(len(frame) for frame in frames[1:])
        self.counters.bytes_received += nbytes
        header: Header | None = None
        try:
            if len(frames) < 2:
                raise FrameError("a malformed message: it has no header", hint="connect gtrain's processes only")
            header = decode_header(frames[1], self._limits)
            tensors = from_frames(header.specs, frames[2:], self._limits)
            if nbytes > self._limits.max_message_bytes:
                raise FrameError(f"a message of {nbytes:,} bytes", hint="send it in pieces")
        except FrameError as err:
            self._handle_malformed(routing, header or err.header, err)
            return
        if header.type == MessageType.HELLO:
            self._welcome(routing, header)
        elif (session := self._session_of(routing, header)) is not None:
            session.routing = routing
            session.acknowledge(header.low, header.acknowledged)
            if header.type == MessageType.REQUEST:
                self._handle_request(session, header, Message(header.fields, tensors), nbytes)
            self._execute_parked(session)

    def _handle_malformed(self, routing: bytes, header: Header | None, error: FrameError) -> None:
        """Answer a request that cannot be read with an error; drop other messages. Nothing is executed."""
        self.counters.malformed += 1
        self._log.warning("malformed", f"{self.name} received {error.message}")
        if header is None or header.type != MessageType.REQUEST:
            return
        session = self._session_of(routing, header)
        if session is not None and session.status(header.sequence) == RequestStatus.NEW:
            self._reply(session, header, self._error_reply(header, error))

    # ------------------------------------------------------------------------------------------------ sessions

    def _welcome(self, routing: bytes, header: Header) -> None:
        """Handle a HELLO: open a session, resume it, or replace it by a newer incarnation's."""
        session = self._sessions.get(header.client)
        if session is not None and session.incarnation > header.client_incarnation:
            self._refuse(routing, header)
            return
        if session is None or session.incarnation < header.client_incarnation:
            low = max(1, header.low)
            session = ServerSession(header.client, header.client_incarnation, routing, self._limits, low=low)
            self._sessions[header.client] = session
            self._drop_idle_sessions()
        session.routing = routing
        session.limits = self._limits.agreed(header.fields.get("limits"))
        session.acknowledge(header.low, header.acknowledged)
        waiting = [number for number in header.fields.get("waiting") or () if type(number) is int]
        missing = [number for number in waiting if session.status(number) == RequestStatus.NEW]
        body = pack_body("", {"limits": self._limits.announce(), "missing": missing}, (), self._limits)
        self._send(routing, header, MessageType.WELCOME, body, [])
        # The client may have lost these replies with the connection.
        for number in waiting:
            if number in session.replies:
                self._resend(session, header, number)
        self._execute_parked(session)

    def _session_of(self, routing: bytes, header: Header) -> ServerSession | None:
        """Return the session of a message; without one, answer a request with STALE or REFUSED and return None."""
        session = self._sessions.get(header.client)
        if session is not None and session.incarnation > header.client_incarnation:
            self._refuse(routing, header)
        elif (
            session is None
            or session.incarnation != header.client_incarnation
            or header.server_incarnation != self.incarnation
        ):
            if header.type == MessageType.REQUEST:
                self._send(routing, header, MessageType.STALE, EMPTY_BODY, [])
        else:
            # Least recently used first: the first idle ones are dropped.
            self._sessions.move_to_end(header.client)
            return session
        return None

    def _refuse(self, routing: bytes, header: Header) -> None:
        self.counters.refused += 1
        self._log.warning("incarnation", f"{self.name} refused an older incarnation of {header.client}")
        self._send(routing, header, MessageType.REFUSED, EMPTY_BODY, [])

    def _drop_idle_sessions(self) -> None:
        """Keep the number of sessions bounded; requests of a dropped client that returns raise."""
        excess = len(self._sessions) - MAX_SESSIONS
        if excess > 0:
            for client in [name for name, session in self._sessions.items() if session.idle][:excess]:
                del self._sessions[client]

    # ------------------------------------------------------------------------------------------------ executing

    def _handle_request(self, session: ServerSession, header: Header, message: Message, nbytes: int) -> None:
        """Execute a request, unless it was received before or must wait."""
        status = session.status(header.sequence)
        if status == RequestStatus.OUT_OF_RANGE:
            self.counters.malformed += 1
            self._log.warning("range", f"{self.name} dropped a request of {header.client} far ahead of others")
        elif status != RequestStatus.NEW:
            self.counters.duplicates += 1
            if status == RequestStatus.ANSWERED:
                self._resend(session, header, header.sequence)
        elif session.overflows(nbytes):
            error = FrameError(
                f"{nbytes:,} bytes more than the {session.waiting_bytes:,} that wait already",
                hint="send smaller requests, or raise max_bytes_in_flight in the Limits of both sides",
            )
            self._reply(session, header, self._error_reply(header, error))
        # Behind others that wait: requests of a client are executed in order.
        elif session.full or session.parked:
            session.park(header, message, nbytes)
        else:
            self._execute(session, header, message, nbytes)

    def _execute_parked(self, session: ServerSession) -> None:
        """Execute parked requests as long as the session has room for replies."""
        while session.parked and not session.full:
            header, message, nbytes = session.unpark()
            if session.status(header.sequence) == RequestStatus.NEW:
                # Else its deadline has passed at the client.
                self._execute(session, header, message, nbytes)

    def _execute(self, session: ServerSession, header: Header, message: Message, nbytes: int) -> None:
        """Call the handler, and reply with its result or exception."""
        self.counters.requests += 1
        try:
            handler = self._handlers.get(header.method)
            if handler is None:
                known = ", ".join(sorted(self._handlers)) or "none"
                raise ConfigError(f"the method {header.method!r} does not exist", hint=f"use one of: {known}")
            begin = time.time_ns()
            result = handler(message, Caller(header.client, header.client_incarnation, header.sequence))
        except Exception as err:
            self._reply(session, header, self._error_reply(header, err))
            return
        if isinstance(result, Future):
            session.start(header.sequence, nbytes)
            # The callback runs in the thread that finishes the future; the loop sends the reply.
            result.add_done_callback(lambda future: self._defer(session, header, future))
            if tracing.active() is not None:
                result.add_done_callback(lambda future: _trace(header, begin))
        else:
            _trace(header, begin)
            self._reply(session, header, self._result_reply(session, header, result))

    def _defer(self, session: ServerSession, header: Header, future: Future[Result]) -> None:
        """Have the loop reply; called by the thread that finished the future."""
        self._deferred.append((session, header, future))
        if self._listener is not None and threading.get_ident() != self._loop_thread:
            self._listener.wake()

    def _reply_deferred(self) -> bool:
        """Reply to the requests whose futures are done; return whether there were any."""
        replied = bool(self._deferred)
        while self._deferred:
            session, header, future = self._deferred.popleft()
            if future.cancelled():
                error: BaseException | None = WireError("the request was cancelled", hint="send it again")
            else:
                error = future.exception()
            self._reply(
                session,
                header,
                self._error_reply(header, error) if error else self._result_reply(session, header, future.result()),
            )
            self._execute_parked(session)
        return replied

    # ------------------------------------------------------------------------------------------------ replying

    def _result_reply(self, session: ServerSession, header: Header, result: Result) -> Reply:
        """Return the reply that carries a handler's result, or the error that it cannot be sent."""
        try:
            return result_reply(header.method, result, session.limits)
        except Exception as err:
            return self._error_reply(header, err)

    def _error_reply(self, header: Header, error: BaseException) -> Reply:
        """Return the reply that raises at the client; bugs are logged with their traceback."""
        self.counters.errors += 1
        error = disk_full(error) or error
        if not isinstance(error, GtrainError):
            log.error("%s failed to answer %r of %s", self.name, header.method, header.client, exc_info=error)
        return error_reply(header.method, error, self._limits)

    def _reply(self, session: ServerSession, header: Header, reply: Reply) -> None:
        """Keep a reply until it is acknowledged, and send it."""
        if session.keep(header.sequence, reply) and self._sessions.get(session.client) is session:
            self._send(session.routing, header, reply.type, reply.body, reply.frames)

    def _resend(self, session: ServerSession, header: Header, sequence: int) -> None:
        """Send a kept reply again."""
        self.counters.resent += 1
        reply = session.replies[sequence]
        self._send(session.routing, header, reply.type, reply.body, reply.frames, sequence)

    def _send(
        self,
        routing: bytes,
        to: Header,
        type: MessageType,
        body: bytes,
        frames: list[memoryview],
        sequence: int | None = None,
    ) -> None:
        """Send a message in reply to the one with header ``to``."""
        assert self._listener is not None
        number = to.sequence if sequence is None else sequence
        header = Header(type, "", to.client, to.client_incarnation, number, self.incarnation)
        self.counters.bytes_sent += self._listener.send(routing, pack_header(header, body), frames)


def _trace(header: Header, begin: int) -> None:
    """Record a request that was executed, if a trace is recorded."""
    if (log := tracing.active()) is not None:
        who = {"client": header.client, "incarnation": header.client_incarnation, "sequence": header.sequence}
        log.add(log.executed, begin, method=header.method, **who)
