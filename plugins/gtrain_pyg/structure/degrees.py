"""How many in-edges a node has in the whole graph, and what they weigh: what a sampled subgraph cannot tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType

NAME = "in_degree"
WEIGHT = "edge_weight"
"""The edge tensor that networks over weighted graphs are given."""

_PIECE = 1 << 22  # edges that are looked at at a time

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Degrees:
    """In-edges of n nodes in the whole graph; float ``[n]`` each.

    Attributes:
        edges: number of in-edges.
        loops: how many of them lead from the node to itself.
        weight: sum of the in-edges' weights; None where edges have none.
        loop_weights: sum of the loops' weights; None likewise.
        last_loop: weight of the last of its loops, 0 without; None likewise. PyG keeps this one and drops the others.
        drawable: number of in-edges that sampling in proportion to weights can draw: those above 0; None where
            sampling does not look at weights.
        drawable_weight: sum of these weights; None likewise.
    """

    edges: Tensor
    loops: Tensor
    weight: Tensor | None = None
    loop_weights: Tensor | None = None
    last_loop: Tensor | None = None
    drawable: Tensor | None = None
    drawable_weight: Tensor | None = None

    def of(self, num_nodes: int) -> Degrees:
        """Those of the first nodes."""
        return Degrees(**{name: column[:num_nodes] for name, column in vars(self).items() if column is not None})

    def columns(self) -> list[Tensor]:
        """The attributes that are set, in their order."""
        return [column for column in vars(self).values() if column is not None]

    def packed(self, dtype: torch.dtype) -> Tensor:
        """The bits of these numbers in a tensor of integers, ``[n, columns]``.

        As features of nodes travel between ranks in half precision and in the precision of the run, degrees must not.

        Args:
            dtype: float32 or float64, of the numbers.
        """
        bits = torch.int32 if dtype == torch.float32 else torch.int64
        return torch.stack([column.to(dtype) for column in self.columns()], 1).view(bits)

    @classmethod
    def unpacked(cls, bits: Tensor, weighted: bool, drawn_by_weight: bool) -> Degrees:
        """The degrees whose :meth:`packed` bits these are."""
        numbers = bits.contiguous().view(torch.float32 if bits.dtype == torch.int32 else torch.float64)
        names = ["edges", "loops"]
        names += ["weight", "loop_weights", "last_loop"] if weighted else []
        names += ["drawable", "drawable_weight"] if drawn_by_weight else []
        return cls(**dict(zip(names, numbers.unbind(1), strict=True)))

    @classmethod
    def counted(cls, edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int, dtype: torch.dtype) -> Degrees:
        """The degrees of a graph of which all edges are here."""
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
    """Count the in-edges of a part's own nodes; see :meth:`Degrees.packed`.

    Args:
        store: the graph.
        edge_type: from a node type to itself.
        part: whose nodes.
        drawn_by: the edge tensor that neighbours are drawn in proportion to; None: they are equally likely.
        dtype: precision of sums.
    """
    indptr = store.edge("indptr", part, edge_type).numpy()
    sources = store.edge("indices", part, edge_type).numpy()
    first = int(store.offsets_of(edge_type[2])[part])
    there = store.edge_tensors(edge_type)
    weights = store.edge(WEIGHT, part, edge_type).numpy() if WEIGHT in there else None
    drawing = store.edge(drawn_by, part, edge_type).numpy() if drawn_by in there and drawn_by else None
    count = len(indptr) - 1
    columns: list[Floats] = [np.diff(indptr).astype(np.float64)]
    columns += [np.zeros(count) for _ in range(1 + 3 * (weights is not None) + 2 * (drawn_by is not None))]
    for nodes, edges in _pieces(indptr):
        target = np.repeat(np.arange(nodes.start, nodes.stop), np.diff(indptr[nodes.start : nodes.stop + 1]))
        loop = sources[edges] == target + first
        rest = iter(columns[1:])
        _add(next(rest), nodes, target[loop])
        if weights is not None:
            weight = weights[edges].astype(np.float64)
            _add(next(rest), nodes, target, weight)
            _add(next(rest), nodes, target[loop], weight[loop])
            next(rest)[target[loop]] = weight[loop]
        if drawn_by is not None:
            chance = np.ones(len(target)) if drawing is None else drawing[edges].astype(np.float64)
            _add(next(rest), nodes, target[chance > 0])
            _add(next(rest), nodes, target, chance)
    return _degrees(columns, weights is not None).packed(dtype)


def _degrees(columns: list[Floats], weighted: bool) -> Degrees:
    numbers = torch.from_numpy(np.stack(columns, 1))
    return Degrees.unpacked(numbers.view(torch.int64), weighted, len(columns) > 2 + 3 * weighted)


def _pieces(indptr: NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """Ranges of nodes and of their in-edges, few enough of the latter to have them in memory."""
    node, count = 0, len(indptr) - 1
    while node < count:
        stop = int(np.searchsorted(indptr, indptr[node] + _PIECE, side="right")) - 1
        stop = min(max(stop, node + 1), count)
        yield slice(node, stop), slice(int(indptr[node]), int(indptr[stop]))
        node = stop


def _add(column: Floats, nodes: slice, target: NDArray[np.int64], values: Floats | None = None) -> None:
    column[nodes] += np.bincount(target - nodes.start, values, nodes.stop - nodes.start)
