"""Cache of what is computed from inputs that never change during a run: their halo rows and aggregates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gtrain.engine.schedule import Schedule

_SMALL_ROW = 16  # bytes: halo rows of numbers such as ids are cached in every mode


class Constants:
    """The tensors of the batch, which are the same objects in every epoch, and the cache of their results.

    Args:
        schedule: its ``cache_inputs`` says what is cached.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._results: Any = WeakIdKeyDictionary()
        self._blocks: Any = WeakIdKeyDictionary()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Declare that these tensors do not change."""
        for tensor in tensors:
            self._results.setdefault(tensor, [])

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._results and not tensor.requires_grad

    def caches(self, *tensors: Tensor | None) -> bool:
        """Whether a result of these tensors alone is cached."""
        constant = all(tensor is None or tensor in self for tensor in tensors)
        return constant and self._schedule.cache_inputs != "false"

    def result(
        self, key: tuple[Tensor | None, ...], settings: tuple[Any, ...], compute: Callable[[], Tensor]
    ) -> Tensor:
        """Return what ``compute`` returns, from the cache if all tensors of the key are constant and caching is on.

        Args:
            key: the tensors that the result is a function of, the first not None.
            settings: compared by value.
            compute: computes the result.
        """
        tensors = [tensor for tensor in key if tensor is not None]
        if not self.caches(*tensors):
            return compute()
        versions = tuple(map(version_of, tensors))
        for others, cached_settings, result, version, of_key in self._results[tensors[0]]:
            unchanged = cached_settings == settings and version_of(result) == version and of_key == versions
            if unchanged and len(others) == len(key) - 1 and all(a is b for a, b in zip(others, key[1:], strict=True)):
                return result
        result = compute()
        if not result.is_inference():
            # Autograd cannot use inference tensors later.
            self._results[tensors[0]].append((key[1:], settings, result, version_of(result), versions))
        return result

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a constant tensor in another dtype, a copy that is cached and constant too; others as they are."""
        if tensor.dtype == dtype or not self.caches(tensor):
            return tensor
        copy = self.result((tensor,), ("cast", dtype), lambda: tensor.to(dtype))
        if not copy.is_inference():
            self.add([copy])
        return copy

    def blocks(self, tensor: Tensor) -> dict[int, Tensor] | None:
        """Return the cached halo rows of a constant tensor by round, to be filled and read; None: not cached."""
        setting = self._schedule.cache_inputs
        recomputes = setting == "auto" and self._schedule.mode == 1 and tensor[:1].nbytes > _SMALL_ROW
        if tensor not in self or setting == "false" or recomputes:
            return None
        cached: dict[int, Tensor] = self._blocks.setdefault(tensor, {})
        # Tensors of inference mode must not enter the cache: training could not use them.
        return cached if cached or not torch.is_inference_mode_enabled() else None


def version_of(tensor: Tensor) -> int | None:
    """Return the number of in-place changes of a tensor; None in inference mode, which does not count them."""
    return None if tensor.is_inference() else tensor._version
