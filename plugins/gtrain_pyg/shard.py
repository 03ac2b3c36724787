"""What a rank opens of one store: its parts, the way to the other ranks, and what it keeps of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gtrain.data.batches.loader import SeedLoader
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain.wire import Security
from gtrain_pyg.batches import Kind
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.config import PygConfig
from gtrain_pyg.features.cache import expected_visits, fill_cache
from gtrain_pyg.features.feature_store import FeatureStore
from gtrain_pyg.features.tables import Extra
from gtrain_pyg.ranks.hosting import host
from gtrain_pyg.ranks.parts import PartBook
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.ranks.sharing import Sharing
from gtrain_pyg.sampling.remote import serve_sampling
from gtrain_pyg.seeds import seed_nodes
from gtrain_pyg.structure.hosted import Structure

_WIRE = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        group: the job's ranks.
        settings: of the strategy.
        counters: where traffic is counted.
        security: the job's keys, where it was given some.
        main_address: host at which the ranks met.
    """

    group: Group
    settings: PygConfig
    counters: Counters
    security: Security | None
    main_address: str


@dataclass
class Shard:
    """What a rank needs of one store to make batches.

    Attributes:
        store: the graph.
        world: number of ranks.
        peers: the other ranks.
        structure: edges, hosted ones.
        features: node and edge tensors, hosted and remote.
        sharing: memory that the machine's ranks share.
    """

    store: Store
    world: int
    peers: Peers
    structure: Structure
    features: FeatureStore
    sharing: Sharing

    @property
    def asks(self) -> bool:
        """Whether anything has to be asked of other ranks."""
        return not self.peers.hosting.complete

    def fill_cache(self, loader: SeedLoader, options: SamplingOptions, nbytes: int) -> None:
        """Keep the rows of remote nodes that this machine's ranks will ask for most, in memory that they share.

        Args:
            loader: describes the batches.
            options: how they are sampled.
            nbytes: of each rank.
        """
        if self.features.cache is not None or not self.asks:
            return
        parts, store = self.peers.hosting.parts, self.store
        share = max(1, (loader.batch_size or loader.num_seeds) // self.world)
        fan_out = options.fan_out(store.edge_types)
        visits = expected_visits(store, seed_nodes(loader, parts), share * len(parts), fan_out)
        first = min(parts)
        fill_cache(
            self.features, visits, nbytes * len(parts), lambda make: self.sharing.arrays("halo-cache", first, make)
        )

    def close(self) -> None:
        """Let go of the other ranks."""
        self.peers.close()
        self.sharing.close()


def open_shard(
    store: Store,
    place: Place,
    pool: BufferPool,
    dtype: torch.dtype,
    extra: Callable[[Store, tuple[int, ...]], Extra],
) -> Shard:
    """Open a store; every rank of the group calls it.

    Args:
        store: the graph.
        place: this rank.
        pool: memory of the batches.
        dtype: of floating tensors in batches.
        extra: makes tensors that the store does not have, of the parts that the rank hosts.

    Raises:
        ConfigError: the store was made for another number of ranks.
    """
    book, group, settings = PartBook.of(store), place.group, place.settings
    book.check_world(group.size)
    hosting = host(group, settings.transport)
    sharing = Sharing.meet(group, hosting)
    peers = Peers(
        group,
        hosting,
        counters=place.counters,
        timeout=settings.request_seconds,
        security=place.security,
        main_address=place.main_address,
    )
    structure = Structure(store, book, hosting, sharing, hops=settings.hops)
    more = extra(store, hosting.parts)
    wire = _WIRE[settings.wire_dtype]
    names, parts = _names(store, more), hosting.parts
    features = FeatureStore(store, book, parts, peers, pool, names, wire_dtype=wire, dtype=dtype, extra=more)
    serve_sampling(structure, peers, pool)
    peers.open()
    return Shard(store, group.size, peers, structure, features, sharing)


def _names(store: Store, extra: Extra) -> dict[Kind, list[str]]:
    """The tensors that batches carry: a batch's seeds say what its split's mask would."""
    names: dict[Kind, list[str]] = {}
    for kind in store.node_types:
        names[kind] = [name for name in store.node_tensors(kind) if not name.endswith("_mask")]
    for edge_type in store.edge_types:
        names[edge_type] = [name for name in store.edge_tensors(edge_type) if name != "indices"]
    for any_kind, tensors in extra.items():
        names[any_kind] += list(tensors)
    return names
