"""Full batches of a link task: the shard, once for each epoch, with the edges that point at its nodes."""

from __future__ import annotations

from collections.abc import Iterator

from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.loader import SeedLoader
from gtrain.strategy.spread_edges import SpreadEdges


class LinkBatches:
    """One batch an epoch. In training each epoch has other false edges.

    Args:
        graph: the shard as a batch.
        edges: this rank's edges of the split.
        loader: describes the split.
    """

    def __init__(self, graph: Data | HeteroData, edges: SpreadEdges, loader: SeedLoader) -> None:
        self._graph, self._edges, self._loader = graph, edges, loader
        self._fixed: Data | HeteroData | None = None

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Data | HeteroData]:
        epoch = self._loader.next_epoch()
        if self._loader.split == "train":
            yield self._edges.batch(self._graph, epoch)
            return
        if self._fixed is None:
            self._fixed = self._edges.batch(self._graph, 0)
        yield self._fixed
