"""The end of a run of a race (``strategy.race_seconds``), which is validated."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer


class RaceTimer(Timer):
    """Ends training when the time is over, and validates then, and at the end of the last epoch.

    With ``check_val_every_n_epoch`` Lightning validates a run that ``trainer.max_time`` ends only if the number of its
    last epoch is a multiple.
    """

    @property
    def state_key(self) -> str:
        """That of Lightning's timer: the run that goes on counts the time of the race."""
        return "Timer"

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate at the end of the last epoch."""
        if trainer.current_epoch + 1 == trainer.max_epochs:
            _validate_now(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Validate after this step if the time is over."""
        super().on_train_batch_end(trainer, *args, **kwargs)
        if trainer.should_stop:
            _validate_now(trainer)


def _validate_now(trainer: pl.Trainer) -> None:
    if trainer.check_val_every_n_epoch is not None:
        trainer.check_val_every_n_epoch = 1
