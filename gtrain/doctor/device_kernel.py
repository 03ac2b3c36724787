"""A small kernel in Triton, by which ``gtrain doctor`` sees whether Triton compiles here. Imports Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gtrain.kernels.device import on_device

_COUNT = 1000
_BLOCK = 256


@triton.jit
def _add_one(source, target, count, block: tl.constexpr) -> None:
    """target[i] = source[i] + 1."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    inside = index < count
    tl.store(target + index, tl.load(source + index, mask=inside) + 1, mask=inside)


def check(number: int, device: str = "cuda") -> None:
    """Compile the kernel and run it on a device.

    Raises:
        RuntimeError: the result is wrong.
    """
    there = torch.device(device, number)
    source = torch.arange(_COUNT, dtype=torch.float32, device=there)
    target = torch.zeros_like(source)
    with on_device(source):
        _add_one[(triton.cdiv(_COUNT, _BLOCK),)](source, target, _COUNT, _BLOCK)
    if not torch.equal(target, source + 1):
        raise RuntimeError(f"a compiled kernel returned a wrong result on {there}")
