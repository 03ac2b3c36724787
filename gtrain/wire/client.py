"""The client: sends requests to a server and returns futures; one connection, any number of threads.

**Threads.** The thread that submits a request also sends it, under a lock. One thread at a time receives, the *driver*:
a thread that waits in :meth:`Client.request` or :meth:`Client.result`, or else the client's own thread, which sleeps
while no request is pending. A plain request therefore needs no thread switch.

**Exactly once.** An answered request was executed exactly once; any other raises. A request carries the incarnation of
the server that it is meant for, and other incarnations do not execute it. After a reconnect the client learns which of
its requests the server lacks, and sends these again, to the same incarnation only.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from gtrain.errors import GtrainError
from gtrain.wire import tracing
from gtrain.wire.addresses import require_keys
from gtrain.wire.client_session import ClientSession
from gtrain.wire.errors import FrameError, WireError
from gtrain.wire.header import pack_body
from gtrain.wire.limits import MAX_NAME, Limits
from gtrain.wire.message import Message, to_frames
from gtrain.wire.pending import PendingRequest
from gtrain.wire.zeromq.security import Security

log = logging.getLogger(__name__)
MAX_WAIT_SECONDS = 1.0
"""The driver checks deadlines and the connection this often even if nothing happens."""


class Client:
    """Sends requests to one server. Threads may share a client; a forked child must create its own.

    Args:
        address: the server's.
        peer: what to call the server in messages, such as "partition server 2".
        security: the job's keys; required unless the address is local.
        limits: of this side; the server announces its limits, and the smaller ones hold.
        timeout_seconds: deadline of a request that sets none.
        name: name of this client; of two clients with the same name the one with the later incarnation counts.
        incarnation: a number that grows with each restart of this client; the default is the time.

    Attributes:
        counters: bytes, requests and errors so far.

    Raises:
        ConfigError: the address is malformed, or not local and no keys were given.
    """

    def __init__(
        self,
        address: str,
        *,
        peer: str,
        security: Security | None = None,
        limits: Limits = Limits(),  # noqa: B008 (it is frozen)
        timeout_seconds: float = 60.0,
        name: str | None = None,
        incarnation: int | None = None,
    ) -> None:
        require_keys(address, security is not None)
        self.peer, self.address, self._timeout = peer, address, timeout_seconds
        self.name = (name or secrets.token_hex(8))[:MAX_NAME]
        self.incarnation = time.time_ns() if incarnation is None else incarnation
        self._limits = limits
        self._lock = threading.Lock()  # guards the session with its socket, and the fields below
        self._room = threading.Condition(self._lock)
        self._deliveries: deque[Callable[[], None]] = deque()
        self._session = ClientSession(peer, address, self.name, self.incarnation, security, limits, self._deliveries)
        self.counters = self._session.counters
        self._driver = threading.Lock()  # held by the one thread that receives
        self._driver_thread: int | None = None
        self._wake_at = 0.0  # when the driver's wait ends
        self._needs_driver = threading.Event()  # wakes the client's own thread
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closed = False
        self._cause: GtrainError | None = None  # why it was closed
        self._waiting = 0  # threads that wait and do not receive
        self._in_background = False  # the client's own thread receives until no request is pending

    @property
    def server_incarnation(self) -> int | None:
        """Incarnation of the server that last accepted this client; None before the first."""
        return self._session.server_incarnation or None

    def submit(
        self,
        method: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
        timeout_seconds: float | None = None,
        attended: bool = False,
    ) -> Future[Message]:
        """Send a request; the future receives its reply or its error.

        Blocks while the limits allow no further request (backpressure). A callback of the future runs in the thread
        that received the reply; it may send requests.

        Args:
            method: name of the server's method.
            fields: see :class:`Message`.
            tensors: see :class:`Message`; must not be written to until the future is done.
            timeout_seconds: deadline, from now.
            attended: whether a thread will call :meth:`result` for the future. The client's own thread then stays
                asleep, and the future is not done before that call.

        Raises:
            FrameError: the message cannot be sent: a type that is not supported, or beyond the limits.
            DeadlineError: the limits allowed no further request before the deadline.
            RefusedError: the server has refused this client.
            WireError: the client is closed, or was created before a fork.
        """
        request = self._submit(method, fields, tensors, timeout_seconds, attended)
        if not attended:
            self._needs_driver.set()
        return request.future

    def has_room_ahead(self, nbytes: int) -> bool:
        """Whether a request may be sent ahead of those without which the server cannot answer it.

        Such requests may wait for each other only: the later ones must find room beside them. So a client that sends
        requests ahead sends them without waiting, or later, in their turn.

        Args:
            nbytes: of the request's tensors.
        """
        with self._lock:
            return self._session.has_room_ahead(nbytes)

    def result(self, future: Future[Message], seconds: float | None = None) -> Message:
        """Wait for the reply to a submitted request; this thread receives if no other does.

        Args:
            future: of :meth:`submit`.
            seconds: how long to wait; None: until the request's deadline.

        Raises:
            TimeoutError: the reply has not arrived; the future can be waited for again.
            WireError: as :meth:`request`.
        """
        end = math.inf if seconds is None else time.monotonic() + seconds
        self._receive_until(lambda: future.done() or time.monotonic() >= end, end)
        return self._wait(future, None if seconds is None else max(0.0, end - time.monotonic()))

    def request(
        self,
        method: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
        timeout_seconds: float | None = None,
    ) -> Message:
        """Send a request and wait for its reply; arguments as for :meth:`submit`.

        Raises:
            RemoteError: the handler raised.
            DeadlineError: no reply arrived in time.
            PeerRestartedError: the server was restarted meanwhile; whether it executed the request is unknown.
            RefusedError: the server refuses this client.
            FrameError: the message or its reply cannot be sent, or is malformed.
        """
        request = self._submit(method, fields, tensors, timeout_seconds, attended=True)
        self._receive_until(lambda: request.sequence not in self._session.pending.requests)
        return self._wait(request.future, None)

    def receive_in_background(self) -> None:
        """Have the client's own thread receive all pending replies: the threads that attend them are held up."""
        with self._lock:
            self._in_background = bool(self._session.pending.requests)
        self._needs_driver.set()

    def close(self, cause: GtrainError | None = None) -> None:
        """Close the client; pending and later requests raise. May be called twice, and by a callback.

        Args:
            cause: what these requests raise: a caller that knows why the server is gone need not let others wait for
                their deadlines.
        """
        # A forked child has neither the thread nor the right to close the parent's connection.
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed, self._cause = True, self._cause or cause
            self._session.fail_all(self._closed_error)
            self._room.notify_all()
            self._session.wake()
            thread = self._thread
        self._deliver()
        self._needs_driver.set()
        # Not from a callback: the thread would wait for itself.
        if thread is not None and self._driver_thread != threading.get_ident():
            thread.join()

    def __enter__(self) -> Client:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    # ------------------------------------------------------------------------------------------------ sending

    def _submit(
        self,
        method: str,
        fields: Mapping[str, Any] | None,
        tensors: Sequence[Tensor],
        timeout_seconds: float | None,
        attended: bool,
    ) -> PendingRequest:
        """Create a request and send it, now or once the server is connected."""
        seconds = self._timeout if timeout_seconds is None else timeout_seconds
        if not 0 < len(method) <= MAX_NAME:
            raise FrameError(f"{method!r} is not the name of a method", hint=f"use 1 to {MAX_NAME} characters")
        specs, frames = to_frames(tensors, self._limits)
        body = pack_body(method, fields or {}, specs, self._limits)
        nbytes = len(body) + sum(frame.nbytes for frame in frames)
        if nbytes > self._limits.max_message_bytes:
            raise FrameError(
                f"a request {method!r} of {nbytes:,} bytes; the limit is {self._limits.max_message_bytes:,}",
                hint="send it in pieces, or raise max_message_bytes in the Limits of both sides",
            )
        request = PendingRequest(method, body, frames, nbytes, time.monotonic() + seconds, seconds, attended)
        # A request that was sent cannot be cancelled.
        request.future.set_running_or_notify_cancel()
        begin = time.time_ns()
        with self._lock:
            self._open()
            self._wait_for_room(request)
            self._session.submit(request)
            # The driver may sleep, although this send consumed the signal that would have woken it.
            driver = self._driver_thread
            if driver not in (None, threading.get_ident()) and (
                self._session.link.has_input() or request.deadline < self._wake_at
            ):
                self._session.wake()
            # A request larger than the kernel's buffer: the client's own thread sends the rest.
            if self._session.link.unsent:
                self._needs_driver.set()
            if (log := tracing.active()) is not None:
                self._trace(log, request, begin)
        self._deliver()
        return request

    def _trace(self, log: tracing.RequestLog, request: PendingRequest, begin: int) -> None:
        """Record a request once it is answered."""
        who = {"client": self.name, "incarnation": self.incarnation, "sequence": request.sequence}
        span = {"method": request.method, "peer": self.peer, "nbytes": request.nbytes, **who}
        request.future.add_done_callback(lambda _: log.add(log.sent, begin, **span))

    def _open(self) -> None:
        """Connect on first use: the process may fork between the creation and the use of a client."""
        if self._closed:
            raise self._cause or WireError(f"the client of {self.peer} is closed", hint="create a new client")
        if self._thread is None:
            self._pid = os.getpid()
            self._session.open()
            self._thread = threading.Thread(target=self._run, name=f"gtrain-client-{self.peer}", daemon=True)
            self._thread.start()
        elif self._pid != os.getpid():
            raise WireError(
                f"the client of {self.peer} was created by the process that this one was forked from",
                hint="create clients after the fork",
            )

    def _wait_for_room(self, request: PendingRequest) -> None:
        """Wait until the limits allow the request beside the pending ones."""
        while not self._session.has_room(request.nbytes):
            remaining = request.deadline - time.monotonic()
            if remaining <= 0:
                raise request.backpressure_error(self.peer)
            if self._driver_thread == threading.get_ident():
                # A callback: no other thread would receive.
                self._lock.release()
                try:
                    self._drive(lambda: self._session.has_room(request.nbytes) or time.monotonic() >= request.deadline)
                finally:
                    self._lock.acquire()
            else:
                self._waiting += 1
                self._needs_driver.set()
                self._room.wait(min(remaining, MAX_WAIT_SECONDS))
                self._waiting -= 1
            if self._closed:
                raise self._closed_error()

    def _closed_error(self) -> GtrainError:
        return self._cause or WireError(f"the client of {self.peer} was closed", hint="send requests before closing")

    # ------------------------------------------------------------------------------------------------ receiving

    def _receive_until(self, done: Callable[[], bool], end: float = math.inf) -> None:
        """Receive until ``done``, as long as no other thread does; check ``done`` at ``end`` too."""
        if self._driver_thread == threading.get_ident():  # called by a callback
            self._drive(done, end)
        # If another thread is the driver, it receives this thread's reply too, and _wait() waits for it.
        while not (done() or self._closed) and self._driver.acquire(blocking=False):
            self._driver_thread = threading.get_ident()
            try:
                self._drive(done, end)
            finally:
                self._driver_thread = None
                self._driver.release()
                if self._thread_is_needed():
                    self._needs_driver.set()

    def _run(self) -> None:
        """Run the client's own thread: receive while requests are pending that no other thread receives for."""
        while not self._closed:
            self._needs_driver.wait()
            # Cleared before the work: a set() in between is not lost.
            self._needs_driver.clear()
            with self._driver:
                self._driver_thread = threading.get_ident()
                try:
                    self._drive(lambda: not self._thread_is_needed())
                except Exception as err:
                    # A bug; without this every request would wait for its deadline.
                    self._abort(err)
                self._driver_thread = None
        with self._driver, self._lock:
            self._session.close()

    def _thread_is_needed(self) -> bool:
        """Whether a request is unattended, or the thread that attends it cannot receive or send."""
        pending = self._session.pending
        self._in_background = self._in_background and bool(pending.requests)
        return pending.unattended > 0 or self._session.link.unsent or self._waiting > 0 or self._in_background

    def _wait(self, future: Future[Message], seconds: float | None) -> Message:
        """Wait for a reply that another thread receives."""
        if future.done() or self._closed or seconds == 0:
            return future.result(seconds)
        with self._lock:
            self._waiting += 1
        self._needs_driver.set()
        try:
            return future.result(seconds)
        finally:
            with self._lock:
                self._waiting -= 1
                # Wakes the client's own thread, which may stop receiving.
                self._session.wake()

    def _abort(self, cause: Exception) -> None:
        """Have all pending requests raise after a failure of the client itself."""
        log.error("the client of %s failed", self.peer, exc_info=cause)
        text = f"the client of {self.peer} failed: {type(cause).__name__}: {cause}"
        with self._lock:
            self._session.fail_all(lambda: WireError(text, hint="report this with the log of this process"))
        self._deliver()

    def _drive(self, done: Callable[[], bool], end: float = math.inf) -> None:
        """Receive, and check deadlines and the connection, until ``done`` or closed; check ``done`` at ``end`` too."""
        while not self._closed:
            with self._lock:
                if self._closed:
                    break
                due = self._session.advance(done)
                now = time.monotonic()
                self._wake_at = min(due, now + MAX_WAIT_SECONDS, end)
                if self._deliveries:
                    self._room.notify_all()
            self._deliver()
            if done():
                break
            self._session.link.wait(self._wake_at - now)

    def _deliver(self) -> None:
        """Give finished requests their results, without the lock: a callback may send requests."""
        while self._deliveries:
            try:
                deliver = self._deliveries.popleft()
            except IndexError:  # another thread took it
                break
            deliver()
