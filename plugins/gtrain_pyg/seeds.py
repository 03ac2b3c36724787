"""Seeds of a split: nodes or edges that batches are grown from, the share of each rank in each step, and the batches.

Every rank takes the same number of steps. A batch is an ordinary ``Data`` or ``HeteroData``.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.loader import SeedLoader, epoch_order, target_edge_type, target_type
from gtrain.data.batches.negatives import Negatives
from gtrain.data.batches.part_edges import PartEdges
from gtrain.data.batches.scored_edges import ScoredEdges
from gtrain.errors import DataError
from gtrain.graph.owners import owner_of
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType
from gtrain.strategy.group import Group
from gtrain.strategy.spread_edges import SpreadEdges, TimedEdges
from gtrain_pyg.peers import Array, NodeOrEdgeType
from gtrain_pyg.sampling.sampler import Subgraph

log = logging.getLogger("gtrain")
Batch: TypeAlias = Data | HeteroData
LATEST = torch.iinfo(torch.int64).max
"""The end of all times."""


@dataclass(frozen=True)
class SeedFields:
    """The fields of a batch that describe its s seeds.

    Attributes:
        target: the node type, or edge type, of the seeds.
        entries: entries of the batch as a whole: ``seeds``, ``batch_size``.
        input_id: int64 ``[s]``, positions among the seeds that the rank draws from.
        time: int64 ``[s]``, of each seed; None without times.
        edges: the true and negative edges that the batch scores, by local ids; None if seeds are nodes.
    """

    target: NodeOrEdgeType
    entries: Mapping[str, Any]
    input_id: Tensor
    time: Tensor | None = None
    edges: ScoredEdges | None = None


def make_batch(
    subgraph: Subgraph,
    rows: Mapping[NodeOrEdgeType, Mapping[str, Tensor]],
    seeds: SeedFields,
    *,
    hetero: bool,
    trim: bool,
    copy: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Data | HeteroData:
    """Assemble a batch.

    Args:
        subgraph: what was sampled, with n nodes and e edges of each type; its arrays may be tensors.
        rows: node and edge tensors by type and name, in the order of the subgraph.
        seeds: the seeds it was grown from; they are its first nodes.
        hetero: make a ``HeteroData``.
        trim: whether layers may leave out what the seeds' results do not depend on.
        copy: called with the tensors of ``seeds``, to copy them to a device.

    Returns:
        A batch with, by type in a ``HeteroData``:

        * the store's node tensors, ``[n, ...]``, and ``n_id`` int64 ``[n]``, global ids;
        * ``edge_index`` int64 ``[2, e]``, the store's edge tensors, ``[e, ...]``, and ``e_id`` int64 ``[e]``, the
          edges' positions in the source data;
        * ``num_sampled_nodes`` and ``num_sampled_edges``, per hop; ``batch`` int64 ``[n]``, the seed whose subgraph a
          node is in, if subgraphs are disjoint;

        and with ``batch_size`` s, ``seeds`` (local ids of nodes int64 ``[s]``, or positions of edges), ``input_id``,
        ``seed_time`` if seeds have times, and ``trim``.
    """
    batch: Data | HeteroData = HeteroData() if hetero else Data()
    for node_type, ids in subgraph.node.items():
        nodes = batch[node_type] if hetero else batch
        nodes.num_nodes = len(ids)
        for name, tensor in rows.get(node_type, {}).items():
            nodes[name] = tensor
        nodes.n_id = as_tensor(ids)
        nodes.num_sampled_nodes = subgraph.num_sampled_nodes[node_type]
        if subgraph.batch is not None:
            nodes.batch = as_tensor(subgraph.batch[node_type])
    for edge_type, index in subgraph.edge_index.items():
        edges = batch[edge_type] if hetero else batch
        edges.edge_index = as_tensor(index)
        for name, tensor in rows.get(edge_type, {}).items():
            edges[batch_name(name)] = tensor
        edges.num_sampled_edges = subgraph.num_sampled_edges[edge_type]
    for name, value in seeds.entries.items():
        batch[name] = copy(value) if isinstance(value, Tensor) else value
    if seeds.edges is not None:
        seeds.edges.put_into(batch, seeds.target if hetero and not isinstance(seeds.target, str) else None, copy)
    target = batch[seeds.target] if hetero else batch
    target.input_id, target.batch_size = copy(seeds.input_id), seeds.input_id.numel()
    if seeds.time is not None:
        target.seed_time = copy(seeds.time)
    batch.trim = trim
    if hetero:
        batch.target = seeds.target
    return batch


def batch_name(name: str) -> str:
    """Return the name in batches of a tensor of the store, which is PyG's."""
    return "e_id" if name == "edge_id" else name


def as_tensor(array: Any) -> Tensor:
    """Return a tensor over the memory of an array."""
    return array if isinstance(array, Tensor) else torch.from_numpy(array)


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


