"""When blocks are fetched, and what is kept of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """When blocks are fetched, and what is kept of them.

    Attributes:
        mode: 1: blocks one after the other, fetched and computed again by the backward pass; 2: one after the other,
            kept for the backward pass; 3: the whole halo by one exchange.
        prefetch: remote blocks in flight beside the one being computed, in mode 1.
        cache_inputs: which results of inputs that never change are cached: ``auto`` (aggregates), ``true`` (their halo
            rows as well) or ``false``.
        compiled: whether known convolutions run by kernels; otherwise all run by PyG's methods.
    """

    mode: int = 1
    prefetch: int = 1
    cache_inputs: str = "auto"
    compiled: bool = True

    @property
    def window(self) -> int | None:
        """Remote blocks in flight beside the current one; None: all of them."""
        return self.prefetch if self.mode == 1 else None
