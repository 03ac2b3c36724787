"""What a client and its server say to each other: greetings, requests, answers, and what a loss of contact means.

Everything here happens under the client's lock. Results are not given to futures here, for a callback may ask again,
but put into ``settled``; the client delivers them without the lock.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gtrain.errors import GtrainError
from gtrain.wire import failures
from gtrain.wire.counters import Counters
from gtrain.wire.errors import FrameError, RefusedError, WireError
from gtrain.wire.header import Header, Kind, decode_header, pack_body, pack_header
from gtrain.wire.limits import Limits
from gtrain.wire.message import Message, from_frames
from gtrain.wire.outstanding import Outstanding, Pending
from gtrain.wire.throttle import Throttle
from gtrain.wire.transports import AnyLink, link
from gtrain.wire.zeromq.security import Security
from gtrain.wire.zeromq.sockets import Frames

log = logging.getLogger(__name__)
TELL_SECONDS = 3.0
"""How long the peer may be missing before the log says so."""
MAX_UNTOLD_BYTES = 8 << 20
MAX_UNTOLD = 128
"""Answers received whose receipt the server is not told of by the next request are acknowledged by a message."""


class Party(Protocol):
    """Who speaks, and to whom."""

    peer: str
    address: str
    name: str
    incarnation: int


class Dialogue:
    """A client's side of it; see :mod:`gtrain.wire.header` for the messages.

    Args:
        party: names.
        security: keys, or None.
        limits: of this side.
        settled: gets a function for each finished request that gives its future the result.
    """

    def __init__(
        self, party: Party, security: Security | None, limits: Limits, settled: deque[Callable[[], None]]
    ) -> None:
        self.counters = Counters()
        self.server = 0
        self._party, self._security, self._settled = party, security, settled
        self._limits = self._agreed = limits
        self._table = Outstanding()
        self._link: AnyLink | None = None
        self._ready = False  # the server has welcomed this connection
        self._greeting = 0
        self._greeted = False  # and not welcomed yet
        self._refusal: str | None = None
        self._missing_since: float | None = None
        self._told = False
        self._heard = 0.0
        self._untold_bytes = self._untold = 0
        self._throttle = Throttle(log)

    @property
    def busy(self) -> bool:
        """Whether anything is unanswered."""
        return bool(self._table.pending)

    @property
    def neglected(self) -> bool:
        """Whether anything is unanswered that no thread comes for."""
        return self._table.unattended > 0

    def open(self) -> None:
        """Begin to connect."""
        self._link = link(self._party.address, self._security, self._limits)

    def close(self) -> None:
        """End the connection; the server is told that it may forget all answers."""
        if self._link is not None:
            if self._ready:
                self._acknowledge()
            self._link.close()
            self._link = None

    def wake(self) -> None:
        """End the driver's waiting."""
        if self._link is not None:
            self._link.wake()

    def wait(self, seconds: float) -> None:
        """Wait for something to happen; the one method that is called without the lock, by the driver."""
        if self._link is not None:
            self._link.wait(seconds)

    @property
    def unsent(self) -> bool:
        """Whether something is to be sent that the kernel does not take yet."""
        return self._link is not None and self._link.unsent

    def has_input(self) -> bool:
        """Whether an answer is there that the driver may not have been told of."""
        return self._link is not None and self._link.has_input()

    def has_room(self, nbytes: int) -> bool:
        """Whether a request of so many bytes fits in beside those under way."""
        return self._table.has_room(nbytes, self._agreed)

    # ------------------------------------------------------------------------------------------------- asking

    def answered(self, pending: Pending) -> bool:
        """Whether a request is finished, its future perhaps not yet."""
        return pending.sequence not in self._table.pending

    def post(self, pending: Pending) -> None:
        """Take a request on: send it now, or when the server is there.

        Raises:
            RefusedError: the server has refused this client.
        """
        assert self._link is not None
        if self._link.connection_changed():  # so that an idle client does not ask a server that has gone
            self._look_at_the_connection()
        if self._refusal is not None:
            raise self._refused(self._refusal)
        self._table.add(pending)
        if self._ready:
            self._send_first(pending)

    def _send_first(self, pending: Pending) -> None:
        """Send a request for the first time, if the server takes one of that size."""
        error = failures.excess(self._party.peer, pending, self._agreed)
        if error is not None:
            self._fail(pending, error)
            return
        if self._send(pending):
            pending.sent = self.server
            self.counters.requests += 1

    def _send(self, pending: Pending) -> bool:
        """Send a request with the latest acknowledgements; tell whether there was a connection for it."""
        low, done = self._table.news()
        header = self._header(Kind.REQUEST, pending.method, pending.sequence, low, done)
        self._transmit(pack_header(header, pending.body), pending.frames)
        self._untold_bytes = self._untold = 0
        return self._ready

    def _header(self, kind: Kind, method: str, sequence: int, low: int, done: list[int]) -> Header:
        """A header from this client to the server that it knows."""
        party = self._party
        return Header(kind, method, party.name, party.incarnation, sequence, self.server, low, done)

    def _transmit(self, header: bytes, frames: list[memoryview]) -> None:
        """Hand a message to zmq."""
        assert self._link is not None
        nbytes = self._link.send(header, frames)
        self.counters.bytes_sent += nbytes
        self._ready = self._ready and nbytes > 0

    def _greet(self) -> None:
        """Tell the server who is here and what was asked before."""
        self._greeting += 1
        self._greeted = True
        low, done = self._table.finished()
        waiting = [sequence for sequence, pending in self._table.pending.items() if pending.sent]
        fields = {"limits": self._limits.announce(), "waiting": waiting}
        header = self._header(Kind.HELLO, "", self._greeting, low, done)
        self._transmit(pack_header(header, pack_body("", fields, (), self._limits)), [])

    def _acknowledge(self) -> None:
        """Tell the server which answers it may forget."""
        low, done = self._table.news()
        self._transmit(pack_header(self._header(Kind.ACK, "", 0, low, done)), [])
        self._untold_bytes = self._untold = 0

    # ---------------------------------------------------------------------------------------------- listening

    def advance(self, awaited: Callable[[], bool]) -> float:
        """Do what can be done without waiting, or until the answer that is waited for is there.

        Args:
            awaited: whether it is; asked after each message.

        Returns:
            the earliest monotonic time at which more is due.
        """
        assert self._link is not None
        if self._link.connection_changed():
            self._look_at_the_connection()
        while self._read_one():
            self._acknowledge_in_time()
            if awaited():
                return self._heard
        now = time.monotonic()
        for pending in self._table.expired(now):
            self._fail(pending, self._late(pending))
        self._watch(now)
        return self._table.soonest

    def _read_one(self) -> bool:
        """Take the next message in; False if there is none. Its memory is not held on to from here."""
        assert self._link is not None
        frames = self._link.receive()
        if frames is None:
            return False
        self._heard = time.monotonic()
        self._read(frames)
        return True

    def _acknowledge_in_time(self) -> None:
        """Have the server forget answers without waiting for the next request, if they are many or large."""
        most = min(MAX_UNTOLD_BYTES, self._agreed.max_bytes_in_flight // 8)
        if self._ready and (self._untold_bytes > most or self._untold >= MAX_UNTOLD):
            self._acknowledge()

    def _look_at_the_connection(self) -> None:
        """Take note of losses, arrivals and refusals."""
        assert self._link is not None
        news = self._link.news()
        if news is None:
            return
        if news.lost:
            self._ready = self._greeted = False
        if news.refusal is not None:
            self._refuse(news.refusal)
        elif news.arrived:
            self._greet()

    def _watch(self, now: float) -> None:
        """Say so when the peer is missing; ask after requests when it is silent."""
        assert self._link is not None
        if not self.busy or self._refusal is not None:
            self._missing_since = None
        elif self._ready:
            self._missing_since = None
            if now - max(self._heard, self._oldest_wait) > self._limits.silence_seconds:
                self._heard = now
                self._greet()
        else:
            self._missing_since = self._missing_since or now
            self._link.renew_if_quiet(now)
            if not self._told and now - self._missing_since > TELL_SECONDS:
                self._told = True
                log.warning("waiting for %s at %s%s", self._party.peer, self._party.address, self._why())

    @property
    def _oldest_wait(self) -> float:
        """When the oldest unanswered request was made, in monotonic seconds."""
        pending = next(iter(self._table.pending.values()))
        return pending.deadline - pending.seconds

    def _why(self) -> str:
        suspicion = self._link.suspicion() if self._link is not None else None
        return f": {suspicion}" if suspicion else ""

    def _read(self, frames: Frames) -> None:
        """Take one message in; what cannot be read is logged and dropped, or raised by the request it answers."""
        nbytes = sum(len(frame) for frame in frames)
        self.counters.bytes_received += nbytes
        header: Header | None = None
        try:
            header = decode_header(frames[0].buffer, self._limits)
            message = Message(header.fields, from_frames(header.specs, [f.buffer for f in frames[1:]], self._limits))
        except FrameError as err:
            self.counters.malformed += 1
            header = header or err.header
            pending = self._answered(header) if header is not None else None
            if pending is None:
                self._throttle.warning("malformed", f"dropped what {self._party.peer} sent: {err.message}")
            else:
                self._fail(pending, err)
            return
        if header.client == self._party.name and header.client_incarnation == self._party.incarnation:
            self._take(header, message, nbytes)

    def _take(self, header: Header, message: Message, nbytes: int) -> None:
        """Act on a message that is for this client."""
        if header.kind == Kind.WELCOME:
            self._welcomed(header)
        elif header.kind == Kind.REFUSED:
            self._refuse("a newer incarnation of this client is there")
        elif (pending := self._answered(header)) is None:
            return
        elif header.kind == Kind.STALE:
            self._not_taken(pending, header.server_incarnation)
        else:
            self._untold_bytes += nbytes
            self._untold += 1
            if header.kind == Kind.REPLY:
                self._table.finish(pending)
                self._settled.append(lambda: pending.future.set_result(message))
            elif header.kind == Kind.ERROR:
                self._fail(pending, failures.remote(self._party.peer, pending, header))

    def _not_taken(self, pending: Pending, server: int) -> None:
        """The server did not execute a request, because it was meant for another life of it.

        zmq delivers a message once at most: what this life has got and was sent only once never reached the other.
        """
        if pending.sent != server and not pending.resent:
            pending.sent = 0
            self.counters.requests -= 1
        else:
            self._fail(pending, failures.restarted(self._party.peer, pending))
        self._ready = False
        if not self._greeted:
            self._greet()

    def _answered(self, header: Header) -> Pending | None:
        """The unanswered request that a message answers; None if it answers none, or one to an earlier server."""
        if header.kind not in (Kind.REPLY, Kind.ERROR, Kind.STALE):
            return None
        pending = self._table.pending.get(header.sequence)
        if pending is None or not pending.sent:
            return None
        return pending if header.kind == Kind.STALE or pending.sent == header.server_incarnation else None

    def _welcomed(self, header: Header) -> None:
        """The server is there: send what it has not got, or raise what another life of it may have had."""
        if header.sequence != self._greeting:
            return
        self._greeted = False
        restarted = self.server not in (0, header.server_incarnation)
        self.counters.restarts += int(restarted)
        self.server, self._ready, self._told = header.server_incarnation, True, False
        announced = header.fields.get("limits")
        self._agreed = self._limits.agreed(announced) if isinstance(announced, dict) else self._limits
        missing = header.fields.get("missing")
        missing = set(missing) if isinstance(missing, list) and all(type(item) is int for item in missing) else set()
        for pending in list(self._table.pending.values()):
            if not pending.sent:
                self._send_first(pending)
            elif pending.sent != self.server:
                self._fail(pending, failures.restarted(self._party.peer, pending))
            elif pending.sequence in missing:
                self.counters.resent += 1
                pending.resent = True
                self._send(pending)

    # ------------------------------------------------------------------------------------------------ raising

    def fail_all(self, make: Callable[[], GtrainError]) -> None:
        """Have all unanswered requests raise."""
        for pending in list(self._table.pending.values()):
            self._fail(pending, make())

    def _fail(self, pending: Pending, error: GtrainError) -> None:
        self.counters.errors += 1
        self._table.finish(pending)
        self._settled.append(lambda: pending.future.set_exception(error))

    def _refuse(self, reason: str) -> None:
        """The server will never let this client in."""
        self._refusal, self._ready = reason, False
        self.fail_all(lambda: self._refused(reason))

    def _refused(self, reason: str) -> RefusedError:
        return failures.refused(self._party.peer, self._party.address, reason)

    def _late(self, pending: Pending) -> WireError:
        """What a request past its deadline raises."""
        if not self._ready and self._link is not None and (suspicion := self._link.suspicion()):
            return self._refused(suspicion)
        return failures.late(self._party.peer, self._party.address, pending)
