"""The CSV file of a run's metrics, which a restarted job continues."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger

from gtrain.launch import slot as slots


class MetricsFile(CSVLogger):
    """Lightning's ``CSVLogger``, which also keeps the rows that were written before a restart of the job or of rank 0.

    Lightning deletes an existing ``metrics.csv``. A restarted job resumes from a checkpoint, so the rows up to that
    checkpoint are part of its metrics. Until they are written again they are in ``metrics.csv.earlier``, where another
    restart finds them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        file = Path(self.log_dir, "metrics.csv")
        self._kept = file.with_name("metrics.csv.earlier")
        self._earlier: list[dict[str, str]] = []
        if slots.attempt() or slots.restarts():
            if file.is_file() and not self._kept.is_file():
                file.rename(self._kept)
            if self._kept.is_file():
                with open(self._kept, newline="") as rows:
                    self._earlier = list(csv.DictReader(rows))

    @rank_zero_only
    def restore(self, steps: int) -> None:
        """Log the rows from before the restart again.

        Args:
            steps: batches of the checkpoint that ended with a step, by which Lightning numbers rows; later rows are
                computed again.
        """
        for row in self._earlier:
            if int(row["step"]) < steps:
                values: dict[str, Any] = {name: text for name, text in row.items() if text and name != "step"}
                self.experiment.log_metrics(values, int(row["step"]))
        if self._earlier:
            self.save()
        self._kept.unlink(missing_ok=True)
        self._earlier = []
