"""Check every ``_target_`` of a configuration, so that a YAML file cannot execute arbitrary code.

Targets on the command line are trusted. A file may come from anywhere (an experiment, the ``.hydra`` folder of a run),
so its targets are limited to :data:`ALLOWED`, the packages of installed backends, modules of the current folder, and
``allow_targets``.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from gtrain import backends
from gtrain.errors import ConfigError
from gtrain.settings import as_typed, nested

ALLOWED = (
    "gtrain.callbacks",
    "gtrain.data",
    "gtrain.model",
    "gtrain.nn",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "torch.nn",
    "torch.optim",
    "torch_geometric.nn",
    "torchmetrics",
)
"""Modules whose classes a file may name."""
_FACTORIES = ("gtrain.model",)  # their functions are allowed too
# The first evaluates text as Python, the second downloads models.
_EXCLUDED = ("torch_geometric.nn.sequential", "torch_geometric.nn.nlp")
_HYDRA_TARGET = re.compile(
    r"gtrain\.cli\.entry\.RunFolder$|(hydra\._internal\.core_plugins|hydra\.experimental\.callbacks|hydra_plugins|optuna)\."
)
_LOG_CLASS = re.compile(r"(logging\.(handlers\.)?|rich\.logging\.|colorlog\.)[A-Z]\w*$")
_PARTS = ("data", "model", "callbacks", "logger")
"""Groups of the configuration that are instantiated."""


def settle(cfg: DictConfig, arguments: Sequence[str]) -> None:
    """Add the targets on the command line to ``allow_targets``, and refuse other targets by their names.

    Args:
        cfg: the composed configuration; changed in place.
        arguments: the command line as the user typed it.

    Raises:
        ConfigError: a file names a target of another package, or sets ``allow_targets``.
    """
    targets, allowed = typed(arguments)
    if (composed := OmegaConf.to_container(cfg.allow_targets)) != allowed:
        raise ConfigError(
            f"allow_targets={as_typed(composed)} was set in a file; a file cannot allow its own targets.",
            hint="set allow_targets on the command line.",
        )
    with open_dict(cfg):
        cfg.allow_targets = [*allowed, *targets]
    for part in _PARTS:
        for key, target in found_in(OmegaConf.to_container(cfg[part], resolve=False), part):
            _check_name(key, str(target), cfg.allow_targets)


def typed(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the targets that a command line names, and its ``allow_targets``."""
    targets: dict[str, None] = {}
    allowed: list[str] = []
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException:  # Hydra reports the mistake
            continue
        for value in _values(override):
            if override.key_or_group == "allow_targets":
                allowed = [value] if isinstance(value, str) else [str(target) for target in value or ()]
            elif override.key_or_group.rpartition(".")[2] == "_target_":
                targets[str(value)] = None
            else:
                targets |= dict.fromkeys(str(target) for _, target in found_in(value))
    return list(targets), allowed


def _values(override: Override) -> list[Any]:
    """Return the values of an override: one, or all values of a sweep."""
    if override.is_delete():
        return []
    if not override.is_sweep_override():
        return [override.value()]
    try:
        return list(override.sweep_iterator())
    except (HydraException, NotImplementedError):  # an interval
        return []


def found_in(node: Any, key: str = "") -> list[tuple[str, Any]]:
    """Return the key and the value of every ``_target_`` in nested dictionaries and lists."""
    return [
        (inner, value)
        for inner, value in nested(node, key)
        if inner.rpartition(".")[2] == "_target_" and value is not None
    ]


def check_objects(config: dict[str, Any], find: Any, parts: Iterable[str] = _PARTS) -> None:
    """Refuse targets by the modules that define them, because an allowed module may import from another package.

    Args:
        config: the resolved configuration, after :func:`settle`.
        find: a function that imports a target from its path and its key.
        parts: the groups to check.

    Raises:
        ConfigError: a target is not allowed, or a value would be resolved a second time on instantiation.
    """
    allowed = config.get("allow_targets") or ()
    for part in parts:
        for key, node in nested(config[part], part):
            if isinstance(node, str) and "${" in node:
                # Hydra would resolve it, and it could become a target.
                raise ConfigError(
                    f"{key}={node} contains an interpolation after the configuration was resolved.",
                    hint="write the value itself.",
                )
        for key, target in found_in(config[part], part):
            _check_name(key, str(target), allowed)  # interpolations are resolved by now
            if target not in allowed:
                _check_object(key, target, find(target, key.removesuffix("._target_")), allowed)


