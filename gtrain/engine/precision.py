"""Precision of the engine: products of bfloat16 where autocast or the parameters say so, sums over edges in float32."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from llvmlite import binding
from torch import Tensor

from gtrain.memory.reuse import empty

_ROWS, _DEVICE_ROWS = 1 << 9, 1 << 15
LOW = (torch.bfloat16, torch.float16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of ``dtype`` are summed: at least float32."""
    return torch.float32 if dtype in LOW else dtype


def rows_at_once(x: Tensor) -> int:
    """Return how many rows of ``x`` a computation takes at a time: as many as the cache holds, or on a GPU many."""
    return _ROWS if x.device.type == "cpu" else _DEVICE_ROWS


def in_autocast(device: str) -> bool:
    """Whether autocast is on for a type of device; there are devices that it does not know."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with ``x``: autocast's inside of autocast, else that of ``x``."""
    device = x.device.type
    if not in_autocast(device) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which operations on the device of ``x`` run in the dtypes of their arguments."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if in_autocast(device) else nullcontext()


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16. Without them torch takes longer than in float32."""
    features = binding.get_host_cpu_features()
    return any(features.get(name) for name in ("avx512bf16", "amx-bf16", "bf16"))


def without_slow_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that leaves autocast if the device of ``x`` has no instructions for products in its dtype."""
    return nullcontext() if x.device.type != "cpu" or cpu_multiplies_bfloat16() else without_autocast(x)


class AutocastState:
    """The state of autocast on one device, for code that a backward pass runs again.

    Args:
        device: the device's type.
    """

    def __init__(self, device: str) -> None:
        self._device, self._enabled = device, in_autocast(device)
        self._dtype = torch.get_autocast_dtype(device) if self._enabled else None

    def restored(self) -> AbstractContextManager[object]:
        """Return a context with this state."""
        if self._enabled == in_autocast(self._device):
            return nullcontext()
        return torch.autocast(self._device, self._dtype, enabled=self._enabled)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of two matrices, without a gradient, in memory that was freed before if it is large."""
    return torch.mm(a, b, out=empty((len(a), b.size(1)), a.dtype, a.device))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add ``a @ b`` to ``total`` in place, which may be of a wider dtype than ``a`` and ``b``."""
    return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(torch.mm(a, b))


def column_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums of columns ``[n, C] -> [C]`` in ``dtype``; narrower rows are converted while in the cache."""
    if rows.dtype == sum_dtype(rows.dtype):
        return rows.sum(0, dtype=dtype)
    total = rows.new_zeros(rows.size(1), dtype=sum_dtype(rows.dtype))
    for part in rows.split(rows_at_once(rows)):
        total += part.sum(0, dtype=total.dtype)
    return total.to(dtype)
