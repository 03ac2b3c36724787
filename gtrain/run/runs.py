"""The index of earlier runs, for ``run=last``, ``ckpt_path=last`` and ``best``, and the lock of a run's folder.

Every training run adds a line to ``<paths.runs>/index.txt``, even if its folder is elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtrain import __version__
from gtrain.errors import CheckpointError, ConfigError
from gtrain.object_store import followed, is_address

INDEX = "index.txt"
JOBS = "jobs"
RUN = "run.json"
NAMES = ("last", "best")
_GROUPS = ("data", "model", "strategy")
_DATA_FOLDERS = ("root", "store")  # data in another folder are the same data
_LOOK_SECONDS = 0.5


def lock_folder(folder: Path, kind: str = "run") -> None:
    """Create a run's folder and lock it against other runs for the lifetime of this process.

    The lock is ``flock`` on the folder itself: the kernel releases it when the process ends, and no file remains.
    Forked processes do not inherit it. On a file system without locks this function only creates the folder.

    Args:
        folder: of the run or sweep.
        kind: ``run`` or ``sweep``.

    Raises:
        ConfigError: the folder cannot be created, or a running job holds its lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder.resolve())
        if path in _held:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"the {kind} folder cannot be created: {error}.",
            hint=f"set hydra.{kind}.dir to a folder that can be written to.",
        ) from error
    try:
        _lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            # Such as ENOLCK of a network file system.
            return
        raise ConfigError(
            f"hydra.{kind}.dir={folder} was set; another {kind} is still writing to this folder.",
            hint=f"wait until it has ended, or leave out hydra.{kind}.dir: each {kind} then gets a new folder.",
        ) from error
    if not _held:
        os.register_at_fork(after_in_child=_close_inherited)
    _held[path] = descriptor


def _lock(descriptor: int) -> None:
    """Lock a folder; a command that looks whether a run writes to it holds the lock for a moment."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_SECONDS / 20)


def _close_inherited() -> None:
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


_held: dict[str, int] = {}
"""File descriptors of the locked folders, by path; a sweep locks the folder of each of its jobs."""


def identity(config: dict[str, Any]) -> str:
    """Return a digest of the data, model and strategy settings; runs with equal digests can resume each other."""
    settings = {name: config[name] for name in _GROUPS}
    settings["data"] = {key: value for key, value in settings["data"].items() if key not in _DATA_FOLDERS}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def register(runs: Path, run_dir: Path, config: dict[str, Any]) -> None:
    """Record a run that is about to train: its digest in the run's folder, its path in the index."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # Replaced as a whole: another rank that resumes this run may be reading it.
    part = run_dir / f"{RUN}.part"
    part.write_text(json.dumps({"identity": identity(config), "gtrain": __version__}) + "\n")
    part.replace(run_dir / RUN)
    runs.mkdir(parents=True, exist_ok=True)
    line = os.path.relpath(run_dir, runs) if run_dir.is_relative_to(runs) else str(run_dir)
    # One short append, which concurrent jobs do not interleave.
    with open(runs / INDEX, "a") as index:
        index.write(line + "\n")


def is_registered(run_dir: Path) -> bool:
    """Return whether a run has trained; an attempt that ended before is not in the index."""
    return (run_dir / RUN).is_file()


def record_job(runs: Path, job: str, run_dir: Path) -> None:
    """Record the folder of a job's run, for :func:`of_job`."""
    file = _job_file(runs, job)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{run_dir}\n")


def of_job(runs: Path, job: str) -> Path | None:
    """Return the folder that an earlier attempt of a job recorded; None if it recorded none.

    Args:
        runs: ``paths.runs``, absolute.
        job: the launcher's name of the job, the same in all attempts.
    """
    file = _job_file(runs, job)
    return Path(file.read_text().strip()) if file.is_file() else None


def _job_file(runs: Path, job: str) -> Path:
    return runs / JOBS / hashlib.sha256(job.encode()).hexdigest()[:16]


def resolve(ckpt_path: str, runs: Path, config: dict[str, Any]) -> Path | str:
    """Return the path or the address of the checkpoint that ``ckpt_path`` names.

    Args:
        ckpt_path: ``last`` or ``best`` of the newest run with equal data, model and strategy, a path, or an address.
        runs: ``paths.runs``, absolute.
        config: the resolved configuration.

    Raises:
        CheckpointError: no run with equal settings has such a checkpoint.
    """
    if is_address(ckpt_path):
        return ckpt_path
    if ckpt_path not in NAMES:
        return followed(Path(ckpt_path).absolute())
    digest = identity(config)
    for run_dir in recorded(runs):
        checkpoint = checkpoint_of(run_dir, (ckpt_path,))
        if checkpoint is not None and digest in _identities_of(run_dir):
            return followed(checkpoint)
    raise CheckpointError(
        f"ckpt_path={ckpt_path} was set; no run under {runs} with the same data, model and strategy has a checkpoint.",
        hint="train first with the same settings, or give the path of a checkpoint.",
    )


