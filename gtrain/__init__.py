"""Lightning strategies for training on graphs and sparse data too large for one machine.

The command line composes what this package offers to Python as well::

    import lightning.pytorch as pl
    from gtrain import PlantedData, SarStrategy, run_local

    def main():
        trainer = pl.Trainer(strategy=SarStrategy(mode=1), num_nodes=2, devices=1, accelerator="cpu", max_epochs=5)
        trainer.fit(MyModule(), datamodule=PlantedData())

    run_local(main, num_nodes=2)

The strategy class of every installed backend can be imported from this package by its name. Once a data module is
imported, Lightning knows the backends by name too, with their default settings: ``pl.Trainer(strategy="sar")``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from gtrain.moved import MovedModules

__version__ = "0.1.0"

_HOMES = {
    "run_local": "gtrain.launch.launchers.local",
    "shard": "gtrain.plain_loop",
    "ShardedGraph": "gtrain.plain_loop",
    "GraphStrategy": "gtrain.strategy.base",
    "GraphShard": "gtrain.graph.shard",
    "Store": "gtrain.graph.store",
    "SeedLoader": "gtrain.data.batches.loader",
    "NodeClassifier": "gtrain.model.classification",
    "NodeRegressor": "gtrain.model.regression",
    "GraphDataModule": "gtrain.data.module",
    "PlantedData": "gtrain.data.planted",
    "EdgesData": "gtrain.data.sources.edges",
    "PyGData": "gtrain.data.sources.pyg",
    "PlanetoidData": "gtrain.data.sources.pyg",
    "AmazonData": "gtrain.data.sources.pyg",
    "CoauthorData": "gtrain.data.sources.pyg",
    "HeterophilousData": "gtrain.data.sources.pyg",
    "GtrainError": "gtrain.errors",
}

__all__ = ["__version__", *_HOMES]

sys.meta_path.append(MovedModules())


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because the command line must start without torch."""
    if name in _HOMES:
        if name != "GtrainError":
            _prepare()
        value = getattr(importlib.import_module(_HOMES[name]), name)
        if "lightning.pytorch" in sys.modules:
            importlib.import_module("gtrain.strategy.names").register()
        return value
    if name.endswith("Strategy"):
        from gtrain import backends

        for backend in backends.usable().values():
            if backend.strategy.endswith(f":{name}"):
                _prepare()
                return backend.load_strategy()
    raise AttributeError(f"module 'gtrain' has no attribute '{name}'")


def _prepare() -> None:
    """Prepare this process for the import of a heavy module.

    Numba fixes the cache folder of a kernel when the module of the kernel is imported; ranks set the folder after that,
    and each would compile every kernel itself. torch_geometric must not initialise CUDA here: ranks are forked.
    """
    importlib.import_module("gtrain.kernel_cache").find_cache()
    importlib.import_module("gtrain.launch.cuda").import_torch_geometric()


def __dir__() -> list[str]:
    return sorted(__all__)
