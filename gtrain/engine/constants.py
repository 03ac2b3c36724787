"""Cache of what is computed from inputs that never change during a run: their halo rows and aggregates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from gtrain.engine.schedule import Schedule

_SMALL_ROW = 16  # bytes: halo rows of numbers such as ids are cached in every mode


class _Result:
    """A result of constant tensors.

    Args:
        first: of these tensors.
        others: of them.
        settings: compared by value.
        result: is kept; the tensors are not.
    """

    def __init__(self, first: Tensor, others: tuple[Tensor | None, ...], settings: Any, result: Tensor) -> None:
        self._others = [None if tensor is None else TensorWeakRef(tensor) for tensor in others]
        self.settings, self.result = settings, result
        self._versions = self._versions_of(first, others)

    def is_valid(self, first: Tensor) -> bool:
        """Whether all tensors exist and none of them, nor the result, was changed in place since."""
        gone = any(ref is not None and ref() is None for ref in self._others)
        return not gone and self._versions_of(first, self._tensors()) == self._versions

    def is_of(self, others: tuple[Tensor | None, ...]) -> bool:
        """Whether the tensors beside the first are these very ones."""
        mine = self._tensors()
        return len(mine) == len(others) and all(a is b for a, b in zip(mine, others, strict=True))

    def _tensors(self) -> list[Tensor | None]:
        return [None if ref is None else ref() for ref in self._others]

    def _versions_of(self, first: Tensor, others: Iterable[Tensor | None]) -> list[int | None]:
        tensors = (first, self.result, *others)
        return [version_of(tensor) for tensor in tensors if tensor is not None]


class Constants:
    """The tensors of the batch, which are the same objects in every epoch, and the cache of their results.

    Args:
        schedule: its ``cache_inputs`` says what is cached.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._results: Any = WeakIdKeyDictionary()
        self._blocks: Any = WeakIdKeyDictionary()  # tensor -> (its version, its halo rows)

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
        # Nobody asks again for results of values that changed in place, or of tensors that are gone.
        kept = self._results[tensors[0]]
        kept[:] = [known for known in kept if known.is_valid(tensors[0])]
        for known in kept:
            if known.settings == settings and known.is_of(key[1:]):
                return known.result
        result = compute()
        if not result.is_inference():
            # Autograd cannot use inference tensors later.
            kept.append(_Result(tensors[0], key[1:], settings, result))
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
        version = version_of(tensor)
        if tensor not in self._blocks or self._blocks[tensor][0] != version:
            self._blocks[tensor] = version, {}
        cached: dict[int, Tensor] = self._blocks[tensor][1]
        # Tensors of inference mode must not enter the cache: training could not use them.
        return cached if cached or not torch.is_inference_mode_enabled() else None


def version_of(tensor: Tensor) -> int | None:
    """Return the number of in-place changes of a tensor; None in inference mode, which does not count them."""
    return None if tensor.is_inference() else tensor._version
