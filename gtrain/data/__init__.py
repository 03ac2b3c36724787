"""Data sources: what to train on. Names are imported on first use, so that the configuration stays light."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "GraphDataModule": "module",
    "SeedLoader": "loader",
    "full_batch": "loader",
    "PlantedData": "planted",
    "PyGData": "pyg",
    "PlanetoidData": "pyg",
    "AmazonData": "pyg",
    "CoauthorData": "pyg",
    "HeterophilousData": "pyg",
    "EdgesData": "edges",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
