"""Checkpoints of a run that may go on in another folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


class RunCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, except that a resumed run still knows the best checkpoint of the run before.

    Each run has a folder of its own. Lightning forgets the best score as soon as the folder differs; the run would then
    be tested with the best of its remaining epochs, not with the best of all.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back score and path of the best checkpoint, as long as it is there."""
        if Path(state_dict.get("best_model_path") or ".").exists():
            state_dict = {**state_dict, "dirpath": self.dirpath}
        super().load_state_dict(state_dict)