def node_seeds(loader: SeedLoader, group: Group, time: str | int | None, *, all_ranks: bool) -> NodeSeeds:
    """Return the seeds of a loader over nodes.

    Args:
        loader: names the store and the split.
        group: the ranks; rank p owns part p.
        time: the node tensor with times, or one time for all; None without times.
        all_ranks: take the seeds of all ranks, in the order of the source data.
    """
    store, node_type = loader.store, loader.seed_type
    part, offsets = group.rank, store.offsets_of(node_type)
    rows = _split_rows(store, loader.split, part, node_type)
    times: Tensor | None = None
    if time is not None:
        times = torch.full_like(rows, time) if isinstance(time, int) else store.node(time, part, node_type)[rows].long()
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


class LinkSeeds(SeedSource):
    """Edges of the type that is predicted.

    The roots are the endpoints of the true and of the negative edges, each node once in the order of first occurrence:
    sources, then targets, then endpoints of negative edges. With disjoint subgraphs (and so with times) a node is a
    root once for each of its edges.

    Args:
        edges: the edges that the rank draws from.
        edge_type: their type.
        negatives: draws negative edges; None adds none.
        order: int64 ``[count]``, the position in ``edges`` of each seed; None keeps the order.
        total: seeds of all ranks.
        owner: see :class:`SeedSource`.
        last: in temporal sampling, the latest time in a subgraph less the time of its edge; None ignores times.
        disjoint: sample a separate subgraph for each root; implied by ``last``.
    """

    def __init__(
        self,
        edges: PartEdges,
        edge_type: EdgeType,
        negatives: Negatives | None,
        *,
        order: Tensor | None,
        total: int,
        owner: Tensor | None,
        last: int | None,
        disjoint: bool,
    ) -> None:
        self.edges, self.edge_type, self.negatives = edges, edge_type, negatives
        self.count, self.total, self.owner = len(edges), total, owner
        self._order, self._last, self._disjoint = order, last, disjoint or last is not None
        # by epoch and step: its edges by global ids, and the index of each source and each target among the roots
        self._pending: dict[tuple[int, int], tuple[ScoredEdges, Tensor, Tensor]] = {}

    def roots(self, step: Step) -> Roots:
        edges = self.scored(step)
        at_source, at_target = edges.at_sources(), edges.at_targets()
        source, _, target = self.edge_type
        if source == target:
            ids, index = self._unique(torch.cat([at_source, at_target]))
            nodes, (heads, tails) = {source: ids}, index.split([at_source.numel(), at_target.numel()])
        else:
            (source_ids, heads), (target_ids, tails) = self._unique(at_source), self._unique(at_target)
            nodes = {source: source_ids, target: target_ids}
        # Batches that were sampled ahead of an epoch's last step are never assembled. A thread may be an epoch late.
        for key in [key for key in list(self._pending) if key[0] < step.epoch - 1]:
            self._pending.pop(key, None)
        self._pending[step.epoch, step.number] = edges, heads, tails
        return Roots(nodes, None if self._last is None else self._times(edges, self._last))

    def fields(self, step: Step, subgraph: Subgraph) -> SeedFields:
        edges, heads, tails = self._pending.pop((step.epoch, step.number))
        source, _, target = self.edge_type
        sources, targets = (torch.from_numpy(np.asarray(subgraph.seeds[node_type])) for node_type in (source, target))
        local = edges.renumbered(sources[heads], targets[tails])
        entries = {"seeds": step.seeds, "batch_size": step.seeds.numel()}
        time = None if self._last is None else local.extra.get("time")
        return SeedFields(self.edge_type, entries, step.seeds, time, local)

    def scored(self, step: Step) -> ScoredEdges:
        """Return the true and negative edges of a step by global ids."""
        chosen = step.seeds if self._order is None else self._order[step.seeds]
        edge_id = self.edges.edge_id(chosen)
        edges = replace(self.edges.select(chosen), edge_id=edge_id)
        return edges if self.negatives is None else self.negatives(edges, edge_id, step.epoch)

    def _unique(self, ids: Tensor) -> tuple[Array, Tensor]:
        """Return the roots, and the index of each id among them."""
        if self._disjoint:
            return ids.numpy(), torch.arange(ids.numel())
        unique, first, inverse = np.unique(ids.numpy(), return_index=True, return_inverse=True)
        # np.unique sorts by id; the roots are in the order of first occurrence.
        order = np.argsort(first)
        return unique[order], torch.from_numpy(np.argsort(order)[inverse])

    def _times(self, edges: ScoredEdges, last: int) -> dict[str, Array]:
        """Return the latest time sampled for each root."""
        time, (source, _, target) = edges.extra["time"].long() + last, self.edge_type
        # Negatives follow in rounds of one per true edge, and have its time.
        heads, tails = (
            time[torch.arange(ids.numel()) % max(time.numel(), 1)].numpy()
            for ids in (edges.at_sources(), edges.at_targets())
        )
        return {source: np.concatenate([heads, tails])} if source == target else {source: heads, target: tails}


