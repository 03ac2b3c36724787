"""Mini-batch training on sampled neighbourhoods of a partitioned graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn import Module
from torch_geometric.data import Data, HeteroData

from gtrain.backends import Serves
from gtrain.data.batches.loader import SeedLoader, target_edge_type, target_type
from gtrain.data.batches.sampling import Sampling, check_hops, seed_time
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.nn.depth import HopMeter, hop_bounds
from gtrain.protocols import EncodesNodes
from gtrain.strategy.base import GraphStrategy
from gtrain_pyg import SERVES
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.config import PygConfig
from gtrain_pyg.features.tables import Extra
from gtrain_pyg.links import LinkEvaluation, link_seeds, own_nodes
from gtrain_pyg.loader import Plan, SampledBatches
from gtrain_pyg.norm import SampledNorm, check_uncached
from gtrain_pyg.sampling.sampler import DistributedSampler
from gtrain_pyg.seeds import SeedSource, node_seeds
from gtrain_pyg.shard import Place, Shard, open_shard


class PygStrategy(GraphStrategy):
    """Every rank owns a part of the graph and trains on sampled neighbourhoods of its seeds; gradients are summed.

    Its settings are those of :class:`gtrain_pyg.config.PygConfig`.
    """

    strategy_name: ClassVar[str] = "pyg"
    serves: ClassVar[Serves] = SERVES
    full_batch = False
    settings_type = PygConfig
    settings: PygConfig

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.pool = BufferPool()
        self._opened: Shard | None = None
        self._norm, self._sampling = SampledNorm(), Sampling()
        self._trained: SamplingOptions | None = None  # until the first step has shown that the hops suffice

    def open_shard(self, store: Store) -> Shard:
        self._close()
        assert self.cluster_environment is not None
        place = Place(
            self.group,
            self.settings,
            self.counters,
            self.servers.security,
            self.cluster_environment.main_address,
        )
        self._opened = open_shard(store, place, self.pool, self.dtype, self._degrees)
        return self._opened

    def batches(self, shard: Shard, loader: SeedLoader) -> Iterable[Data | HeteroData]:
        options = self._options(loader)
        sampler = DistributedSampler(shard.structure, shard.peers, self.pool, options, seed=loader.seed)
        place, plan = (self.global_rank, self.world_size), self._plan(shard, options)
        show = partial(self._norm.see, options=options)
        encodes = isinstance(self.lightning_module, EncodesNodes) and self.lightning_module.encodes_nodes
        if loader.seeds_are_edges and loader.split != "train" and encodes:
            nodes = replace(loader, split="predict", shuffle=False)
            node_batches = {
                kind: SampledBatches(nodes, seeds, sampler, shard.features, plan, place, self.counters, show)
                for kind, seeds in own_nodes(loader, self.global_rank, timed=options.temporal is not None).items()
            }
            return LinkEvaluation(self.group, loader, node_batches, self.batch_to_device)
        source = self._source(loader, options)
        if self.settings.cache_bytes and loader.split == "train" and shard.asks:
            shard.fill_cache(loader, options, self.settings.cache_bytes)
        if loader.split == "train":
            self._trained = options
        return SampledBatches(loader, source, sampler, shard.features, plan, place, self.counters, show)

    def process_dataloader(self, dataloader: object) -> Iterable[Data | HeteroData]:
        if isinstance(dataloader, SeedLoader):
            self._sampling = dataloader.sampling  # which the shard's degrees depend on
        return super().process_dataloader(dataloader)

    # -------------------------------------------------------------------------------------------------- the module

    def check_module(self, module: Module) -> None:
        check_uncached(module)

    def install(self, module: Module) -> None:
        if SampledNorm.wanted(module):
            self._norm.install(module)

    def uninstall(self, module: Module) -> None:
        self._norm.uninstall()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self.root_device.type != "cpu":
            self._norm.moved(moved)
        return moved

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The first step also finds out how many hops the model looks."""
        options, self._trained = self._trained, None
        if options is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        with HopMeter(self.lightning_module) as meter:
            output = super().training_step(*args, **kwargs)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is not None:
            check_hops(options.num_neighbors, meter.hops(loss))
        return output

    def teardown(self) -> None:
        super().teardown()
        self._close()

    # ------------------------------------------------------------------------------------------------- of batches

    def _options(self, loader: SeedLoader) -> SamplingOptions:
        """What the loader asks for; every neighbour where evaluation is to be exact."""
        assert self.lightning_module is not None
        least, most = hop_bounds(self.lightning_module)
        if self.settings.evaluation == "exact" and not loader.shuffle:
            loader = replace(loader, num_neighbors=None)
        return loader.sampling_options((most or None) if loader.num_neighbors is None else least)

    def _source(self, loader: SeedLoader, options: SamplingOptions) -> SeedSource:
        everybody = self.settings.seeds == "global"
        if loader.seeds_are_edges:
            timed = seed_time(loader.store, options, target_edge_type(loader.store)) is not None
            return link_seeds(loader, self.group, everybody=everybody, timed=timed, disjoint=options.disjoint)
        time = seed_time(loader.store, options, target_type(loader.store))
        return node_seeds(loader, self.group, time, everybody=everybody)

    def _plan(self, shard: Shard, options: SamplingOptions) -> Plan:
        settings, asks = self.settings, shard.asks
        threads = settings.threads or max(torch.get_num_threads(), 2 if asks else 1)
        trim = settings.trim and options.trimmable
        # on a CPU both would share its cores: nothing is won by a second batch's memory
        beside = self.root_device.type != "cpu"
        return Plan(threads, settings.prefetch, settings.lookahead if asks else 1, beside, trim)

    def _degrees(self, store: Store, parts: tuple[int, ...]) -> Extra:
        """The nodes' degrees in the whole graph, where a layer normalises by them and they do not depend on times."""
        assert self.lightning_module is not None
        if not SampledNorm.wanted(self.lightning_module) or self._sampling.temporal_strategy is not None:
            return {}
        return SampledNorm.tensors(store, parts, self._sampling.weight_attr, self.dtype)

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
            self._shards = {}
