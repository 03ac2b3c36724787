"""A mesh of connections between all ranks of a group: tagged messages, heartbeats (pings) and failure detection.

Two ranks have two connections, one per direction. A thread of the sender writes to it and a thread of the receiver
reads from it; both release the interpreter lock while bytes move. Messages of up to :data:`EAGER_BYTES` are sent
*eagerly*. A larger one follows the *rendezvous* protocol: it waits until the receiver has posted a buffer and has sent
READY, so that the receiver never copies it.

Each frame is a header and its content:

    kind   1 byte    the type of the frame, see :class:`FrameKind`
    tag    8 bytes   the number of the message; in a pong, the rank that its sender waits for (-1: none)
    size   8 bytes   the length of the content

Heartbeats are sent on demand. A rank that waits for another sends it a ping, and the pong has the rank that the other
one waits for. So the terminal can name the rank at the end of a chain of waits, and a rank that is busy differs from
one that is stopped or unreachable.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from gtrain.errors import PeerLostError, SilentRankError
from gtrain.launch import links
from gtrain.launch.environment import REPORT_SECONDS, SAY_SECONDS, WaitReport
from gtrain.launch.logs import write_stacks

EAGER_BYTES = 64 << 10
BUSY_SECONDS = 1800.0
"""How long to wait for a rank that answers pings; one that does not is lost after ``timeout_seconds``."""
_PING_SECONDS = 2.0
_CHECK_SECONDS = 1.0
_STACK_SECONDS = 30.0
_FRAME = struct.Struct("!BqQ")
_HELLO = struct.Struct("!16sI")

T = TypeVar("T")


class FrameKind(enum.IntEnum):
    """The type of a frame."""

    DATA = 1
    READY = 2
    """The receiver has a buffer for a large message."""
    PING = 3
    PONG = 4
    STACKS = 5
    """A peer has waited long for the receiver: it writes the stacks of its threads to its log."""
    BYE = 6
    """The sender leaves the group."""


class PendingMessage:
    """A message in transfer; :meth:`Mesh.wait` waits until it was sent or received."""

    __slots__ = ("_done", "error", "peer", "view")

    def __init__(self, peer: int, view: memoryview) -> None:
        self.peer, self.view = peer, view
        self.error: PeerLostError | None = None
        self._done = threading.Event()

    def finish(self, error: PeerLostError | None = None) -> None:
        """Mark the transfer as done or failed."""
        self.error = error
        self._done.set()

    def done_within(self, seconds: float) -> bool:
        """Wait for the transfer for at most ``seconds``; return whether it has ended."""
        return self._done.wait(seconds)


def _copied(error: PeerLostError) -> PeerLostError:
    """Return a new exception to raise: several threads may wait, and a traceback belongs to one."""
    copy = type(error)(error.message, hint=error.hint)
    copy.__cause__ = error
    return copy


def _pop(queues: dict[int, deque[T]], tag: int) -> T | None:
    """Remove and return the first entry of a tag's queue; None without one."""
    queue = queues.get(tag)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first