def link_seeds(
    loader: SeedLoader, group: Group, *, all_ranks: bool, timed: bool = False, disjoint: bool = False
) -> LinkSeeds:
    """Return the seeds of a loader over edges, without communication.

    Args:
        loader: names the store and the split, and configures negative edges.
        group: the ranks; rank p owns part p and the edges that point at its nodes.
        all_ranks: take the edges of all ranks, in the order of the source data.
        timed: restrict a subgraph to what is known at the time of its edge.
        disjoint: sample a separate subgraph for each root.

    Raises:
        DataError: the edges have no times.
    """
    store, edge_type = loader.store, target_edge_type(loader.store)
    if timed and "edge_time" not in store.edge_tensors(edge_type):
        raise DataError(
            f"temporal sampling needs the time of each seed, and edges of type {','.join(edge_type)} have no "
            "edge_time.",
            hint="set data.temporal_strategy=null, or add times to the edges.",
        )
    # An edge of the graph would be its own neighbour at its time.
    last = (0 if store.holds_out("train", edge_type) else -1) if timed else None
    edges = PartEdges(store, edge_type, loader.split, range(store.num_parts) if all_ranks else [group.rank])
    order = edges.edge_id().argsort() if all_ranks else None
    return LinkSeeds(
        edges,
        edge_type,
        loader.negatives(),
        order=order,
        total=loader.num_seeds,
        owner=None if order is None else edges.owner[order],
        last=last,
        disjoint=disjoint,
    )


class LinkEvaluation:
    """A batch for each time: this rank's held-out edges of a split, with ``node_batches`` that encode its nodes.

    :meth:`gtrain.model.link_predictor.LinkPredictor.embeddings` reads ``node_batches``;
    :meth:`gtrain.strategy.spread_edges.SpreadEdges.batch` describes the other fields. Construction is collective.

    Args:
        group: the ranks.
        loader: describes the split.
        node_batches: by time, one of :func:`evaluation_times`, and by node type at an end of the edges: batches of all
            nodes that the rank owns, as of this time.
        prepare: called with each node batch before the model; returns the batch to use.
    """

    def __init__(
        self,
        group: Group,
        loader: SeedLoader,
        node_batches: Mapping[int | None, Mapping[str, Iterable[Batch]]],
        prepare: Callable[[Batch], Batch],
    ) -> None:
        def opener(batches: Iterable[Batch]) -> Callable[[], Iterator[Batch]]:
            return lambda: map(prepare, batches)

        self._batches, timed = [], TimedEdges(loader.store, group.rank)
        for time, by_type in node_batches.items():
            edges = SpreadEdges(group, loader, None if time == LATEST else time, timed)
            batch = edges.batch(HeteroData() if loader.store.is_hetero else Data(), 0)
            batch.node_batches = {node_type: opener(batches) for node_type, batches in by_type.items()}
            self._batches.append(batch)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def evaluation_times(group: Group, loader: SeedLoader, *, timed: bool) -> list[int | None]:
    """Return the times as of which nodes are encoded to rank the held-out edges of a split. Collective.

    Where training edges are held out, they are the times of the split's edges. Where training edges are those of the
    graph, the only one is the end of all times: no held-out edge is among the neighbours.

    Args:
        group: the ranks.
        loader: names the store and the split.
        timed: sampling is temporal; else the only time is None.
    """
    if not timed:
        return [None]
    edge_type = target_edge_type(loader.store)
    if not loader.store.holds_out("train", edge_type):
        return [LATEST]
    own = PartEdges(loader.store, edge_type, loader.split, [group.rank]).select().extra.get("time")
    times = torch.cat(group.all_gather(torch.empty(0, dtype=torch.int64) if own is None else own.unique())).unique()
    if times.numel() > 1:
        log.info("%s edges have %d times; each takes a pass over all nodes", loader.split, times.numel())
    return [*times.tolist()] or [LATEST]


def local_nodes(loader: SeedLoader, rank: int, time: int | None) -> dict[str, NodeSeeds]:
    """Return all nodes of a rank, of each type at an end of the predicted edges.

    Args:
        loader: names the store.
        rank: the rank, and its part.
        time: the time as of which nodes are encoded; None without times.
    """
    store, (source, _, target) = loader.store, target_edge_type(loader.store)
    seeds = {}
    for node_type in (source, target):
        ids = torch.arange(*store.offsets_of(node_type)[rank : rank + 2].tolist())
        times = None if time is None else torch.full_like(ids, time)
        seeds[node_type] = NodeSeeds(ids, node_type, times, store.num_nodes_of(node_type), None)
    return seeds
