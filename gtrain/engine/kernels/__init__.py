"""Sums, attention and extremes over one block of edges, accumulated in place; none of them holds a message per edge.

CPU tensors of float32 or float64 take compiled loops in ``torch.get_num_threads()`` threads, all others plain torch
code in chunks of edges. Both give the same result to rounding, and the same dropout mask.
"""

from __future__ import annotations

from gtrain.engine.kernels.attention import (
    attention_backward,
    attention_finish,
    attention_forward,
    attention_state,
    load_attention,
)
from gtrain.engine.kernels.pairs import load_pairs, pair_backward, pair_forward
from gtrain.engine.kernels.plain import (
    AttentionGradients,
    AttentionInputs,
    AttentionState,
    ExtremeState,
    PairGradients,
    PairInputs,
    TargetGradients,
)
from gtrain.engine.kernels.sums import (
    extreme_backward,
    extreme_forward,
    extreme_state,
    load_sums,
    row_dots,
    sddmm,
    spmm,
)

__all__ = [
    "AttentionGradients",
    "AttentionInputs",
    "AttentionState",
    "ExtremeState",
    "PairGradients",
    "PairInputs",
    "TargetGradients",
    "attention_backward",
    "attention_finish",
    "attention_forward",
    "attention_state",
    "extreme_backward",
    "extreme_forward",
    "extreme_state",
    "load_attention",
    "load_pairs",
    "load_sums",
    "pair_backward",
    "pair_forward",
    "row_dots",
    "sddmm",
    "spmm",
]
