"""Full-graph training in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import lightning.pytorch as pl
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data, HeteroData

from gtrain.backends import Serves
from gtrain.data.batches.edge_seeds import EdgeSeeds
from gtrain.data.batches.loader import SeedLoader, graph_batch, hetero_batch
from gtrain.engine.local import LocalEngine
from gtrain.errors import ConfigError
from gtrain.graph.shard import GraphShard, load_whole
from gtrain.graph.shard.whole import load_whole_hetero
from gtrain.graph.store import Store
from gtrain.memory.heap import give_back_freed, keep_freed
from gtrain.memory.reuse import free_large, keep_large
from gtrain.protocols import OrdersByQuery
from gtrain.strategy.base import GraphStrategy
from gtrain_single import SERVES
from gtrain_single.config import SingleConfig

_STEP_MEBIBYTES = 512
"""Training by query takes many steps in an epoch, each with arrays of the table's size: those below this size are
kept for the next step."""


class SingleStrategy(GraphStrategy):
    """Trains the unchanged module on the whole graph in one process. The store may have any number of parts."""

    strategy_name: ClassVar[str] = "single"
    serves: ClassVar[Serves] = SERVES
    settings_type = SingleConfig
    settings: SingleConfig

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self._engine = LocalEngine(constant=True)

    @property
    def full_batch(self) -> bool:  # type: ignore[override]
        return self.data is None or self.data.batch_size is None

    def setup_environment(self) -> None:
        ranks = self.num_nodes * self.num_processes
        if ranks != 1:
            raise ConfigError(
                f"trainer.num_nodes {self.num_nodes} * trainer.devices {self.num_processes} = {ranks} ranks were set; "
                "strategy=single is one process.",
                hint="set both to 1, or choose another strategy.",
            )
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        if isinstance(module, OrdersByQuery) and module.by_query:
            keep_freed(_STEP_MEBIBYTES)
        else:
            give_back_freed()
        super().setup(trainer)

    def open_shard(self, store: Store) -> GraphShard | HeteroData:
        return load_whole_hetero(store) if store.is_hetero else load_whole(store)

    def batches(self, shard: GraphShard | HeteroData, loader: SeedLoader) -> Iterable[Data | HeteroData]:
        batch: Data | HeteroData
        if isinstance(shard, HeteroData):
            batch = hetero_batch(shard, loader.store, self.dtype)
        else:
            batch = graph_batch(shard, self.dtype)
        # Moved once, so that all steps share the tensors of the device; Lightning moves only the seeds of a step.
        whole = copy.copy(batch).to(self.root_device)
        self._engine.add_constants(value for stored in whole.stores for value in stored.values())
        return _Steps(loader, whole, batch)

    def install(self, module: Module) -> None:
        keep_large()
        if self.settings.layers == "auto":
            self._engine.install(module)

    def uninstall(self, module: Module) -> None:
        self._engine.uninstall()
        free_large()

    def follows_messages(self, conv: Module) -> bool:
        return not self._engine.runs(conv)


class _Steps:
    """Batches of the whole graph, one for each group of seeds in the loader's order.

    Args:
        loader: says which seeds.
        whole: the graph on the device of the run.
        host: the graph on the CPU, from which seeds are chosen.
    """

    def __init__(self, loader: SeedLoader, whole: Data | HeteroData, host: Data | HeteroData) -> None:
        self._loader, self._whole, self._host = loader, whole, host
        self._seeds: Tensor | EdgeSeeds | None = None
        self._first = self._done = 0  # step of the next iteration's start; steps of the epoch that were yielded

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Data | HeteroData]:
        if self._seeds is None:
            self._seeds = self._loader.seeds(self._host)
        self._done, self._first = self._first, 0
        for batch in self._loader.steps(self._whole, self._seeds, self._done):
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the number of the epoch's steps that were taken."""
        return {"done": self._done % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume an epoch: the next iteration starts behind the steps that were taken."""
        self._first = state["done"]
