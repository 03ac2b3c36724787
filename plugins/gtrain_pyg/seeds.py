"""Seeds of a split, and the seeds that each rank takes in each step. Every rank takes the same number of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gtrain.data.batches.loader import SeedLoader, epoch_order, target_edge_type, target_type
from gtrain.data.batches.part_edges import PartEdges
from gtrain.graph.owners import owner_of
from gtrain.graph.store import Store
from gtrain.strategy.group import Group
from gtrain_pyg.batches import SeedFields
from gtrain_pyg.ranks.parts import Array
from gtrain_pyg.sampling.subgraph import Subgraph


@dataclass(frozen=True)
class Step:
    """A rank's share of one optimizer step.

    Attributes:
        epoch: number of the epoch; 0 in evaluation, which repeats the same batches.
        number: number of the step in the epoch, from 0.
        batch: number of the batch in the epoch over all ranks; seed, epoch and batch determine its random numbers.
        seeds: int64 ``[s]``, positions among the seeds that the rank draws from; may be empty.
    """

    epoch: int
    number: int
    batch: int
    seeds: Tensor


def num_steps(total: int, batch_size: int | None) -> int:
    """Return the steps of an epoch over ``total`` seeds of all ranks, at least 1; None takes all seeds in one step."""
    return 1 if batch_size is None else max(1, -(-total // batch_size))


def local_shares(count: int, steps: int, order: int | None) -> Sequence[Tensor]:
    """Divide a rank's seeds among the steps in nearly equal shares.

    Args:
        count: the rank's seeds.
        steps: of the epoch.
        order: seed of the shuffle; None keeps the order.
    """
    return epoch_order(count, order).tensor_split(steps)


def global_shares(owner: Tensor, batch_size: int | None, order: int | None, rank: int, world: int) -> Sequence[Tensor]:
    """Divide the seeds of all ranks among the steps as a single process does, and each step equally among the ranks.

    Within a step a seed goes to the rank that owns it as far as equal shares allow.

    Args:
        owner: int64 ``[S]``, the part that owns each seed of the split, in the order of the source data.
        batch_size: seeds of a step; None takes all.
        order: seed of the shuffle; None keeps the order.
        rank: whose shares to return.
        world: number of ranks.
    """
    seeds = epoch_order(owner.numel(), order)
    chunks = [seeds] if batch_size is None or not seeds.numel() else seeds.split(batch_size)
    return [chunk[owner[chunk].argsort(stable=True)].tensor_split(world)[rank] for chunk in chunks]


@dataclass(frozen=True)
class Roots:
    """The nodes that a subgraph is grown from.

    Attributes:
        ids: by node type, int64 global ids; the subgraph lists them first, in this order.
        time: by node type, int64, the latest time that is sampled for each root; None without times.
    """

    ids: Mapping[str, Array]
    time: Mapping[str, Array] | None = None


class SeedSource(ABC):
    """The seeds of one split.

    Attributes:
        count: seeds that this rank draws from.
        total: seeds of all ranks.
        owner: int64 ``[count]``, the part that owns each seed if the rank draws from the seeds of all ranks; None if
            it draws from its own.
    """

    count: int
    total: int
    owner: Tensor | None

    @abstractmethod
    def roots(self, step: Step) -> Roots:
        """Return the nodes to sample around for the seeds of a step."""

    @abstractmethod
    def fields(self, step: Step, subgraph: Subgraph) -> SeedFields:
        """Return the batch's fields about the seeds of a step, by the subgraph's local ids."""


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

    def fields(self, step: Step, subgraph: Subgraph) -> SeedFields:
        local = torch.from_numpy(np.asarray(subgraph.seeds[self.node_type]))
        time = None if self.time is None else self.time[step.seeds]
        return SeedFields(self.node_type, {"seeds": local, "batch_size": local.numel()}, step.seeds, time)


def node_seeds(loader: SeedLoader, group: Group, time: str | None, *, all_ranks: bool) -> NodeSeeds:
    """Return the seeds of a loader over nodes.

    Args:
        loader: names the store and the split.
        group: the ranks; rank p owns part p.
        time: the node tensor with times, or None.
        all_ranks: take the seeds of all ranks, in the order of the source data.
    """
    store, node_type = loader.store, target_type(loader.store)
    part, offsets = group.rank, store.offsets_of(node_type)
    rows = _split_rows(store, loader.split, part, node_type)
    times = None if time is None else store.node(time, part, node_type)[rows].long()
    ids = rows + offsets[part]
    total = int(group.all_reduce(torch.tensor([ids.numel()])))
    if not all_ranks:
        return NodeSeeds(ids, node_type, times, total, None)
    order = torch.cat(group.all_gather(store.node("orig_id", part, node_type)[rows])).argsort()
    ids = torch.cat(group.all_gather(ids))[order]
    times = None if times is None else torch.cat(group.all_gather(times))[order]
    return NodeSeeds(ids, node_type, times, total, owner_of(ids, offsets))


def seed_nodes(loader: SeedLoader, parts: Sequence[int]) -> dict[str, Array]:
    """Return the distinct nodes that the batches of some parts are grown from: int64 global ids by node type."""
    store = loader.store
    if loader.seeds_are_edges:
        edge_type = target_edge_type(store)
        edges = PartEdges(store, edge_type, loader.split, parts)
        endpoints = edges.select(torch.arange(len(edges)))
        nodes = [(edge_type[0], endpoints.source), (edge_type[2], endpoints.target)]
    else:
        labelled = target_type(store)
        offsets = store.offsets_of(labelled)
        nodes = [(labelled, _split_rows(store, loader.split, part, labelled) + offsets[part]) for part in parts]
    by_type: dict[str, list[Tensor]] = {}
    for node_type, ids in nodes:
        by_type.setdefault(node_type, []).append(ids)
    return {node_type: torch.cat(arrays).unique().numpy() for node_type, arrays in by_type.items()}


def _split_rows(store: Store, split: str, part: int, node_type: str) -> Tensor:
    """Return the rows of the split's nodes within the part, ascending, which is the order of the source data."""
    if split == "predict":
        offsets = store.offsets_of(node_type)
        return torch.arange(int(offsets[part + 1] - offsets[part]))
    return store.node(f"{split}_mask", part, node_type).nonzero().flatten()
