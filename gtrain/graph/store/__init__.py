"""The partitioned store: a graph on disk, one folder per part."""

from gtrain.graph.store.store import Store

__all__ = ["Store"]
