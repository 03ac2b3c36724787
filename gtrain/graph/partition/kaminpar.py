"""KaMinPar partitioning: as few cut edges as METIS in a fraction of the time, for large graphs that fit in memory."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import ConfigError
from gtrain.graph.partition.adjacency import Adjacency

Ints = NDArray[np.int64]

IMBALANCE = 0.03
"""Fraction by which the heaviest part may exceed the mean weight, as in METIS's k-way partitioning."""

REFINED_PARTS = 16
"""Largest number of parts that are refined: the refinement counts each node's neighbours in each part."""
REFINED_IMBALANCE = 1.005
"""Weight of a part, in multiples of the mean, that the refinement does not exceed unless a part weighs more before."""
LOSS, PATIENCE = 0.25, 4
"""See :func:`.kernels.refine`; 0.25 is the value of the method's authors for the finest level."""

_VERSION = 1 | 8 | 16
"""ParHIP's version number, a set of flags: no weights of edges; ids of 32 bits; weights of nodes of 32 bits."""


def available() -> bool:
    """Return whether kaminpar is installed. It is not imported: an import loads TBB, and the agent forks."""
    return importlib.util.find_spec("kaminpar") is not None


def check_available() -> None:
    """Raise a ConfigError unless kaminpar is installed."""
    if not available():
        raise ConfigError(
            "data.partitioner=kaminpar is set, but kaminpar is not installed.",
            hint="pip install kaminpar (it has wheels for Python 3.11 to 3.13), or set data.partitioner=metis or ldg.",
        )


def kaminpar_partition(graph: Adjacency, num_parts: int, weights: NDArray[np.int32], *, seed: int = 0) -> Ints:
    """Run KaMinPar (Gottesbueren et al., Deep Multilevel Graph Partitioning, ESA 2021) on one thread.

    With one thread the result depends on the seed alone. KaMinPar's Python package reads graphs from files only: the
    graph is written in ParHIP's binary format to an anonymous file in memory.

    Args:
        graph: the symmetric graph.
        num_parts: P.
        weights: positive weight of each node, ``[N]``; a part has at most 1 + :data:`IMBALANCE` times the mean weight.
        seed: seed of the random numbers.

    Returns:
        The part of each node, ``[N]``; on tiny graphs a part may be empty.

    Raises:
        ConfigError: kaminpar is not installed.
    """
    check_available()
    import kaminpar

    # The instance first: it limits TBB to one thread, which reading a graph would exceed.
    partitioner = kaminpar.KaMinPar(1, kaminpar.default_context())
    kaminpar.reseed(seed % 2**31)
    descriptor = os.memfd_create("gtrain-graph")
    try:
        _write_parhip(descriptor, graph, weights)
        copy = kaminpar.load_graph(f"/proc/self/fd/{descriptor}", kaminpar.GraphFileFormat.PARHIP, compress=False)
    finally:
        os.close(descriptor)
    parts = np.array(partitioner.compute_partition(copy, num_parts, IMBALANCE), dtype=np.int64)
    del copy
    return _refined(graph, parts, num_parts, weights)


def _refined(graph: Adjacency, parts: Ints, num_parts: int, weights: NDArray[np.int32]) -> Ints:
    """Return parts with fewer cut edges: KaMinPar's settings end with label propagation, whose optima are local."""
    if not 1 < num_parts <= REFINED_PARTS:
        return parts
    from gtrain.graph.partition import kernels

    load = np.bincount(parts, weights=weights, minlength=num_parts).astype(np.int64)
    limit = max(REFINED_IMBALANCE * float(load.mean()), float(load.max()))
    kernels.refine(graph.starts, graph.adjacent, weights, parts, load, limit, LOSS, PATIENCE)
    return parts


def _write_parhip(descriptor: int, graph: Adjacency, weights: NDArray[np.int32]) -> None:
    """Write a graph in the binary format of ParHIP: header, position of each node's first id in bytes, ids, weights."""
    header = np.array([_VERSION, graph.num_nodes, graph.adjacent.size], dtype=np.uint64)
    first = header.nbytes + graph.starts.nbytes
    for array in (header, first + graph.starts * graph.adjacent.itemsize, graph.adjacent, weights):
        _write(descriptor, array)


def _write(descriptor: int, array: NDArray[Any]) -> None:
    data = array.view(np.uint8).data
    while data.nbytes:
        data = data[os.write(descriptor, data) :]
