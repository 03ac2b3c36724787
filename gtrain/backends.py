"""Finding backends: every one, ours included, is an entry point of the group ``gtrain.backends``.

An entry point names a :class:`Backend` object in the light part of a package; the heavy part (its strategy class) is
imported in the ranks, and only for the backend that was chosen.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from gtrain.errors import ConfigError

GROUP = "gtrain.backends"


@dataclass(frozen=True)
class Backend:
    """What the framework knows of a backend before it imports it.

    Attributes:
        description: one line for ``gtrain --help``.
        config: ``package.module:Class``, the dataclass that types and checks the ``strategy`` group. It must import
            the standard library, omegaconf and ``gtrain.errors`` only.
        strategy: ``package.module:Class``, the subclass of ``GraphStrategy``.
        conf: package that holds ``strategy/<name>.yaml``.
        serves: kinds of models that it trains; None for all. See ``gtrain.model.kinds``.
        refusal: why it does not train the others, a clause that follows "because".
    """

    description: str
    config: str
    strategy: str
    conf: str
    serves: frozenset[str] | None = None
    refusal: str = "it was not made for it"

    def load_config(self) -> type[Any]:
        """The configuration dataclass."""
        return _load(self.config)

    def load_strategy(self) -> type[Any]:
        """The strategy class; imports torch."""
        return _load(self.strategy)


@cache
def installed() -> dict[str, EntryPoint]:
    """Entry points by the name that ``strategy=`` takes, in alphabetical order."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


def get(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ConfigError: none is installed under that name, or it cannot be imported.
    """
    if name not in installed():
        raise ConfigError(
            f"strategy={name} was set, and no such strategy is installed.",
            hint=f"the installed strategies are {', '.join(installed())}.",
        )
    try:
        backend = installed()[name].load()
    except Exception as error:
        raise ConfigError(
            f"strategy={name} cannot be used: importing {installed()[name].value} failed with "
            f"{type(error).__name__}: {error}",
            hint="reinstall the package that provides it.",
        ) from error
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"the entry point {name} = {installed()[name].value} is no gtrain.backends.Backend.",
            hint="let the entry point name the Backend object of the package.",
        )
    return backend


def usable() -> dict[str, Backend]:
    """The backends that can be imported; a broken one is left out here and named only when it is chosen."""
    found = {}
    for name in installed():
        try:
            found[name] = get(name)
        except ConfigError:
            continue
    return found


def descriptions() -> str:
    """One line a strategy, for ``gtrain --help``."""
    lines = []
    for name in installed():
        try:
            text = get(name).description
        except ConfigError as error:
            text = f"(cannot be imported) {error.message}"
        lines.append(f"  {name:<12} {text}")
    return "\n".join(lines)


def serving(kind: str) -> list[str]:
    """Names of the strategies that train models of that kind."""
    return [name for name, backend in usable().items() if backend.serves is None or kind in backend.serves]


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
