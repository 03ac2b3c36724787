"""Import packages that only one source needs."""

from __future__ import annotations

import importlib
from types import ModuleType

from gtrain.errors import ConfigError


def require(package: str, source: str, *, module: str | None = None, extra: str | None = None) -> ModuleType:
    """Import a package that is not among gtrain's requirements.

    Args:
        package: its name for pip.
        source: the source that needs it, for messages, such as ``data=entities``.
        module: the module to import; None: the package.
        extra: the extra of gtrain that installs it.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        return importlib.import_module(module or package)
    except ImportError as err:
        hint = f"pip install {package}" + (f", or pip install 'gtrain[{extra}]'" if extra else "")
        raise ConfigError(f"{source} needs the package {package!r}, which is not installed ({err})", hint=hint) from err
