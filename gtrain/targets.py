"""Which ``_target_`` a configuration may name: code of others is not run because a YAML file says so.

What is typed on the command line is the user's own. A file may come from anywhere (an experiment, the ``.hydra`` folder
of a run), so its targets are limited to :data:`ALLOWED`, the packages of installed backends, modules of the current
folder, and ``allow_targets``.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from gtrain import backends
from gtrain.errors import ConfigError

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
_FACTORIES = ("gtrain.model",)  # functions too
_EXCLUDED = ("torch_geometric.nn.sequential", "torch_geometric.nn.nlp")  # evaluate text; download language models
_HYDRA_TARGET = re.compile(
    r"gtrain\.cli\.entry\.RunFolder$|(hydra\._internal\.core_plugins|hydra\.experimental\.callbacks|hydra_plugins|optuna)\."
)
_LOG_CLASS = re.compile(r"(logging\.(handlers\.)?|rich\.logging\.|colorlog\.)[A-Z]\w*$")
_PARTS = ("data", "model", "callbacks", "logger")
"""Parts of the configuration of which objects are made."""


def settle(cfg: DictConfig, arguments: Sequence[str]) -> None:
    """Complete ``allow_targets`` by the targets that are typed, and refuse others that are not allowed, by their names.

    Args:
        cfg: the composed configuration; changed in place.
        arguments: the command line as the user typed it.

    Raises:
        ConfigError: a file names a target of another package, or sets ``allow_targets``.
    """
    targets, allowed = typed(arguments)
    if (set_elsewhere := OmegaConf.to_container(cfg.allow_targets)) != allowed:
        raise ConfigError(
            f"allow_targets={backends.as_set(set_elsewhere)} was set in a file, which cannot allow itself.",
            hint="set allow_targets on the command line.",
        )
    with open_dict(cfg):
        cfg.allow_targets = [*allowed, *targets]
    for part in _PARTS:
        for key, target in found_in(OmegaConf.to_container(cfg[part], resolve=False), part):
            _check_name(key, str(target), cfg.allow_targets)


def typed(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The targets that a command line names, and its ``allow_targets``."""
    targets: dict[str, None] = {}
    allowed: list[str] = []
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException:  # Hydra says what is wrong with it
            continue
        for value in _values(override):
            if override.key_or_group == "allow_targets":
                allowed = [value] if isinstance(value, str) else [str(one) for one in value or ()]
            elif override.key_or_group.rpartition(".")[2] == "_target_":
                targets[str(value)] = None
            else:
                targets |= dict.fromkeys(str(target) for _, target in found_in(value))
    return list(targets), allowed


def _values(override: Override) -> list[Any]:
    """The value of an override, or those that it sweeps over."""
    if override.is_delete():
        return []
    if not override.is_sweep_override():
        return [override.value()]
    try:
        return list(override.sweep_iterator())
    except (HydraException, NotImplementedError):  # an interval
        return []


