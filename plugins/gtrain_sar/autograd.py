"""Helpers of custom autograd functions: saved generator states, and saved tensors that backward passes free early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SavedOnce:
    """A saved tensor that the backward pass frees before it ends; ``save_for_backward`` would keep it to the end.

    Args:
        tensor: must not be changed in place before the backward pass.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version

    def take(self) -> Tensor:
        """Return the tensor and drop the reference to it.

        Raises:
            RuntimeError: it was changed in place, or taken before.
        """
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            raise RuntimeError("strategy=sar frees a layer's result in the backward pass, which cannot run twice.")
        if self._version is not None and tensor._version != self._version:
            raise RuntimeError("a layer's result, needed for its gradient, was modified by an inplace operation.")
        return tensor


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of the generators that a computation on ``device`` may draw from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def replayed_random(state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Replay the random numbers drawn since :func:`random_state`; afterwards the generators continue as before."""
    devices = [] if state[1] is None else [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1])
        yield
