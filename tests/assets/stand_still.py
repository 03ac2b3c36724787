"""A callback by which a rank stands still before it meets the others, for a test that kills it there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lightning.pytorch as pl

from gtrain.launch import slot


class StandStill(pl.Callback):
    """Callbacks are made before the strategy's set-up; a rank that was restarted goes on.

    Args:
        rank: which one.
        folder: gets a file ``standing`` with the process id.
    """

    def __init__(self, rank: int, folder: str) -> None:
        context = slot.current()
        if context is not None and context.slot.rank == rank and slot.restarts() == 0:
            part = Path(folder, "standing.part")
            part.write_text(str(os.getpid()))
            os.replace(part, Path(folder, "standing"))
            while True:
                signal.pause()
