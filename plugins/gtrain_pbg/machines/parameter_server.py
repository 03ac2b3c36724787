"""Parameters that all machines share: a server that adds up changes, and each machine's copy.

A background thread keeps the copy close to those of the other machines. An exchange at the start of each bucket bounds
its staleness, however busy the machine is. An exchange sends the change since the last one; the server adds it to its
value and returns the sum, to which the changes that the machine's workers made meanwhile are added. Optimizer state is
a sum, too, and is exchanged in the same way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gtrain.errors import DataError
from gtrain.strategy.server import ServerContext
from gtrain.wire import Caller, Client, Message
from gtrain_pbg.machines.heartbeat import start_heartbeat

PIECE_NUMBERS = 1 << 18
"""Numbers of a parameter per server; larger parameters are spread over all servers."""
MOST_UPDATES = 100
"""Most exchanges per second."""
MOST_BYTES = 1e9
"""Most bytes per second."""


def main(context: ServerContext) -> None:
    """Serve until asked to end."""
    start_heartbeat(context)
    context.serve(ParameterHandlers().methods())


class ParameterHandlers:
    """The methods of a parameter server. Keys are a parameter's name and the number of its piece."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def methods(self) -> dict[str, Any]:
        """Return the handlers by the names of their methods."""
        return {name: getattr(self, name) for name in ("put", "add", "get")}

    def put(self, message: Message, caller: Caller) -> None:
        """Store values. Fields: ``keys``; a tensor for each."""
        self._values |= dict(zip(message.fields["keys"], message.tensors, strict=True))

    def add(self, message: Message, caller: Caller) -> Message:
        """Add changes, and return the new values. Fields: ``keys``; a tensor for each."""
        for key, change in zip(message.fields["keys"], message.tensors, strict=True):
            self._value(key).add_(change)
        return self.get(message, caller)

    def get(self, message: Message, caller: Caller) -> Message:
        """Return values. Fields: ``keys``."""
        return Message({}, [self._value(key).clone() for key in message.fields["keys"]])

    def _value(self, key: str) -> Tensor:
        if key not in self._values:
            raise DataError(f"this server has no parameter {key}.", hint="this is an error of gtrain.")
        return self._values[key]


class SharedParameters:
    """A machine's copy of the shared parameters.

    Args:
        tensors: by name; in memory that the machine's workers share.
        clients: of the parameter servers, in rank order.
        interval: least seconds between exchanges.
        silent_seconds: time-out of requests.
        exchanging: held during an exchange; a device adds its changes to the tensors under it.

    Attributes:
        holding: numbers of the servers that store parameters; the others get no requests.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        clients: Sequence[Client],
        interval: float,
        silent_seconds: float = 60.0,
        exchanging: threading.Lock | None = None,
    ) -> None:
        self._silent_seconds = silent_seconds
        pieces = [_pieces(tensors, server, len(clients)) for server in range(len(clients))]
        self.holding = [server for server, own in enumerate(pieces) if own]
        self._clients, self._pieces = [clients[server] for server in self.holding], [pieces[n] for n in self.holding]
        self._last = [{key: piece.clone() for key, piece in pieces.items()} for pieces in self._pieces]
        nbytes = sum(piece.nbytes for pieces in self._pieces for piece in pieces.values())
        self._interval = max(interval, 1 / MOST_UPDATES, nbytes / MOST_BYTES)
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._exchanging = exchanging or threading.Lock()

    def put(self) -> None:
        """Set the servers' values to those of this machine."""
        for client, pieces in zip(self._clients, self._pieces, strict=True):
            # Copies: workers go on changing the pieces while these are sent.
            values = [piece.clone() for piece in pieces.values()]
            client.request("put", {"keys": list(pieces)}, values, self._silent_seconds)
        self._remember()

    def get(self) -> None:
        """Set the values of this machine to those of the servers."""
        for client, pieces in zip(self._clients, self._pieces, strict=True):
            values = client.request("get", {"keys": list(pieces)}, timeout_seconds=self._silent_seconds).tensors
            for piece, value in zip(pieces.values(), values, strict=True):
                piece.copy_(value)
        self._remember()

    def exchange(self) -> None:
        """Send the changes of this machine, and add those of the others; thread-safe."""
        with self._exchanging:
            sent = []
            for client, pieces, last in zip(self._clients, self._pieces, self._last, strict=True):
                # One snapshot for both the difference and the comparison with the reply.
                now = {key: piece.clone() for key, piece in pieces.items()}
                changes = [now[key] - last[key] for key in pieces]
                sent.append((now, client.submit("add", {"keys": list(pieces)}, changes, self._silent_seconds)))
            for (now, reply), pieces, last in zip(sent, self._pieces, self._last, strict=True):
                for key, value in zip(pieces, reply.result().tensors, strict=True):
                    # Added, not copied: the workers have changed the piece since ``now`` was taken.
                    pieces[key].add_(value - now[key])
                    last[key] = value

    def start(self) -> None:
        """Start the background thread."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._stop,), name="gtrain-parameters", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the background thread, with a last exchange.

        Raises:
            WireError: an exchange failed.
        """
        if self._thread is None or self._stop is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        self.check()
        self.exchange()

    def check(self) -> None:
        """Raise the error of the background thread, if any."""
        if self._failure is not None:
            raise self._failure

    def _run(self, stop: threading.Event) -> None:
        start = time.monotonic()
        while not stop.wait(max(0.0, start + self._interval - time.monotonic())):
            start = time.monotonic()
            try:
                self.exchange()
            except Exception as error:  # noqa: BLE001 - raised by the training thread
                self._failure = error
                return

    def _remember(self) -> None:
        for pieces, last in zip(self._pieces, self._last, strict=True):
            last.update({key: piece.clone() for key, piece in pieces.items()})


def _pieces(tensors: Mapping[str, Tensor], server: int, servers: int) -> dict[str, Tensor]:
    """Return views of a server's pieces. Small parameters are on the first server, whose loss ends the job anyway."""
    pieces = {}
    for name, tensor in tensors.items():
        flat = tensor.view(-1)
        count = min(servers, -(-flat.numel() // PIECE_NUMBERS))
        if server < count:
            pieces[f"{name}/{server}"] = flat.tensor_split(count)[server]
    return pieces
