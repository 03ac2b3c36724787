"""What mini-batches are grown from: the seeds of a split, this rank's own or everybody's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gtrain.data.batches.loader import SeedLoader, target_edge_type, target_type
from gtrain.data.batches.part_edges import PartEdges
from gtrain.graph.owners import owner_of
from gtrain.graph.store import Store
from gtrain.strategy.group import Group
from gtrain_pyg.batches import Seeds
from gtrain_pyg.epoch import Step
from gtrain_pyg.sampling.subgraph import Array, Subgraph


@dataclass(frozen=True)
class Roots:
    """The nodes that a subgraph is grown from.

    Attributes:
        ids: for each node type int64 global ids, in the order in which the subgraph lists them first.
        time: for each of these types int64, the time up to which is sampled; None without times.
    """

    ids: Mapping[str, Array]
    time: Mapping[str, Array] | None = None


class SeedSource(ABC):
    """The seeds of one split.

    Attributes:
        count: seeds that this rank draws from: its own, or everybody's.
        total: seeds of all ranks.
        owner: int64 ``[count]``, the part that owns each, where they are everybody's; None where they are its own.
    """

    count: int
    total: int
    owner: Tensor | None

    @abstractmethod
    def roots(self, step: Step) -> Roots:
        """The nodes to sample around for the seeds of a step."""

    @abstractmethod
    def describe(self, step: Step, subgraph: Subgraph) -> Seeds:
        """What the batch says of the seeds of a step, once they have local ids."""


class NodeSeeds(SeedSource):
    """Nodes of the type that carries the labels.

    Args:
        ids: int64 ``[count]``, global ids.
        node_type: their type.
        time: int64 ``[count]``, or None without times.
        total: seeds of all ranks.
        owner: see :class:`SeedSource`.
    """

    def __init__(self, ids: Tensor, node_type: str, time: Tensor | None, total: int, owner: Tensor | None) -> None:
        self.ids, self.node_type, self.time = ids, node_type, time
        self.count, self.total, self.owner = ids.numel(), total, owner

    def roots(self, step: Step) -> Roots:
        times = None if self.time is None else {self.node_type: self.time[step.seeds].numpy()}
        return Roots({self.node_type: self.ids[step.seeds].numpy()}, times)

    def describe(self, step: Step, subgraph: Subgraph) -> Seeds:
        local = torch.from_numpy(np.asarray(subgraph.seeds[self.node_type]))
        time = None if self.time is None else self.time[step.seeds]
        return Seeds(self.node_type, {"seeds": local, "batch_size": local.numel()}, step.seeds, time)


def node_seeds(loader: SeedLoader, group: Group, time: str | None, *, everybody: bool) -> NodeSeeds:
    """Return the seeds of a loader over nodes.

    Args:
        loader: names the store and the split.
        group: the ranks; rank p owns part p.
        time: the node tensor with times, or None.
        everybody: take the seeds of all ranks, in the order of the source data.
    """
    store, kind = loader.store, target_type(loader.store)
    part = group.rank
    own = _own(store, loader.split, part, kind)
    times = None if time is None else store.node(time, part, kind)[own].long()
    ids = own + store.offsets_of(kind)[part]
    total = int(group.all_reduce(torch.tensor([own.numel()])))
    if not everybody:
        return NodeSeeds(ids, kind, times, total, None)
    place = torch.cat(group.all_gather(store.node("orig_id", part, kind)[own])).argsort()
    everybodys = torch.cat(group.all_gather(ids))[place]
    owner = owner_of(everybodys, store.offsets_of(kind))
    times = None if times is None else torch.cat(group.all_gather(times))[place]
    return NodeSeeds(everybodys, kind, times, total, owner)


def seed_nodes(loader: SeedLoader, parts: Sequence[int]) -> dict[str, Array]:
    """Return the nodes that the batches of some parts are grown from, int64 global ids by type, each once."""
    store = loader.store
    if loader.seeds_are_edges:
        edge_type = target_edge_type(store)
        edges = PartEdges(store, edge_type, loader.split, parts)
        ends = edges.select(torch.arange(len(edges)))
        found = [(edge_type[0], ends.source), (edge_type[2], ends.target)]
    else:
        kind = target_type(store)
        offsets = store.offsets_of(kind)
        found = [(kind, _own(store, loader.split, part, kind) + offsets[part]) for part in parts]
    return {name: torch.cat([ids for kind, ids in found if kind == name]).unique().numpy() for name, _ in found}


def _own(store: Store, split: str, part: int, kind: str) -> Tensor:
    """Places of the split's nodes in the part, ascending, which is the order of the source data."""
    if split == "predict":
        offsets = store.offsets_of(kind)
        return torch.arange(int(offsets[part + 1] - offsets[part]))
    return store.node(f"{split}_mask", part, kind).nonzero().flatten()
