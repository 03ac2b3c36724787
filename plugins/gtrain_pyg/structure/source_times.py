"""The time of each edge's source, laid out by edge, so that sampling by times reads columns and no remote nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling.columns import readable
from gtrain.graph.store import Store
from gtrain_pyg.ranks.parts import PartBook

Array = NDArray[Any]
_PIECE = 1 << 21  # edges handled at a time


def source_times(store: Store, book: PartBook, node_type: str, name: str, indices: Array) -> Array:
    """Look up the times of edges' sources, of whatever part.

    Args:
        store: the store, whose files of all parts are read.
        book: its offsets.
        node_type: the type of the sources.
        name: of the node tensor.
        indices: ``[e]``, the sources, global ids.

    Returns:
        int64 ``[e]``.

    Raises:
        DataError: times are no whole numbers.
    """
    times = [readable(store.node(name, p, node_type).numpy(), name, ("i8",)) for p in range(store.num_parts)]
    found = np.empty(indices.size, np.int64)
    for start in range(0, indices.size, _PIECE):
        source, out = indices[start : start + _PIECE], found[start : start + _PIECE]
        owner = book.owner(node_type, source)
        for p in np.unique(owner).tolist():
            chosen = owner == p
            out[chosen] = times[p][source[chosen] - book.offsets[node_type][p]]
    return found
