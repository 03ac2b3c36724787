"""The live line: epoch, time left, loss, throughput, bytes a second."""

from __future__ import annotations

import shutil
import sys
import time

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gtrain.callbacks.recorder import RunRecorder


class ProgressLine(Callback):
    """Rank 0's line of progress: rewritten in place on a terminal, else a new line now and then.

    Args:
        recorder: where this run's figures are; it must come before this callback.
        work: what an epoch goes through.
        unit: of its rate, such as ``nodes/s``.
        every_seconds: least time between two lines where there is no terminal.
    """

    def __init__(self, recorder: RunRecorder, work: int, unit: str, every_seconds: float = 2.0) -> None:
        self._recorder, self._work, self._unit, self._every = recorder, work, unit, every_seconds
        self._began = self._printed = 0.0
        self._first_epoch = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began, self._first_epoch = time.monotonic(), trainer.current_epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero or not self._recorder.history:
            return
        now, last = time.monotonic(), trainer.current_epoch + 1 == trainer.max_epochs
        live = sys.stdout.isatty()
        if not (live or last or now - self._printed >= self._every):
            return
        self._printed = now
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
            per_epoch = (time.monotonic() - self._began) / max(done - self._first_epoch, 1)
            parts.append(f"ETA {_clock(per_epoch * (trainer.max_epochs - done))}")  # type: ignore[operator]
        newest, monitored = recorder.history[-1], getattr(trainer.checkpoint_callback, "monitor", None)
        scores = [monitored] if monitored else ["val/acc", "val/mrr"]
        names = dict.fromkeys(["train/loss", "val/loss", *scores])
        parts += [f"{name} {newest[name]:.4f}" for name in names if name in newest]
        if seconds > 0:
            parts.append(f"{_scaled(self._work * len(recorder.epoch_seconds) / seconds, 1000)}{self._unit}")
            parts.append(f"{_scaled(recorder.counters.bytes_sent / seconds, 1024)}B/s sent")
        return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _scaled(value: float, base: int) -> str:
    """A number with a unit prefix: ``12.3 k``; binary prefixes where the base is 1024."""
    for prefix in ("", "k", "M", "G"):
        if value < base:
            return f"{value:.1f} {prefix}{'i' if base == 1024 and prefix else ''}"
        value /= base
    return f"{value:.1f} T{'i' if base == 1024 else ''}"
