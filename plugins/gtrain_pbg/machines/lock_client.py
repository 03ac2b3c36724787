"""A rank's line to the lock server, and the heartbeats by which it is known to be there."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gtrain.errors import PeerLostError
from gtrain.wire import Client, Message, RemoteError, WireError
from gtrain_pbg.machines.lock_server import place

FOREVER = 1e7
"""Seconds: who waits for a bucket or a meeting waits until it comes, or until the heartbeats say that it cannot."""
BEATS = 4
"""Heartbeats in the time after which a rank is taken for lost."""


class LockClient:
    """Asks the lock server.

    Args:
        client: of the lock server.
        lease_seconds: after how long a rank that is silent is taken for lost.
        timeout_seconds: how long the lock server may be silent.
    """

    def __init__(self, client: Client, lease_seconds: float, timeout_seconds: float) -> None:
        self._client, self._timeout_seconds = client, timeout_seconds
        self._pause, self._silent = lease_seconds / BEATS, ""
        self._over = threading.Event()
        self.ask("join", {"place": place(), "pid": os.getpid()})
        threading.Thread(target=self._beat, name="gtrain-heart", daemon=True).start()

    def ask(self, method: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Message:
        """Ask, and wait for as long as it takes.

        Raises:
            PeerLostError: the lock server is gone, this machine was taken for lost, or the job cannot go on.
        """
        try:
            return self._client.request(method, fields, tensors, timeout_seconds=FOREVER)
        except RemoteError as error:
            if error.kind == PeerLostError.__name__:
                raise PeerLostError(error.remote_message, hint=error.hint) from error
            raise
        except WireError as error:
            raise PeerLostError(self._silent or error.message) from error

    def close(self) -> None:
        """End the heartbeats."""
        self._over.set()

    def _beat(self) -> None:
        while not self._over.wait(self._pause):
            try:
                self._client.request("beat", timeout_seconds=self._timeout_seconds)
            except WireError as error:
                self._silent = error.message
                self._client.close()  # whoever waits for an answer has waited in vain
                return
