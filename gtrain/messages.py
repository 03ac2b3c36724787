"""Translate errors of Hydra and OmegaConf into messages that say what was set, what was found and what to do."""

from __future__ import annotations

import difflib
import importlib.resources
import re
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from gtrain import backends
from gtrain.errors import ConfigError, GtrainError
from gtrain.settings import as_typed, names_of, nested

OPEN_GROUPS = ("model", "callbacks", "logger")
"""Groups whose keys are the arguments of any class."""
_SETTINGS = ("cluster", "data", "model", "strategy", "trainer")
"""Groups whose keys a user may take for keys at the top."""
INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def readable(error: BaseException, arguments: Sequence[str]) -> str | None:
    """Return the message for a mistake in the command; None if the error is a defect of gtrain.

    Args:
        error: the exception.
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
    if (validation := next((e for e in causes if isinstance(e, ValidationError)), None)) is not None:
        return _wrong_type(validation, arguments)
    if isinstance(error, OSError) and _raised_in_hydra(error):
        return (
            f"the run folder cannot be created: {error}.\nHINT: set hydra.run.dir to a folder that can be written to."
        )
    if (ambiguous := re.search("Ambiguous value for argument '(.*)'", str(error))) is not None:
        return (
            f"{ambiguous[1]} was set; a comma separates the values of a sweep.\n"
            "HINT: add --multirun for a sweep; write a list as [a,b], and a text with commas in two pairs of quotes."
        )
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return f"{_first_line(causes[-1])}\nHINT: gtrain --help lists the settings."
    return None


def _raised_in_hydra(error: OSError) -> bool:
    """Whether Hydra raised the error while it created the run folder, before it called gtrain's job."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return "decorated_main" in names and "_hydra_main" not in names


def did_you_mean(word: str, options: Iterable[str]) -> str | None:
    """Return a hint that names the closest options; None if none is close."""
    close = difflib.get_close_matches(word, list(options), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else None


def _missing_option(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    # Hydra names no options of one in a list, such as logger=[csv,NAME].
    options = [option for option in error.options or [] if option] or _packaged_options(group)
    if not options:
        return f"{_first_line(error)}\nHINT: gtrain --help lists the groups and their options."
    if group == "strategy" and name in backends.installed():
        # Raises the error that explains why the backend cannot be imported.
        backends.get(name)
    hint = did_you_mean(name, options) or f"choose one of these for {group}."
    return f"{group}={name} was set; the options of {group} are {', '.join(options)}.\nHINT: {hint}"


def _packaged_options(group: str) -> list[str]:
    folder = importlib.resources.files("gtrain.conf").joinpath(group)
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _unknown_key(error: Any, causes: Sequence[BaseException], arguments: Sequence[str]) -> str:
    full_key = str(error.full_key or error.key or "")
    parent = error.parent_node
    setting = _setting(full_key, arguments)
    is_top = isinstance(parent, DictConfig) and "." not in full_key and not strategies_with(full_key)
    if is_top and (groups := groups_with(full_key, parent)):
        meant = " or ".join(f"{group}.{setting.lstrip('+~')}" for group in groups)
        return f"{setting} was set; the configuration has no key {full_key}.\nHINT: did you mean {meant}?"
    options = sorted(str(k) for k in parent) if isinstance(parent, DictConfig) else []
    group, _, key = full_key.rpartition(".")
    inner = _holders(key, parent) if group and isinstance(parent, DictConfig) else []
    return str(_unknown(full_key, setting, options, [f"{group}.{name}.{key}" for name in inner]))


def unknown_key(cfg: DictConfig, full_key: str, value: Any) -> ConfigError:
    """Return the error for a strategy's key that the configuration sets and the chosen strategy lacks."""
    is_strategy_key = "." in full_key
    names = names_of(backends.get(cfg.strategy.name).load_config()) if is_strategy_key else []
    return unknown_key_of(full_key, value, sorted(names))


def unknown_key_of(full_key: str, value: Any, options: Sequence[str]) -> ConfigError:
    """Return the error for an unknown key; ``options`` are the keys of its group, or of the top."""
    return _unknown(full_key, f"{full_key}={as_typed(value)}", options)


def _unknown(full_key: str, setting: str, options: Sequence[str], whole_keys: Sequence[str] = ()) -> ConfigError:
    """Return the error for an unknown key; ``whole_keys`` are those of the same name deeper in its group."""
    group, _, key = full_key.rpartition(".")
    problem = f"{setting} was set; {group or 'the configuration'} has no key {key}"
    if names := strategies_with(full_key):
        owners = " and ".join(f"strategy={name}" for name in names)
        return ConfigError(f"{problem} here.", hint=f"{full_key} is a setting of {owners}.")
    keys = f"; its keys are {', '.join(options)}" if options else ""
    is_open = group.partition(".")[0] in OPEN_GROUPS
    if whole_keys:
        meant = " or ".join(setting.replace(full_key, whole, 1) for whole in whole_keys)
        return ConfigError(f"{problem}{keys}.", hint=f"did you mean {meant}?")
    advice = f"a plus sign adds a new key: +{setting}" if is_open else "gtrain --cfg job shows every key."
    return ConfigError(f"{problem}{keys}.", hint=did_you_mean(key, options) or advice)


def _wrong_type(error: ValidationError, arguments: Sequence[str]) -> str:
    key = str(error.full_key or error.key or "")
    return f"{_setting(key, arguments)} was set: {_first_line(error)}.\nHINT: give {key or 'it'} a value of that type."


def strategies_with(key: str) -> list[str]:
    """Return the strategies that declare a key of the strategy group, or a shortcut at the top."""
    field = key.removeprefix("strategy.")
    return [
        name
        for name, backend in backends.usable().items()
        if field in (backend.shortcuts if field == key else names_of(backend.load_config()))
    ]


def groups_with(key: str, cfg: DictConfig) -> list[str]:
    """Return where a configuration has a key that was written without its group: ``model.optimizer`` for ``lr``."""
    return [group for group in _holders(key, cfg) if group.partition(".")[0] in _SETTINGS]


def _holders(key: str, cfg: DictConfig) -> list[str]:
    """Return the groups in a configuration, at any depth, that have a key; not the settings of an object of no type."""
    content = dict(nested(OmegaConf.to_container(cfg, resolve=False)))
    groups = [name.rpartition(".")[0] for name in content if name.endswith(f".{key}")]
    return [group for group in groups if content.get(f"{group}._target_", "") is not None]


def _setting(key: str, arguments: Sequence[str]) -> str:
    """Return the override as the user typed it, of the key or of one inside it; the key if nobody typed it."""
    typed = [a for a in arguments if f"{a.lstrip('+~').split('=')[0]}.".startswith(f"{key}.")]
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
