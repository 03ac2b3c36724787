"""``run=FOLDER``: a command takes its settings from an earlier run, and its own settings override them. Light.

The run's overrides are composed again, so that the command line can choose other options of their groups. Where gtrain
or a configuration file has changed since, the values of the run's ``.hydra/config.yaml`` hold. Nothing that comes from
the run counts as typed, see :mod:`gtrain.targets`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtrain import __version__, config, messages
from gtrain.cli.earlier_run import EarlierRun, folder_of
from gtrain.config import key_of
from gtrain.errors import ConfigError
from gtrain.object_store import is_address
from gtrain.plan.compose import override_of
from gtrain.settings import as_typed, nested

_COMPARED = ("seed", "trainer", "data", "model", "callbacks", "logger", "strategy")
"""Groups whose values are those of the run, even if defaults or files have changed since."""
_WITH_PATHS = ("paths", "data", "strategy", "plan", "cluster")
_FLAGS_WITH_VALUE = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--cfg", "-c", "--package",
                     "-p", "--info", "-i")  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command line in which ``run`` is replaced by the settings of that run.

    Attributes:
        arguments: flags, the settings of the run, then those of the user.
        inherited: what set each key that comes from the run, for messages.
        notices: lines for the terminal, about settings that are left out.
    """

    arguments: list[str]
    inherited: Mapping[str, str] = field(default_factory=dict)
    notices: Sequence[str] = ()


def folders(arguments: Sequence[str]) -> list[str]:
    """Replace ``run=FOLDER`` by the folder, for verbs that take folders; ``run=last`` needs no checkpoint here."""
    settings = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    runs_folder = Path(settings.get("paths.runs", config.PathsConfig.runs))
    return [
        str(folder_of(argument.partition("=")[2], runs_folder, checkpoint=False))
        if argument.startswith("run=")
        else argument
        for argument in arguments
        if not argument.startswith("paths.runs=")
    ]


def inherit(arguments: Sequence[str]) -> Command:
    """Replace ``run=FOLDER`` of a command line by the settings of that run; Hydra must be prepared.

    Args:
        arguments: the command line, with ``verb=...``.

    Raises:
        GtrainError: the folder has no run, its settings no longer exist, or it lacks the checkpoint.
    """
    flags, overrides = _divided(arguments)
    typed = {key_of(override): override for override in overrides}
    if "run" not in typed or typed["run"] in ("run=null", "run="):
        return Command(list(arguments))
    runs_folder = Path(_value(typed["paths.runs"]) if "paths.runs" in typed else config.PathsConfig.runs)
    run = EarlierRun(folder_of(_value(typed["run"]), runs_folder))
    verb = _value(typed.get("verb", "verb=train"))
    checkpoint = run.checkpoint(verb, _value(typed["ckpt_path"]) if "ckpt_path" in typed else None)
    flags += run.flags([*flags, *overrides])
    with _hydra([*flags, *(each for each in overrides if key_of(each) == "hydra.searchpath")]) as (name, search):
        own, notices = _Settings(run, overrides, name, search).overrides()
    users = [override for override in overrides if key_of(override) not in ("run", "ckpt_path")]
    ours = [override_of("run", str(run.folder))]
    if checkpoint is not None:
        ours.append(override_of("ckpt_path", str(checkpoint)))
    elif "ckpt_path" in typed:
        ours.append(typed["ckpt_path"])
    inherited = {key_of(override): f"run={run.folder}" for override in own if key_of(override) not in typed}
    return Command([*flags, *own, *users, *ours], inherited, notices)


