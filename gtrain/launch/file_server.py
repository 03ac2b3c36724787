"""The files of a store, sent by the process that prepared it to processes on machines without it.

A request is a frame with the name of a file; the answer is its size and its contents. One connection carries one file.
:mod:`gtrain.launch.links` decides who may connect.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from gtrain.errors import PeerLostError, StoreError
from gtrain.launch import links
from gtrain.launch.sockets import listen_tcp

_SIZE = struct.Struct("!q")
_ABSENT = -1
_LONGEST_NAME = 4096  # bytes
_PIECE = 1 << 20  # bytes per message
_ANSWER_SECONDS = 60.0
"""How long the server may take for a piece of a file."""


class FileServer:
    """Sends files of one folder to the processes of the job, until this process ends.

    Args:
        folder: the folder.
        names: the paths of the files that it sends, relative to the folder; other names are refused.
        host: address of this machine at which it listens.
        key_file: path of the job's key file.

    Attributes:
        address: where it listens, ``tcp://HOST:PORT``.
    """

    def __init__(self, folder: Path, names: Collection[str], host: str, key_file: str) -> None:
        self._folder, self._names = folder, frozenset(names)
        self._listener = listen_tcp(host)
        self.address = self._listener.address
        name = f"the server of the files in {folder}"
        self._door = links.AuthenticatedListener([self._listener.socket], key_file, None, self._answer, name)

    def close(self) -> None:
        """Accept no more connections."""
        self._door.close()
        self._listener.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            name = links.receive_frame(connection, _LONGEST_NAME).decode(errors="replace")
            if name not in self._names:
                connection.sendall(_SIZE.pack(_ABSENT))
                return
            with (self._folder / name).open("rb", buffering=0) as file:
                size = file.seek(0, 2)
                file.seek(0)
                connection.sendall(_SIZE.pack(size))
                while piece := file.read(_PIECE):
                    connection.sendall(piece)


class ServedFolder:
    """A store that a :class:`FileServer` of this job sends.

    Args:
        address: address of the server.
        key_file: path of the job's key file.
    """

    def __init__(self, address: str, key_file: str) -> None:
        self.address, self._key_file = address, key_file

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file; see :class:`gtrain.graph.store.replica.Origin`.

        Raises:
            StoreError: the server does not send this file.
            PeerLostError: the server is gone.
        """
        try:
            with links.connect(self.address, self._key_file, _ANSWER_SECONDS) as connection:
                connection.settimeout(_ANSWER_SECONDS)
                links.send_frame(connection, name.encode())
                (left,) = _SIZE.unpack(links.receive_exactly(connection, _SIZE.size))
                if left == _ABSENT:
                    raise StoreError(
                        f"the server at {self.address} does not send {name}",
                        hint="install the same release of gtrain on all machines.",
                    )
                while left:
                    piece = links.receive_exactly(connection, min(left, _PIECE))
                    left -= len(piece)
                    yield bytes(piece)
        except OSError as error:
            reason = error.strerror or error
            raise PeerLostError(f"the server of files at {self.address} is gone: {reason}") from error
