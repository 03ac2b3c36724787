"""Packages that one source alone needs."""

from __future__ import annotations

import importlib
from types import ModuleType

from gtrain.errors import ConfigError


def need(package: str, source: str, *, module: str | None = None, extra: str | None = None) -> ModuleType:
    """Import a package that is not among gtrain's own requirements.

    Args:
        package: what pip calls it.
        source: what needs it, for messages, such as ``data=entities``.
        module: the module to import; None means the package.
        extra: gtrain's extra that installs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module or package)
    except ImportError as err:
        way = f"pip install {package}" + (f", or pip install 'gtrain[{extra}]'" if extra else "")
        raise ConfigError(f"{source} needs the package {package!r}, which is not installed ({err})", hint=way) from err
