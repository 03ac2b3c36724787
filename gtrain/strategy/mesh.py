"""Connections between all ranks of a group, and messages on them.

Two ranks have two connections, one for each direction: a thread of the sender writes to it, a thread of the receiver
reads from it, and both release the interpreter while bytes move. Up to :data:`EAGER_BYTES` are sent at once; more waits
until the receiver has a buffer for it, so that nothing is copied twice and nothing large lies in memory unasked.

Each frame is a header and its content:

    kind   1 byte    what it is, see :class:`Kind`
    tag    8 bytes   which message; of a pong, for whom its sender waits (-1: nobody)
    size   8 bytes   of the content

A rank that waits for another asks it for a sign of life, and is told whom that one waits for. So the rank that all the
others wait for in the end can be named, and one that is busy is told from one that is stopped or cut off.
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

from gtrain.errors import PeerLostError, SilentRankError
from gtrain.launch import links
from gtrain.launch.logs import write_stacks

EAGER_BYTES = 64 << 10
SAY_SECONDS = 10.0
"""After how long it is said for whom a rank waits."""
BUSY_SECONDS = 1800.0
"""How long a rank is waited for that gives signs of life; one that gives none is lost after ``timeout_seconds``."""
_ASK_SECONDS = 2.0
_LOOK_SECONDS = 1.0
_STACK_SECONDS = 30.0
_FRAME = struct.Struct("!BqQ")
_HELLO = struct.Struct("!16sI")


class Kind(enum.IntEnum):
    """What a frame is."""

    DATA = 1
    READY = 2
    """The receiver has a buffer for a large message."""
    PING = 3
    PONG = 4
    STACKS = 5
    """Write the stacks of all threads to the log: somebody has been waiting for long."""
    BYE = 6
    """The sender leaves the group in order."""


class Work:
    """A message on its way: :meth:`Mesh.wait` waits until it has left, or arrived."""

    __slots__ = ("_done", "error", "peer", "view")

    def __init__(self, peer: int, view: memoryview) -> None:
        self.peer, self.view = peer, view
        self.error: PeerLostError | None = None
        self._done = threading.Event()

    def finish(self, error: PeerLostError | None = None) -> None:
        """Note that it is over."""
        self.error = error
        self._done.set()

    def done_within(self, seconds: float) -> bool:
        """Whether it is over, after at most so many seconds."""
        return self._done.wait(seconds)


class _Peer:
    """One other rank: what is to be sent to it, and what is expected from it."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self.lock = threading.Lock()
        self.heard = time.monotonic()
        self.waits_for, self.lost = -1, None  # type: tuple[int, PeerLostError | None]
        self.line: socket.socket | None = None  # to send
        self.source: socket.socket | None = None  # to receive
        self._queue: deque[tuple[int, int, Work | None]] = deque()
        self._queued = threading.Condition(self.lock)
        self._writing = self._closing = False
        self._parked: dict[int, deque[Work]] = {}  # large ones, until the receiver is ready
        self._ready: dict[int, int] = {}  # how often it was ready before there was one
        self._expected: dict[int, deque[Work]] = {}
        self._arrived: dict[int, deque[bytearray]] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to write and to read."""
        for name, run in (("send", self._write), ("receive", self._read)):
            thread = threading.Thread(target=run, name=f"gtrain-{name}-{self.rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # ------------------------------------------------------------------------------------------ sending

    def send(self, view: memoryview, tag: int) -> Work:
        work = Work(self.rank, view)
        with self.lock:
            if self.lost is not None:
                work.finish(self.lost)
            elif tag in self._parked:  # messages of one tag keep their order
                self._parked[tag].append(work)
            elif len(view) <= EAGER_BYTES or self._take_ready(tag):
                self._post(Kind.DATA, tag, work)
            else:
                self._parked[tag] = deque([work])
        return work

    def say(self, kind: Kind, tag: int = 0) -> None:
        """Send a frame without content."""
        with self.lock:
            if self.lost is None:
                self._post(kind, tag, None)

    def _take_ready(self, tag: int) -> bool:
        count = self._ready.get(tag, 0)
        if count > 1:
            self._ready[tag] = count - 1
        elif count:
            del self._ready[tag]
        return count > 0

    def _post(self, kind: int, tag: int, work: Work | None) -> None:
        self._queue.append((kind, tag, work))
        self._queued.notify()

    def _write(self) -> None:
        line, work = self.line, None
        assert line is not None
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
                    line.sendall(_FRAME.pack(kind, tag, 0))
                    continue
                size = len(work.view)
                head = _FRAME.pack(kind, tag, size)
                if size <= EAGER_BYTES:
                    line.sendall(b"".join((head, work.view)))
                else:
                    line.sendall(head)
                    line.sendall(work.view)
                work.finish()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait in vain
            self.lose(self._gone(error))
            if work is not None:
                work.finish(self.lost)
        finally:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    # ------------------------------------------------------------------------------------------ receiving

    def receive(self, view: memoryview, tag: int) -> Work:
        work = Work(self.rank, view)
        with self.lock:
            if early := self._arrived.get(tag):
                self._fill(work, early.popleft())
                if not early:
                    del self._arrived[tag]
            elif self.lost is not None:
                work.finish(self.lost)
            else:
                self._expected.setdefault(tag, deque()).append(work)
                if len(view) > EAGER_BYTES:
                    self._post(Kind.READY, tag, None)
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
                self.heard = time.monotonic()
                if kind == Kind.DATA:
                    self._take(source, tag, size)
                elif kind == Kind.READY:
                    self._let_go(tag)
                elif kind == Kind.PING:
                    self.say(Kind.PONG, self.mesh.waits_for(besides=self.rank))
                elif kind == Kind.PONG:
                    self.waits_for = tag
                elif kind == Kind.STACKS:
                    write_stacks()
                elif kind == Kind.BYE:
                    raise ConnectionResetError("it has left")
                else:
                    raise ConnectionAbortedError(f"a frame of kind {kind} came")
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait in vain
            self.lose(self._gone(error))
        finally:
            source.close()

    def _take(self, source: socket.socket, tag: int, size: int) -> None:
        """Receive a message into its buffer, or keep it for one."""
        with self.lock:
            works = self._expected.get(tag)
            work = works.popleft() if works else None
            if works is not None and not works:
                del self._expected[tag]
        if work is None or len(work.view) != size:
            if work is not None or size > EAGER_BYTES:
                wanted = "no large message was" if work is None else f"{len(work.view)} were"
                error = ConnectionAbortedError(f"{size} bytes where {wanted} expected")
                if work is not None:
                    work.finish(self._gone(error))
                raise error
            early = bytearray(size)
            links.receive_into(source, memoryview(early))
            with self.lock:
                if works := self._expected.get(tag):  # it came to be expected meanwhile
                    work = works.popleft()
                    if not works:
                        del self._expected[tag]
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

    def _fill(self, work: Work, content: bytearray) -> None:
        if len(content) != len(work.view):
            work.finish(
                PeerLostError(
                    f"{self.mesh.name_of(self.rank)} sent {len(content)} bytes where {len(work.view)} were expected"
                )
            )
            return
        work.view[:] = content
        work.finish()

    def _let_go(self, tag: int) -> None:
        with self.lock:
            works = self._parked.get(tag)
            if not works:
                self._ready[tag] = self._ready.get(tag, 0) + 1
                return
            self._post(Kind.DATA, tag, works.popleft())
            while works and len(works[0].view) <= EAGER_BYTES:
                self._post(Kind.DATA, tag, works.popleft())
            if not works:
                del self._parked[tag]

    def _alive(self) -> None:
        self.heard = time.monotonic()

    # ------------------------------------------------------------------------------------------ the end

    def _gone(self, error: Exception) -> PeerLostError:
        name = self.mesh.name_of(self.rank)
        if isinstance(error, ConnectionAbortedError):
            return PeerLostError(f"{name} sent what was not expected: {error}")
        return PeerLostError(f"{name} is gone: {getattr(error, 'strerror', None) or error}")

    def lose(self, error: PeerLostError) -> None:
        """Let all that is under way with this rank fail."""
        with self.lock:
            if self.lost is not None:
                return
            self.lost, self._closing = error, True
            works = [work for _, _, work in self._queue if work is not None]
            for waiting in (self._parked, self._expected):
                works += [work for some in waiting.values() for work in some]
                waiting.clear()
            self._queue.clear()
            self._queued.notify()
        for work in works:
            work.finish(error)
        for line in (self.line, self.source):
            if line is not None:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Send what is queued, say goodbye, and end the threads."""
        with self.lock:
            if self.lost is None:
                self._queue.append((Kind.BYE, 0, None))
            self._closing = True
            self._queued.notify()

    def join(self, deadline: float) -> None:
        """Wait until what was queued has left, and end the reading thread."""
        if not self._threads:
            for line in (self.line, self.source):
                if line is not None:
                    line.close()
            return
        self._threads[0].join(max(0.0, deadline - time.monotonic()))
        self.lose(PeerLostError("the group is closed"))
        self._threads[1].join(max(0.1, deadline - time.monotonic()))


