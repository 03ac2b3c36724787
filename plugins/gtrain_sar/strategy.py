"""Full-batch training over a sharded graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing

from gtrain.data.loader import SeedLoader, full_batch
from gtrain.errors import ConfigError
from gtrain.graph.shard import GraphShard, load_shard
from gtrain.graph.store import Store
from gtrain.strategy.base import GraphStrategy
from gtrain_sar import config, refusals
from gtrain_sar.halo import HaloExchange
from gtrain_sar.takeover import Takeover


class SarStrategy(GraphStrategy):
    """Every rank holds one part of the graph and trains on it in full batch, exactly as one process would on the whole.

    Args:
        mode: 1 sequential aggregation with recomputation, 2 sequential aggregation, 3 one exchange.
        prefetch: remote blocks in flight beside the one being computed (modes 1 and 2).
        kwargs: passed on to :class:`gtrain.strategy.base.GraphStrategy`.

    Raises:
        ConfigError: no such mode, or a negative prefetch.
    """

    strategy_name: ClassVar[str] = "sar"

    def __init__(self, mode: int = 1, prefetch: int = 1, **kwargs: Any) -> None:
        config.check(mode, prefetch)
        super().__init__(**kwargs)
        self.mode, self.prefetch = mode, prefetch
        self._takeover: Takeover | None = None
        self._module: nn.Module | None = None

    def open_shard(self, store: Store) -> GraphShard:
        if store.num_parts != self.world_size:
            raise ConfigError(
                f"the store has {store.num_parts} parts and the job {self.world_size} ranks; "
                "strategy=sar gives each rank one part.",
                hint="leave data.num_parts unset: it defaults to the number of ranks.",
            )
        shard = load_shard(store, self.global_rank)
        exchange = HaloExchange(self.group, shard)
        exchange.to(self.root_device)
        if self._takeover is not None:  # of another graph
            self._takeover.uninstall()
        self._takeover = Takeover(exchange, self.mode, self.prefetch)
        if self._module is not None:
            self._takeover.install(self._module)
        return shard

    def batches(self, shard: GraphShard, loader: SeedLoader) -> Iterable[Data]:
        if loader.batch_size is not None:
            raise ConfigError(
                f"data.batch_size={loader.batch_size} was set; strategy=sar trains on the whole graph at once.",
                hint="leave data.batch_size=null, or use strategy=single, which steps after each group of seeds.",
            )
        if loader.num_neighbors is not None:
            raise ConfigError(
                f"data.num_neighbors={list(loader.num_neighbors)} was set; strategy=sar uses every neighbour.",
                hint="leave data.num_neighbors=null.",
            )
        return [full_batch(shard, loader.split, self.dtype)]

    def check_module(self, module: nn.Module) -> None:
        if not any(isinstance(layer, MessagePassing) for layer in module.modules()):
            raise ConfigError(
                f"strategy=sar does not serve {type(module).__name__}: it has no message-passing layer, so there is "
                "nothing to aggregate.",
                hint="use strategy=single, or a model with PyG convolutions.",
            )
        for name, layer in module.named_modules():
            why = refusals.reason(layer)
            if why is not None:
                raise ConfigError(
                    f"strategy=sar does not serve {type(layer).__name__} ({name}): {why}.",
                    hint="use strategy=single, or another layer.",
                )

    def install(self, module: nn.Module) -> None:
        # the shard is opened with the first loader, which Lightning asks for after this
        self._module = module
        if self._takeover is not None:
            self._takeover.install(module)

    def uninstall(self, module: nn.Module) -> None:
        self._module = None
        if self._takeover is not None:
            self._takeover.uninstall()
