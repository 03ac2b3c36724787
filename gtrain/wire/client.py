"""The asking side: requests that become futures, one connection, any number of threads.

**Who works.** There is no thread that must run for a message to leave: whoever asks sends, under a lock. Somebody has
to receive, the *driver*: a thread that waits in :meth:`Client.request`, or else the client's own thread, which sleeps
while nothing is under way. So a plain request costs no change of threads.

**What is certain.** An answered request was executed exactly once; any other raises. Requests carry the incarnation of
the server that they are meant for, and another incarnation does not execute them. After a reconnect the client asks
which of its requests are missing and sends these again, to the same incarnation only.
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
from types import TracebackType
from typing import Any

from torch import Tensor

from gtrain.errors import GtrainError
from gtrain.wire.addresses import is_local
from gtrain.wire.counters import Counters
from gtrain.wire.dialogue import Dialogue
from gtrain.wire.errors import FrameError, WireError
from gtrain.wire.failures import no_room
from gtrain.wire.header import pack_body
from gtrain.wire.limits import MAX_NAME, Limits
from gtrain.wire.message import Message, to_frames
from gtrain.wire.outstanding import Pending
from gtrain.wire.zeromq.security import Security, require_security

log = logging.getLogger(__name__)
MAX_WAIT_SECONDS = 1.0
"""The driver looks around this often even if nothing happens."""


class Client:
    """Asks one server. Threads may share it; a forked child has to make its own.

    Args:
        address: the server's.
        peer: what to call the server in messages, such as "partition server 2".
        security: the job's keys; required unless the address is local.
        limits: of this side; the server announces its own, and the smaller ones hold.
        timeout_seconds: deadline of a request that sets none.
        name: of this client; two clients of one name are taken for lives of one, of which the later one counts.
        incarnation: which life, larger is later; the default is the time.

    Raises:
        ConfigError: the address is malformed, or not local and there are no keys.
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
        require_security(address, is_local(address), security)
        self.peer, self.address, self._timeout = peer, address, timeout_seconds
        self.name = (name or secrets.token_hex(8))[:MAX_NAME]
        self.incarnation = time.time_ns() if incarnation is None else incarnation
        self._limits = limits
        self._lock = threading.Lock()  # around all of the dialogue's state, and the socket
        self._room = threading.Condition(self._lock)
        self._settled: deque[Callable[[], None]] = deque()
        self._dialogue = Dialogue(self, security, limits, self._settled)
        self._driver = threading.Lock()  # held by the one thread that receives
        self._driver_thread: int | None = None
        self._wake_at = 0.0
        self._work = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closed = False
        self._cause: GtrainError | None = None  # for which it was closed
        self._waiting = 0  # threads that wait and do not receive
        self._left = False  # whether the client's own thread receives until nothing is under way

    @property
    def counters(self) -> Counters:
        """Bytes, requests and errors so far."""
        return self._dialogue.counters

    @property
    def server_incarnation(self) -> int | None:
        """Which life of the server was met last; None before the first."""
        return self._dialogue.server or None

    def submit(
        self,
        method: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
        timeout_seconds: float | None = None,
        attended: bool = False,
    ) -> Future[Message]:
        """Send a request; its answer, or what went wrong, comes with the future.

        Blocks while as much is under way as the limits allow. A callback of the future runs in the thread that
        received the answer; it may ask again.

        Args:
            method: what to ask for.
            fields: see :class:`Message`.
            tensors: see :class:`Message`; not to be written to until the future is done.
            timeout_seconds: deadline, from now.
            attended: whether a thread will come for the answer with :meth:`result`. The client's own thread then
                stays asleep, and nothing happens to the future before.

        Raises:
            FrameError: the message cannot be sent: a type that does not cross, or beyond the limits.
            DeadlineError: there was no room for it in time.
            RefusedError: the server has refused this client.
            WireError: the client is closed, or was made before a fork.
        """
        pending = self._post(method, fields, tensors, timeout_seconds, attended)
        if not attended:
            self._work.set()
        return pending.future

    def result(self, future: Future[Message], seconds: float | None = None) -> Message:
        """Wait for the answer to a request that was submitted, and receive it in this thread if no other receives.

        Args:
            future: of :meth:`submit`.
            seconds: how long to wait; None: as long as the request's own deadline lets it.

        Raises:
            TimeoutError: it is not there yet; it can be waited for again.
            WireError: as :meth:`request`.
        """
        end = math.inf if seconds is None else time.monotonic() + seconds

        def done() -> bool:
            return future.done() or _passed(end)

        if self._driver_thread == threading.get_ident():  # called by a callback
            self._drive(done, end)
        while not (done() or self._closed) and self._driver.acquire(blocking=False):
            self._driver_thread = threading.get_ident()
            try:
                self._drive(done, end)
            finally:
                self._driver_thread = None
                self._driver.release()
                if self._to_do():
                    self._work.set()
        return self._wait(future, None if seconds is None else max(0.0, end - time.monotonic()))

    def leave(self) -> None:
        """Have the client's own thread receive all that is under way: who is to come for it may be kept from it."""
        with self._lock:
            self._left = self._dialogue.busy
        self._work.set()

    def request(
        self,
        method: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
        timeout_seconds: float | None = None,
    ) -> Message:
        """Send a request and wait for its answer; arguments as for :meth:`submit`.

        Raises:
            RemoteError: its handler raised.
            DeadlineError: no answer in time.
            PeerRestartedError: the server was restarted meanwhile; whether it executed the request is unknown.
            RefusedError: the server does not let this client in.
            FrameError: the message or its answer cannot be sent, or is malformed.
        """
        pending = self._post(method, fields, tensors, timeout_seconds, attended=True)
        self._drive_or_wait(pending)
        return self._wait(pending.future, None)

    def close(self, cause: GtrainError | None = None) -> None:
        """End; what is unanswered raises, and so does what is asked later. Can be called twice, and by a callback.

        Args:
            cause: what that is to raise: who knows why the server is gone need not let others wait for their deadlines.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed, self._cause = True, self._cause or cause
            self._dialogue.fail_all(self._was_closed)
            self._room.notify_all()
            self._dialogue.wake()
            thread = self._thread
        self._settle()
        self._work.set()
        if thread is not None and self._driver_thread != threading.get_ident():
            thread.join()

    def __enter__(self) -> Client:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # ------------------------------------------------------------------------------------------------- sending

    def _post(
        self,
        method: str,
        fields: Mapping[str, Any] | None,
        tensors: Sequence[Tensor],
        timeout_seconds: float | None,
        attended: bool,
    ) -> Pending:
        """Make a request and send it, or keep it until the server is there."""
        seconds = self._timeout if timeout_seconds is None else timeout_seconds
        if not 0 < len(method) <= MAX_NAME:
            raise FrameError(f"{method!r} is no method's name", hint=f"use 1 to {MAX_NAME} characters")
        specs, frames = to_frames(tensors, self._limits)
        body = pack_body(method, fields or {}, specs, self._limits)
        nbytes = len(body) + sum(frame.nbytes for frame in frames)
        pending = Pending(method, body, frames, nbytes, time.monotonic() + seconds, seconds, attended)
        if pending.nbytes > self._limits.max_message_bytes:
            raise FrameError(
                f"a request {method!r} of {pending.nbytes:,} bytes; the limit is {self._limits.max_message_bytes:,}",
                hint="send it in pieces, or raise max_message_bytes in the Limits of both sides",
            )
        pending.future.set_running_or_notify_cancel()  # an answer cannot be taken back: no cancelling
        with self._lock:
            self._open()
            self._wait_for_room(pending)
            self._dialogue.post(pending)
            driver = self._driver_thread  # it may sleep, while sending has eaten the signal that would wake it
            if driver not in (None, threading.get_ident()) and (
                self._dialogue.has_input() or pending.deadline < self._wake_at
            ):
                self._dialogue.wake()
            if self._dialogue.unsent:
                self._work.set()
        self._settle()
        return pending

    def _open(self) -> None:
        """Connect on first use: not before, because a fork may come between."""
        if self._closed:
            raise self._cause or WireError(f"the client of {self.peer} is closed", hint="make a new client")
        if self._thread is None:
            self._pid = os.getpid()
            self._dialogue.open()
            self._thread = threading.Thread(target=self._run, name=f"gtrain-client-{self.peer}", daemon=True)
            self._thread.start()
        elif self._pid != os.getpid():
            raise WireError(
                f"the client of {self.peer} was made by the process that this one was forked from",
                hint="make clients after the fork",
            )

    def _wait_for_room(self, pending: Pending) -> None:
        """Wait until the request fits in beside those under way."""
        while not self._dialogue.has_room(pending.nbytes):
            remaining = pending.deadline - time.monotonic()
            if remaining <= 0:
                raise no_room(self.peer, pending)
            if self._driver_thread == threading.get_ident():  # a callback: nobody else would receive
                self._lock.release()
                try:
                    self._drive(lambda: self._dialogue.has_room(pending.nbytes) or _passed(pending.deadline))
                finally:
                    self._lock.acquire()
            else:
                self._waiting += 1
                self._work.set()
                self._room.wait(min(remaining, MAX_WAIT_SECONDS))
                self._waiting -= 1
            if self._closed:
                raise self._was_closed()

    def _was_closed(self) -> GtrainError:
        return self._cause or WireError(f"the client of {self.peer} was closed", hint="ask before closing")

    # ----------------------------------------------------------------------------------------------- receiving

    def _drive_or_wait(self, pending: Pending) -> None:
        """Receive until the request is answered, if no other thread does."""

        def answered() -> bool:
            return self._dialogue.answered(pending)

        if self._driver_thread == threading.get_ident():  # asked by a callback
            self._drive(answered)
        elif self._driver.acquire(blocking=False):
            self._driver_thread = threading.get_ident()
            try:
                self._drive(answered)
            finally:
                self._driver_thread = None
                self._driver.release()
                if self._to_do():
                    self._work.set()

    def _run(self) -> None:
        """The client's own thread: receives when there is something under way and no other thread does."""
        while not self._closed:
            self._work.wait()
            self._work.clear()
            with self._driver:
                self._driver_thread = threading.get_ident()
                try:
                    self._drive(lambda: not self._to_do())
                except Exception as err:  # a defect; without this every request would wait for ever
                    self._abort(err)
                self._driver_thread = None
        with self._driver, self._lock:
            self._dialogue.close()

    def _to_do(self) -> bool:
        """Whether the client's own thread is needed: nobody comes for an answer, or who does cannot receive or send."""
        self._left = self._left and self._dialogue.busy
        return self._dialogue.neglected or self._dialogue.unsent or self._waiting > 0 or self._left

    def _wait(self, future: Future[Message], seconds: float | None) -> Message:
        """Wait for an answer that another thread receives."""
        if future.done() or self._closed or seconds == 0:
            return future.result(seconds)
        with self._lock:
            self._waiting += 1
        self._work.set()
        try:
            return future.result(seconds)
        finally:
            with self._lock:
                self._waiting -= 1
                self._dialogue.wake()  # the client's own thread, which need not receive any more

    def _abort(self, cause: Exception) -> None:
        """Have all that is under way raise after a failure of the client itself."""
        log.error("the client of %s failed", self.peer, exc_info=cause)
        text = f"the client of {self.peer} failed: {type(cause).__name__}: {cause}"
        with self._lock:
            self._dialogue.fail_all(lambda: WireError(text, hint="report this with the log of this process"))
        self._settle()

    def _drive(self, done: Callable[[], bool], end: float = math.inf) -> None:
        """Receive, watch deadlines and the connection, until ``done`` or closed; ask ``done`` at ``end`` too."""
        while not self._closed:
            with self._lock:
                if self._closed:
                    break
                soonest = self._dialogue.advance(done)
                now = time.monotonic()
                self._wake_at = min(soonest, now + MAX_WAIT_SECONDS, end)
                if self._settled:
                    self._room.notify_all()
            self._settle()
            if done():
                break
            self._dialogue.wait(self._wake_at - now)

    def _settle(self) -> None:
        """Give finished requests their results, outside of the lock: a callback may ask again."""
        while self._settled:
            try:
                deliver = self._settled.popleft()
            except IndexError:  # another thread took it
                break
            deliver()


def _passed(deadline: float) -> bool:
    """Whether a monotonic time is over."""
    return time.monotonic() >= deadline
