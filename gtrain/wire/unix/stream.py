"""Messages over a connected stream socket within a machine, sent and received by the threads that ask and answer.

zmq has a thread of its own carry every message. Where processes share cores, each such step waits for a core, often for
longer than the work takes that it carries; here a message wakes whom it is for, and nobody else.

A message is a prelude (a mark, the number of frames, the length of each) and the frames. Nothing else is added: who may
connect is a matter of the folder that the socket is in.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from gtrain.wire.limits import Limits

KERNEL_BUFFER = 4 << 20
"""Bytes that the kernel may buffer for a connection, as far as it lets us (net.core.wmem_max)."""
MARK = b"gtr1"
ZMQ_MARK = b"\xff"
"""What a zmq socket says first."""
_NO_KEYS = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)  # ZMTP 3.1's greeting
_FRONT = struct.Struct("=4sI")
_SCRATCH_BYTES = 16 << 10
_MOST_PIECES = 512  # of one system call; the kernel takes 1024


class EndedError(Exception):
    """The other end has gone."""


class ForeignError(Exception):
    """What came is no message of ours.

    Args:
        zmq: whether a zmq socket is at the other end.
    """

    def __init__(self, zmq: bool = False) -> None:
        super().__init__("it does not speak this protocol")
        self.zmq = zmq


class Piece:
    """A received frame; see ``zmq.Frame``.

    Args:
        buffer: its memory, which is no one else's.
    """

    __slots__ = ("buffer",)

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return self.buffer.nbytes

    @property
    def bytes(self) -> bytes:
        """A copy."""
        return bytes(self.buffer)


class Stream:
    """One end of a connection.

    Args:
        sock: connected, of which this takes care from now on.
        limits: of this side; a larger frame, or more frames, end the connection before anything is allocated.
    """

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, KERNEL_BUFFER)
        self._socket = sock
        self._most_bytes = max(limits.max_frame_bytes, limits.max_header_bytes)
        self._most_frames = limits.max_tensors + 1
        self._unsent: deque[bytes | memoryview] = deque()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._begin = self._end = 0  # of what was received and not looked at
        self._frames: list[memoryview] | None = None  # of the message that is coming in
        self._missing: deque[memoryview] = deque()

    @property
    def descriptor(self) -> int:
        """The socket's."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits until the kernel takes it."""
        return bool(self._unsent)

    @property
    def buffered(self) -> bool:
        """Whether something was received that belongs to the next message."""
        return self._begin < self._end

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    # ------------------------------------------------------------------------------------------------- sending

    def send(self, header: bytes, frames: Sequence[memoryview]) -> int:
        """Send a message, now or as soon as the kernel takes it; return its bytes.

        Memory of frames is not to be written to while :attr:`unsent`.

        Raises:
            EndedError: the other end has gone.
        """
        sizes = [frame.nbytes for frame in frames]
        count = len(sizes) + 1
        front = struct.pack(f"=4sI{count}Q", MARK, count, len(header), *sizes) + header
        self._unsent.append(front)
        self._unsent.extend(frame for frame in frames if frame.nbytes)
        self.flush()
        return len(header) + sum(sizes)

    def greet_zmq(self) -> None:
        """Have a zmq socket at the other end know that there are no keys here; it does not understand more."""
        with suppress(OSError):
            self._socket.send(_NO_KEYS)

    def flush(self) -> None:
        """Give the kernel what it takes.

        Raises:
            EndedError: the other end has gone.
        """
        unsent = self._unsent
        while unsent:
            try:
                sent = self._socket.sendmsg(list(islice(unsent, _MOST_PIECES)))
            except BlockingIOError:
                return
            except OSError as err:
                raise EndedError from err
            while sent:
                piece = memoryview(unsent.popleft())
                if sent < piece.nbytes:
                    unsent.appendleft(piece.cast("B")[sent:])
                    break
                sent -= piece.nbytes

    # ----------------------------------------------------------------------------------------------- receiving

    def receive(self) -> list[Piece] | None:
        """The frames of the next message, or None if it is not all there yet.

        Raises:
            EndedError: the other end has gone.
            ForeignError: what came is no message.
        """
        while self._frames is None:
            if not self._begin_message() and not self._read():
                return None
        while self._missing:
            if not self._fill():
                return None
        frames, self._frames = self._frames, None
        return [Piece(frame) for frame in frames]

    def _begin_message(self) -> bool:
        """Make room for the frames of the next message, if its prelude is here, and take in what is here of them."""
        there = self._end - self._begin
        if there and bytes(self._scratch[self._begin : self._begin + 1]) == ZMQ_MARK:
            raise ForeignError(zmq=True)
        if there < _FRONT.size:
            return False
        mark, count = _FRONT.unpack_from(self._scratch, self._begin)
        if mark != MARK or not 0 < count <= self._most_frames:
            raise ForeignError
        begin = self._begin + _FRONT.size
        if self._end - begin < 8 * count:
            return False
        sizes = struct.unpack_from(f"={count}Q", self._scratch, begin)
        if max(sizes) > self._most_bytes:
            raise ForeignError
        self._begin = begin + 8 * count
        self._frames = [np.empty(size, np.uint8).data for size in sizes]
        self._missing.extend(rest for frame in self._frames if len(rest := self._take(frame)))
        return True

    def _take(self, frame: memoryview) -> memoryview:
        """Copy what is here of a frame; return the rest of it."""
        count = min(len(frame), self._end - self._begin)
        frame[:count] = self._scratch[self._begin : self._begin + count]
        self._begin += count
        return frame[count:]

    def _read(self) -> bool:
        """Read what there is, up to some number of bytes; False if there is nothing."""
        if self._begin:
            rest = bytes(self._scratch[self._begin : self._end])
            self._scratch[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        count = self._received([self._scratch[self._end :]])
        self._end += count
        return count > 0

    def _fill(self) -> bool:
        """Read into frames; False if there is nothing."""
        count = there = self._received(list(islice(self._missing, _MOST_PIECES)))
        while count:
            frame = self._missing.popleft()
            if count < len(frame):
                self._missing.appendleft(frame[count:])
                break
            count -= len(frame)
        return there > 0

    def _received(self, rooms: list[memoryview]) -> int:
        """Read into memory; return the number of bytes, 0 if there are none now."""
        try:
            count = self._socket.recvmsg_into(rooms)[0]
        except BlockingIOError:
            return 0
        except OSError as err:
            raise EndedError from err
        if not count:
            raise EndedError
        return count
