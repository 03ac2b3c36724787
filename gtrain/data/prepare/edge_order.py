"""Telling that edges came out of the order of their times, which the store sorts them by."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch_geometric.data import HeteroData

from gtrain.graph.store.files import chunks
from gtrain.graph.store.tables import EdgeArrays, Graph

log = logging.getLogger("gtrain")
TIME = "edge_time"


def tell_unsorted(graph: Graph, origin: str) -> None:
    """Log each edge type whose times descend somewhere in the order of the edges.

    Args:
        graph: as it was read; its times ``[E]`` may be a memory map, of which one piece is read at a time.
        origin: where it comes from.
    """
    for whose, times in _times(graph):
        if _descends(times):
            log.info("%s: the times of edges%s are not in order; each node's edges are sorted by time", origin, whose)


def _times(graph: Graph) -> Iterator[tuple[str, Any]]:
    if isinstance(graph, EdgeArrays):
        if TIME in graph.edge_tensors:
            yield "", graph.edge_tensors[TIME]
        return
    for edge_type, edges in graph.edge_items() if isinstance(graph, HeteroData) else [(None, graph.stores[0])]:
        if TIME in edges:
            yield "" if edge_type is None else f" of {','.join(edge_type)}", edges[TIME]


def _descends(times: Any) -> bool:
    """Whether any time is earlier than the one before it; an undirected list has all edges once more, reversed."""
    half, odd = divmod(len(times), 2)
    if not odd and all(
        np.array_equal(times[rows], times[half + rows.start : half + rows.stop]) for rows in chunks(0, half)
    ):
        times = times[:half]
    pieces = (np.asarray(times[rows.start : rows.stop + 1]) for rows in chunks(0, len(times)))
    return any((piece[1:] < piece[:-1]).any() for piece in pieces)
