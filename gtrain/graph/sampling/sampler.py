"""Whole subgraphs of a homogeneous graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gtrain.errors import ConfigError
from gtrain.graph.sampling.columns import Columns
from gtrain.graph.sampling.hetero import HeteroNeighborSampler
from gtrain.graph.sampling.output import EdgeType, Sample

_TYPE = "node"
_EDGE_TYPE: EdgeType = (_TYPE, "to", _TYPE)


class NeighborSampler:
    """Samples subgraphs around seeds of a homogeneous graph; see :class:`HeteroNeighborSampler`.

    Example:
        >>> import numpy as np
        >>> columns = Columns(indptr=np.array([0, 2, 3, 3]), indices=np.array([1, 2, 2]))
        >>> sample = NeighborSampler(columns, [-1, -1]).sample([0])
        >>> sample.node.tolist(), sample.row.tolist(), sample.col.tolist()
        ([0, 1, 2], [1, 2, 2], [0, 0, 1])

    Args:
        columns: the graph.
        num_neighbors: fan-out of each hop, -1 all.
        node_time: times of the nodes.
        options: ``replace, temporal, disjoint, induced, seed``.

    Raises:
        ConfigError, DataError: as the other's.
    """

    def __init__(
        self, columns: Columns, num_neighbors: Sequence[int], *, node_time: Any = None, **options: Any
    ) -> None:
        if isinstance(num_neighbors, Mapping):
            raise ConfigError(
                "num_neighbors was given by edge type for a homogeneous graph.",
                hint="give a list, one number for each hop.",
            )
        times = None if node_time is None else {_TYPE: node_time}
        self.typed = HeteroNeighborSampler(
            {_EDGE_TYPE: columns}, {_TYPE: columns.num_targets}, num_neighbors, node_time=times, **options
        )

    def sample(self, seeds: Any, *, epoch: int = 0, batch: int = 0, seed_time: Any = None, copy: bool = True) -> Sample:
        """Sample around seeds; arguments and errors as :meth:`HeteroNeighborSampler.sample`, without types."""
        times = None if seed_time is None else {_TYPE: seed_time}
        found = self.typed.sample({_TYPE: seeds}, epoch=epoch, batch=batch, seed_time=times, copy=copy)
        return Sample(
            node=found.node[_TYPE],
            row=found.row[_EDGE_TYPE],
            col=found.col[_EDGE_TYPE],
            edge=found.edge[_EDGE_TYPE],
            edge_id=found.edge_id.get(_EDGE_TYPE),
            batch=None if found.batch is None else found.batch[_TYPE],
            seeds=found.seeds[_TYPE],
            num_sampled_nodes=found.num_sampled_nodes[_TYPE],
            num_sampled_edges=found.num_sampled_edges[_EDGE_TYPE],
        )
