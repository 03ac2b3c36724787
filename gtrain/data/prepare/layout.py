"""How the features of a graph are stored: as a dense matrix, in CSR form, or as a sparse matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.graph.store.tables import EdgeArrays, Graph
from gtrain.nn import Csr
from gtrain.nn.compressed import CompressedMatrix

SPARSE = "sparse"
"""The value of ``data.feature_layout`` with which a network reads features through a table."""


def lay_out(graph: Graph, layout: str) -> None:
    """Give the features of every node type the layout that was set, in place.

    Args:
        graph: its ``x`` may be dense, sparse CSR, or a :class:`~gtrain.nn.compressed.CompressedMatrix`.
        layout: ``data.feature_layout``. ``sparse``: ``x`` becomes ``torch.sparse_csr``, which a network reads through a
            :class:`~gtrain.nn.SparseLinear`. Otherwise a sparse ``x`` becomes a ``CompressedMatrix``, which a network
            reads as the dense matrix. The store decides whether that is stored in CSR form.
    """
    for nodes in [graph.node_tensors] if isinstance(graph, EdgeArrays) else graph.node_stores:
        x: Any = nodes.get("x")
        if isinstance(x, np.ndarray):
            x = torch.from_numpy(x)
        if not isinstance(x, Tensor) or x.dim() != 2:
            continue
        if layout == SPARSE:
            nodes["x"] = x if x.layout == torch.sparse_csr else x.to_sparse_csr()
        elif x.layout == torch.sparse_csr:
            # Entries that are all 1, as in bags of words, are not stored.
            values = None if bool((x.values() == 1).all()) else x.values()
            nodes["x"] = CompressedMatrix(Csr(x.col_indices().int(), values, x.crow_indices()), x.size(1), x.dtype)


def expected_facts(outline: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """Return what :func:`lay_out` makes of a graph's outline: which node types have sparse features.

    Args:
        outline: facts of the graph before it is read, as :attr:`~gtrain.data.module.GraphDataModule.outline`.
        layout: ``data.feature_layout``.
    """
    if layout != SPARSE:
        return dict(outline)
    widths = outline["num_features"]
    if isinstance(widths, Mapping):
        return {**outline, "sparse_features": [name for name, width in widths.items() if width is not None]}
    return {**outline, "sparse_features": widths is not None}
