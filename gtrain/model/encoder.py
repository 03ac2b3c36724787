"""The first layer where a graph's own features do not go into a network as they are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from gtrain.nn import Embedding, SparseLinear


class NodeEncoder(nn.Module):
    """Brings the nodes of each type to one width: dense features by a linear layer, sparse ones by a
    :class:`~gtrain.nn.SparseLinear`, nodes without features by a learned :class:`~gtrain.nn.Embedding`.

    Args:
        channels: columns of the result.
        num_nodes: number of nodes of each type.
        num_features: columns of ``x`` of each type; None without features.
        sparse: the types whose ``x`` is a sparse CSR tensor.

    Shapes:
        x of a type [n, num_features], orig_id [n]; result of a type [n, channels]. Learned rows belong to the
        source data's ids, so that they are the same however the graph is cut.
    """

    def __init__(
        self,
        channels: int,
        num_nodes: Mapping[str, int],
        num_features: Mapping[str, int | None],
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for node_type, count in num_nodes.items():
            columns = num_features[node_type]
            if columns is None:
                layer: nn.Module = Embedding(count, channels, node_type=node_type)
            else:
                layer = SparseLinear(columns, channels) if node_type in sparse else nn.Linear(columns, channels)
            self.layers[node_type] = layer

    def forward(self, batch: Data | HeteroData) -> Tensor | dict[str, Tensor]:
        """Features of every node of the batch, by type where it has several."""
        if isinstance(batch, HeteroData):
            return {node_type: self._encode(node_type, batch[node_type]) for node_type in batch.node_types}
        (node_type,) = self.layers
        return self._encode(node_type, batch)

    def _encode(self, node_type: str, nodes: Data) -> Tensor:
        layer = self.layers[node_type]
        encoded: Tensor = layer(nodes.orig_id) if isinstance(layer, Embedding) else layer(nodes.x)
        return encoded


class NodeIds(nn.Module):
    """The nodes' ids in the source data, for networks whose first layer has a row for each node."""

    returns_node_ids = True  # a checkpoint's rows belong to these nodes

    def forward(self, batch: Data) -> Tensor:
        """int64 [n]."""
        ids: Tensor = batch.orig_id
        return ids