def check_hydra(hydra: DictConfig, arguments: Sequence[str]) -> None:
    """Refuse code that a file's settings of Hydra would execute, such as callbacks and log handlers.

    Raises:
        ConfigError: names the key.
    """
    typed_targets, allowed = typed(arguments)
    node = OmegaConf.to_container(hydra, resolve=False)
    assert isinstance(node, dict)
    for key, target in found_in(node, "hydra"):
        if not (_HYDRA_TARGET.match(str(target)) or target in typed_targets or _within(str(target), allowed)):
            raise _refused(key, str(target))
    for key, value in nested({name: node.get(name) for name in ("job_logging", "hydra_logging")}):
        name = key.rpartition(".")[2]
        if name in ("()", "class") and not _LOG_CLASS.match(str(value)):  # logging.config calls these
            raise _refused(f"hydra logging {name}", str(value))
    variables = (node.get("job") or {}).get("env_set")
    if variables and not any(argument.lstrip("+").startswith("hydra.job.env_set") for argument in arguments):
        raise ConfigError(
            f"hydra.job.env_set sets {', '.join(map(str, variables))} in a file; such variables can execute code.",
            hint="set hydra.job.env_set on the command line, or the variables in the shell.",
        )


def _check_name(key: str, target: str, allowed: Iterable[str]) -> None:
    """Refuse a target of a package without allowed modules, without importing it."""
    if target.startswith("${"):
        # check_objects checks it when it is resolved.
        return
    package = target.partition(".")[0]
    packages = {prefix.partition(".")[0] for prefix in (*_prefixes(), *allowed)}
    if package not in packages and not _is_local(package):
        raise _refused(key, target)


def _check_object(key: str, target: str, imported: Any, allowed: Iterable[str]) -> None:
    module, name = getattr(imported, "__module__", None), getattr(imported, "__qualname__", type(imported).__name__)
    full = f"{module}.{name}"
    if not isinstance(module, str) or not callable(imported):
        raise _refused(key, target)
    if _within(full, allowed) or (_is_local(module.partition(".")[0]) and _is_loaded_from_here(module)):
        return
    prefixes = _prefixes() if inspect.isclass(imported) else _FACTORIES
    if not _within(full, prefixes) or _within(full, _EXCLUDED):
        raise _refused(key, target if target == full else f"{target} ({full})")


def _prefixes() -> tuple[str, ...]:
    packages = {point.module.partition(".")[0] for point in backends.installed().values()}
    return (*ALLOWED, *sorted(packages - {"gtrain"}))


def _within(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _is_local(package: str) -> bool:
    """Whether the current folder contains a user's module or package of this name."""
    # The current folder may be gtrain's source tree, whose packages are not the user's.
    framework = {prefix.partition(".")[0] for prefix in _prefixes()}
    return (
        package not in framework
        and package.isidentifier()
        and (os.path.isfile(f"{package}.py") or os.path.isdir(package))
    )


def _is_loaded_from_here(module: str) -> bool:
    """Whether an imported module was loaded from the current folder."""
    path, expected = getattr(sys.modules.get(module), "__file__", None), Path.cwd().joinpath(*module.split("."))
    if path is None:
        return False
    return Path(path).resolve().with_suffix("") in (expected.resolve(), (expected / "__init__").resolve())


def _refused(key: str, target: str) -> ConfigError:
    return ConfigError(
        f"{key}={target} was set in a file; files may not name this target.",
        hint=f"if you trust it: allow_targets=[{target.partition(' ')[0].rpartition('.')[0] or target}] on the command "
        "line. docs/configuration.md#code-that-a-file-names lists what is allowed.",
    )
