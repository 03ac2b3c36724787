"""Turning Hydra's and OmegaConf's errors into ours: what was set, what was found, what to do."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from gtrain import backends
from gtrain.errors import ConfigError, GtrainError

OPEN_GROUPS = ("model", "callbacks", "logger")
"""Groups that take arguments of any class."""
INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def readable(error: BaseException, arguments: Sequence[str]) -> str | None:
    """The message for a mistake in the command; None if the error is not one that a user can make.

    Args:
        error: what was raised.
        arguments: the command line after the program's name.
    """
    if isinstance(error, GtrainError):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read: {_first_line(error)}.\nHINT: settings have the form key=value."
    causes = _causes(error)
    key_errors = [e for e in causes if isinstance(e, (ConfigAttributeError, ConfigKeyError))]
    if key_errors:
        return _unknown_key(key_errors[-1], causes, arguments)
    if any(isinstance(e, ValidationError) for e in causes):
        return _wrong_type(next(e for e in causes if isinstance(e, ValidationError)), arguments)
    if isinstance(error, OSError) and _made_folders(error):
        return f"a run's folder cannot be made: {error}.\nHINT: set hydra.run.dir to one that can be written to."
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return f"{_first_line(causes[-1])}\nHINT: gtrain --help lists the settings."
    return None


def _made_folders(error: OSError) -> bool:
    """Whether Hydra was at it, which makes a run's folder and its copies of the configuration before it calls us."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return "decorated_main" in names and "_hydra_main" not in names


def did_you_mean(word: str, options: Iterable[str]) -> str | None:
    """A hint that names the closest options, if one is close."""
    close = difflib.get_close_matches(word, list(options), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else None


def _missing_option(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    options = [option for option in error.options or [] if option]
    if not options:
        return f"{_first_line(error)}\nHINT: gtrain --help lists the groups and their options."
    what = f"{group}={name} was set; the options of {group} are {', '.join(options)}."
    if group == "strategy" and name in backends.installed():
        backends.get(name)  # says why it cannot be imported
    return f"{what}\nHINT: {did_you_mean(name, options) or f'choose one of these for {group}.'}"


def _unknown_key(error: Any, causes: Sequence[BaseException], arguments: Sequence[str]) -> str:
    full_key = str(error.full_key or error.key or "")
    parent = error.parent_node
    options = sorted(str(k) for k in parent) if isinstance(parent, DictConfig) else []
    return str(_unknown(full_key, _setting(full_key, arguments), options))


def unknown_key(cfg: DictConfig, full_key: str, value: Any) -> ConfigError:
    """The error for a key of the strategy that a composed configuration has and its strategy lacks."""
    group, _, key = full_key.rpartition(".")
    fields = backends.get(cfg.strategy.name).load_config().__dataclass_fields__ if group else {}
    return _unknown(full_key, f"{full_key}={backends.as_set(value)}", sorted(fields))


def unknown_key_of(full_key: str, value: Any, options: Sequence[str]) -> ConfigError:
    """The error for a key that nothing reads; ``options`` are those of its group, or at the top."""
    return _unknown(full_key, f"{full_key}={backends.as_set(value)}", options)


def _unknown(full_key: str, setting: str, options: Sequence[str]) -> ConfigError:
    where, _, key = full_key.rpartition(".")
    known = f"{where or 'the configuration'} has no key {key}"
    if owner := strategies_with(full_key):
        owners = " and ".join(f"strategy={name}" for name in owner)
        return ConfigError(f"{setting} was set; {known} here.", hint=f"{full_key} is a setting of {owners}.")
    keys = f"; its keys are {', '.join(options)}" if options else ""
    is_open = where.partition(".")[0] in OPEN_GROUPS
    other = f"a plus sign adds a new key: +{setting}" if is_open else "gtrain --cfg job shows every key."
    return ConfigError(f"{setting} was set; {known}{keys}.", hint=did_you_mean(key, options) or other)


def _wrong_type(error: ValidationError, arguments: Sequence[str]) -> str:
    key = str(error.full_key or error.key or "")
    return f"{_setting(key, arguments)} was set: {_first_line(error)}.\nHINT: give {key or 'it'} a value of that type."


def strategies_with(key: str) -> list[str]:
    """The strategies that own a top-level key or a key of the strategy group."""
    name = key.removeprefix("strategy.")
    if "." in name:
        return []
    if name == key:
        return [n for n, backend in backends.usable().items() if key in backend.shortcuts]
    return [n for n, backend in backends.usable().items() if name in backend.load_config().__dataclass_fields__]


def _setting(key: str, arguments: Sequence[str]) -> str:
    """The override as the user typed it."""
    typed = [a for a in arguments if a.lstrip("+~").split("=")[0] == key]
    return typed[-1] if typed else key


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
