"""Neighbour sampling within one process: compiled kernels, and the samplers that call them.

``spans``, ``pick``, ``reservoir`` and ``number`` have the kernels, ``columns`` the checked CSC arrays of a graph,
``options`` the settings, ``scratch`` the buffers that batches reuse, ``hop`` one hop, ``sampler`` the samplers of whole
subgraphs, ``output`` their results. Names are imported on first use: all modules except ``options`` import numba, which
the command and the agent must not.
"""

from __future__ import annotations

from gtrain.lazy import lazy_names

_HOME = {
    "Columns": "columns",
    "HeteroNeighborSampler": "sampler",
    "HeteroSample": "output",
    "HopSample": "hop",
    "NeighborSampler": "sampler",
    "Rule": "hop",
    "Sample": "output",
    "SamplingOptions": "options",
    "batch_key": "hop",
    "sample_hop": "hop",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