def recorded(runs: Path) -> Iterator[Path]:
    """Yield the folders of the runs in the index that still exist, the newest first, each once.

    Args:
        runs: ``paths.runs``.
    """
    index = runs / INDEX
    lines = index.read_text().splitlines() if index.is_file() else []
    for line in dict.fromkeys(filter(None, reversed(lines))):
        if (runs / line).is_dir():
            yield runs / line


def newest(runs: Path, *, checkpoint: bool = True) -> Path | None:
    """Return the folder of the newest run, the one that ``run=last`` means; None if there is none.

    Args:
        runs: ``paths.runs``.
        checkpoint: whether runs without a checkpoint are passed over.
    """
    return next((run for run in recorded(runs) if not checkpoint or checkpoint_of(run) is not None), None)


def checkpoint_of(run_dir: Path, names: Iterable[str] = NAMES) -> Path | None:
    """Return the first of these checkpoints that a run has, without the suffix that it has while it is replaced."""
    paths = (run_dir / "checkpoints" / f"{name}.ckpt" for name in names)
    return next((path for path in paths if path.exists() or _replaced(path).exists()), None)


class SavedCheckpoint(NamedTuple):
    """A checkpoint of a run.

    Attributes:
        name: ``last`` or ``best``.
        path: its folder, without the suffix that it has while it is replaced.
        epochs: number of completed epochs.
        within_epoch: whether it was written within the epoch after them.
        step: number of steps of the optimizer.
    """

    name: str
    path: Path
    epochs: int
    within_epoch: bool
    step: int

    @property
    def reached(self) -> str:
        """How far the run was, in words."""
        return f"within epoch {self.epochs + 1}" if self.within_epoch else f"after epoch {self.epochs}"


def last_checkpoint(run_dir: Path) -> SavedCheckpoint | None:
    """Return the checkpoint that an interrupted run resumes from; None if it wrote none."""
    for name in NAMES:
        path = run_dir / "checkpoints" / f"{name}.ckpt"
        for folder in (path, _replaced(path)):
            if (saved := _saved(name, path, folder)) is not None:
                return saved
    return None


def _replaced(path: Path) -> Path:
    """Return where a checkpoint is while another replaces it; that of a link is beside its target."""
    path = path.readlink() if path.is_symlink() else path
    return path.with_name(f"{path.name}.old")


def _saved(name: str, path: Path, folder: Path) -> SavedCheckpoint | None:
    """Return what the manifest in a checkpoint's folder says; None if it does not say how many epochs are completed."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        within = bool(manifest.get("within_epoch"))
        epochs, step = int(manifest["epoch"]) + (not within), int(manifest.get("global_step") or 0)
        return SavedCheckpoint(name, path.absolute(), epochs, within, step)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_epochs_left(checkpoint: Path, config: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint that has more epochs than the training, or with ``run`` as many.

    Args:
        checkpoint: its folder.
        config: the resolved configuration.

    Raises:
        ConfigError: no epoch is left to train.
    """
    saved, limit = _saved(checkpoint.name, checkpoint, checkpoint), config["trainer"]["max_epochs"]
    if saved is None or limit is None or limit < 0:
        return
    done = saved.epochs
    if done > limit or (done == limit and config["run"] is not None):
        raise ConfigError(
            f"trainer.max_epochs={limit} was set; {checkpoint} has completed {done} epochs already.",
            hint=f"set trainer.max_epochs above {done} to go on, or ckpt_path=null to train from the beginning.",
        )


def resume(cfg: DictConfig, run_dir: Path) -> str:
    """Set ``ckpt_path`` to the last checkpoint of an earlier attempt, and return where the job restarts, in words."""
    checkpoint = last_checkpoint(run_dir)
    if checkpoint is None:
        return "the start"
    cfg.ckpt_path = str(checkpoint.path)
    return "its last checkpoint"


def how_to_resume(run_dir: Path) -> str:
    """Return the sentence for an interrupted run that names the checkpoint to resume from."""
    checkpoint = last_checkpoint(run_dir)
    if checkpoint is None:
        return "no checkpoint exists yet: the same command starts from the beginning"
    return f"to resume {checkpoint.reached}, run the same command with ckpt_path={checkpoint.name}"


def _identities_of(run_dir: Path) -> Iterator[str]:
    """Yield the digest that a run recorded and, if another release recorded it, the digest of its command line today.

    Keys and defaults differ between releases.
    """
    try:
        record = json.loads((run_dir / RUN).read_text())
        yield record["identity"]
        if record.get("gtrain") != __version__ and GlobalHydra.instance().is_initialized():
            overrides = [str(override) for override in OmegaConf.load(run_dir / ".hydra" / "overrides.yaml")]
            name = OmegaConf.load(run_dir / ".hydra" / "hydra.yaml").hydra.job.config_name
            cfg = compose(str(name), overrides)
            yield identity({group: OmegaConf.to_container(cfg[group], resolve=True) for group in _GROUPS})
    except (OSError, ValueError, KeyError, HydraException, OmegaConfBaseException):
        # Not a run's folder, or settings that this release lacks.
        return