def found_in(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every ``_target_`` in a node of dictionaries and lists, with its key.

    Raises:
        ConfigError: text in it would be resolved a second time, when an object is made of it.
    """
    if isinstance(node, dict):
        if node.get("_target_") is not None:
            yield f"{key}._target_" if key else "_target_", node["_target_"]
        for name, value in node.items():
            yield from found_in(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from found_in(value, f"{key}[{index}]")


def check_objects(config: dict[str, Any], find: Any, parts: Iterable[str] = _PARTS) -> None:
    """Refuse targets that are not allowed, by the modules that define them: a name may lead to another package.

    Args:
        config: the resolved configuration, after :func:`settle`.
        find: imports a target, given its path and its key.
        parts: of the configuration, of which objects are to be made.

    Raises:
        ConfigError: names the key and the object.
    """
    allowed = config.get("allow_targets") or ()
    for part in parts:
        _refuse_late_interpolations(config[part], part)
        for key, target in found_in(config[part], part):
            _check_name(key, str(target), allowed)  # interpolations are resolved by now
            if target not in allowed:
                _check_object(key, target, find(target, key.removesuffix("._target_")), allowed)


def check_hydra(hydra: DictConfig, arguments: Sequence[str]) -> None:
    """Refuse code that Hydra's own settings would run, before Hydra does, where it is not typed.

    Raises:
        ConfigError: names the key.
    """
    own, allowed = typed(arguments)
    node = OmegaConf.to_container(hydra, resolve=False)
    assert isinstance(node, dict)
    for key, target in found_in(node, "hydra"):
        if not _HYDRA_TARGET.match(str(target)) and target not in own and not _within(str(target), allowed):
            raise _refused(key, str(target))
    for key, value in [*_log_factories(node.get("job_logging")), *_log_factories(node.get("hydra_logging"))]:
        if not _LOG_CLASS.match(str(value)) and not any(argument.startswith(key) for argument in arguments):
            raise _refused(f"hydra logging {key}", str(value))
    variables = (node.get("job") or {}).get("env_set")
    if variables and not any(argument.lstrip("+").startswith("hydra.job.env_set") for argument in arguments):
        raise ConfigError(
            f"hydra.job.env_set sets {', '.join(map(str, variables))} in a file; such variables decide what code runs.",
            hint="set hydra.job.env_set on the command line, or the variables in the shell.",
        )


def _log_factories(node: Any) -> Iterator[tuple[str, Any]]:
    """What ``logging.config`` would call: the values of ``()`` and ``class``."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name in ("()", "class"):
                yield name, value
            yield from _log_factories(value)


def _check_name(key: str, target: str, allowed: Iterable[str]) -> None:
    """Refuse a target whose package holds nothing that is allowed, without importing it."""
    if target.startswith("${"):  # checked once it is resolved
        return
    package = target.partition(".")[0]
    packages = {prefix.partition(".")[0] for prefix in (*_prefixes(), *allowed)}
    if package not in packages and not _is_here(package):
        raise _refused(key, target)


def _check_object(key: str, target: str, found: Any, allowed: Iterable[str]) -> None:
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", type(found).__name__)
    full = f"{module}.{name}"
    if not isinstance(module, str) or not callable(found):
        raise _refused(key, target)
    if _within(full, allowed) or (_is_here(module.partition(".")[0]) and _lies_here(module)):
        return
    kind = _FACTORIES if not inspect.isclass(found) else _prefixes()
    if not _within(full, kind) or _within(full, _EXCLUDED):
        raise _refused(key, target if target == full else f"{target} ({full})")


def _prefixes() -> tuple[str, ...]:
    packages = {point.module.partition(".")[0] for point in backends.installed().values()}
    return (*ALLOWED, *sorted(packages - {"gtrain"}))


def _within(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _is_here(package: str) -> bool:
    """Whether the current folder has a module or package of the user's own under this name."""
    framework = {prefix.partition(".")[0] for prefix in _prefixes()}  # which may be a source tree in that folder
    return (
        package not in framework
        and package.isidentifier()
        and (os.path.isfile(f"{package}.py") or os.path.isdir(package))
    )


def _lies_here(module: str) -> bool:
    """Whether an imported module is one of the current folder."""
    path, here = getattr(sys.modules.get(module), "__file__", None), Path.cwd()
    if path is None:
        return False
    return Path(path).resolve().with_suffix("") in (
        here.joinpath(*module.split(".")).resolve(),
        here.joinpath(*module.split("."), "__init__").resolve(),
    )


def _refuse_late_interpolations(node: Any, key: str) -> None:
    """Refuse text that Hydra would resolve when it makes an object: it could become a target."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    for name, value in items:
        _refuse_late_interpolations(value, f"{key}.{name}")
    if isinstance(node, str) and "${" in node:
        raise ConfigError(
            f"{key}={node} holds an interpolation that is left after the configuration was resolved.",
            hint="write the value itself.",
        )


def _refused(key: str, target: str) -> ConfigError:
    return ConfigError(
        f"{key}={target} stands in a file, and is not among what files may name.",
        hint=f"if you trust it: allow_targets=[{target.partition(' ')[0].rpartition('.')[0] or target}] on the command "
        "line. docs/configuration.md#code-that-a-file-names lists what is allowed.",
    )
