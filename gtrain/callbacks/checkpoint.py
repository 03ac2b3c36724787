"""Checkpoints of a run that may go on in another folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


class RunCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, except in two things.

    A resumed run still knows the best checkpoint of the run before. Each run has a folder of its own, and Lightning
    forgets the best score as soon as the folder differs; the run would then be tested with the best of its remaining
    epochs, not with the best of all.

    ``last.ckpt`` is of the last epoch. Lightning leaves it as it is where an epoch was no better than those before.
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the epoch if it is the best, and in any case as the last."""
        super().on_train_epoch_end(trainer, pl_module)
        due = self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0
        # what has been saved at this step already is left out here
        skipped = self._should_skip_saving_checkpoint(trainer) or not self._should_save_on_train_epoch_end(trainer)
        if self.save_last and due and not skipped:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back score and path of the best checkpoint, as long as it is there."""
        if Path(state_dict.get("best_model_path") or ".").exists():
            state_dict = {**state_dict, "dirpath": self.dirpath}
        super().load_state_dict(state_dict)
