"""A callback that writes down which batches a rank trained on, and can have a rank be killed between two of them."""

from __future__ import annotations

import os
import signal
import zlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class Watch(pl.Callback):
    """Writes a line for each batch to ``rank-<r>.txt``: epoch, number, checksums of what it holds, loss, buffers.

    The last is a checksum of the module's buffers, such as running statistics.

    Args:
        folder: where.
        kill: rank, epoch and batch before which it makes a file ``killed`` and kills itself.
    """

    def __init__(self, folder: str, kill: tuple[int, int, int] | None = None) -> None:
        self._folder, self._kill = Path(folder), None if kill is None else tuple(kill)
        self._folder.mkdir(parents=True, exist_ok=True)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, number: int) -> None:
        """Be killed, if it is time."""
        if self._kill == (trainer.global_rank, trainer.current_epoch, number):
            (self._folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, number: int
    ) -> None:
        """Write a line."""
        seen = [zlib.crc32(tensor.contiguous().numpy()) for tensor in (batch.n_id, batch.e_id, batch.seeds, batch.x)]
        buffers = zlib.crc32(b"".join(buffer.numpy().tobytes() for buffer in pl_module.buffers()))
        with open(self._folder / f"rank-{trainer.global_rank}.txt", "a") as lines:
            print(trainer.current_epoch, number, *seen, float(outputs["loss"]), buffers, file=lines)
