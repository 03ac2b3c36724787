"""A trial of a search: reports the score of each epoch to Optuna, and ends the run if the pruner says so."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from gtrain.record.trials import PRUNED, make_pruner


class TrialReporter(Callback):
    """Rank 0 reports to the study; all ranks end after the same epoch. ``hydra/sweeper=optuna`` adds it to its jobs.

    Args:
        storage: database of the study, as a URL of SQLAlchemy.
        study: name of the study.
        number: of the trial.
        pruner: name of the pruner.
    """

    def __init__(self, storage: str, study: str, number: int, pruner: str) -> None:
        self._storage, self._study, self._number, self._pruner = storage, study, number, pruner

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the monitored score of this epoch."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        ends = self._report(trainer) if trainer.is_global_zero else False
        if trainer.strategy.broadcast(ends):
            trainer.should_stop = True

    def _report(self, trainer: pl.Trainer) -> bool:
        import optuna

        saver = trainer.checkpoint_callback
        score = trainer.callback_metrics.get(saver.monitor or "") if isinstance(saver, ModelCheckpoint) else None
        if score is None:
            return False
        study = optuna.load_study(study_name=self._study, storage=self._storage, pruner=make_pruner(self._pruner))
        frozen = study.get_trials(deepcopy=False)[self._number]
        if frozen.state.is_finished():  # a later command has given up and repeated the trial of this job
            return False
        trial = optuna.trial.Trial(study, frozen._trial_id)
        trial.report(float(score), trainer.current_epoch)
        if not trial.should_prune():
            return False
        trial.set_user_attr(PRUNED, True)
        return True
