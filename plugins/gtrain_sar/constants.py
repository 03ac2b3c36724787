"""What never changes during a run, and what is kept of it: halo rows and aggregates of constant inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gtrain_sar.config import Schedule

_SMALL_ROW = 16  # bytes: numbers such as ids, kept in any mode


class Constants:
    """Tensors of the batch, which are the same objects in every epoch.

    Args:
        schedule: says what may be kept.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._results: Any = WeakIdKeyDictionary()
        self._blocks: Any = WeakIdKeyDictionary()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Say that these tensors do not change."""
        for tensor in tensors:
            self._results.setdefault(tensor, [])

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._results and not tensor.requires_grad

    def keeps(self, *tensors: Tensor | None) -> bool:
        """Whether what is made of these tensors alone may be kept."""
        constant = all(tensor is None or tensor in self for tensor in tensors)
        return constant and self._schedule.cache_inputs != "false"

    def result(
        self, key: tuple[Tensor | None, ...], settings: tuple[Any, ...], compute: Callable[[], Tensor]
    ) -> Tensor:
        """What ``compute`` returns; kept where all tensors of the key are constant and keeping is allowed.

        Args:
            key: what the result is a function of, the first not None.
            settings: compared by value.
            compute: makes the result.
        """
        tensors = [tensor for tensor in key if tensor is not None]
        if not self.keeps(*tensors):
            return compute()
        for known, same, result, version in self._results[tensors[0]]:
            unchanged = same == settings and _version(result) == version  # nobody wrote into it
            if unchanged and len(known) == len(key) - 1 and all(a is b for a, b in zip(known, key[1:], strict=True)):
                return result  # type: ignore[no-any-return]
        result = compute()
        if not result.is_inference():  # autograd could not use it later
            self._results[tensors[0]].append((key[1:], settings, result, _version(result)))
        return result

    def blocks(self, tensor: Tensor) -> dict[int, Tensor] | None:
        """Halo rows of a constant tensor by round, to be filled and read; None: they are not kept."""
        keep = self._schedule.cache_inputs
        row_bytes = tensor[:1].nbytes
        if tensor not in self or keep == "false":
            return None
        if keep == "auto" and self._schedule.mode == 1 and row_bytes > _SMALL_ROW:
            return None
        found: dict[int, Tensor] = self._blocks.setdefault(tensor, {})
        return found if found or not torch.is_inference_mode_enabled() else None  # autograd could not use them later


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written into; None: not counted, in inference mode."""
    return None if tensor.is_inference() else tensor._version