class _Settings:
    """The settings of a run for a command; an object exists while Hydra is initialised as for this command.

    Args:
        run: the run.
        users: the overrides of the command line.
        name: of the configuration.
        search: the override of Hydra's search path, if there is one.
    """

    def __init__(self, run: EarlierRun, users: Sequence[str], name: str, search: Sequence[str]) -> None:
        self._run, self._name, self._search = run, name, search
        self._typed = {key_of(override): override for override in users}
        self._today = self._compose_again()
        choices = self._today.hydra.runtime.choices
        self._swapped = {
            key for key, override in self._typed.items() if key in choices and _options(override) != [str(choices[key])]
        }
        """Groups of which the command line chooses another option than the run."""

    def overrides(self) -> tuple[list[str], list[str]]:
        """Return the overrides that give the command the run's settings, and lines about those that are left out."""
        kept, notices = self._kept()
        changed, gone = self._changes()
        if gone:
            notices.append(f"gtrain: run={self._run.folder}: this release lacks {', '.join(gone)}; they are left out.")
        values = {**changed, **self._paths({key_of(override) for override in kept})}
        added = {key: value for key, value in values.items() if not _overridden(key, self._typed)}
        kept = [override for override in kept if key_of(override) not in added]
        # Two plus signs set a key whether or not the run added it.
        return kept + [f"++{override_of(key, value)}" for key, value in added.items()], notices

    def _compose_again(self) -> DictConfig:
        """Compose the run's overrides as this release does.

        Raises:
            ConfigError: names the settings that no longer exist.
        """
        try:
            return compose(self._name, [*self._search, *self._run.overrides], return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise self._outdated(error) from error

    def _outdated(self, error: Exception) -> ConfigError:
        """Return the error for settings of the run that this release lacks, or that it no longer accepts."""
        groups = [override for override in self._run.overrides if "." not in key_of(override)]
        try:
            base = compose(self._name, [*self._search, *(each for each in groups if _is_group(key_of(each)))])
            gone = [each for each in self._run.overrides if each[0] not in "+~" and not _has(base, key_of(each))]
        except (HydraException, OmegaConfBaseException):  # an option of a group has gone
            gone = []
        problem = (messages.readable(error, self._run.overrides) or str(error)).splitlines()[0].rstrip(".")
        rest = [override for override in self._run.overrides if override not in gone]
        what = f"it was trained with {', '.join(gone)}, which this release lacks" if gone else problem
        return ConfigError(
            f"run={self._run.folder} was set; {what} (gtrain {self._run.release} trained it, this is {__version__}).",
            hint=f"without run: gtrain VERB {shlex.join(rest)} ckpt_path={self._run.folder}/checkpoints/best.ckpt",
        )

    def _kept(self) -> tuple[list[str], list[str]]:
        """Return the overrides that the command takes over, and a line for each group whose new option lacks some."""
        kept = [
            override
            for override in self._run.overrides
            if key_of(override) not in self._typed
            or (override.startswith("+") and not self._typed[key_of(override)].startswith("+"))
        ]
        notices = []
        # config.fit_strategy leaves out what another strategy lacks.
        for group in sorted(self._swapped - {"strategy"}):
            inner = [each for each in kept if key_of(each).startswith(f"{group}.") and each[0] not in "+~"]
            options = _options(self._typed[group]) if inner else []
            bases = [compose(self._name, [*self._search, f"{group}={option}"]) for option in options]
            lacking = [override for override in inner if not all(_has(base, key_of(override)) for base in bases)]
            if lacking:
                kept = [override for override in kept if override not in lacking]
                left_out = f"leaves out settings that it does not have: {', '.join(lacking)}"
                notices.append(f"gtrain: {self._typed[group]} {left_out} (run={self._run.folder})")
        return kept, notices

    def _changes(self) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the run that this release or changed files compose otherwise, and keys that are gone.

        Values of a swapped group, and interpolations, are this release's.
        """
        if "experiment" in self._swapped:
            return {}, []
        compared = [group for group in _COMPARED if group not in self._swapped]
        stored, new = (_leaves(cfg, compared) for cfg in (self._run.composed, self._today))
        own = {key_of(override) for override in self._run.overrides}
        gone = [
            f"{key}={as_typed(value)}"
            for key, value in stored.items()
            # not where one release has a value, and the other a node with keys
            if key not in new and not _within(key, new) and not any(other.startswith(f"{key}.") for other in new)
        ]
        changed = {
            key: value
            for key, value in stored.items()
            if key in new and value != new[key] and not _is_interpolation(value) and not _overridden(key, own)
            # a class that has moved keeps working under its new name
            if not (key.endswith("_target_") and str(new[key]).startswith("gtrain"))
        }
        return changed, gone

    def _paths(self, kept: set[str]) -> dict[str, Any]:
        """Return the settings that name files relative to the folder in which the run started, as absolute paths.

        Args:
            kept: keys of the run's overrides that hold for the command; of a swapped group only these are returned.
        """
        start = Path(str(self._run.hydra.runtime.cwd))
        if not start.is_dir() or start.samefile(Path.cwd()):
            return {}
        paths = {}
        for group in (group for group in _WITH_PATHS if group in self._run.composed and group in self._today):
            schema = OmegaConf.get_type(self._today[group])
            declared = dataclasses.fields(schema) if dataclasses.is_dataclass(schema) else ()
            names_files = {field.name: bool(field.metadata.get("path")) for field in declared}
            for name, value in _raw(self._run.composed)[group].items():
                key = f"{group}.{name}"
                # A setting of a user's own DataModule is declared nowhere.
                if names_files.get(name, group == "data") and (group not in self._swapped or key in kept):
                    absolute = _absolute(value, start)
                    if absolute != value:
                        paths[key] = absolute
        return paths


# ------------------------------------------------------------------------------------------------------ overrides


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into Hydra's flags with their values, and overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        is_value = bool(flags) and flags[-1] in _FLAGS_WITH_VALUE
        is_flag = argument.startswith("-") or is_value or not ("=" in argument or argument.startswith("~"))
        (flags if is_flag else overrides).append(argument)
    return flags, overrides


def _value(override: str) -> str:
    """Return the text of an override's value, without quotes.

    Raises:
        ConfigError: it has several values.
    """
    text = override.partition("=")[2]
    if Path(text).exists():  # a sweep's folder may have commas and equals signs in its name
        return text
    parsed = OverridesParser.create().parse_override(override)
    if parsed.is_sweep_override():
        raise ConfigError(f"{override} was set; it takes one value.", hint="run the command for each of them.")
    return as_typed(parsed.value())


def _options(override: str) -> list[str]:
    """Return the options of a group that an override chooses, of which a sweep has several."""
    parsed = OverridesParser.create().parse_override(override)
    if parsed.is_delete():
        return []
    return [as_typed(each) for each in (parsed.sweep_iterator() if parsed.is_sweep_override() else [parsed.value()])]


def _overridden(key: str, by: Iterable[str]) -> bool:
    """Whether overrides of these keys set a key, or a node around it."""
    return any(key == other or key.startswith(f"{other}.") for other in by if "." in other or other == key)


# -------------------------------------------------------------------------------------------------- configurations


@contextlib.contextmanager
def _hydra(flags: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Initialise Hydra as the command with these flags does; yields the configuration's name and the search path."""
    values: dict[str, str] = {}
    for flag, following in zip_longest(flags, flags[1:], fillvalue=""):
        flag, equals, value = flag.partition("=")
        values[flag] = value if equals else following
    main, folder, name = (
        values.get(long, values.get(short))
        for long, short in (("--config-path", "-cp"), ("--config-dir", "-cd"), ("--config-name", "-cn"))
    )
    search = [f"hydra.searchpath={values['hydra.searchpath']}"] if "hydra.searchpath" in values else []
    if folder is not None:
        listed: Any = OverridesParser.create().parse_override(search[0]).value() if search else []
        search = [override_of("hydra.searchpath", [*map(as_typed, listed), f"file://{os.path.abspath(folder)}"])]
    start = (
        initialize_config_module("gtrain.conf", **config.VERSION_BASE)
        if main is None
        else initialize_config_dir(os.path.abspath(main), **config.VERSION_BASE)
    )
    with start:
        yield name or "config", search


def _is_group(key: str) -> bool:
    return key in GlobalHydra.instance().config_loader().list_groups("")


def _has(cfg: DictConfig, key: str) -> bool:
    """Whether a configuration has a key; of a key deeper than two levels, whether it has the first two."""
    if _is_group(key):
        return True
    parent, _, name = ".".join(key.split(".")[:2]).rpartition(".")
    node = cfg.get(parent) if parent else cfg
    return isinstance(node, DictConfig) and name in node.keys()  # noqa: SIM118 - `in node` is false if it must be set


def _leaves(cfg: DictConfig, groups: Iterable[str]) -> dict[str, Any]:
    """Return the values of groups by key, lists as values, interpolations as text."""
    raw = _raw(cfg)
    inner = nested({group: raw.get(group) for group in groups})
    return {key: value for key, value in inner if "[" not in key and not isinstance(value, dict)}


def _raw(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration as dictionaries, with its interpolations as text."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(raw, dict)
    return {str(name): value for name, value in raw.items()}


def _within(key: str, keys: Iterable[str]) -> bool:
    """Whether a key is inside of one of these."""
    return any(key.startswith(f"{other}.") for other in keys)


def _is_interpolation(value: Any) -> bool:
    return any(isinstance(inner, str) and "${" in inner for _, inner in nested(value))


def _absolute(value: Any, folder: Path) -> Any:
    """Return the names of existing files and folders, or patterns of such, as paths below a folder."""
    if isinstance(value, list):
        return [_absolute(each, folder) for each in value]
    if isinstance(value, dict):  # a table's entry, in which most keys name columns, or entries by type
        is_entry = not value.keys().isdisjoint(("path", "duckdb", "polars"))
        names_files = ("path", "labels") if is_entry else tuple(value)
        return {key: _absolute(inner, folder) if key in names_files else inner for key, inner in value.items()}
    if not isinstance(value, str) or not value or "${" in value or is_address(value) or Path(value).is_absolute():
        return value
    exists = (folder / value).exists() or bool(glob.glob(value, root_dir=folder))
    return os.path.normpath(folder / value) if exists else value
