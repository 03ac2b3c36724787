"""A client's side of the protocol: handshakes, requests, replies, reconnects, retries and server restarts.

"Wire" in docs/formats.md specifies the protocol. The client calls everything here with its lock held. Results go into a
queue of deliveries, which the client runs without the lock, because a future's callback may send a request.

**Retries.** A request is sent again only if the server's WELCOME after a reconnect lists it as never received, or if a
server incarnation rejects a request (STALE) that was sent once. The server's session recognises repetitions, so every
request is executed at most once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from gtrain.errors import GtrainError
from gtrain.wire.counters import Counters
from gtrain.wire.errors import FrameError, RefusedError, WireError
from gtrain.wire.header import Header, MessageType, decode_header, pack_body, pack_header
from gtrain.wire.limits import Limits
from gtrain.wire.logs import RateLimitedLog
from gtrain.wire.message import Message, from_frames
from gtrain.wire.pending import PendingRequest, PendingRequests
from gtrain.wire.transport import Frames, Link, uses_unix_sockets
from gtrain.wire.unix.link import UnixLink
from gtrain.wire.zeromq.link import ZmqLink
from gtrain.wire.zeromq.security import Security

log = logging.getLogger(__name__)
LOG_AFTER_SECONDS = 3.0
"""The log reports a server that cannot be reached after this time."""
MAX_UNACKNOWLEDGED_BYTES = 8 << 20
MAX_UNACKNOWLEDGED = 128
"""The client sends an ACK once this many replies have arrived since its last message."""


class ClientSession:
    """A client's session with one server.

    Args:
        peer: name of the server in messages.
        address: address of the server.
        name, incarnation: name and incarnation of the client.
        security: the job's keys, or None.
        limits: limits of this side.
        deliveries: receives, for each finished request, a function that gives its future the result.
    """

    link: Link  # since open()

    def __init__(
        self,
        peer: str,
        address: str,
        name: str,
        incarnation: int,
        security: Security | None,
        limits: Limits,
        deliveries: deque[Callable[[], None]],
    ) -> None:
        self.counters = Counters()
        self.server_incarnation = 0  # of the last WELCOME
        self.pending = PendingRequests()
        self._peer, self._address, self._name, self._incarnation = peer, address, name, incarnation
        self._security, self._deliveries = security, deliveries
        self._limits = self._agreed = limits
        # A connection is lost -> connected (HELLO sent: handshaking) -> ready (WELCOME received). Requests are sent
        # while it is ready; submitted earlier, they wait in `pending` with `sent` 0 and go out with the WELCOME.
        self._is_open = False
        self._ready = False  # the server has welcomed this connection
        self._handshake = 0  # number of the last HELLO
        self._handshaking = False  # HELLO was sent, and no WELCOME has arrived
        self._refusal: str | None = None
        self._missing_since: float | None = None
        self._logged_missing = False
        self._last_message = 0.0
        self._unacknowledged_bytes = self._unacknowledged = 0  # of the replies since the last message sent
        self._log = RateLimitedLog(log)

    def open(self) -> None:
        """Start to connect."""
        if uses_unix_sockets(self._address, self._security is not None):
            self.link = UnixLink(self._address, self._limits)
        else:
            self.link = ZmqLink(self._address, self._security, self._limits)
        self._is_open = True

    def close(self) -> None:
        """End the connection; the server may forget all replies."""
        if self._is_open:
            if self._ready:
                self._acknowledge()
            self._is_open = False
            self.link.close()

    def wake(self) -> None:
        """End the driver's wait."""
        if self._is_open:
            self.link.wake()

    def has_room(self, nbytes: int) -> bool:
        """Whether a further request of this size may be sent."""
        return self.pending.has_room(nbytes, self._agreed)

    def has_room_ahead(self, nbytes: int) -> bool:
        """Whether a further request of this size may be sent that waits for later ones."""
        return self.pending.has_room_ahead(nbytes, self._agreed)

    # ------------------------------------------------------------------------------------------------ requests

    def submit(self, request: PendingRequest) -> None:
        """Send a request, now or once the server is connected.

        Raises:
            RefusedError: the server has refused this client.
        """
        # Notice a lost connection now, so that an idle client sends no request to a server that is gone.
        self._check_connection()
        if self._refusal is not None:
            raise self._refused(self._refusal)
        self.pending.add(request)
        if self._ready:
            self._send_first(request)

    def _send_first(self, request: PendingRequest) -> None:
        """Send a request for the first time, if it is within the server's limits."""
        error = request.size_error(self._peer, self._agreed)
        if error is not None:
            self._fail(request, error)
            return
        self._send(request)
        if self._ready:
            request.sent = self.server_incarnation
            self.counters.requests += 1

    def _send(self, request: PendingRequest) -> None:
        """Send a request with the latest acknowledgements."""
        low, finished = self.pending.new_acknowledgements()
        header = self._header(MessageType.REQUEST, request.method, request.sequence, low, finished)
        self._transmit(pack_header(header, request.body), request.frames)
        self._unacknowledged_bytes = self._unacknowledged = 0

    def _header(self, type: MessageType, method: str, sequence: int, low: int, finished: list[int]) -> Header:
        """Return a header from this client to the server incarnation that it knows."""
        return Header(type, method, self._name, self._incarnation, sequence, self.server_incarnation, low, finished)

    def _transmit(self, header: bytes, frames: list[memoryview]) -> None:
        """Give a message to the link; without a connection, the session is no longer ready."""
        nbytes = self.link.send(header, frames)
        self.counters.bytes_sent += nbytes
        self._ready = self._ready and nbytes > 0

    def _send_hello(self) -> None:
        """Open or resume the session: name the requests that were sent and not answered."""
        self._handshake += 1
        self._handshaking = True
        low, finished = self.pending.all_acknowledgements()
        # Requests that were never sent are not listed; they follow the WELCOME.
        waiting = [sequence for sequence, request in self.pending.requests.items() if request.sent]
        fields = {"limits": self._limits.announce(), "waiting": waiting}
        header = self._header(MessageType.HELLO, "", self._handshake, low, finished)
        self._transmit(pack_header(header, pack_body("", fields, (), self._limits)), [])

    def _acknowledge(self) -> None:
        """Send an explicit acknowledgement."""
        low, finished = self.pending.new_acknowledgements()
        self._transmit(pack_header(self._header(MessageType.ACK, "", 0, low, finished)), [])
        self._unacknowledged_bytes = self._unacknowledged = 0

    # ------------------------------------------------------------------------------------------------ replies

    def advance(self, done: Callable[[], bool]) -> float:
        """Receive and handle all messages that have arrived, and fail requests past their deadlines; never wait.

        Args:
            done: whether the reply that the caller waits for has arrived; called after each message.

        Returns:
            the earliest monotonic time at which more is due.
        """
        self._check_connection()
        while self._receive_one():
            self._acknowledge_in_time()
            if done():
                return self._last_message
        now = time.monotonic()
        for request in self.pending.pop_expired(now):
            self._fail(request, self._deadline_error(request))
        self._watch(now)
        return self.pending.first_deadline

    def _receive_one(self) -> bool:
        """Read the next message; False if none has arrived. Returning releases the memory of its frames."""
        frames = self.link.receive()
        if frames is None:
            return False
        self._last_message = time.monotonic()
        self._read(frames)
        return True

    def _acknowledge_in_time(self) -> None:
        """Send an acknowledgement without waiting for the next request if the replies are many or large."""
        # An eighth of what the server may hold for this client, so that it rarely has to park requests.
        limit = min(MAX_UNACKNOWLEDGED_BYTES, self._agreed.max_bytes_in_flight // 8)
        if self._ready and (self._unacknowledged_bytes > limit or self._unacknowledged >= MAX_UNACKNOWLEDGED):
            self._acknowledge()

    def _check_connection(self) -> None:
        """React to a lost or new connection and to a refusal."""
        change = self.link.connection_change()
        if change is None:
            return
        if change.lost:
            self._ready = self._handshaking = False
        if change.refusal is not None:
            self._refuse(change.refusal)
        elif change.connected:
            self._send_hello()

    def _watch(self, now: float) -> None:
        """Log a server that cannot be reached; repeat the handshake with a silent one."""
        if not self.pending.requests or self._refusal is not None:
            self._missing_since = None
        elif self._ready:
            self._missing_since = None
            oldest = next(iter(self.pending.requests.values()))
            # Silence counts from the last message, or from the oldest request if that is later.
            if now - max(self._last_message, oldest.deadline - oldest.seconds) > self._limits.silence_seconds:
                self._last_message = now
                self._send_hello()
        else:
            self._missing_since = self._missing_since or now
            self.link.reconnect_if_idle(now)
            if not self._logged_missing and now - self._missing_since > LOG_AFTER_SECONDS:
                self._logged_missing = True
                reason = self.link.suspected_refusal()
                log.warning("waiting for %s at %s%s", self._peer, self._address, f": {reason}" if reason else "")

    def _read(self, frames: Frames) -> None:
        """Read one message. A malformed reply fails its request; other malformed messages are logged and dropped."""
        nbytes = sum(len(frame) for frame in frames)
        self.counters.bytes_received += nbytes
        header: Header | None = None
        try:
            header = decode_header(frames[0], self._limits)
            message = Message(header.fields, from_frames(header.specs, frames[1:], self._limits))
        except FrameError as err:
            self.counters.malformed += 1
            header = header or err.header
            request = self._request_of(header) if header is not None else None
            if request is None:
                self._log.warning("malformed", f"dropped a message of {self._peer}: {err.message}")
            else:
                self._fail(request, err)
            return
        if header.client == self._name and header.client_incarnation == self._incarnation:
            self._handle(header, message, nbytes)

    def _handle(self, header: Header, message: Message, nbytes: int) -> None:
        """Handle a message for this client."""
        if header.type == MessageType.WELCOME:
            self._welcome(header)
        elif header.type == MessageType.REFUSED:
            self._refuse("a newer incarnation of this client is connected")
        elif (request := self._request_of(header)) is None:
            return
        elif header.type == MessageType.STALE:
            self._not_executed(request, header.server_incarnation)
        else:
            self._unacknowledged_bytes += nbytes
            self._unacknowledged += 1
            if header.type == MessageType.REPLY:
                self.pending.finish(request)
                self._deliveries.append(lambda: request.future.set_result(message))
            elif header.type == MessageType.ERROR:
                self._fail(request, request.remote_error(self._peer, header.fields))

    def _not_executed(self, request: PendingRequest, server_incarnation: int) -> None:
        """Handle a STALE reply: this server incarnation did not execute a request that was meant for another.

        The transport delivers a message at most once. A request that was sent once and reached this incarnation
        therefore never reached the other, and is sent again.
        """
        if request.sent != server_incarnation and not request.resent:
            request.sent = 0
            self.counters.requests -= 1
        else:
            self._fail(request, request.restart_error(self._peer))
        self._ready = False
        if not self._handshaking:
            self._send_hello()

    def _request_of(self, header: Header) -> PendingRequest | None:
        """Return the pending request that a message replies to; None without one, or if an earlier server replied."""
        is_reply = header.type in (MessageType.REPLY, MessageType.ERROR, MessageType.STALE)
        request = self.pending.requests.get(header.sequence)
        if not is_reply or request is None or not request.sent:
            return None
        return request if header.type == MessageType.STALE or request.sent == header.server_incarnation else None

    def _welcome(self, header: Header) -> None:
        """Handle a WELCOME: send the requests that the server lacks, fail those that another incarnation may have."""
        # The reply to an earlier HELLO: the connection was lost and made again meanwhile.
        if header.sequence != self._handshake:
            return
        self._handshaking = False
        self.counters.restarts += self.server_incarnation not in (0, header.server_incarnation)
        self.server_incarnation, self._ready, self._logged_missing = header.server_incarnation, True, False
        self._agreed = self._limits.agreed(header.fields.get("limits"))
        missing = header.fields.get("missing")
        missing = set(missing) if isinstance(missing, list) and all(type(item) is int for item in missing) else set()
        for request in list(self.pending.requests.values()):
            if not request.sent:
                self._send_first(request)
            elif request.sent != self.server_incarnation:
                self._fail(request, request.restart_error(self._peer))
            elif request.sequence in missing:
                self.counters.resent += 1
                request.resent = True
                self._send(request)

    # ------------------------------------------------------------------------------------------------ errors

    def fail_all(self, make_error: Callable[[], GtrainError]) -> None:
        """Have all pending requests raise."""
        for request in list(self.pending.requests.values()):
            self._fail(request, make_error())

    def _fail(self, request: PendingRequest, error: GtrainError) -> None:
        self.counters.errors += 1
        self.pending.finish(request)
        self._deliveries.append(lambda: request.future.set_exception(error))

    def _refuse(self, reason: str) -> None:
        """Fail this and all further requests: the server will never accept this client."""
        self._refusal, self._ready = reason, False
        self.fail_all(lambda: self._refused(reason))

    def _refused(self, reason: str) -> RefusedError:
        return RefusedError(
            f"{self._peer} at {self._address} refuses this process: {reason}",
            hint="give all processes of a job the same key file; end processes of an earlier start of the job",
        )

    def _deadline_error(self, request: PendingRequest) -> WireError:
        """Return the error of a request past its deadline."""
        if not self._ready and (reason := self.link.suspected_refusal()):
            return self._refused(reason)
        return request.deadline_error(self._peer, self._address)
