"""Installed versions of gtrain's dependencies and extras, by the metadata of its distribution."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import Any

from packaging.requirements import Requirement

NAME = "gtrain"


def facts() -> dict[str, Any]:
    """Return the versions of gtrain and its dependencies, and the state of each extra."""
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
    """Return the installed version of a requirement (None if missing), the required one, and whether they agree."""
    present = installed(need.name)
    return {
        "installed": present,
        "needed": str(need.specifier) or "any",
        "ok": present is not None and need.specifier.contains(present, prereleases=True),
    }


def extras(needed: list[Requirement]) -> dict[str, dict[str, Any]]:
    """Return the missing requirements of each extra, and the command that installs it."""
    names = [] if installed(NAME) is None else metadata(NAME).get_all("Provides-Extra") or []
    return {
        name: {"missing": _missing(name, needed), "command": f'pip install "{NAME}[{name}]"'} for name in sorted(names)
    }


def installed(name: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _missing(extra: str, needed: list[Requirement]) -> list[str]:
    """Return the unmet requirements of an extra, which may name other extras of the same distribution."""
    missing: list[str] = []
    for need in needed:
        # Skip what is needed without any extra, and what belongs to another one.
        if need.marker is None or need.marker.evaluate({"extra": ""}) or not need.marker.evaluate({"extra": extra}):
            continue
        if need.name == NAME:
            missing += [line for inner in need.extras for line in _missing(inner, needed)]
        elif not state(need)["ok"]:
            missing.append(f"{need.name}{need.specifier}")
    return missing
