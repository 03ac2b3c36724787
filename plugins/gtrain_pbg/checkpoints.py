"""Checkpoints within an epoch, and those that are kept for good, beside the last and the best."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from gtrain_pbg.files import keep

REACHED = "reached.json"


@dataclass(frozen=True)
class EpochProgress:
    """How far an epoch has come.

    Attributes:
        epoch: its number, from 0.
        chunk: how often it has gone through the buckets: chunks of edge sets that are trained.
    """

    epoch: int
    chunk: int

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint."""
        (folder / REACHED).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> EpochProgress | None:
        """What a checkpoint has; None: it was written between epochs."""
        path = folder / REACHED
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def first(self, epoch: int) -> int:
        """The chunk with which an epoch begins."""
        return self.chunk if epoch == self.epoch else 0


def preserve(path: Path, epoch: int, interval: int) -> None:
    """Keep a checkpoint of every so many epochs, as ``epoch-<number>.ckpt`` beside it.

    Its files are second names of those of the checkpoint, which are never written to again; so it costs the more, the
    more partitions change afterwards.

    Args:
        path: the checkpoint of an epoch.
        epoch: its number, from 0.
        interval: epochs from one that is kept to the next.
    """
    target = path.with_name(f"epoch-{epoch + 1:05}.ckpt")
    if (epoch + 1) % interval or target.exists() or path.name.startswith("epoch-"):
        return
    temporary = target.with_name(target.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(path, temporary, copy_function=lambda source, kept: keep(Path(source), Path(kept)))
    os.rename(temporary, target)
