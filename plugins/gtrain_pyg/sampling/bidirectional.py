"""Adding the reverse of each sampled edge, as PyG's ``subgraph_type="bidirectional"`` does."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling.scratch import Edges
from gtrain.graph.store.manifest import EdgeType

Array = NDArray[Any]
log = logging.getLogger(__name__)
_REVERSE = "rev_"


class Bidirectional:
    """Completes sampled edges; of edges that are there several times one is kept.

    Which edges are each other's reverse follows PyG (``HeteroSamplerOutput.to_bidirectional``): those of a relation
    and of ``rev_`` and its name complete each other; otherwise a relation within one node type is completed from
    itself, and any other from the one relation that leads back, if there is one.

    Args:
        kinds: the edge types.
    """

    def __init__(self, kinds: Sequence[EdgeType]) -> None:
        self._from = {kind: _reverse(kind, kinds) for kind in kinds}
        for kind in [kind for kind, other in self._from.items() if other is None]:
            log.warning("subgraph_type=bidirectional: no edge type is the reverse of %s, which stays as it is", kind)

    def complete(self, edges: Mapping[EdgeType, Edges]) -> set[EdgeType]:
        """Add edges to all types, ordered by target and then source.

        Args:
            edges: by type; ``row`` and ``column`` are local ids.

        Returns:
            The types whose ``position`` no longer says which edges they hold, since some came from another type.
        """
        found = {kind: tuple(a[: e.size].copy() for a in (e.row, e.column, e.position)) for kind, e in edges.items()}
        for kind, other in self._from.items():
            if other is not None:
                row, column, position = found[kind]
                back = found[other]
                _keep(edges[kind], np.r_[row, back[1]], np.r_[column, back[0]], np.r_[position, back[2]])
        return {kind for kind, other in self._from.items() if other not in (None, kind)}


def _reverse(kind: EdgeType, kinds: Sequence[EdgeType]) -> EdgeType | None:
    source, relation, target = kind
    named = relation.removeprefix(_REVERSE) if relation.startswith(_REVERSE) else _REVERSE + relation
    if (target, named, source) in kinds:
        return target, named, source
    if source == target:
        return kind
    back = [other for other in kinds if (other[0], other[2]) == (target, source)]
    return back[0] if len(back) == 1 else None


def _keep(edges: Edges, row: Array, column: Array, position: Array) -> None:
    """Keep the first edge of each pair of ends."""
    key = column * (int(row.max(initial=0)) + 1) + row
    _, first = np.unique(key, return_index=True)
    edges.size = 0
    edges.reserve(first.size)
    for kept, array in zip(edges.extend(first.size), (row, column, position), strict=True):
        np.take(array, first, out=kept, mode="clip")
