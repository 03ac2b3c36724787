"""Messages over a connected Unix stream socket.

The threads that send a request and compute its reply read and write the socket themselves. ZeroMQ has an I/O thread
carry every message; where processes share cores, that thread often waits for a core for longer than the message takes.

A message is a prelude (magic bytes, the number of frames, the length of each) followed by the frames; see "Wire" in
docs/formats.md. The mode of the socket's folder decides who may connect.
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
from gtrain.wire.transport import KERNEL_BUFFER

MAGIC = b"gtr1"
ZMQ_MAGIC = b"\xff"
"""The first byte that a zmq socket sends."""
_ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)  # ZMTP 3.1, no keys
_PRELUDE = struct.Struct("=4sI")  # magic bytes, number of frames
_SCRATCH_BYTES = 16 << 10
_MAX_BUFFERS = 512  # per system call; the kernel takes 1024


class ConnectionEndedError(Exception):
    """The peer closed the connection, or is gone."""


class ProtocolError(Exception):
    """The peer sent data that is not a message of this protocol.

    Args:
        is_zmq: whether the peer is a zmq socket.
    """

    def __init__(self, is_zmq: bool = False) -> None:
        super().__init__("it does not speak this protocol")
        self.is_zmq = is_zmq


class Stream:
    """One end of a connection.

    Args:
        sock: a connected socket; the stream closes it.
        limits: of this side; a larger frame, or more frames, end the connection before memory is allocated.
        routing: the listener's id of the connection.
    """

    def __init__(self, sock: socket.socket, limits: Limits, routing: bytes = b"") -> None:
        self.routing = routing
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, KERNEL_BUFFER)
        self._socket = sock
        self._max_frame_bytes = max(limits.max_frame_bytes, limits.max_header_bytes)
        self._max_frames = limits.max_tensors + 1
        self._unsent: deque[bytes | memoryview] = deque()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0  # of the received bytes in the scratch buffer
        self._frames: list[memoryview] | None = None  # of the message that is arriving
        self._missing: deque[memoryview] = deque()  # parts of these frames that have not arrived

    @property
    def descriptor(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether data waits until the kernel has room."""
        return bool(self._unsent)

    @property
    def buffered(self) -> bool:
        """Whether part of the next message is in the scratch buffer."""
        return self._start < self._end

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    # ------------------------------------------------------------------------------------------------- sending

    def send(self, header: bytes, frames: Sequence[memoryview]) -> int:
        """Send a message, now or as soon as the kernel has room; return its size in bytes.

        The frames' memory must not be written to while :attr:`unsent`.

        Raises:
            ConnectionEndedError: the peer is gone.
        """
        sizes = [frame.nbytes for frame in frames]
        count = len(sizes) + 1
        # Prelude and header are joined: a small message is one buffer.
        self._unsent.append(struct.pack(f"=4sI{count}Q", MAGIC, count, len(header), *sizes) + header)
        self._unsent.extend(frame for frame in frames if frame.nbytes)
        self.flush()
        return len(header) + sum(sizes)

    def greet_zmq(self) -> None:
        """Send a zmq peer the greeting of a server without keys: a client with keys then raises at once."""
        with suppress(OSError):
            self._socket.send(_ZMTP_GREETING)

    def flush(self) -> None:
        """Send as much as the kernel takes.

        Raises:
            ConnectionEndedError: the peer is gone.
        """
        unsent = self._unsent
        while unsent:
            try:
                sent = self._socket.sendmsg(list(islice(unsent, _MAX_BUFFERS)))
            except BlockingIOError:
                return
            except OSError as err:
                raise ConnectionEndedError from err
            while sent:
                # The kernel took a part: drop what was sent, and keep the rest of the first incomplete buffer.
                buffer = memoryview(unsent.popleft())
                if sent < buffer.nbytes:
                    unsent.appendleft(buffer.cast("B")[sent:])
                    break
                sent -= buffer.nbytes

    # ----------------------------------------------------------------------------------------------- receiving

    def receive(self) -> list[memoryview] | None:
        """Return the frames of the next message, or None if it has not arrived completely.

        Raises:
            ConnectionEndedError: the peer is gone.
            ProtocolError: the data is not a message.
        """
        while self._frames is None:
            if not self._start_message() and not self._read():
                return None
        while self._missing:
            if not self._fill():
                return None
        frames, self._frames = self._frames, None
        return frames

    def _start_message(self) -> bool:
        """Allocate the next message's frames, once its prelude has arrived, and copy the bytes that followed it."""
        available = self._end - self._start
        if available and self._scratch[self._start] == ZMQ_MAGIC[0]:
            raise ProtocolError(is_zmq=True)
        if available < _PRELUDE.size:
            return False
        magic, count = _PRELUDE.unpack_from(self._scratch, self._start)
        if magic != MAGIC or not 0 < count <= self._max_frames:
            raise ProtocolError
        start = self._start + _PRELUDE.size
        if self._end - start < 8 * count:
            return False
        sizes = struct.unpack_from(f"={count}Q", self._scratch, start)
        # Before the allocation: a malformed prelude must not take memory.
        if max(sizes) > self._max_frame_bytes:
            raise ProtocolError
        self._start = start + 8 * count
        # np.empty does not write zeros into memory that the message overwrites.
        self._frames = [np.empty(size, np.uint8).data for size in sizes]
        self._missing.extend(rest for frame in self._frames if len(rest := self._copy_to(frame)))
        return True

    def _copy_to(self, frame: memoryview) -> memoryview:
        """Copy a frame's bytes from the scratch buffer; return the part of the frame that has not arrived."""
        count = min(len(frame), self._end - self._start)
        frame[:count] = self._scratch[self._start : self._start + count]
        self._start += count
        return frame[count:]

    def _read(self) -> bool:
        """Read into the scratch buffer; return False if nothing has arrived."""
        if self._start:
            # A copy, because source and target overlap.
            rest = bytes(self._scratch[self._start : self._end])
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        count = self._receive_into([self._scratch[self._end :]])
        self._end += count
        return count > 0

    def _fill(self) -> bool:
        """Read into the missing parts of frames; return False if nothing has arrived."""
        count = received = self._receive_into(list(islice(self._missing, _MAX_BUFFERS)))
        while count:
            frame = self._missing.popleft()
            if count < len(frame):
                self._missing.appendleft(frame[count:])
                break
            count -= len(frame)
        return received > 0

    def _receive_into(self, buffers: list[memoryview]) -> int:
        """Read into memory; return the number of bytes, 0 if none have arrived."""
        try:
            count = self._socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return 0
        except OSError as err:
            raise ConnectionEndedError from err
        if not count:
            raise ConnectionEndedError
        return count
