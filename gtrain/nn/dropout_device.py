"""The masks of :mod:`gtrain.nn.dropout` in Triton, for tensors on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gtrain.kernels.device import on_device, random_bits, sum_type

_BLOCK = 1024


def drop(x: Tensor, out: Tensor, ids: Tensor, stream: int, threshold: int, scale: float) -> None:
    """Set ``out`` to ``x`` times its mask over ``1 - p``.

    Args:
        x, out: contiguous, [n, C]; they may be one tensor.
        ids: int64 [n], the id of each row.
        stream, threshold, scale: of the :class:`~gtrain.nn.dropout.Mask`.
    """
    count, columns = x.numel(), x.size(1)
    with on_device(x):
        _drop[(triton.cdiv(count, _BLOCK),)](
            x,
            out,
            ids,
            stream,
            threshold,
            count,
            columns,
            (columns + 1) // 2,
            scale,
            sum_type(x),
            _BLOCK,
        )


@triton.jit(do_not_specialize=["stream", "threshold"])
def _drop(
    x, out, ids, stream, threshold, count, columns, words, SCALE: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row, column = at // columns, at % columns
    bits = random_bits(stream, tl.load(ids + row, mask=inside, other=0), column, words)
    value = tl.load(x + at, mask=inside, other=0).to(SUM)
    dropped = tl.where(bits >= threshold, value * SCALE, 0.0)
    tl.store(out + at, dropped.to(out.dtype.element_ty), mask=inside)
