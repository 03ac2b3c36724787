"""The request to end a run early, such as before a preemption: all ranks grant it after the same step."""

from __future__ import annotations

import contextlib
import signal
from typing import Any


class Interruption:
    """A rank's view of the request to save a checkpoint and to end.

    Ranks that step together must end after the same step, or those that go on would wait for the others. So a rank that
    received SIGTERM adds a 1 to a message that a step sends in any case, and all ranks end after the step in which the
    sum is above 0.

    Attributes:
        requested: whether this rank, or a server that announced it, received SIGTERM since :meth:`watch`.
        agreed: whether a step has told all ranks that one of them did.
    """

    def __init__(self) -> None:
        self.requested = self.agreed = False

    def watch(self, requested: bool = False) -> None:
        """Take SIGTERM for the request from now on; without effect in a thread, which may not handle signals.

        Args:
            requested: whether SIGTERM was received before.
        """
        self.requested, self.agreed = requested, False
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, self.request)

    def request(self, *_: Any) -> None:
        """Ask all ranks to save a checkpoint and to end; a handler of signals, which any thread may call too."""
        self.requested = True

    def settle(self, requests: float) -> None:
        """Receive a step's sum over the ranks of :attr:`requested`, perhaps scaled by a positive number."""
        self.agreed = self.agreed or requests > 0