class _Peer:
    """The queues and threads of the two connections with another rank."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self.lock = threading.Lock()
        self.last_heard = time.monotonic()
        self.waits_for, self.lost = -1, None  # type: tuple[int, PeerLostError | None]
        self.connection: socket.socket | None = None  # connection to send on
        self.source: socket.socket | None = None  # connection to receive on
        self._queue: deque[tuple[int, int, PendingMessage | None]] = deque()
        self._queued = threading.Condition(self.lock)
        self._writing = self._closing = False
        self._leaving = self._said_goodbye = False  # whether this rank, or the other one, ends the connections in order
        # State of the rendezvous protocol, by tag, each in the order of the calls. Sender: large messages without a
        # READY yet, and the number of READYs without a message yet.
        self._held_back: dict[int, deque[PendingMessage]] = {}
        self._ready: dict[int, int] = {}
        # Receiver: buffers without a message yet, and small messages without a buffer yet.
        self._expected: dict[int, deque[PendingMessage]] = {}
        self._arrived: dict[int, deque[bytearray]] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        for name, run in (("send", self._write), ("receive", self._read)):
            thread = threading.Thread(target=run, name=f"gtrain-{name}-{self.rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # ------------------------------------------------------------------------------------------ sending

    def send(self, view: memoryview, tag: int) -> PendingMessage:
        work = PendingMessage(self.rank, view)
        with self.lock:
            if self.lost is not None:
                work.finish(self.lost)
            elif tag in self._held_back:
                # Messages of one tag keep their order.
                self._held_back[tag].append(work)
            elif len(view) <= EAGER_BYTES or self._take_ready(tag):
                self._post(FrameKind.DATA, tag, work)
            else:
                self._held_back[tag] = deque([work])
        return work

    def send_control(self, kind: FrameKind, tag: int = 0) -> None:
        """Send a frame without content."""
        with self.lock:
            if self.lost is None:
                self._post(kind, tag, None)

    def _take_ready(self, tag: int) -> bool:
        count = self._ready.pop(tag, 0)
        if count > 1:
            self._ready[tag] = count - 1
        return count > 0

    def _post(self, kind: int, tag: int, work: PendingMessage | None) -> None:
        self._queue.append((kind, tag, work))
        self._queued.notify()

    def _write(self) -> None:
        connection, work = self.connection, None
        assert connection is not None
        try:
            while True:
                work = None
                with self.lock:
                    while not self._queue:
                        if self._closing:
                            return
                        self._queued.wait()
                    kind, tag, work = self._queue.popleft()
                if work is None:
                    connection.sendall(_FRAME.pack(kind, tag, 0))
                    continue
                size = len(work.view)
                head = _FRAME.pack(kind, tag, size)
                # One system call for a small message; a large one is not copied to join it with its header.
                if size <= EAGER_BYTES:
                    connection.sendall(b"".join((head, work.view)))
                else:
                    connection.sendall(head)
                    connection.sendall(work.view)
                work.finish()
        except Exception as error:  # noqa: BLE001 - every waiting call must end
            self.fail(self._gone(error))
            if work is not None:
                work.finish(self.lost)
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    # ------------------------------------------------------------------------------------------ receiving

    def receive(self, view: memoryview, tag: int) -> PendingMessage:
        work = PendingMessage(self.rank, view)
        with self.lock:
            if (early := _pop(self._arrived, tag)) is not None:
                self._fill(work, early)
            elif self.lost is not None:
                work.finish(self.lost)
            else:
                self._expected.setdefault(tag, deque()).append(work)
                if len(view) > EAGER_BYTES:
                    self._post(FrameKind.READY, tag, None)
        return work

    def _read(self) -> None:
        source = self.source
        assert source is not None
        head = bytearray(_FRAME.size)
        view = memoryview(head)
        try:
            while True:
                links.receive_into(source, view)
                kind, tag, size = _FRAME.unpack(head)
                self.last_heard = time.monotonic()
                match kind:
                    case FrameKind.DATA:
                        self._receive_data(source, tag, size)
                    case FrameKind.READY:
                        self._release(tag)
                    case FrameKind.PING:
                        self.send_control(FrameKind.PONG, self.mesh.waits_for(besides=self.rank))
                    case FrameKind.PONG:
                        self.waits_for = tag
                    case FrameKind.STACKS:
                        write_stacks()
                    case FrameKind.BYE:
                        self._said_goodbye = True
                        raise ConnectionResetError("it left the group")
                    case _:
                        raise ConnectionAbortedError(f"a frame of the unknown type {kind} arrived")
        except Exception as error:  # noqa: BLE001 - every waiting call must end
            # Before others are woken: an mpirun kills this process within milliseconds after the first.
            if not (self._leaving or self._said_goodbye or isinstance(error, ConnectionAbortedError)):
                self.mesh.report_gone(self.rank)
            self.fail(self._gone(error))
        finally:
            source.close()

    def _receive_data(self, source: socket.socket, tag: int, size: int) -> None:
        """Receive a message into its buffer, or into memory until a buffer is posted."""
        with self.lock:
            work = _pop(self._expected, tag)
        if work is None or len(work.view) != size:
            # A large message is sent only after READY, so without a buffer of its size the two ranks disagree.
            if work is not None or size > EAGER_BYTES:
                expected = "no large message was" if work is None else f"{len(work.view)} bytes were"
                error = ConnectionAbortedError(f"{size} bytes, but {expected} expected")
                if work is not None:
                    work.finish(self._gone(error))
                raise error
            # Eager: at most EAGER_BYTES, so that messages without a buffer cannot fill the memory.
            early = links.receive_exactly(source, size)
            with self.lock:
                # A buffer may have been posted meanwhile.
                work = _pop(self._expected, tag)
                if work is None:
                    self._arrived.setdefault(tag, deque()).append(early)
                else:
                    self._fill(work, early)
            return
        try:
            links.receive_into(source, work.view, self._alive)
        except OSError as error:
            work.finish(self._gone(error))
            raise
        work.finish()

    def _fill(self, work: PendingMessage, content: bytearray) -> None:
        if len(content) != len(work.view):
            work.finish(
                PeerLostError(
                    f"{self.mesh.name_of(self.rank)} sent {len(content)} bytes, but {len(work.view)} bytes "
                    "were expected"
                )
            )
            return
        work.view[:] = content
        work.finish()

    def _release(self, tag: int) -> None:
        with self.lock:
            works = self._held_back.get(tag)
            if not works:
                self._ready[tag] = self._ready.get(tag, 0) + 1
                return
            self._post(FrameKind.DATA, tag, works.popleft())
            # Small messages behind it were held back only to keep the order of the tag.
            while works and len(works[0].view) <= EAGER_BYTES:
                self._post(FrameKind.DATA, tag, works.popleft())
            if not works:
                del self._held_back[tag]

    def _alive(self) -> None:
        self.last_heard = time.monotonic()

    # ------------------------------------------------------------------------------------------ the end

    def _gone(self, error: Exception) -> PeerLostError:
        name = self.mesh.name_of(self.rank)
        if isinstance(error, ConnectionAbortedError):
            return PeerLostError(f"{name} sent an unexpected message: {error}")
        return PeerLostError(f"{name} is gone: {getattr(error, 'strerror', None) or error}")

    def fail(self, error: PeerLostError) -> None:
        """Fail all transfers with this rank, and close the connections."""
        with self.lock:
            if self.lost is not None:
                return
            self.lost, self._closing = error, True
            works = [work for _, _, work in self._queue if work is not None]
            for waiting in (self._held_back, self._expected):
                works += [work for some in waiting.values() for work in some]
                waiting.clear()
            self._queue.clear()
            self._queued.notify()
        for work in works:
            work.finish(error)
        for connection in (self.connection, self.source):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Send what is queued and a goodbye, then end the threads."""
        with self.lock:
            self._leaving = True
            if self.lost is None:
                self._queue.append((FrameKind.BYE, 0, None))
            self._closing = True
            self._queued.notify()

    def join(self, deadline: float) -> None:
        """Wait until the queue is sent, then end the reading thread."""
        if not self._threads:
            for connection in (self.connection, self.source):
                if connection is not None:
                    connection.close()
            return
        self._threads[0].join(max(0.0, deadline - time.monotonic()))
        # The reading thread waits in recv; only a shutdown of the connection wakes it.
        self.fail(PeerLostError("the group is closed"))
        self._threads[1].join(max(0.1, deadline - time.monotonic()))


