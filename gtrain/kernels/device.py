"""What kernels for GPUs share: random numbers in Triton, types, and the device that they start on.

Importing this module imports Triton.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gtrain.kernels import splitmix

_GOLDEN = tl.constexpr(int(splitmix.GOLDEN))
_MIX_1 = tl.constexpr(int(splitmix.MIX_1))
_MIX_2 = tl.constexpr(int(splitmix.MIX_2))
_TYPES: dict[torch.dtype, Any] = {torch.float64: tl.float64}


@triton.jit
def random_bits(stream, ids, columns, words):
    """Return the 32 bits, int64, that decide on the columns of rows; see :mod:`gtrain.nn.dropout`.

    ``ids`` int64 and ``columns`` broadcast against each other; a row has ``words`` numbers of 64 bits.
    """
    count = (ids * words + columns // 2).to(tl.uint64)
    x = count * _GOLDEN + stream.to(tl.uint64)
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    return tl.where(columns % 2 == 0, x & 0xFFFFFFFF, x >> 32).to(tl.int64)


def sum_type(*tensors: Tensor) -> Any:
    """Return Triton's type of sums over numbers of these tensors: at least float32."""
    return next((tl.float64 for tensor in tensors if tensor.dtype in _TYPES), tl.float32)


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels start on the device of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
