"""Data sources: what to train on. Names are imported on first use, so that the configuration stays light."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "GraphDataModule": "module",
    "SeedLoader": "batches.loader",
    "full_batch": "batches.loader",
    "PlantedData": "planted",
    "PyGData": "sources.pyg",
    "PlanetoidData": "sources.pyg",
    "AmazonData": "sources.pyg",
    "CoauthorData": "sources.pyg",
    "HeterophilousData": "sources.pyg",
    "EdgesData": "sources.edges",
    "KGData": "sources.kg",
    "LibsvmData": "sources.libsvm",
    "PlantedHeteroData": "planted.hetero",
    "PlantedTemporalData": "planted.temporal",
    "PlantedKGData": "planted.kg",
    "PlantedSparseData": "planted.sparse",
    "EntitiesData": "sources.entities",
    "HeCoData": "sources.heco",
    "TemporalData": "sources.temporal",
    "BigGraphData": "sources.biggraph",
    "PyGPartitionData": "sources.pyg_partition",
    "DGLPartitionData": "sources.dgl_partition",
    "MusaeData": "sources.musae",
    "ParquetData": "sources.parquet",
    "OGBData": "sources.ogb",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
