"""The kernels in Triton, for tensors on a GPU; each has the name and the arguments of its plain form.

A program computes a row, or a head of a row, and reads the row's edges in groups. Rows are added in float32, or in
float64 if they are of that type. The interpreter of Triton runs the same kernels on the CPU, which the tests do.
"""

from __future__ import annotations

from gtrain.engine.kernels.device.attention import (
    attention_backward,
    attention_forward,
    pair_backward,
    pair_forward,
)
from gtrain.engine.kernels.device.sums import extreme_backward, extreme_forward, sddmm, spmm

__all__ = [
    "attention_backward",
    "attention_forward",
    "extreme_backward",
    "extreme_forward",
    "pair_backward",
    "pair_forward",
    "sddmm",
    "spmm",
]
