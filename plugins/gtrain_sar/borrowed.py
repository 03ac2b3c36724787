"""Tensors that a backward pass lets go of before it ends."""

from __future__ import annotations

from torch import Tensor


class Borrowed:
    """A tensor that the backward pass reads and lets go of before it ends, which saved tensors outlive.

    Args:
        tensor: not to be written into meanwhile.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version

    def give_back(self) -> Tensor:
        """The tensor, once.

        Raises:
            RuntimeError: it was written into, or given back already.
        """
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            raise RuntimeError("strategy=sar frees a layer's result in the backward pass, which cannot run twice.")
        if self._version is not None and tensor._version != self._version:
            raise RuntimeError("a layer's result, needed for its gradient, was modified by an inplace operation.")
        return tensor
