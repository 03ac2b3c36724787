"""The answering side: one loop that takes requests in turn, executes each once, and answers.

Handlers run in the loop's thread, one after the other, so they need no locks among themselves. One that has to wait,
for other clients or for a disk, returns a future, and the loop goes on; the answer leaves when the future is done.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType

from gtrain.errors import ConfigError, GtrainError, disk_full
from gtrain.wire.addresses import reachable
from gtrain.wire.counters import Counters
from gtrain.wire.errors import FrameError, WireError
from gtrain.wire.header import EMPTY_BODY, Header, Kind, decode_header, pack_body, pack_header
from gtrain.wire.limits import Limits
from gtrain.wire.message import Message, from_frames
from gtrain.wire.session import Answer, Caller, Session, Status, failure, success
from gtrain.wire.throttle import Throttle
from gtrain.wire.transports import AnyListener, listener
from gtrain.wire.zeromq.listener import plan_address
from gtrain.wire.zeromq.security import Security
from gtrain.wire.zeromq.sockets import Frames

log = logging.getLogger(__name__)
Result = Message | None
Handler = Callable[[Message, Caller], "Result | Future[Result]"]
MAX_SESSIONS = 4096
STOP_SECONDS = 0.2
"""How often an event given to ``run`` is looked at."""


class Server:
    """Answers requests of any number of clients.

    Args:
        handlers: for each method a function of the message and its caller that returns the answer, None for an empty
            one, or a future of either. What it raises is raised at the asker as RemoteError.
            One that is added to this mapping later is found as well.
        name: for messages, such as "lock server".
        address: ``ipc://`` path or ``tcp://host:port``; port 0 takes a free one.
        descriptor: a bound stream socket to use instead, which stays the caller's: a server that is restarted
            adopts it once more, and clients find it at the same address.
        security: the job's keys; required unless the address is local.
        limits: see :class:`Limits`.

    Raises:
        ConfigError: no address, a malformed one, or one that is not local without keys.
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
        self.name, self.counters = name, Counters()
        self.incarnation = secrets.randbits(62) + 1
        self._handlers, self._limits = handlers, limits
        self._plan = plan_address(address, descriptor, security)
        self._descriptor, self._security = descriptor, security
        self._listener: AnyListener | None = None
        self._pid = 0
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._deferred: deque[tuple[Session, Header, Future[Result]]] = deque()
        self._throttle = Throttle(log)
        self._closing = self._running = False
        self._thread: threading.Thread | None = None
        self._loop = 0

    @property
    def address(self) -> str:
        """What clients connect to; binds the socket if it is not bound yet."""
        return reachable(self._bound().endpoint)

    def run(self, stop: threading.Event | None = None, work: Callable[[], bool] | None = None) -> None:
        """Serve until ``stop`` is set or :meth:`close` is called; then answers already given still leave.

        Args:
            stop: looked at every 0.2 s.
            work: called when all requests that are there were taken, to do a little of what they ask for by futures;
                returns whether it did anything, and is called again before the loop sleeps. So work needs no thread.
        """
        sockets, self._running, self._loop = self._bound(), True, threading.get_ident()
        try:
            while not self._ended(stop):
                served = self._serve_some(sockets, stop)
                if work is not None and work():
                    continue
                if not served:
                    sockets.wait(STOP_SECONDS if stop is not None else 60.0)
        finally:
            sockets.close()

    def start(self, work: Callable[[], bool] | None = None) -> Server:
        """Serve in a thread of its own, unless it has one; returns the server. See :meth:`run`."""
        if self._thread is not None:
            return self
        self._bound()
        self._running = True
        name = f"gtrain-server-{self.name}"
        self._thread = threading.Thread(target=self.run, args=(None, work), name=name, daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End serving, and wait for the thread that :meth:`start` made."""
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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # ------------------------------------------------------------------------------------------------ the loop

    def _bound(self) -> AnyListener:
        """The listening socket, made on first use: not before, because a fork may come between."""
        if self._listener is None:
            self._pid = os.getpid()
            self._listener = listener(
                self._plan, self._descriptor, self._security, self._limits, self.name, self.counters
            )
        elif self._pid != os.getpid():
            raise WireError(
                f"{self.name} was bound by the process that this one was forked from",
                hint="bind servers after the fork",
            )
        return self._listener

    def _ended(self, stop: threading.Event | None) -> bool:
        return self._closing or (stop is not None and stop.is_set())

    def _serve_some(self, sockets: AnyListener, stop: threading.Event | None) -> bool:
        """Take all that is there; tell whether there was anything, for sending may eat the signal of more."""
        served = False
        while not self._ended(stop) and self._take_one(sockets):
            served = True
            self._finish_deferred()
        sockets.watch()
        return self._finish_deferred() or served

    def _take_one(self, sockets: AnyListener) -> bool:
        """Act on the next message; False if there is none. Its memory is not held on to from here."""
        frames = sockets.receive()
        if frames is not None:
            self._take(frames)
        return frames is not None

    def _take(self, frames: Frames) -> None:
        """Read one message and act on it; what cannot be read is answered if its sender can be told, or dropped."""
        routing, nbytes = frames[0].bytes, sum(len(frame) for frame in frames[1:])
        self.counters.bytes_received += nbytes
        header: Header | None = None
        try:
            if len(frames) < 2:
                raise FrameError("a malformed message: it has no header", hint="connect gtrain's processes only")
            header = decode_header(frames[1].buffer, self._limits)
            tensors = from_frames(header.specs, [frame.buffer for frame in frames[2:]], self._limits)
            if nbytes > self._limits.max_message_bytes:
                raise FrameError(f"a message of {nbytes:,} bytes", hint="send it in pieces")
        except FrameError as err:
            self._malformed(routing, header or err.header, err)
            return
        if header.kind == Kind.HELLO:
            self._greeted(routing, header)
        elif (session := self._known(routing, header)) is not None:
            session.routing = routing
            session.acknowledge(header.low, header.done)
            if header.kind == Kind.REQUEST:
                self._asked(session, header, Message(header.fields, tensors), nbytes)
            self._resume(session)

    def _malformed(self, routing: bytes, header: Header | None, error: FrameError) -> None:
        """Answer a request that cannot be read, or drop it; either way it was not executed."""
        self.counters.malformed += 1
        self._throttle.warning("malformed", f"{self.name} received {error.message}")
        if header is None or header.kind != Kind.REQUEST:
            return
        session = self._known(routing, header)
        if session is not None and session.status(header.sequence) == Status.NEW:
            self._answer(session, header, self._failure(header, error))

    # ------------------------------------------------------------------------------------------- clients' lives

    def _greeted(self, routing: bytes, header: Header) -> None:
        """A client is here: for the first time, again, or in a new life."""
        session = self._sessions.get(header.client)
        if session is not None and session.incarnation > header.client_incarnation:
            self._refuse(routing, header)
            return
        if session is None or session.incarnation < header.client_incarnation:
            session = Session(header.client, header.client_incarnation, routing, self._limits, low=max(1, header.low))
            self._sessions[header.client] = session
            self._forget_old_sessions()
        session.routing = routing
        announced = header.fields.get("limits")
        session.limits = self._limits.agreed(announced) if isinstance(announced, dict) else self._limits
        session.acknowledge(header.low, header.done)
        waiting = [number for number in header.fields.get("waiting") or () if type(number) is int]
        missing = [number for number in waiting if session.status(number) == Status.NEW]
        body = pack_body("", {"limits": self._limits.announce(), "missing": missing}, (), self._limits)
        self._send(routing, header, Kind.WELCOME, body, [])
        for number in waiting:
            if number in session.answers:
                self._send_again(session, header, number)
        self._resume(session)

    def _known(self, routing: bytes, header: Header) -> Session | None:
        """The session that a message belongs to; None if it was told that there is none."""
        session = self._sessions.get(header.client)
        if session is not None and session.incarnation > header.client_incarnation:
            self._refuse(routing, header)
        elif (
            session is None
            or session.incarnation != header.client_incarnation
            or header.server_incarnation != self.incarnation
        ):
            if header.kind == Kind.REQUEST:
                self._send(routing, header, Kind.STALE, EMPTY_BODY, [])
        else:
            self._sessions.move_to_end(header.client)
            return session
        return None

    def _refuse(self, routing: bytes, header: Header) -> None:
        self.counters.refused += 1
        self._throttle.warning("incarnation", f"{self.name} refused an older incarnation of {header.client}")
        self._send(routing, header, Kind.REFUSED, EMPTY_BODY, [])

    def _forget_old_sessions(self) -> None:
        """Keep the number of sessions bounded; a forgotten client that asks again is told so and raises."""
        excess = len(self._sessions) - MAX_SESSIONS
        if excess > 0:
            for client in [name for name, session in self._sessions.items() if session.idle][:excess]:
                del self._sessions[client]

    # ------------------------------------------------------------------------------------------------ executing

    def _asked(self, session: Session, header: Header, message: Message, nbytes: int) -> None:
        """Execute a request, unless it came before or has to wait."""
        status = session.status(header.sequence)
        if status == Status.BEYOND:
            self.counters.malformed += 1
            self._throttle.warning("beyond", f"{self.name} dropped a request of {header.client} far ahead of others")
        elif status != Status.NEW:
            self.counters.duplicates += 1
            if status == Status.ANSWERED:
                self._send_again(session, header, header.sequence)
        elif session.overflows(nbytes):
            error = FrameError(
                f"{nbytes:,} bytes more than the {session.waiting_bytes:,} that wait already",
                hint="ask for less at a time, or raise max_bytes_in_flight in the Limits of both sides",
            )
            self._answer(session, header, self._failure(header, error))
        elif session.full or session.parked:
            session.park(header, message, nbytes)
        else:
            self._execute(session, header, message, nbytes)

    def _resume(self, session: Session) -> None:
        """Execute what had to wait, as long as there is room for answers."""
        while session.parked and not session.full:
            header, message, nbytes = session.unpark()
            if session.status(header.sequence) == Status.NEW:  # else its deadline passed meanwhile
                self._execute(session, header, message, nbytes)

    def _execute(self, session: Session, header: Header, message: Message, nbytes: int) -> None:
        """Call the handler, and answer with what it returns or raises."""
        self.counters.requests += 1
        try:
            handler = self._handlers.get(header.method)
            if handler is None:
                raise self._unknown_method(header.method)
            result = handler(message, Caller(header.client, header.client_incarnation, header.sequence))
        except Exception as err:
            self._answer(session, header, self._failure(header, err))
            return
        if isinstance(result, Future):
            session.start(header.sequence, nbytes)
            result.add_done_callback(lambda future: self._defer(session, header, future))
        else:
            self._answer(session, header, self._success(session, header, result))

    def _unknown_method(self, method: str) -> ConfigError:
        known = ", ".join(sorted(self._handlers)) or "none"
        return ConfigError(f"there is no method {method!r}", hint=f"use one of: {known}")

    def _defer(self, session: Session, header: Header, future: Future[Result]) -> None:
        """Have the loop answer; called by whichever thread finished the future."""
        self._deferred.append((session, header, future))
        if self._listener is not None and threading.get_ident() != self._loop:
            self._listener.wake()

    def _finish_deferred(self) -> bool:
        """Answer requests whose futures are done; tell whether there were any."""
        any_finished = False
        while self._deferred:
            session, header, future = self._deferred.popleft()
            any_finished = True
            if future.cancelled():
                error: BaseException | None = WireError("the request was cancelled", hint="ask once more")
            else:
                error = future.exception()
            answer = self._failure(header, error) if error else self._success(session, header, future.result())
            self._answer(session, header, answer)
            self._resume(session)
        return any_finished

    # ------------------------------------------------------------------------------------------------ answering

    def _success(self, session: Session, header: Header, result: Result) -> Answer:
        """The answer that carries a handler's result, or the error that it cannot be sent."""
        try:
            return success(header.method, result, session.limits)
        except Exception as err:
            return self._failure(header, err)

    def _failure(self, header: Header, error: BaseException) -> Answer:
        """The answer that raises at the asker; a defect is logged here with its traceback."""
        self.counters.errors += 1
        error = disk_full(error) or error
        if not isinstance(error, GtrainError):
            log.error("%s failed to answer %r of %s", self.name, header.method, header.client, exc_info=error)
        return failure(header.method, error, self._limits)

    def _answer(self, session: Session, header: Header, answer: Answer) -> None:
        """Keep an answer until it is acknowledged, and send it."""
        if session.keep(header.sequence, answer) and self._sessions.get(session.client) is session:
            self._send(session.routing, header, answer.kind, answer.body, answer.frames)

    def _send_again(self, session: Session, header: Header, sequence: int) -> None:
        """Send a kept answer once more."""
        self.counters.resent += 1
        answer = session.answers[sequence]
        self._send(session.routing, header, answer.kind, answer.body, answer.frames, sequence)

    def _send(
        self, routing: bytes, to: Header, kind: Kind, body: bytes, frames: list[memoryview], sequence: int | None = None
    ) -> None:
        """Send a message that answers the one with header ``to``."""
        assert self._listener is not None
        number = to.sequence if sequence is None else sequence
        header = Header(kind, "", to.client, to.client_incarnation, number, self.incarnation)
        self.counters.bytes_sent += self._listener.send(routing, pack_header(header, body), frames)