class Mesh:
    """The connections of one rank with all others of a group.

    Args:
        rank: this process.
        size: number of ranks.
        timeout_seconds: how long a rank that is waited for may not answer pings.
        name_of: returns the name of a rank in messages, such as ``rank 2 (machine 1)``.
        say: called with the name of the rank that this one has waited for, and the seconds.
        say_gone: called with the name of the first rank whose connection closed without a goodbye.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_seconds: float,
        name_of: Callable[[int], str] = lambda rank: f"rank {rank}",
        say: Callable[[str, float], None] = lambda name, seconds: None,
        say_gone: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.rank, self.size, self.name_of = rank, size, name_of
        self._say_gone: Callable[[str], None] | None = say_gone
        self._timeout_seconds, self._say = timeout_seconds, say
        self._peers = {other: _Peer(self, other) for other in range(size) if other != rank}
        self._waiting: list[int] = []  # ranks that threads of this one wait for
        self._accepted = threading.Condition()

    # ------------------------------------------------------------------------------------------ forming

    # Each rank connects to all others (its sending connections) and accepts one connection from each (the receiving
    # ones), so that no order of ranks is needed. Both sides of a connection name the group: a rank of an earlier
    # incarnation is refused.

    def connect(
        self,
        listeners: Sequence[socket.socket],
        key_file: str | None,
        redirect: str | None,
        group: str,
        address_of: Callable[[int], str],
        seconds: float,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Connect to all other ranks, which do the same; report the ranks that this one waits for.

        Args:
            listeners: sockets at which the others connect; unused afterwards.
            key_file: path of the job's key file; see :class:`gtrain.launch.links.AuthenticatedListener`.
            redirect: as there.
            group: name of the group; connections of other groups are refused.
            address_of: waits for and returns the address of a rank.
            seconds: how long all connections may take.
            check: called every second while this rank waits; may raise.

        Raises:
            PeerLostError: a rank did not connect in time.
            RefusedConnectionError: a rank has another key.
        """
        deadline = time.monotonic() + seconds
        mark = hashlib.sha256(group.encode()).digest()[:16]

        def accept(connection: socket.socket) -> None:
            connection.settimeout(links.HANDSHAKE_SECONDS)
            name, rank = _HELLO.unpack(links.receive_exactly(connection, _HELLO.size))
            connection.settimeout(None)
            with self._accepted:
                # A rank of an earlier incarnation, or a second connection of the same one.
                if name != mark or rank not in self._peers or self._peers[rank].source is not None:
                    connection.close()
                    return
                self._peers[rank].source = connection
                self._accepted.notify_all()

        listener = links.AuthenticatedListener(listeners, key_file, redirect, accept, f"rank {self.rank}")
        try:
            for other, peer in self._peers.items():
                try:
                    address = address_of(other)
                    report = WaitReport(f"{self.name_of(other)} to connect", self._say)
                    remaining = max(0.0, deadline - time.monotonic())
                    peer.connection = links.connect(address, key_file, remaining, listens=True, on_wait=report)
                    peer.connection.sendall(_HELLO.pack(mark, self.rank))
                except (OSError, PeerLostError) as error:
                    reason = error.message if isinstance(error, PeerLostError) else error
                    raise PeerLostError(f"{self.name_of(other)} cannot be reached: {reason}") from error
            self._await_connections(deadline, seconds, check)
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()
        for peer in self._peers.values():
            for connection in (peer.connection, peer.source):
                if connection is not None:
                    connection.settimeout(None)
            peer.start()

    def _await_connections(self, deadline: float, seconds: float, check: Callable[[], object]) -> None:
        """Wait until all other ranks have connected to this one."""
        reports = {other: WaitReport(f"{self.name_of(other)} to connect", self._say) for other in self._peers}
        while True:
            with self._accepted:
                left = deadline - time.monotonic()
                if self._accepted.wait_for(lambda: not self._unconnected(), max(0.0, min(_CHECK_SECONDS, left))):
                    return
            missing = self._unconnected()
            if left <= 0:
                names = ", ".join(map(self.name_of, missing))
                raise PeerLostError(f"{names} did not connect within {seconds:g} s")
            for other in missing:
                reports[other]()
            check()

    def _unconnected(self) -> list[int]:
        """Return the ranks that have not connected to this one."""
        return [other for other, peer in self._peers.items() if peer.source is None]

    def close(self) -> None:
        """Send what is queued, and close the connections."""
        for peer in self._peers.values():
            peer.close()
        deadline = time.monotonic() + min(5.0, self._timeout_seconds)
        for peer in self._peers.values():
            peer.join(deadline)

    # ------------------------------------------------------------------------------------------ messages

    def send(self, view: memoryview, to: int, tag: int) -> PendingMessage:
        """Post a send of bytes, which must not change before the transfer is done."""
        return self._peers[to].send(view, tag)

    def receive(self, view: memoryview, source: int, tag: int) -> PendingMessage:
        """Post a receive into a buffer of exactly the message's size."""
        return self._peers[source].receive(view, tag)

    def wait(self, work: PendingMessage) -> None:
        """Wait until a message was sent or received.

        Raises:
            SilentRankError: the other rank did not answer pings for ``timeout_seconds``.
            PeerLostError: it is gone, or was busy with something else for :data:`BUSY_SECONDS`.
        """
        self.watch(work.peer, work.done_within)
        if work.error is not None:
            raise _copied(work.error)

    def watch(self, rank: int, done_within: Callable[[float], bool]) -> None:
        """Wait for something that another rank does: send it heartbeats, and report the rank that this one waits for.

        Args:
            rank: the rank.
            done_within: waits for at most the given seconds; returns whether it is done.

        Raises:
            SilentRankError, PeerLostError: as :meth:`wait`.
        """
        if not done_within(_PING_SECONDS):
            self._waiting.append(rank)
            try:
                self._watch_long(self._peers[rank], done_within)
            finally:
                self._waiting.remove(rank)

    def _watch_long(self, peer: _Peer, done_within: Callable[[float], bool]) -> None:
        start = time.monotonic() - _PING_SECONDS
        next_report, next_ping, next_stacks = SAY_SECONDS, 0.0, _STACK_SECONDS
        peer.waits_for = -1
        while True:
            now = time.monotonic()
            waited, silent = now - start, now - max(peer.last_heard, start)
            if waited >= next_ping:
                peer.send_control(FrameKind.PING)
                next_ping = waited + _PING_SECONDS
            if waited >= next_report:
                self._report_wait(peer, waited)
                # After 10 s, 30 s, and then every 30 s.
                next_report = REPORT_SECONDS * (waited // REPORT_SECONDS + 1)
            # The peer answers and waits for no other rank: it is the end of the chain, so its stacks tell why.
            if waited >= next_stacks and silent < next_stacks / 2 and peer.waits_for < 0:
                peer.send_control(FrameKind.STACKS)
                next_stacks *= 10
            if silent >= self._timeout_seconds:
                peer.fail(
                    SilentRankError(
                        f"{self.name_of(peer.rank)} has sent no heartbeat for {silent:.0f} s",
                        hint="check whether it is stopped or its machine is unreachable; the limit is "
                        f"strategy.timeout_seconds={self._timeout_seconds:g}.",
                    )
                )
            elif waited >= max(BUSY_SECONDS, self._timeout_seconds):
                peer.fail(
                    PeerLostError(
                        f"{self.name_of(peer.rank)} sends heartbeats, but has been busy with something else for "
                        f"{waited:.0f} s"
                    )
                )
            if done_within(min(_CHECK_SECONDS, max(0.01, self._timeout_seconds - silent))):
                return
            if peer.lost is not None:
                raise _copied(peer.lost)

    def report_gone(self, rank: int) -> None:
        """Report the first rank that is gone without a goodbye: the others go because of it."""
        say, self._say_gone = self._say_gone, None
        if say is not None:
            say(self.name_of(rank))

    def _report_wait(self, peer: _Peer, waited: float) -> None:
        other = peer.rank if peer.waits_for < 0 or peer.waits_for >= self.size else peer.waits_for
        if other != self.rank:
            self._say(self.name_of(other), waited)

    def waits_for(self, besides: int) -> int:
        """Return the rank at the end of this rank's chain of waits; -1 if it waits for none, or for ``besides``."""
        # -1 and `besides` break cycles: two ranks that wait for each other both report the first rank of their chain.
        first = next(iter(tuple(self._waiting)), None)
        if first is None or first == besides:
            return -1
        last = self._peers[first].waits_for
        return first if last in (-1, self.rank, besides) else last
