"""What a rank opens of one store: its parts, the connections to the other ranks, and its copies of their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gtrain.data.batches.loader import SeedLoader
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.strategy.group import Group
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.config import PygConfig
from gtrain_pyg.features.cache import expected_visits, fill_cache
from gtrain_pyg.features.feature_store import FeatureStore
from gtrain_pyg.features.tables import ExtraTensors
from gtrain_pyg.ranks.hosting import SharedArrays
from gtrain_pyg.ranks.parts import NodeOrEdgeType, PartBook
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.sampling.remote import serve_sampling
from gtrain_pyg.seeds import seed_nodes
from gtrain_pyg.structure.hosted import GraphStructure

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
    """

    store: Store
    peers: Peers
    structure: GraphStructure
    features: FeatureStore
    shared: SharedArrays

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
        hosting, store = self.peers.hosting, self.store
        share = max(1, (loader.batch_size or loader.num_seeds) // hosting.world)
        seeds, fan_out = seed_nodes(loader, hosting.parts), options.fan_out(store.edge_types)
        visits = expected_visits(store, seeds, share * len(hosting.parts), fan_out)
        fill_cache(
            self.features,
            visits,
            nbytes * len(hosting.parts),
            lambda make: self.shared.arrays("halo-cache", min(hosting.parts), make),
        )

    def close(self) -> None:
        """Close the connections and release the shared memory."""
        self.peers.close()
        self.shared.close()


def open_shard(
    store: Store,
    group: Group,
    peers: Peers,
    settings: PygConfig,
    pool: BufferPool,
    dtype: torch.dtype,
    extra: Callable[[Store, tuple[int, ...]], ExtraTensors],
) -> Shard:
    """Open a store; collective.

    Args:
        store: the graph.
        group: the job's ranks.
        peers: the same ranks as servers of their parts, not opened yet.
        settings: of the strategy.
        pool: memory of the batches.
        dtype: of floating tensors in batches.
        extra: computes tensors that the store does not have, for the parts that the rank hosts.

    Raises:
        ConfigError: the store was made for another number of ranks.
    """
    book, hosting = PartBook.of(store), peers.hosting
    book.check_world(group.size)
    shared = SharedArrays.create(group, hosting)
    structure = GraphStructure(store, book, hosting, shared, hops=settings.hops)
    computed = extra(store, hosting.parts)
    features = FeatureStore(
        store,
        book,
        hosting.parts,
        peers,
        pool,
        _tensor_names(store, computed),
        wire_dtype=_WIRE_DTYPES[settings.wire_dtype],
        dtype=dtype,
        extra=computed,
    )
    serve_sampling(structure, peers, pool)
    peers.open()
    return Shard(store, peers, structure, features, shared)


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
