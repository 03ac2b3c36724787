"""Progress line: epoch, estimated time left, loss, throughput, bytes per second."""

from __future__ import annotations

import shutil
import sys
import time

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gtrain.callbacks.recorder import RunRecorder


class ProgressLine(Callback):
    """Rank 0's progress line: rewritten in place on a terminal, otherwise a new line at intervals.

    Args:
        recorder: has the run's figures; must precede this callback.
        work: nodes, edges or other units that an epoch processes.
        unit: of the rate, such as ``nodes/s``.
        every_seconds: least time between two lines without a terminal.
    """

    def __init__(self, recorder: RunRecorder, work: int, unit: str, every_seconds: float = 2.0) -> None:
        self._recorder, self._work, self._unit, self._every = recorder, work, unit, every_seconds
        self._started_at = self._printed_at = 0.0
        self._first_epoch = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started_at, self._first_epoch = time.monotonic(), trainer.current_epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero or not self._recorder.history:
            return
        now, last = time.monotonic(), trainer.current_epoch + 1 == trainer.max_epochs
        live = sys.stdout.isatty()
        if not (live or last or now - self._printed_at >= self._every):
            return
        self._printed_at = now
        text = self._line(trainer)[: shutil.get_terminal_size().columns if live else None]
        print(f"\r\x1b[2K{text}" if live else text, end="\n" if last or not live else "", flush=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        stopped_early = trainer.current_epoch + 1 < (trainer.max_epochs or 0)
        if trainer.is_global_zero and sys.stdout.isatty() and stopped_early:
            print(flush=True)

    def _line(self, trainer: pl.Trainer) -> str:
        recorder, seconds = self._recorder, sum(self._recorder.epoch_seconds)
        done = trainer.current_epoch + 1
        parts = [f"epoch {done}" + (f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else "")]
        if (trainer.max_epochs or -1) > 0:
            per_epoch = (time.monotonic() - self._started_at) / max(done - self._first_epoch, 1)
            parts.append(f"ETA {_clock(per_epoch * (trainer.max_epochs - done))}")  # type: ignore[operator]
        newest, monitored = recorder.history[-1], getattr(trainer.checkpoint_callback, "monitor", None)
        scores = [monitored] if monitored else ["val/acc", "val/mrr"]
        names = dict.fromkeys(["train/loss", "val/loss", *scores])
        parts += [f"{name} {newest[name]:.4f}" for name in names if name in newest]
        if seconds > 0:
            parts.append(f"{_scaled(self._work * recorder.epochs_trained / seconds, 1000)}{self._unit}")
            parts.append(f"{_scaled(recorder.counters.bytes_sent / seconds, 1024)}B/s sent")
        return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _scaled(value: float, base: int) -> str:
    """Return a number with a unit prefix: ``12.3 k``; a binary prefix if the base is 1024."""
    for prefix in ("", "k", "M", "G"):
        if value < base:
            return f"{value:.1f} {prefix}{'i' if base == 1024 and prefix else ''}"
        value /= base
    return f"{value:.1f} T{'i' if base == 1024 else ''}"