class Mesh:
    """The connections of one rank with all others of a group.

    Args:
        rank: this process.
        size: number of ranks.
        timeout_seconds: how long a rank may give no sign of life while it is waited for.
        name_of: what messages call a rank, such as ``rank 2 (machine 1)``.
        say: called with a sentence when a rank has been waited for for long.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_seconds: float,
        name_of: Callable[[int], str] = lambda rank: f"rank {rank}",
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.rank, self.size, self.name_of = rank, size, name_of
        self._timeout_seconds, self._say = timeout_seconds, say
        self._peers = {other: _Peer(self, other) for other in range(size) if other != rank}
        self._waiting: int | None = None
        self._entered = threading.Condition()

    # ------------------------------------------------------------------------------------------ forming

    def connect(
        self,
        listeners: Sequence[socket.socket],
        key_file: str | None,
        pointer: str | None,
        group: str,
        address_of: Callable[[int], str],
        seconds: float,
    ) -> None:
        """Connect with all other ranks, which do the same.

        Args:
            listeners: sockets at which this rank lets the others in; not used any more afterwards.
            key_file: of the job; see :class:`gtrain.launch.links.AuthenticatedListener`.
            pointer: as there.
            group: name of the group, by which a connection of another one is told apart.
            address_of: returns where a rank listens, once it has said so.
            seconds: how long all of it may take.

        Raises:
            PeerLostError: a rank did not come in time.
            RefusedConnectionError: a rank has another key.
        """
        deadline = time.monotonic() + seconds
        mark = hashlib.sha256(group.encode()).digest()[:16]

        def enter(line: socket.socket) -> None:
            line.settimeout(links.HANDSHAKE_SECONDS)
            head = bytearray(_HELLO.size)
            links.receive_into(line, memoryview(head))
            line.settimeout(None)
            name, rank = _HELLO.unpack(head)
            with self._entered:
                if name != mark or rank not in self._peers or self._peers[rank].source is not None:
                    line.close()
                    return
                self._peers[rank].source = line
                self._entered.notify_all()

        door = links.AuthenticatedListener(listeners, key_file, pointer, enter, f"rank {self.rank}")
        try:
            for other, peer in self._peers.items():
                try:
                    left = max(0.0, deadline - time.monotonic())
                    peer.line = links.connect(address_of(other), key_file, left, listens=True)
                    peer.line.sendall(_HELLO.pack(mark, self.rank))
                except (OSError, PeerLostError) as error:
                    reason = error.message if isinstance(error, PeerLostError) else error
                    raise PeerLostError(f"{self.name_of(other)} cannot be reached: {reason}") from error
            with self._entered:
                came = self._entered.wait_for(self._all_here, max(0.0, deadline - time.monotonic()))
            if not came:
                away = [self.name_of(other) for other, peer in self._peers.items() if peer.source is None]
                raise PeerLostError(f"{', '.join(away)} did not come within {seconds:g} s")
        except BaseException:
            self.close()
            raise
        finally:
            door.close()
        for peer in self._peers.values():
            for line in (peer.line, peer.source):
                if line is not None:
                    line.settimeout(None)
            peer.start()

    def _all_here(self) -> bool:
        return all(peer.source is not None for peer in self._peers.values())

    def close(self) -> None:
        """Send what is under way, and let go of the connections."""
        for peer in self._peers.values():
            peer.close()
        deadline = time.monotonic() + min(5.0, self._timeout_seconds)
        for peer in self._peers.values():
            peer.join(deadline)

    # ------------------------------------------------------------------------------------------ messages

    def send(self, view: memoryview, to: int, tag: int) -> Work:
        """Post a send of bytes, which must not change before it is done."""
        return self._peers[to].send(view, tag)

    def receive(self, view: memoryview, source: int, tag: int) -> Work:
        """Post a receive into a buffer of just the size that comes."""
        return self._peers[source].receive(view, tag)

    def wait(self, work: Work) -> None:
        """Wait until a message has left, or arrived.

        Raises:
            SilentRankError: the other rank gave no sign of life for ``timeout_seconds``.
            PeerLostError: it is gone, or is busy with something else for :data:`BUSY_SECONDS`.
        """
        if not work.done_within(_ASK_SECONDS):
            self._wait_long(work)
        if work.error is not None:
            raise type(work.error)(work.error.message, hint=work.error.hint) from work.error

    def _wait_long(self, work: Work) -> None:
        """Wait on, and find out for whom."""
        peer = self._peers[work.peer]
        began = time.monotonic() - _ASK_SECONDS
        next_said, next_asked, stacks_at = SAY_SECONDS, 0.0, _STACK_SECONDS
        self._waiting = work.peer
        peer.waits_for = -1
        try:
            while True:
                now = time.monotonic()
                waited, silent = now - began, now - max(peer.heard, began)
                if waited >= next_asked:
                    peer.say(Kind.PING)
                    next_asked = waited + _ASK_SECONDS
                if waited >= next_said:
                    self._tell(peer, waited)
                    next_said = 30.0 if waited < 30 else next_said + 30.0
                if waited >= stacks_at and silent < stacks_at / 2 and peer.waits_for < 0:
                    peer.say(Kind.STACKS)
                    stacks_at *= 10
                if silent >= self._timeout_seconds:
                    peer.lose(
                        SilentRankError(
                            f"{self.name_of(work.peer)} has given no sign of life for {silent:.0f} s",
                            hint="see whether it is stopped, or its machine cut off; strategy.timeout_seconds="
                            f"{self._timeout_seconds:g} is how long it is waited for.",
                        )
                    )
                elif waited >= max(BUSY_SECONDS, self._timeout_seconds):
                    peer.lose(
                        PeerLostError(
                            f"{self.name_of(work.peer)} is there, and has been busy with something else for "
                            f"{waited:.0f} s"
                        )
                    )
                if work.done_within(min(_LOOK_SECONDS, max(0.01, self._timeout_seconds - silent))):
                    return
        finally:
            self._waiting = None

    def _tell(self, peer: _Peer, waited: float) -> None:
        if self._say is None:
            return
        other = peer.rank if peer.waits_for < 0 or peer.waits_for >= self.size else peer.waits_for
        if other != self.rank:
            self._say(f"waiting for {self.name_of(other)}, {waited:.0f} s")

    def waits_for(self, besides: int) -> int:
        """The rank for which this one waits in the end; -1 if it waits for nobody, or for ``besides`` itself."""
        first = self._waiting
        if first is None or first == besides:
            return -1
        last = self._peers[first].waits_for
        return first if last in (-1, self.rank, besides) else last
