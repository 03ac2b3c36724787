"""Neighbour sampling within one process: compiled kernels, and the samplers that drive them.

Names are imported on first use: all but ``options`` import numba, which the command and the agent do not. ``spans``,
``pick``, ``reservoir``, ``number`` and ``random`` hold the kernels, ``columns`` a graph's arrays and their checks,
``options`` and ``rules`` what can be asked for, ``scratch`` reused memory, ``hop`` one hop, ``sampler`` and ``hetero``
whole subgraphs, ``output`` what they return.
"""

from __future__ import annotations

from gtrain.lazy import lazy_names

_HOME = {
    "Columns": "columns",
    "HeteroNeighborSampler": "hetero",
    "HeteroSample": "output",
    "HopSample": "hop",
    "NeighborSampler": "sampler",
    "Rule": "rules",
    "Sample": "output",
    "SamplingOptions": "options",
    "batch_key": "rules",
    "sample_hop": "hop",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
