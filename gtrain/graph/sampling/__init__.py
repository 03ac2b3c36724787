"""Neighbour sampling within one process: compiled kernels, and the samplers that drive them.

Importing this package imports numba; the command and the agent do not. ``spans``, ``pick``, ``reservoir``, ``number``
and ``random`` hold the kernels, ``columns`` a graph's arrays and their checks, ``rules`` what can be asked for,
``scratch`` reused memory, ``hop`` one hop, ``sampler`` and ``hetero`` whole subgraphs, ``output`` what they return.
"""

from gtrain.graph.sampling.columns import Columns
from gtrain.graph.sampling.hetero import HeteroNeighborSampler
from gtrain.graph.sampling.hop import HopSample, sample_hop
from gtrain.graph.sampling.output import HeteroSample, Sample
from gtrain.graph.sampling.rules import Rule, batch_key
from gtrain.graph.sampling.sampler import NeighborSampler

__all__ = [
    "Columns",
    "HeteroNeighborSampler",
    "HeteroSample",
    "HopSample",
    "NeighborSampler",
    "Rule",
    "Sample",
    "batch_key",
    "sample_hop",
]
