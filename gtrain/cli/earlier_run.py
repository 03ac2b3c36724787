"""The folder of an earlier run, from which ``run=FOLDER`` takes settings and a checkpoint. Light.

It may come from anybody. Of the places of its configuration files only folders are used: ``pkg://`` imports a package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtrain import config
from gtrain.config import key_of
from gtrain.errors import CheckpointError, ConfigError
from gtrain.object_store import followed
from gtrain.plan.compose import override_of
from gtrain.run import runs

LAST = "last"
OF_ONE_COMMAND = {
    *("verb", "run", "ckpt_path", "output", "role", "allow_targets", "explain", "hparams_search"),
    *("cluster.rank", "cluster.rendezvous", "paths.run"),
}
"""Settings that another command does not take over from a run."""
_READS = {"train": ("last", "best"), **dict.fromkeys(config.APPLYING, ("best", "last"))}
"""The checkpoints of a run that a verb reads, in the order of preference."""
_FOLDER_FLAGS = {"main": ("--config-path", "-cp"), "command-line": ("--config-dir", "-cd")}
"""Hydra's flags by its name for the source of configurations that they add."""
_READ_OF_HYDRA = ("runtime.config_sources", "runtime.cwd", "job.config_name")
_OF_AUTO = {"strategy", *(f"strategy.{name}" for name in config.AUTO_SETTINGS)}
_HINT = "gtrain runs lists the runs in a folder."


def folder_of(text: str, runs_folder: Path, *, checkpoint: bool = True) -> Path:
    """Return the folder that ``run=TEXT`` names.

    Args:
        text: a folder, or ``last``.
        runs_folder: ``paths.runs``, in which ``last`` is searched.
        checkpoint: whether ``last`` passes over runs without a checkpoint.

    Raises:
        ConfigError: the folder does not exist, or no run has been recorded.
    """
    if text != LAST:
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"run={text} was set; {folder.absolute()} is not a folder.", hint=_HINT)
        return folder.absolute()
    newest = runs.newest(runs_folder.absolute(), checkpoint=checkpoint)
    if newest is None:
        what = "with a checkpoint " if checkpoint else ""
        raise ConfigError(
            f"run=last was set; no run {what}is recorded in {runs_folder.absolute() / runs.INDEX}.",
            hint="name the folder of a run, or set paths.runs to the folder of all runs.",
        )
    return newest


@dataclass(frozen=True)
class EarlierRun:
    """The folder of a run, as the settings of another command.

    Attributes:
        folder: absolute.
    """

    folder: Path

    def _load(self, name: str) -> Any:
        file = self.folder / ".hydra" / name
        try:
            return OmegaConf.load(file)
        except FileNotFoundError:
            inner = sorted(path.parent.parent for path in self.folder.glob(f"*/.hydra/{name}"))
            raise ConfigError(
                f"run={self.folder} was set; it is not the folder of a run: it has no {file.relative_to(self.folder)}.",
                hint=f"name one of its {len(inner)} runs, such as run={inner[0]}." if inner else _HINT,
            ) from None
        except Exception as error:  # of the parser of YAML, or an OSError
            raise ConfigError(
                f"run={self.folder} was set; {file} cannot be read: {str(error).splitlines()[0]}.",
                hint="name another run, or type the settings and ckpt_path.",
            ) from error

    @cached_property
    def overrides(self) -> list[str]:
        """The settings on the run's command line that another command takes over."""
        stored = [str(override) for override in self._load("overrides.yaml")]
        chosen = OmegaConf.select(self.composed, "plan.chosen")
        if chosen is not None:  # what strategy=auto chose
            strategy, *variant = str(chosen).split()
            rest = [override for override in stored if key_of(override) not in _OF_AUTO]
            stored = [f"strategy={strategy}", *rest, *variant]
        return [
            each
            for each in stored
            if key_of(each) not in OF_ONE_COMMAND and not key_of(each).startswith(("hydra", "-"))
        ]

    @cached_property
    def composed(self) -> DictConfig:
        """The configuration of the run, with interpolations."""
        return self._load("config.yaml")

    @cached_property
    def hydra(self) -> DictConfig:
        """Hydra's own settings of the run."""
        cfg = self._load("hydra.yaml")
        if any(OmegaConf.select(cfg, f"hydra.{key}") is None for key in _READ_OF_HYDRA):
            raise ConfigError(
                f"run={self.folder} was set; its .hydra/hydra.yaml is not what gtrain writes.", hint=_HINT
            )
        return cfg.hydra

    @property
    def release(self) -> str:
        """The release of gtrain that trained the run."""
        try:
            return str(json.loads((self.folder / runs.RUN).read_text())["gtrain"])
        except (OSError, ValueError, KeyError, TypeError):
            return "of an unknown release"

    def checkpoint(self, verb: str, ckpt_path: str | None) -> Path | str | None:
        """Return the run's checkpoint that a command reads; None if it reads none, or ``ckpt_path`` names another.

        Raises:
            CheckpointError: the run has no such checkpoint.
        """
        names = _READS.get(verb, ()) if ckpt_path is None else (ckpt_path,)
        if not names or names[0] not in runs.NAMES:
            return None
        path = runs.checkpoint_of(self.folder, names)
        if path is not None:
            return followed(path)
        self.overrides  # noqa: B018 - raises if the folder is not that of a run
        what = "no checkpoint" if ckpt_path is None else f"no checkpoint {ckpt_path}.ckpt"
        trained = OmegaConf.select(self.composed, "verb") == "train"
        other = "ckpt_path=FILE names a checkpoint elsewhere."
        raise CheckpointError(
            f"run={self.folder} was set; this run has {what}.",
            hint=f"ckpt_path=null trains with its settings from the beginning; {other}"
            if verb == "train"
            else other
            if trained
            else f"it is a run of gtrain {self.composed.get('verb')}: name the run that trained. {other}",
        )

    def flags(self, typed: Sequence[str]) -> list[str]:
        """Return the flags and settings with which Hydra finds the run's configuration files.

        Args:
            typed: the user's flags and overrides, which take precedence.

        Raises:
            ConfigError: a folder no longer exists, or the files are those of another program's package.
        """
        flags: list[str] = []
        searched: list[str] = []
        for source in self.hydra.runtime.config_sources:
            provider, scheme, path = (str(source[name]) for name in ("provider", "schema", "path"))
            names = _FOLDER_FLAGS.get(provider)
            if provider == "main" and (scheme, path) == ("pkg", "gtrain.conf"):
                continue
            if names is None and not provider.startswith("hydra.searchpath in command-line"):
                continue
            if names is not None and any(argument.partition("=")[0] in names for argument in typed):
                continue
            if scheme != "file" or not Path(path).is_dir():
                raise ConfigError(
                    f"run={self.folder} was set; its configuration files were in {scheme}://{path}, "
                    + ("which is not a folder of this machine." if scheme == "file" else "which is a package."),
                    hint=f"give the folder of the files with {(names or ('--config-dir',))[0]} DIR.",
                )
            if names is None:
                searched.append(f"file://{path}")
            else:
                flags += [names[0], path]
        if searched and "hydra.searchpath" not in map(key_of, typed):
            flags.append(override_of("hydra.searchpath", searched))
        name = str(self.hydra.job.config_name)
        if name != "config" and not any(argument.partition("=")[0] in ("--config-name", "-cn") for argument in typed):
            flags += ["--config-name", name]
        return flags
