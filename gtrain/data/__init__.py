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
    "KGData": "kg",
    "LibsvmData": "libsvm",
    "PlantedHeteroData": "planted_hetero",
    "PlantedTemporalData": "planted_temporal",
    "PlantedKGData": "planted_kg",
    "PlantedSparseData": "planted_sparse",
    "EntitiesData": "entities",
    "HeCoData": "heco",
    "TemporalData": "temporal",
    "BigGraphData": "biggraph",
    "PyGPartitionData": "pyg_partition",
    "DGLPartitionData": "dgl_partition",
    "MusaeData": "musae",
    "ParquetData": "parquet",
    "OGBData": "ogb",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
