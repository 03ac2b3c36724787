"""Parameters that all machines have: a server that adds up changes, and each machine's copy.

A loop beside training keeps the copy near those of the other machines. Where a bucket begins they are exchanged too, so
that a copy is never older than one bucket, however busy the machine is. The loop sends the change since it last did;
the server adds it to its own value and answers with that. What the machine's workers have changed meanwhile stays on
top. State of optimizers is a sum too and travels alike.
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
"""Numbers of a parameter that one server has; larger ones are spread over all."""
MOST_UPDATES = 100
"""A second."""
MOST_BYTES = 1e9
"""A second."""


def main(context: ServerContext) -> None:
    """Serve until asked to end."""
    start_heartbeat(context)
    context.serve(ParameterHandlers().methods())


class ParameterHandlers:
    """The methods of a parameter server. Keys are a parameter's name and the number of its piece."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def methods(self) -> dict[str, Any]:
        """The handlers by the names of their methods."""
        return {name: getattr(self, name) for name in ("put", "add", "get")}

    def put(self, message: Message, caller: Caller) -> None:
        """Have these values. Fields: ``keys``; as many tensors."""
        self._values |= dict(zip(message.fields["keys"], message.tensors, strict=True))

    def add(self, message: Message, caller: Caller) -> Message:
        """Add what has changed, and answer with the new values. Fields: ``keys``; as many tensors."""
        for key, change in zip(message.fields["keys"], message.tensors, strict=True):
            self._value(key).add_(change)
        return self.get(message, caller)

    def get(self, message: Message, caller: Caller) -> Message:
        """The values. Fields: ``keys``."""
        return Message({}, [self._value(key).clone() for key in message.fields["keys"]])

    def _value(self, key: str) -> Tensor:
        if key not in self._values:
            raise DataError(f"there is no parameter {key} here.", hint="this is an error of gtrain.")
        return self._values[key]


class SharedParameters:
    """The copy.

    Args:
        tensors: by name; in memory that the machine's workers share.
        clients: of the parameter servers, in rank order.
        interval: seconds between updates, at least.
        silent_seconds: how long a server may take to answer.

    Attributes:
        holding: numbers of the servers that keep something; the others are not asked.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        clients: Sequence[Client],
        interval: float,
        silent_seconds: float = 60.0,
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
        self._exchanging = threading.Lock()

    def put(self) -> None:
        """Let the servers have the values as they are here."""
        for client, pieces in zip(self._clients, self._pieces, strict=True):
            values = [piece.clone() for piece in pieces.values()]
            client.request("put", {"keys": list(pieces)}, values, self._silent_seconds)
        self._remember()

    def get(self) -> None:
        """Take the servers' values."""
        for client, pieces in zip(self._clients, self._pieces, strict=True):
            values = client.request("get", {"keys": list(pieces)}, timeout_seconds=self._silent_seconds).tensors
            for piece, value in zip(pieces.values(), values, strict=True):
                piece.copy_(value)
        self._remember()

    def exchange(self) -> None:
        """Send what has changed, and take in what others have; any thread may do so."""
        with self._exchanging:
            self._exchange()

    def _exchange(self) -> None:
        sent = []
        for client, pieces, last in zip(self._clients, self._pieces, self._last, strict=True):
            now = {key: piece.clone() for key, piece in pieces.items()}
            changes = [now[key] - last[key] for key in pieces]
            sent.append((now, client.submit("add", {"keys": list(pieces)}, changes, self._silent_seconds)))
        for (now, answer), pieces, last in zip(sent, self._pieces, self._last, strict=True):
            for key, value in zip(pieces, answer.result().tensors, strict=True):
                pieces[key].add_(value - now[key])
                last[key] = value

    def start(self) -> None:
        """Begin to exchange beside training."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._stop,), name="gtrain-parameters", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End that, with a last exchange.

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
        """Raise what went wrong beside training."""
        if self._failure is not None:
            raise self._failure

    def _run(self, stop: threading.Event) -> None:
        began = time.monotonic()
        while not stop.wait(max(0.0, began + self._interval - time.monotonic())):
            began = time.monotonic()
            try:
                self.exchange()
            except Exception as error:  # noqa: BLE001 - for the thread that trains to raise
                self._failure = error
                return

    def _remember(self) -> None:
        for pieces, last in zip(self._pieces, self._last, strict=True):
            last.update({key: piece.clone() for key, piece in pieces.items()})


def _pieces(tensors: Mapping[str, Tensor], server: int, servers: int) -> dict[str, Tensor]:
    """Views of what a server has: small parameters are at the first, without which no job goes on; large are spread."""
    pieces = {}
    for name, tensor in tensors.items():
        flat = tensor.view(-1)
        count = min(servers, -(-flat.numel() // PIECE_NUMBERS))
        if server < count:
            pieces[f"{name}/{server}"] = flat.tensor_split(count)[server]
    return pieces
