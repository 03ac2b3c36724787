"""Checkpoints of a run that may be resumed in another folder."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from gtrain.errors import ConfigError, InterruptedRunError
from gtrain.launch import leaving
from gtrain.launch import slot as slots
from gtrain.launch.job_store import job_store
from gtrain.object_store import is_address
from gtrain.record.scores import lower_is_better
from gtrain.strategy import checkpoint as checkpoints
from gtrain.strategy.base import GraphStrategy

log = logging.getLogger("gtrain")


def unknown_monitor(key: str, monitor: str, logged: Iterable[str]) -> ConfigError:
    """Return the error for a monitored value that the model does not log."""
    return ConfigError(
        f"{key}={monitor} was set; the model does not log {monitor}. It logs {', '.join(sorted(logged))}.",
        hint=f"set {key} to one of these.",
    )


def check_stopping(key: str, monitor: object, strict: object, reason: str) -> None:
    """Refuse an ``EarlyStopping`` that would miss its score after the first epoch of a run without validation.

    Args:
        key: of the callback.
        monitor: its score; None if it is not known.
        strict: whether it requires the score.
        reason: why nothing is validated.

    Raises:
        ConfigError: names the callback and the reason.
    """
    if strict and isinstance(monitor, str) and monitor.startswith("val"):
        raise ConfigError(
            f"{key}.monitor={monitor} was set, and nothing is validated: {reason}.",
            hint=f"set {key}.monitor=train/loss, or callbacks=default, which trains all epochs; or validate.",
        )


class RunCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint`` with eight differences.

    1. A resumed run keeps the best checkpoint of the interrupted run. Each run has its folder, and Lightning resets the
       best score when the folder changes: the test would use the best of the remaining epochs, not of all.
    2. ``last.ckpt`` is of the last epoch. Lightning does not update it after an epoch that is not among the best.
    3. An epoch without validation (``check_val_every_n_epoch``) is not compared. Lightning warns of a missing score.
    4. While the monitored score is NaN, the newest epoch is the best. Lightning would keep the first.
    5. ``every_n_train_steps`` and ``train_time_interval`` write ``last.ckpt`` within epochs, from the first one on; the
       end of an epoch writes ``last.ckpt`` and ``best.ckpt`` as without them. Lightning would write nothing before the
       first score and at the ends of epochs, and would take the score of the epoch before for weights within an epoch.
       Without a monitored score they do what Lightning does.
    6. ``dirpath`` may be an address with any protocol of :mod:`gtrain.strategy.remote_checkpoint`; Lightning takes
       ``file://`` for a local path. A resumed run never deletes checkpoints outside of it.
    7. After SIGTERM all ranks finish the same step, write ``last.ckpt`` and end; see
       :meth:`gtrain.GraphStrategy.interrupted`. If this is the last step of an epoch, they end with the
       epoch. Lightning would end each rank after the step that it is in, without a checkpoint.
    8. ``mode`` may be ``auto``: ``min`` for losses and errors, ``max`` for other scores, by the name of ``monitor``.

    Attributes:
        best_epoch: the epoch of the best checkpoint; None before the first, and without ``monitor``.
        monitor_key: the setting that named the score, in messages.
    """

    best_epoch: int | None = None
    monitor_key = "callbacks.checkpoint.monitor"
    _watches = False
    _stepped = 0  # global step after the last batch
    _earlier_score: Tensor | None = None  # at the end of the epoch before; the same tensor if it was not logged again
    _ends = False

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        *,
        mode: str = "auto",
        **kwargs: Any,
    ) -> None:
        self._chooses_mode = mode == "auto"
        super().__init__(dirpath, filename, monitor, mode="max" if self._chooses_mode else mode, **kwargs)
        self.select_by(self.monitor)
        if dirpath is not None and is_address(dirpath):
            self.dirpath = str(dirpath).rstrip("/")
        within_epochs = self._every_n_train_steps > 0 or self._train_time_interval is not None
        self._saves_within_epochs = within_epochs and self.monitor is not None and bool(self.save_last)
        if self._saves_within_epochs:
            self._every_n_epochs = 1

    def select_by(self, monitor: str | None) -> None:
        """Set the score that selects the best checkpoint; None: the newest is the best."""
        self.monitor = monitor
        if self._chooses_mode and monitor is not None:
            lower = lower_is_better(monitor)
            self.mode, self.kth_value = ("min", torch.tensor(torch.inf)) if lower else ("max", -torch.tensor(torch.inf))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Watch for SIGTERM, and let the agent know that this rank saves a checkpoint after it."""
        super().on_train_start(trainer, pl_module)
        self._adopt_best(trainer)
        self._stepped = trainer.global_step
        strategy = trainer.strategy
        if isinstance(strategy, GraphStrategy) and strategy.saves_on_request:
            strategy.interruption.watch(trainer.received_sigterm)
            self._watches = True
            slots.report("saves on request", value=True)
            if strategy.is_global_zero and (roster := slots.roster()).standalone:
                assert strategy.cluster_environment is not None
                address = job_store(strategy.cluster_environment).address
                leaving.watch(address, roster.key_file, strategy.interruption.request)

    def _adopt_best(self, trainer: pl.Trainer) -> None:
        """Take the best checkpoint of the run that this one goes on from into its own folder, by links if possible.

        ``gtrain test run=FOLDER`` reads it there, unless a later epoch is better.
        """
        before, folder = self.best_model_path, self.dirpath
        if not before or folder is None or is_address(before) or is_address(folder):
            return
        own = str(Path(folder, Path(before).name))
        if trainer.is_global_zero:
            if before != own:
                checkpoints.link(Path(before), Path(own))
            if (run := getattr(trainer.strategy, "run_folder", None)) is not None:
                checkpoints.lead_to(run / "checkpoints" / Path(own).name, Path(own).absolute())
        self.best_model_path = own
        self.best_k_models = {own if path == before else path: score for path, score in self.best_k_models.items()}
        self.kth_best_model_path = own if self.kth_best_model_path == before else self.kth_best_model_path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the agent know that this rank need not save anything any more."""
        super().on_train_end(trainer, pl_module)
        if self._watches:
            self._watches = False
            slots.report("saves on request", value=False)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save the last checkpoint if it is due within the epoch."""
        stepped = trainer.global_step > self._stepped  # after a batch whose gradients are accumulated it is not
        self._stepped = trainer.global_step
        if not self._saves_within_epochs:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        elif (
            stepped
            and self._is_due(trainer)
            and not self._should_skip_saving_checkpoint(trainer)
            and _is_finite(trainer, outputs)
        ):
            saved = self._last_global_step_saved
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
            # Lightning skips a step that it has saved: the end of the epoch still has to be saved.
            self._last_global_step_saved = saved
        if self._watches and stepped:
            assert isinstance(trainer.strategy, GraphStrategy)
            self._ends = trainer.strategy.interrupted()
            if self._ends and not trainer.is_last_batch:
                if _is_finite(trainer, outputs):
                    self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
                raise InterruptedRunError

    def _is_due(self, trainer: pl.Trainer) -> bool:
        if self._train_time_interval is None:
            return trainer.global_step % self._every_n_train_steps == 0
        now, before = time.monotonic(), self._last_time_checked
        due = before is not None and now - before >= self._train_time_interval.total_seconds()
        if due := bool(trainer.strategy.broadcast(due)):  # clocks of ranks differ
            self._last_time_checked = now
        return due

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        """Return whether this epoch is saved as one of the best."""
        if current is not None and bool(torch.isnan(current)) and self.save_top_k and not self._has_score:
            return True
        return super().check_monitor_top_k(trainer, current)

    def _should_remove_checkpoint(self, trainer: pl.Trainer, previous: str, current: str) -> bool:
        if not is_address(previous):
            return super()._should_remove_checkpoint(trainer, previous, current)
        own = previous.startswith(f"{self.dirpath}/") and previous != str(trainer.ckpt_path)
        return own and previous != current

    def _update_best_and_save(
        self, current: Tensor, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        undefined = bool(torch.isnan(current))
        if undefined and self.best_epoch is None and trainer.is_global_zero:
            log.warning(
                "%s is not defined in epoch %d (NaN), such as the AUC of a split with one class: until it is, the "
                "newest epoch counts as the best. model.score selects another score.",
                self.monitor,
                trainer.current_epoch + 1,
            )
        better, best = torch.lt if self.mode == "min" else torch.gt, self.best_model_score
        if best is None or not self._has_score or (not undefined and bool(better(current, best))):
            # Must be set before Lightning saves this callback's state with the checkpoint.
            self.best_epoch = trainer.current_epoch
        super()._update_best_and_save(current, trainer, monitor_candidates)

    @property
    def _has_score(self) -> bool:
        return self.best_model_score is not None and math.isfinite(float(self.best_model_score))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a resumed run."""
        return {**super().state_dict(), "best_epoch": self.best_epoch}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the epoch as the last, and as the best if it is.

        Raises:
            InterruptedRunError: a rank received SIGTERM.
        """
        self._check_monitor(trainer)
        every = trainer.check_val_every_n_epoch
        validated = every is None or (trainer.current_epoch + 1) % every == 0
        score = None if self.monitor is None else trainer.callback_metrics.get(self.monitor)
        stale, self._earlier_score = score is not None and score is self._earlier_score, score
        if not stale and (validated or self.monitor is None or score is not None):
            super().on_train_epoch_end(trainer, pl_module)
        due = self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0
        # Lightning skips a step that it has saved already
        skipped = self._should_skip_saving_checkpoint(trainer) or not self._should_save_on_train_epoch_end(trainer)
        if self.save_last and (due or self._ends) and not skipped:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        if self._ends:
            raise InterruptedRunError

    def _check_monitor(self, trainer: pl.Trainer) -> None:
        """Raise if the first validated epoch did not log the monitored score.

        Raises:
            ConfigError: lists what was logged.
        """
        logged = trainer.callback_metrics
        if self.monitor in (None, *logged) or not any(name.startswith("val") for name in logged):
            return
        raise unknown_monitor(self.monitor_key, str(self.monitor), logged)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore score and path of the best checkpoint, if the file exists."""
        if checkpoints.exists(state_dict.get("best_model_path") or "."):
            state_dict = {**state_dict, "dirpath": self.dirpath}
        super().load_state_dict(state_dict)
        self.best_epoch = None if self.best_model_score is None else state_dict.get("best_epoch")


def _is_finite(trainer: pl.Trainer, outputs: Any) -> bool:
    """Return whether the loss of a step is finite on all ranks; collective.

    Otherwise the run ends at the end of the epoch, and should leave the checkpoint before it.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    broken = torch.tensor(float(isinstance(loss, Tensor) and not bool(loss.isfinite().all())))
    return not float(trainer.strategy.reduce(broken, reduce_op="sum"))
