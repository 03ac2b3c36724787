"""Finding the runs that were made before: ``ckpt_path=last`` and ``best``.

Every training run leaves a line in ``<paths.runs>/index.txt``, also one whose folder lies elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtrain import __version__
from gtrain.errors import CheckpointError, ConfigError

INDEX = "index.txt"
RUN = "run.json"
NAMES = ("last", "best")
_GROUPS = ("data", "model", "strategy")
_PLACES = ("root", "store")  # where data lie does not make them other data


def hold(folder: Path) -> None:
    """Make a run's folder, and keep every other run out of it as long as this process lives.

    The lock is one of the kernel's on the folder itself: it ends with the process, however that ends, and leaves no
    file. Processes that are forked from here on do not hold it. Where folders cannot be locked nothing is held.

    Raises:
        ConfigError: it cannot be made, or another run that is still alive holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder.resolve())
        if path in _held:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"a run's folder cannot be made: {error}.", hint="set hydra.run.dir to one that can be written to."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return  # such as ENOLCK of a network file system
        raise ConfigError(
            f"hydra.run.dir={folder}: another run that has not ended yet writes to this folder.",
            hint="wait until it has ended, or give this run a folder of its own: leave out hydra.run.dir.",
        ) from error
    if not _held:
        os.register_at_fork(after_in_child=_let_go)
    _held[path] = descriptor


def _let_go() -> None:
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


_held: dict[str, int] = {}
"""Descriptors of the folders that this process holds; a sweep holds those of its jobs."""


def identity(config: dict[str, Any]) -> str:
    """A digest of the data, model and strategy settings: runs with equal ones can continue each other."""
    parts = {name: config[name] for name in _GROUPS}
    parts["data"] = {key: value for key, value in parts["data"].items() if key not in _PLACES}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def register(runs: Path, run_dir: Path, config: dict[str, Any]) -> None:
    """Note a run that is about to train."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / RUN).write_text(json.dumps({"identity": identity(config), "gtrain": __version__}) + "\n")
    runs.mkdir(parents=True, exist_ok=True)
    line = os.path.relpath(run_dir, runs) if run_dir.is_relative_to(runs) else str(run_dir)
    with open(runs / INDEX, "a") as index:  # one short write: lines of concurrent jobs do not mix
        index.write(line + "\n")


def resolve(ckpt_path: str, runs: Path, config: dict[str, Any]) -> Path:
    """The checkpoint that ``ckpt_path`` means.

    Args:
        ckpt_path: ``last`` or ``best`` of the newest run with equal data, model and strategy, or a path.
        runs: ``paths.runs``, absolute.
        config: the resolved configuration.

    Raises:
        CheckpointError: no such run has one.
    """
    if ckpt_path not in NAMES:
        return Path(ckpt_path).absolute()
    wanted = identity(config)
    for run_dir in reversed(_known(runs)):
        checkpoint = run_dir / "checkpoints" / f"{ckpt_path}.ckpt"
        there = checkpoint.exists() or checkpoint.with_name(f"{ckpt_path}.ckpt.old").exists()
        if there and wanted in _identities_of(run_dir):
            return checkpoint
    raise CheckpointError(
        f"ckpt_path={ckpt_path} was set; no run under {runs} with the same data, model and strategy has a checkpoint.",
        hint="train first with the same settings, or give the path of a checkpoint.",
    )


def how_to_resume(run_dir: Path) -> str:
    """One sentence for a run that was ended: the checkpoint from which the same command resumes."""
    for name in NAMES:
        for suffix in ("", ".old"):
            try:
                manifest = json.loads((run_dir / "checkpoints" / f"{name}.ckpt{suffix}" / "manifest.json").read_text())
                epoch = int(manifest["epoch"]) + 1
            except (OSError, ValueError, KeyError, TypeError):
                continue
            return f"to resume after epoch {epoch}, run the same command with ckpt_path={name}"
    return "there is no checkpoint yet: the same command starts from the beginning"


def _known(runs: Path) -> list[Path]:
    index = runs / INDEX
    if not index.is_file():
        return []
    return [runs / line for line in index.read_text().splitlines() if line]


def _identities_of(run_dir: Path) -> Iterator[str]:
    """The identity that a run noted, and the one that its command line has today if another release noted it."""
    try:
        noted = json.loads((run_dir / RUN).read_text())
        yield noted["identity"]
        if noted.get("gtrain") != __version__ and GlobalHydra.instance().is_initialized():
            yield identity(_composed_again(run_dir))
    except (OSError, ValueError, KeyError, HydraException, OmegaConfBaseException):
        return  # not a run's folder, or settings that this release does not have


def _composed_again(run_dir: Path) -> dict[str, Any]:
    """What a run's command line means today: keys and defaults of releases differ."""
    overrides = [str(override) for override in OmegaConf.load(run_dir / ".hydra" / "overrides.yaml")]
    cfg = compose("config", overrides)
    return {group: OmegaConf.to_container(cfg[group], resolve=True) for group in _GROUPS}
