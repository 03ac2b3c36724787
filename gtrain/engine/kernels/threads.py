"""Which tensors the compiled loops take and which kernels the others, and how rows are divided among threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.engine.edges import CompressedEdges
from gtrain.engine.kernels import plain
from gtrain.kernels.available import has_triton
from gtrain.kernels.threads import num_threads, run_in_threads

_RANGE_EDGES = 1 << 13  # fewer edges are not worth another thread
_RANGES_PER_THREAD = 4  # a thread that finishes early takes over some of the others' rows


_NUMBERS = ({torch.float32}, {torch.float64}, {torch.bfloat16}, {torch.float32, torch.bfloat16})


def runs_compiled(
    inputs: Sequence[Tensor | None], outputs: Sequence[Tensor], rows: Sequence[Tensor] = (), *, rounds: bool = False
) -> bool:
    """Whether compiled loops take these tensors: on the CPU, all float32 or all float64, outputs contiguous.

    Args:
        inputs, outputs: tensors of the loop.
        rows: inputs that may be bfloat16 beside float32.
        rounds: whether the outputs may be bfloat16 too; the loop sums in float32, and rounds.
    """
    exact = [t for t in ([*inputs] if rounds else [*outputs, *inputs]) if t is not None]
    tensors = [*exact, *outputs, *rows]
    if any(t.dtype == torch.bfloat16 for t in exact) or any(t.device.type != "cpu" for t in tensors):
        return False
    return {t.dtype for t in tensors} in _NUMBERS and all(t.is_contiguous() for t in outputs)


def form_for(x: Tensor) -> Any:
    """Return the kernels that run on the device of ``x``, where compiled loops do not: in Triton, or in plain torch."""
    return device_kernels() if x.is_cuda and x.is_floating_point() and has_triton() else plain


def device_kernels() -> ModuleType:
    """Return the kernels in Triton, which this imports."""
    from gtrain.engine.kernels import device

    return device


def as_numpy(value: Any) -> Any:
    """Convert a tensor, or each tensor of a NamedTuple, to numpy; only a tensor that is not contiguous is copied.

    bfloat16 becomes uint16, the same bits.
    """
    if isinstance(value, tuple):
        return type(value)(*map(as_numpy, value))
    if not isinstance(value, Tensor):
        return value
    # An operation of torch takes a microsecond or two, as long as a small block.
    dense = (value.detach() if value.requires_grad else value).contiguous()
    return (dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense).numpy()


def row_ranges(block: CompressedEdges, per_thread: int = _RANGES_PER_THREAD) -> list[tuple[int, int]]:
    """Divide the rows of a block into ranges with about equally many edges, none of them empty.

    Args:
        block: the edges.
        per_thread: the most ranges for each thread; a single thread gets one range.
    """
    ptr, threads = as_numpy(block.ptr), num_threads()
    # A single thread takes all rows in one range: more would only add calls.
    count = min(threads * per_thread if threads > 1 else 1, int(ptr[-1]) // _RANGE_EDGES)
    if count < 2:
        return [(0, len(ptr) - 1)] if len(ptr) > 1 else []
    cuts = np.searchsorted(ptr, np.linspace(0, ptr[-1], count + 1)[1:-1])
    bounds = [0, *np.unique(cuts).tolist(), len(ptr) - 1]
    return [(low, high) for low, high in zip(bounds[:-1], bounds[1:], strict=True) if low < high]


def run_over_rows(block: CompressedEdges, loop: Callable[..., None], *arguments: Any) -> None:
    """Call ``loop(block, *arguments, first, last)`` for ranges that cover the rows of a block, in all threads.

    Args:
        block: the edges.
        loop: a compiled loop over the rows ``first .. last-1``, whose results do not depend on other rows'.
        arguments: tensors and NamedTuples of tensors, which the loop receives as numpy arrays, or numbers.
    """
    values = [as_numpy(value) for value in (block, *arguments)]
    run_in_threads([partial(loop, *values, first, last) for first, last in row_ranges(block)])
