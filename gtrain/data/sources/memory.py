"""Graphs that a Python program has in memory."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.config import MemoryConfig
from gtrain.data.module import GraphDataModule
from gtrain.data.prepare.split import MASKS
from gtrain.data.tables.labels import UNLABELLED
from gtrain.errors import ConfigError
from gtrain.graph.store.manifest import NODE_TYPE
from gtrain.graph.store.tables import csr_tensor


class MemoryData(GraphDataModule[MemoryConfig]):
    """A ``Data`` or ``HeteroData`` of PyG; see :meth:`~gtrain.data.module.GraphDataModule.from_pyg`."""

    name = "memory"
    graph: Data | HeteroData

    @classmethod
    def of(cls, graph: Any, settings: dict[str, Any]) -> MemoryData:
        """Return the data module of a graph.

        Args:
            graph: the graph.
            settings: by name.

        Raises:
            ConfigError: it is no graph of PyG.
        """
        if not isinstance(graph, (Data, HeteroData)):
            raise ConfigError(
                f"a {type(graph).__name__} was given as a graph.", hint="give a Data or HeteroData of PyG."
            )
        if "split" not in settings:
            held_out = any(name in store for store in graph.stores for name in (*MASKS, "val_edge_index"))
            settings = {**settings, "split": "public" if held_out else "random"}
        module = cls(**settings)
        module.graph = graph
        return module

    @classmethod
    def of_scipy(cls, adjacency: Any, x: Any, y: Any, settings: dict[str, Any]) -> MemoryData:
        """Return the data module of a matrix; see :meth:`~gtrain.data.module.GraphDataModule.from_scipy`."""
        return cls.of(_scipy_graph(adjacency, x, y), settings)

    def identity(self) -> dict[str, Any]:
        """Return a digest of the graph's tensors, and what the labels are if it is set."""
        kind = self.settings.label_kind
        return {"digest": self._digest, **({} if kind is None else {"label_kind": kind})}

    @property
    def number_labels(self) -> frozenset[str]:
        graph = self.graph
        labels = {name: nodes.get("y") for name, nodes in graph.node_items()} if isinstance(graph, HeteroData) else None
        by_type = {NODE_TYPE: graph.y} if labels is None else labels
        return frozenset(name for name, y in by_type.items() if isinstance(y, Tensor) and self._are_numbers(name, y))

    @property
    def _no_label(self) -> int | None:
        return self._for_nan if any(map(_has_nan, self.graph.stores)) else self.unlabelled

    @property
    def _for_nan(self) -> int:
        return UNLABELLED if self.unlabelled is None else self.unlabelled

    def _are_numbers(self, node_type: str, y: Tensor) -> bool:
        known, kind = self._trained_on_numbers(node_type), self.settings.label_kind
        if known is not None or kind is not None:
            return kind == "number" if known is None else known
        values = y[~y.isnan()] if y.is_floating_point() else y
        one_column = y.dim() == 1 or y.shape[1:] == (1,)
        return one_column and y.is_floating_point() and bool((values != values.round()).any())

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for store in self.graph.stores:
            digest.update(repr(getattr(store, "_key", None)).encode())
            for name, value in sorted(store.items()):
                digest.update(name.encode())
                for part in _parts(value):
                    digest.update(part)
        return digest.hexdigest()[:16]

    def read(self) -> Data | HeteroData:
        """Return a copy that shares the tensors.

        Numbers to predict are float ``[N]``; of classes and multi-label ``y``, NaN is the value of no label.
        """
        graph = copy.copy(self.graph)
        numbers = self.number_labels
        for name, nodes in graph.node_items() if isinstance(graph, HeteroData) else [(NODE_TYPE, graph)]:
            if name in numbers:
                nodes.y = nodes.y.flatten().float() if nodes.y.numel() == len(nodes.y) else nodes.y
            elif _has_nan(nodes):
                nodes.y = nodes.y.nan_to_num(nan=self._for_nan)
        return graph


def _has_nan(store: Mapping[str, Any]) -> bool:
    y = store.get("y")
    return isinstance(y, Tensor) and y.is_floating_point() and bool(y.isnan().any())


def _scipy_graph(adjacency: Any, x: Any, y: Any) -> Data:
    if not hasattr(adjacency, "tocoo"):
        raise ConfigError(
            f"a {type(adjacency).__name__} was given as an adjacency matrix.",
            hint="give a sparse matrix: scipy.sparse.coo_array(matrix).",
        )
    matrix = adjacency.tocoo()
    if matrix.shape[0] != matrix.shape[1]:
        raise ConfigError(f"an adjacency matrix of shape {matrix.shape} was given.", hint="give a square matrix.")
    index = torch.from_numpy(np.stack([matrix.row, matrix.col]).astype(np.int64))
    data = Data(edge_index=index, num_nodes=matrix.shape[0])
    if not (matrix.data == 1).all():
        data.edge_weight = torch.from_numpy(matrix.data.astype(np.float32))
    if x is not None and hasattr(x, "tocsr"):
        rows = x.tocsr()
        indptr, indices = (torch.from_numpy(part.astype(np.int64)) for part in (rows.indptr, rows.indices))
        data.x = csr_tensor(indptr, indices, torch.from_numpy(rows.data.astype(np.float32)), rows.shape)
    elif x is not None:
        data.x = torch.as_tensor(np.asarray(x), dtype=torch.float32)
    if y is not None:
        labels = np.asarray(y)
        if labels.dtype.kind not in "biuf":
            raise ConfigError(
                f"labels of dtype {labels.dtype} were given.",
                hint="give class numbers: names, y = numpy.unique(y, return_inverse=True).",
            )
        data.y = torch.as_tensor(labels)
    return data


def _parts(value: Any) -> list[Any]:
    """Return what identifies a value of a graph."""
    if not isinstance(value, Tensor):
        return [repr(value).encode()]
    if value.layout != torch.strided:
        matrix = value.to_sparse_csr()
        tensors = [matrix.crow_indices(), matrix.col_indices(), matrix.values()]
    else:
        tensors = [value]
    arrays = [t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() for t in tensors]
    return [f"{value.dtype} {tuple(value.shape)}".encode(), *arrays]
