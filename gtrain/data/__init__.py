"""Data sources: what to train on. Names are imported on first use, so that the configuration stays light."""

from __future__ import annotations

from gtrain.lazy import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _HOME)
