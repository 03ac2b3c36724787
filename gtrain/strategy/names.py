"""The names of backends in Lightning's registry: ``Trainer(strategy="sar")``."""

from __future__ import annotations

from functools import cache

from lightning.pytorch.strategies import StrategyRegistry

from gtrain import backends
from gtrain.strategy.base import GraphStrategy


@cache
def register() -> None:
    """Add every backend that is installed to Lightning's registry; its strategy is imported when a Trainer names it."""
    for name, backend in backends.usable().items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, _Factory(backend), description=backend.description)


class _Factory:
    """Makes the strategy of a backend, with its settings as keywords."""

    def __init__(self, backend: backends.Backend) -> None:
        self._backend = backend

    def __call__(self, **settings: object) -> GraphStrategy:
        return self._backend.load_strategy()(**settings)
