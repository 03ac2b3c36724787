"""Mini-batch training on sampled neighbourhoods of a partitioned graph."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import Data, HeteroData

from gtrain.backends import Serves
from gtrain.data.batches.loader import SeedLoader, target_edge_type
from gtrain.data.batches.sampling import Sampling, check_hops, seed_time
from gtrain.engine.local import LocalEngine
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.launch.environment import ranks_on_this_machine
from gtrain.memory.heap import keep_freed
from gtrain.nn.depth import HopMeter, hop_bounds
from gtrain.protocols import EncodesNodes, data_of
from gtrain.strategy.base import GraphStrategy
from gtrain_pyg import SERVES
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.config import PygConfig
from gtrain_pyg.device import BatchMover, DeviceCopies
from gtrain_pyg.features.cache import expected_visits, fill_cache
from gtrain_pyg.features.device_cache import DeviceCache
from gtrain_pyg.features.feature_store import FeatureStore
from gtrain_pyg.features.tables import ExtraTensors
from gtrain_pyg.graph_structure import GraphStructure
from gtrain_pyg.loader import PrefetchPlan, SampledBatches
from gtrain_pyg.norm import SampledGcnNorm, check_uncached
from gtrain_pyg.peers import Array, NodeOrEdgeType, PartBook, Peers, SharedArrays, detect_hosting
from gtrain_pyg.sampling.hop import serve_sampling
from gtrain_pyg.sampling.sampler import DistributedSampler
from gtrain_pyg.seeds import (
    LATEST,
    LinkEvaluation,
    SeedSource,
    evaluation_times,
    link_seeds,
    local_nodes,
    node_seeds,
    seed_nodes,
)

_KEPT_MEBIBYTES = 1024
_OTHER_CORES, _MOST_THREADS, _MOST_COMPLETE = 2, 16, 2
"""With a GPU: cores that are left for training and copying, and most sampling threads, also with all neighbours, since
the batches that they make take memory."""
_FIRST_THREADS = 4
"""With a GPU: sampling threads that start with an epoch, if there may be as many."""
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_WIRE_DTYPES = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Shard:
    """What a rank needs of one store to make batches.

    Attributes:
        store: the graph.
        peers: the other ranks.
        structure: the edges that this rank reads.
        features: node and edge tensors, hosted and remote.
        shared: arrays shared by the ranks of the machine.
        mover: moves batches to the rank's GPU, which has a cache of rows once training has started; None without a GPU.
    """

    store: Store
    peers: Peers
    structure: GraphStructure
    features: FeatureStore
    shared: SharedArrays
    mover: BatchMover | None = None

    @property
    def has_remote_parts(self) -> bool:
        """Whether some rank has to request data of another."""
        return not self.peers.hosting.complete

    def fill_cache(self, loader: SeedLoader, options: SamplingOptions, nbytes: int) -> None:
        """Cache the rows of the remote nodes that this machine's ranks are likeliest to need, in shared memory.

        Args:
            loader: describes the batches.
            options: how they are sampled.
            nbytes: bytes per rank.
        """
        if self.features.cache is not None:
            return
        hosting = self.peers.hosting
        fill_cache(
            self.features,
            self._visits(loader, options, hosting.parts),
            nbytes * len(hosting.parts),
            lambda make: self.shared.arrays("halo-cache", min(hosting.parts), make),
        )

    def fill_device_cache(
        self, loader: SeedLoader, options: SamplingOptions, nbytes: int, least_visits: float, threads: int
    ) -> None:
        """Cache the rows that this rank is likeliest to need on its GPU, once.

        Args:
            loader: describes the batches.
            options: how they are sampled.
            nbytes: most bytes on the GPU.
            least_visits: remote nodes that a batch is expected to need less often are not cached.
            threads: threads that gather the rows.
        """
        if self.mover is None or self.mover.cache is not None or not nbytes:
            return
        cache, parts = DeviceCache(self.mover.copies.device, threads), (self.peers.hosting.rank,)
        cache.fill(
            self.features,
            nbytes,
            # Other machines' edges may not even be on this one.
            lambda: self._visits(loader, options, parts, read=self.peers.hosting.parts),
            least_visits=least_visits,
        )
        self.mover.cache = cache

    def _visits(
        self,
        loader: SeedLoader,
        options: SamplingOptions,
        parts: tuple[int, ...],
        read: tuple[int, ...] | None = None,
    ) -> dict[str, Array]:
        """Estimate, by node type, how likely one batch of each rank of these parts is to need each node.

        Args:
            loader: describes the batches.
            options: how they are sampled.
            parts: the ranks.
            read: the parts whose edges are read; None: all.
        """
        share = max(1, (loader.batch_size or loader.num_seeds) // self.peers.hosting.world)
        fan_out = options.fan_out(self.store.edge_types)
        return expected_visits(self.store, seed_nodes(loader, parts), share * len(parts), fan_out, read)

    def close(self) -> None:
        """Close the connections and release the shared memory."""
        if self.mover is not None:
            self.mover.copies.close()
        self.peers.close()
        self.shared.close()


def _tensor_names(store: Store, extra: ExtraTensors) -> dict[NodeOrEdgeType, list[str]]:
    """Return the tensors that batches carry; masks are left out, since a batch names its seeds."""
    names: dict[NodeOrEdgeType, list[str]] = {}
    for node_type in store.node_types:
        names[node_type] = [name for name in store.node_tensors(node_type) if not name.endswith("_mask")]
    for edge_type in store.edge_types:
        names[edge_type] = [name for name in store.edge_tensors(edge_type) if name != "indices"]
    for graph_type, tensors in extra.items():
        names[graph_type] += list(tensors)
    return names


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
        self._norm, self._sampling, self._engine = SampledGcnNorm(), Sampling(), LocalEngine()
        self._unchecked_hops: SamplingOptions | None = None  # of training, until the first step has checked its hops
        self._on_device: Any = WeakIdKeyDictionary()  # batches that the loader has moved
        self._resolved: dict[str, Any] = {}

    def setup(self, trainer: pl.Trainer) -> None:
        # Activations of a large batch: faulting in their pages took a fifth of a step.
        keep_freed(_KEPT_MEBIBYTES)
        super().setup(trainer)

    def open_shard(self, store: Store) -> Shard:
        self._close()
        self.serves.check_parts(self.strategy_name, store.num_parts, self.world_size)
        assert self.cluster_environment is not None
        peers = Peers(
            self.group,
            detect_hosting(self.group, self.settings.transport),
            counters=self.counters,
            timeout=self.settings.request_seconds,
            security=self.servers.security,
            main_address=self.cluster_environment.main_address,
        )
        book, hosting = PartBook.of(store), peers.hosting
        copies = self._device_copies()
        self.pool = BufferPool() if copies is None else copies.pool()
        shared = SharedArrays.create(self.group, hosting)
        structure = GraphStructure(store, book, hosting, shared, hops=self.settings.hops)
        degrees = self._degrees(store, hosting.parts)
        features = FeatureStore(
            store,
            book,
            hosting.parts,
            peers,
            self.pool,
            _tensor_names(store, degrees),
            wire_dtype=_WIRE_DTYPES[self.settings.wire_dtype],
            dtype=self.dtype,
            extra=degrees,
        )
        serve_sampling(structure, peers, self.pool)
        peers.open()
        mover = None if copies is None else BatchMover(copies, features.output_dtypes())
        self._opened = Shard(store, peers, structure, features, shared, mover)
        return self._opened

    def batches(self, shard: Shard, loader: SeedLoader) -> Iterable[Data | HeteroData]:
        options = self._options(loader)
        sampler = DistributedSampler(shard.structure, shard.peers, self.pool, options, seed=loader.seed)
        ranks, plan = (self.global_rank, self.world_size), self._plan(shard, options)

        def on_batch(batch: Data | HeteroData) -> None:
            self._norm.register(batch, options)
            if shard.mover is not None:
                self._on_device[batch] = True

        def sampled(loader: SeedLoader, source: SeedSource) -> SampledBatches:
            features, mover = shard.features, shard.mover
            return SampledBatches(loader, source, sampler, features, plan, ranks, self.counters, on_batch, mover)

        encodes = isinstance(self.lightning_module, EncodesNodes) and self.lightning_module.encodes_nodes
        if loader.seeds_are_edges and loader.split != "train" and encodes:
            nodes = replace(loader, split="predict", shuffle=False)
            node_batches = {}
            for time in evaluation_times(self.group, loader, timed=options.temporal is not None):
                seeds = local_nodes(loader, self.global_rank, time)
                node_batches[time] = {node_type: sampled(nodes, source) for node_type, source in seeds.items()}
            return LinkEvaluation(self.group, loader, node_batches, self.batch_to_device)
        source = self._source(loader, options)
        if loader.split == "train":
            self._unchecked_hops = options
            if self.settings.cache_bytes and shard.has_remote_parts:
                shard.fill_cache(loader, options, self.settings.cache_bytes)
            if shard.mover is not None:
                nbytes, steps = self._device_cache_bytes(shard.mover.copies), len(loader) * self._epochs
                # Of the rows that the user did not ask for, those that the run is expected to need.
                least = 1 / steps if self.settings.device_bytes is None else 0.0
                shard.fill_device_cache(loader, options, nbytes, least, plan.threads)
                cache = shard.mover.cache
                self._resolved["strategy.device_cache"] = 0 if cache is None else cache.nbytes
                self._resolved["strategy.threads"] = plan.threads
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
        if self.settings.layers == "auto":
            self._engine.install(module)

    def uninstall(self, module: Module) -> None:
        self._engine.uninstall()
        self._norm.uninstall()

    def follows_messages(self, conv: Module) -> bool:
        return not self._engine.runs(conv)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, (Data, HeteroData)) and batch in self._on_device:
            return batch
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
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is not None and loss.requires_grad:  # with manual optimization a step may return any value, or none
            check_hops(options.num_neighbors, meter.hops(loss))
        return output

    def resolved_settings(self) -> dict[str, Any]:
        return self._resolved

    def teardown(self) -> None:
        super().teardown()
        self._close()

    # ------------------------------------------------------------------------------------------------- the device

    def _device_copies(self) -> DeviceCopies | None:
        """Return what copies batches to this rank's GPU ahead; None on a CPU, or if hooks of the user move batches."""
        assert self.lightning_module is not None
        if self.root_device.type != "cuda":
            return None
        data = None if self.trainer is None else data_of(self.trainer)
        overridden = (
            is_overridden(name, self.lightning_module) or (data is not None and is_overridden(name, data))
            for name in _TRANSFER_HOOKS
        )
        return None if any(overridden) else DeviceCopies(self.root_device)

    def _device_cache_bytes(self, copies: DeviceCopies) -> int:
        """Return the bytes of this rank's cache on its GPU. All ranks call this."""
        if self.settings.device_bytes is not None:
            return self.settings.device_bytes
        assert self._opened is not None
        hosting = self._opened.peers.hosting
        # Simulated machines share their devices too: they have one host name and boot id.
        own = hosting.machines[hosting.rank], str(copies.device)
        sharing = self.group.all_gather_object(own).count(own)
        return copies.free_bytes() // 2 // sharing

    @property
    def _epochs(self) -> int:
        """The epochs of the run; 1000, which is Lightning's default, if it has no limit."""
        epochs = None if self.trainer is None else self.trainer.max_epochs
        return epochs if epochs is not None and epochs > 0 else 1000

    def _threads(self, options: SamplingOptions, *, remote: bool) -> int:
        """Return the number of sampling threads."""
        if self.settings.threads is not None:
            return self.settings.threads
        least = 2 if remote else 1
        if self.root_device.type == "cpu":
            return max(torch.get_num_threads(), least)
        assert self._opened is not None
        # Not torch's threads, of which a rank with a GPU is often given one (OMP_NUM_THREADS).
        cores = len(os.sched_getaffinity(0)) // ranks_on_this_machine()
        complete = any(-1 in counts for counts in options.fan_out(self._opened.store.edge_types).values())
        return max(min(cores - _OTHER_CORES, _MOST_COMPLETE if complete else _MOST_THREADS), least)

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
        time: str | int | None = None
        if options.temporal is not None:
            # Nodes that no task asks about at some time are embedded by all that is known.
            time = LATEST if loader.task == "link" else seed_time(store, options, loader.seed_type)
        return node_seeds(loader, self.group, time, all_ranks=all_ranks)

    def _plan(self, shard: Shard, options: SamplingOptions) -> PrefetchPlan:
        settings, remote = self.settings, shard.has_remote_parts
        threads = self._threads(options, remote=remote)
        return PrefetchPlan(
            threads=threads,
            first_threads=min(threads, _FIRST_THREADS) if settings.threads is None else None,
            prefetch=settings.prefetch,
            lookahead=settings.lookahead if remote else 1,
            # on a CPU, assembly and step would compete for the cores: a second batch's memory gains nothing
            overlap=self.root_device.type != "cpu",
            trim=settings.trim and options.trimmable,
            remote=remote,
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
