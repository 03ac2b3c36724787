"""Training on graphs and sparse data too large for one machine, as Lightning strategies.

The command line composes what this package offers to Python as well::

    import lightning.pytorch as pl
    from gtrain import PlantedData, SarStrategy, run_local

    def main():
        trainer = pl.Trainer(strategy=SarStrategy(mode=1), num_nodes=2, devices=1, accelerator="cpu", max_epochs=5)
        trainer.fit(MyModule(), datamodule=PlantedData())

    run_local(main, num_nodes=2)

The strategy class of every installed backend can be imported from here by its name.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from gtrain.moved import MovedModules

__version__ = "0.1.0"

_HOMES = {
    "run_local": "gtrain.launch.launchers.local",
    "GraphStrategy": "gtrain.strategy.base",
    "GraphShard": "gtrain.graph.shard",
    "Store": "gtrain.graph.store",
    "SeedLoader": "gtrain.data.batches.loader",
    "NodeClassifier": "gtrain.model.node_classifier",
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
    """Import what is asked for, and only that: the command line must start without torch."""
    if name in _HOMES:
        if name != "GtrainError":
            _prepare()
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name.endswith("Strategy"):
        from gtrain import backends

        for backend in backends.usable().values():
            if backend.strategy.endswith(f":{name}"):
                _prepare()
                return backend.load_strategy()
    raise AttributeError(f"module 'gtrain' has no attribute '{name}'")


def _prepare() -> None:
    """Do what must come before what is asked for is imported.

    Numba asks once, when it meets a kernel, where kernels are kept: a program's ranks would each compile for themselves
    otherwise, for they say it when all is imported. And torch_geometric must not begin to use CUDA, or ranks could not.
    """
    importlib.import_module("gtrain.kernel_cache").find_cache()
    importlib.import_module("gtrain.launch.cuda").import_torch_geometric()


def __dir__() -> list[str]:
    return sorted(__all__)
