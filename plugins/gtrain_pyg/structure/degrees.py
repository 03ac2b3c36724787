"""In-degrees of nodes in the whole graph, and sums of their edges' weights, which a sampled subgraph does not have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType
from gtrain_pyg.structure.replica import edge_blocks

NAME = "in_degree"
WEIGHT = "edge_weight"
"""The edge tensor that networks over weighted graphs receive."""

_BLOCK_EDGES = 1 << 22  # edges counted at a time

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Degrees:
    """In-edges of n nodes in the whole graph; float ``[n]`` each.

    Attributes:
        edges: number of in-edges.
        loops: number of self-loops.
        weight: sum of the in-edges' weights; None if edges have none.
        loop_weights: sum of the self-loops' weights; None likewise.
        last_loop: weight of the last self-loop, 0 without; None likewise. PyG keeps this one and drops the others.
        drawable: number of in-edges that weighted sampling can draw, those with weights above 0; None if sampling is
            not weighted.
        drawable_weight: sum of these weights; None likewise.
    """

    edges: Tensor
    loops: Tensor
    weight: Tensor | None = None
    loop_weights: Tensor | None = None
    last_loop: Tensor | None = None
    drawable: Tensor | None = None
    drawable_weight: Tensor | None = None

    def first(self, num_nodes: int) -> Degrees:
        """Return the degrees of the first nodes."""
        return Degrees(**{name: column[:num_nodes] for name, column in vars(self).items() if column is not None})

    def packed(self, dtype: torch.dtype) -> Tensor:
        """Return the bits of these numbers as integers, ``[n, columns]``, in the order of the attributes.

        Floating features are converted to the run's precision, and to half precision on the wire; degrees must not be.

        Args:
            dtype: float32 or float64, of the numbers.
        """
        columns = [column.to(dtype) for column in vars(self).values() if column is not None]
        return torch.stack(columns, 1).view(torch.int32 if dtype == torch.float32 else torch.int64)

    @classmethod
    def unpacked(cls, bits: Tensor, weighted: bool, drawn_by_weight: bool) -> Degrees:
        """Return the degrees of :meth:`packed` bits."""
        numbers = bits.contiguous().view(torch.float32 if bits.dtype == torch.int32 else torch.float64)
        names = ["edges", "loops"]
        names += ["weight", "loop_weights", "last_loop"] if weighted else []
        names += ["drawable", "drawable_weight"] if drawn_by_weight else []
        return cls(**dict(zip(names, numbers.unbind(1), strict=True)))

    @classmethod
    def counted(cls, edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int, dtype: torch.dtype) -> Degrees:
        """Count the degrees in a graph with these edges, ``[2, e]`` with weights ``[e]``."""
        target = edge_index[1]
        loop = edge_index[0] == target
        ones = torch.ones(len(target), dtype=dtype, device=target.device)

        def total(values: Tensor, at: Tensor) -> Tensor:
            return torch.zeros(num_nodes, dtype=dtype, device=target.device).index_add_(0, at, values)

        edges, loops = total(ones, target), total(loop.to(dtype), target)
        if edge_weight is None:
            return cls(edges, loops)
        weight, last = edge_weight.to(dtype), torch.zeros_like(edges)
        last[target[loop]] = weight[loop]
        return cls(edges, loops, total(weight, target), total(weight[loop], target[loop]), last)


def degree_rows(
    store: Store, edge_type: EdgeType, part: int, drawn_by: str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Count the in-edges of the nodes that a part owns; see :meth:`Degrees.packed`.

    Args:
        store: the graph.
        edge_type: from a node type to itself.
        part: the part.
        drawn_by: the edge tensor that neighbours are drawn in proportion to; None draws them uniformly.
        dtype: precision of the result; sums are float64.
    """
    indptr = store.edge("indptr", part, edge_type).numpy()
    sources = store.edge("indices", part, edge_type).numpy()
    first = int(store.offsets_of(edge_type[2])[part])
    stored = store.edge_tensors(edge_type)
    weights = store.edge(WEIGHT, part, edge_type).numpy() if WEIGHT in stored else None
    chances = store.edge(drawn_by, part, edge_type).numpy() if drawn_by in stored and drawn_by else None
    count = len(indptr) - 1
    columns: dict[str, Floats] = {"edges": np.diff(indptr).astype(np.float64), "loops": np.zeros(count)}
    if weights is not None:
        columns |= {name: np.zeros(count) for name in ("weight", "loop_weights", "last_loop")}
    if drawn_by is not None:
        columns |= {name: np.zeros(count) for name in ("drawable", "drawable_weight")}
    for nodes, edges in edge_blocks(indptr, _BLOCK_EDGES):
        target = np.repeat(np.arange(nodes.start, nodes.stop), np.diff(indptr[nodes.start : nodes.stop + 1]))
        loop = sources[edges] == target + first

        def add(name: str, at: NDArray[np.int64], values: Floats | None = None, nodes: slice = nodes) -> None:
            columns[name][nodes] += np.bincount(at - nodes.start, values, nodes.stop - nodes.start)

        add("loops", target[loop])
        if weights is not None:
            weight = weights[edges].astype(np.float64)
            add("weight", target, weight)
            add("loop_weights", target[loop], weight[loop])
            columns["last_loop"][target[loop]] = weight[loop]
        if drawn_by is not None:
            chance = np.ones(len(target)) if chances is None else chances[edges].astype(np.float64)
            add("drawable", target[chance > 0])
            add("drawable_weight", target, chance)
    return Degrees(**{name: torch.from_numpy(column) for name, column in columns.items()}).packed(dtype)
