"""First layers for graphs whose features a network cannot read directly: sparse, missing, or of several widths."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.module_dict import ModuleDict

from gtrain.nn import Embedding, SparseLinear


class NodeEncoder(nn.Module):
    """Maps the nodes of each type to one width.

    Dense features go through a linear layer, sparse ones through a :class:`~gtrain.nn.SparseLinear`; nodes without
    features get the rows of a learned :class:`~gtrain.nn.Embedding`.

    Args:
        channels: columns of the result.
        num_nodes: number of nodes of each type.
        num_features: columns of ``x`` of each type; None without features.
        sparse: the types whose ``x`` is a sparse CSR tensor.

    Shapes:
        x of a type [n, num_features], orig_id [n]; result of a type [n, channels]. Learned rows are indexed by the
        source data's ids, so that they do not depend on the partition.
    """

    def __init__(
        self,
        channels: int,
        num_nodes: Mapping[str, int],
        num_features: Mapping[str, int | None],
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.layers = ModuleDict()  # torch's takes no type named items or keys
        for node_type, count in num_nodes.items():
            columns = num_features[node_type]
            if columns is None:
                layer: nn.Module = Embedding(count, channels, node_type=node_type)
            else:
                layer = SparseLinear(columns, channels) if node_type in sparse else nn.Linear(columns, channels)
            self.layers[node_type] = layer

    def forward(self, batch: Data | HeteroData) -> Tensor | dict[str, Tensor]:
        """Return the features of every node of the batch, by type in a heterogeneous graph."""
        if isinstance(batch, HeteroData):
            return {node_type: self._encode(node_type, batch[node_type]) for node_type in batch.node_types}
        (node_type,) = self.layers.keys()
        return self._encode(node_type, batch)

    def _encode(self, node_type: str, nodes: Data) -> Tensor:
        layer = self.layers[node_type]
        encoded: Tensor = layer(nodes.orig_id) if isinstance(layer, Embedding) else layer(nodes.x)
        return encoded


class NodeIds(nn.Module):
    """Returns the nodes' ids in the source data, for networks whose first layer has a row per node."""

    # Checkpoints then index the rows of the first layer by original ids.
    returns_node_ids = True

    def forward(self, batch: Data) -> Tensor:
        """Return int64 [n]."""
        ids: Tensor = batch.orig_id
        return ids
