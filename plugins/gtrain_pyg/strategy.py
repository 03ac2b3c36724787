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
from gtrain_pyg.features.tables import ExtraTensors
from gtrain_pyg.links import LinkEvaluation, link_seeds, local_nodes
from gtrain_pyg.loader import PrefetchPlan, SampledBatches
from gtrain_pyg.norm import SampledGcnNorm, check_uncached
from gtrain_pyg.ranks.hosting import detect_hosting
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.sampling.sampler import DistributedSampler
from gtrain_pyg.seeds import SeedSource, node_seeds
from gtrain_pyg.shard import Shard, open_shard


class PygStrategy(GraphStrategy):
    """Each rank owns a part of the graph and trains on sampled neighbourhoods of its seeds; gradients are summed.

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
        self._norm, self._sampling = SampledGcnNorm(), Sampling()
        self._unchecked_hops: SamplingOptions | None = None  # of training, until the first step has checked its hops

    def open_shard(self, store: Store) -> Shard:
        self._close()
        assert self.cluster_environment is not None
        peers = Peers(
            self.group,
            detect_hosting(self.group, self.settings.transport),
            counters=self.counters,
            timeout=self.settings.request_seconds,
            security=self.servers.security,
            main_address=self.cluster_environment.main_address,
        )
        self._opened = open_shard(store, self.group, peers, self.settings, self.pool, self.dtype, self._degrees)
        return self._opened

    def batches(self, shard: Shard, loader: SeedLoader) -> Iterable[Data | HeteroData]:
        options = self._options(loader)
        sampler = DistributedSampler(shard.structure, shard.peers, self.pool, options, seed=loader.seed)
        ranks, plan = (self.global_rank, self.world_size), self._plan(shard, options)
        on_batch = partial(self._norm.register, options=options)

        def sampled(loader: SeedLoader, source: SeedSource) -> SampledBatches:
            return SampledBatches(loader, source, sampler, shard.features, plan, ranks, self.counters, on_batch)

        encodes = isinstance(self.lightning_module, EncodesNodes) and self.lightning_module.encodes_nodes
        if loader.seeds_are_edges and loader.split != "train" and encodes:
            nodes = replace(loader, split="predict", shuffle=False)
            seeds = local_nodes(loader, self.global_rank, timed=options.temporal is not None)
            node_batches = {node_type: sampled(nodes, source) for node_type, source in seeds.items()}
            return LinkEvaluation(self.group, loader, node_batches, self.batch_to_device)
        source = self._source(loader, options)
        if loader.split == "train":
            self._unchecked_hops = options
            if self.settings.cache_bytes and shard.has_remote_parts:
                shard.fill_cache(loader, options, self.settings.cache_bytes)
        return sampled(loader, source)

    def process_dataloader(self, dataloader: object) -> Iterable[Data | HeteroData]:
        if isinstance(dataloader, SeedLoader):
            self._sampling = dataloader.sampling  # the shard's degrees depend on it
        return super().process_dataloader(dataloader)

    # -------------------------------------------------------------------------------------------------- the module

    def check_module(self, module: Module) -> None:
        check_uncached(module)

    def install(self, module: Module) -> None:
        if SampledGcnNorm.applies_to(module):
            self._norm.install(module)

    def uninstall(self, module: Module) -> None:
        self._norm.uninstall()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self.root_device.type != "cpu":
            self._norm.register_moved(moved)
        return moved

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step; the first one also checks that batches have the hops that the model reads."""
        options, self._unchecked_hops = self._unchecked_hops, None
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

    # ------------------------------------------------------------------------------------------------- batches

    def _options(self, loader: SeedLoader) -> SamplingOptions:
        """Return the loader's sampling options; exact evaluation takes every neighbour."""
        assert self.lightning_module is not None
        least, most = hop_bounds(self.lightning_module)
        if self.settings.evaluation == "exact" and not loader.shuffle:
            loader = replace(loader, num_neighbors=None)
        return loader.sampling_options((most or None) if loader.num_neighbors is None else least)

    def _source(self, loader: SeedLoader, options: SamplingOptions) -> SeedSource:
        all_ranks, store = self.settings.seeds == "global", loader.store
        if loader.seeds_are_edges:
            timed = seed_time(store, options, target_edge_type(store)) is not None
            return link_seeds(loader, self.group, all_ranks=all_ranks, timed=timed, disjoint=options.disjoint)
        return node_seeds(loader, self.group, seed_time(store, options, target_type(store)), all_ranks=all_ranks)

    def _plan(self, shard: Shard, options: SamplingOptions) -> PrefetchPlan:
        settings, remote = self.settings, shard.has_remote_parts
        return PrefetchPlan(
            threads=settings.threads or max(torch.get_num_threads(), 2 if remote else 1),
            prefetch=settings.prefetch,
            lookahead=settings.lookahead if remote else 1,
            # on a CPU, assembly and step would compete for the cores: a second batch's memory gains nothing
            overlap=self.root_device.type != "cpu",
            trim=settings.trim and options.trimmable,
        )

    def _degrees(self, store: Store, parts: tuple[int, ...]) -> ExtraTensors:
        """Return the nodes' degrees in the whole graph, if a layer normalises by them and times do not change them."""
        assert self.lightning_module is not None
        if not SampledGcnNorm.applies_to(self.lightning_module) or self._sampling.temporal_strategy is not None:
            return {}
        return SampledGcnNorm.tensors(store, parts, self._sampling.weight_attr, self.dtype)

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
            self._shards = {}
