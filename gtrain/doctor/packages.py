"""What is installed, by the metadata of the distribution: its dependencies and its extras."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import Any

from packaging.requirements import Requirement

NAME = "gtrain"


def facts() -> dict[str, Any]:
    """Versions of gtrain and its dependencies, and the state of each extra."""
    needed = [] if installed(NAME) is None else [Requirement(text) for text in requires(NAME) or []]
    return {
        "python": platform.python_version(),
        "gtrain": installed(NAME),
        "dependencies": {
            need.name: state(need) for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})
        },
        "extras": extras(needed),
    }


def state(need: Requirement) -> dict[str, Any]:
    """One dependency: the version found (None: not installed), the one needed, and whether they agree."""
    found = installed(need.name)
    return {
        "installed": found,
        "needed": str(need.specifier) or "any",
        "ok": found is not None and need.specifier.contains(found, prereleases=True),
    }


def extras(needed: list[Requirement]) -> dict[str, dict[str, Any]]:
    """By the name of an extra: what is missing of it, and the command that installs it."""
    names = [] if installed(NAME) is None else metadata(NAME).get_all("Provides-Extra") or []
    return {
        name: {"missing": _missing(name, needed), "command": f'pip install "{NAME}[{name}]"'} for name in sorted(names)
    }


def installed(name: str) -> str | None:
    """The version of a distribution, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _missing(extra: str, needed: list[Requirement]) -> list[str]:
    """Requirements of an extra that are not met; an extra may name others of the same distribution."""
    found = []
    for need in needed:
        if need.marker is None or need.marker.evaluate({"extra": ""}) or not need.marker.evaluate({"extra": extra}):
            continue
        if need.name == NAME:
            found += [line for inner in need.extras for line in _missing(inner, needed)]
        elif not state(need)["ok"]:
            found.append(f"{need.name}{need.specifier}")
    return found
