"""SeedLoader: the description of a split's batches, from which each strategy makes its batches."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.edge_seeds import EdgeSeeds, edge_seeds
from gtrain.data.batches.negatives import Negatives
from gtrain.data.batches.sampling import Sampling, as_set
from gtrain.errors import ConfigError, DataError
from gtrain.graph.sampling.options import SamplingOptions, checked_fan_out
from gtrain.graph.shard import GraphShard, load_whole
from gtrain.graph.shard.graph import HeteroShard
from gtrain.graph.shard.whole import load_whole_hetero
from gtrain.graph.store import Store
from gtrain.graph.store.tables import HELD_OUT_PREFIXES
from gtrain.kernels.splitmix import key

SPLITS = ("train", "val", "test", "predict")
Batch = TypeVar("Batch", bound=Data | HeteroData)
Item = TypeVar("Item")


@dataclass
class SeedLoader:
    """A description of the batches of one split.

    A strategy reads the fields and makes batches by them. A Lightning strategy that does not know gtrain iterates over
    the loader itself, which yields the whole graph once for each group of ``batch_size`` seeds, without sampling.

    Attributes:
        store: the graph.
        split: ``train``, ``val``, ``test``, or ``predict`` for all nodes.
        batch_size: seeds of one optimizer step over all ranks; None means all of them (full batch).
        num_neighbors: fan-out of each hop for a sampling strategy, -1 all; a mapping has one per edge type; None means
            all neighbours.
        shuffle: whether each epoch has another order; only with a ``batch_size``.
        seed: seed of the order; epoch e is shuffled with ``seed + e``.
        epoch: number of the next epoch, advanced by each iteration; see :meth:`next_epoch`.
        task: ``node``: seeds are nodes; ``link``: seeds are edges, except for ``predict``, whose seeds are all nodes.
        num_negatives: negatives of each edge that a batch scores, ``dst_neg_index``; 0: none. A strategy sets it to
            the ``num_negatives`` of the module that it trains, see :meth:`set_num_negatives`.
        sampling: how a sampling strategy draws neighbours, and which negative edges a user's module gets.
        by_query: whether a training step is of edges that are ordered by query, to find one of their ends, see
            :meth:`EdgeSeeds.query_steps`. A strategy sets it to the ``by_query`` of the module that it trains.
        clock: returns the number of the next epoch if the caller counts epochs.
        node_type: the type of the nodes of ``predict``; None: that of the labels.
    """

    store: Store
    split: str
    batch_size: int | None = None
    num_neighbors: Sequence[int] | Mapping[Any, Sequence[int]] | None = None
    shuffle: bool = False
    seed: int = 0
    epoch: int = field(default=0, compare=False)
    task: str = "node"
    num_negatives: int = field(default=0, compare=False)
    sampling: Sampling = field(default_factory=Sampling)
    by_query: bool = field(default=False, compare=False)
    clock: Callable[[], int] | None = field(default=None, compare=False, repr=False)
    node_type: str | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"{self.split!r} is not a split", hint=f"choose one of {', '.join(SPLITS)}")
        if self.task == "node" and self.split != "predict" and not has_split(self.store, self.split):
            raise _no_split(self.split)
        if self.num_neighbors is not None:
            self.num_neighbors = checked_fan_out(self.num_neighbors)

    def __len__(self) -> int:
        """Return the optimizer steps of one epoch: 1 for full batch."""
        steps = 1 if self.batch_size is None else max(1, -(-self.num_seeds // self.batch_size))
        return 2 * steps if self._orders_queries else steps

    @property
    def seeds_are_edges(self) -> bool:
        """Whether the batches carry edges to be scored."""
        return self.task == "link" and self.split != "predict"

    @property
    def seed_type(self) -> str:
        """The node type of seeds that are nodes."""
        return self.node_type or target_type(self.store)

    def targeted(self, graph: Batch) -> Batch:
        """Return a graph whose ``target`` is the node type of the seeds: a shallow copy if it is another one."""
        if not isinstance(graph, HeteroData) or self.seeds_are_edges or graph.target == self.seed_type:
            return graph
        copied = copy.copy(graph)
        copied.target = self.seed_type
        return copied

    @property
    def num_seeds(self) -> int:
        """Number of the split's nodes, or edges, over all parts."""
        if self.split == "predict":
            return self.store.num_nodes_of(self.seed_type)
        return num_link_seeds(self.store, self.split) if self.seeds_are_edges else self.store.split_size(self.split)

    def __iter__(self) -> Iterator[Data | HeteroData]:
        # A generator: Lightning calls iter() on every loader, even if a strategy makes the batches, and the graph may
        # be larger than this machine's memory.
        graph: Data | HeteroData = (
            hetero_batch(load_whole_hetero(self.store), self.store)
            if self.store.is_hetero
            else graph_batch(load_whole(self.store))
        )
        yield from self.steps(graph)

    def refuse_sampling(self, reason: str) -> None:
        """Raise if the user asked for sampled neighbours; for strategies that use all of them.

        Args:
            reason: a clause for the message, such as "this strategy draws no neighbours".

        Raises:
            ConfigError: names what was set.
        """
        settings = self.sampling.settings()
        if self.num_neighbors is not None:
            settings = [f"data.num_neighbors={as_set(checked_fan_out(self.num_neighbors))}", *settings]
        if settings:
            keys = ", ".join(setting.partition("=")[0] for setting in settings)
            raise ConfigError(
                f"{', '.join(settings)} is set, and {reason}",
                hint=f"leave {keys} out, or choose a strategy that samples",
            )

    def sampling_options(self, hops: int | None = None) -> SamplingOptions:
        """Return the settings of neighbour sampling from this store.

        Args:
            hops: layers of message passing in the model; None: unknown.

        Raises:
            ConfigError, DataError: see :meth:`gtrain.data.batches.sampling.Sampling.options`.
        """
        return self.sampling.options(self.store, self.num_neighbors, hops)  # type: ignore[arg-type]

    def seeds(self, graph: Data | HeteroData) -> Tensor | EdgeSeeds:
        """Return the split's seeds in the order of the source data, which does not depend on the partitioning.

        Args:
            graph: every node and edge, as :func:`graph_batch` or :func:`hetero_batch` returns it.

        Returns:
            Local ids of nodes, int64, or the edges.
        """
        if self.seeds_are_edges:
            return edge_seeds(graph, self.store, self.split, self.negatives())
        return node_seeds(self.targeted(graph), self.split)

    def set_num_negatives(self, count: int | None) -> None:
        """Set the number of negative targets drawn for each edge to a module's ``num_negatives``; None means 0.

        Raises:
            ConfigError: ``data.neg_sampling`` was set too.
        """
        mode = self.sampling.neg_sampling
        if count is not None and mode is not None and self.seeds_are_edges:
            raise ConfigError(
                f"data.neg_sampling={mode} was set, and the model draws negatives by itself, "
                f"model.num_negatives={count} for each edge.",
                hint="set data.neg_sampling=null; it is for modules of your own.",
            )
        self.num_negatives = count or 0

    def draw_negatives(self, count: int | None) -> None:
        """Call :meth:`set_num_negatives`, which had this name in release 0.1.0."""
        message = "draw_negatives() is now set_num_negatives(); the old name works until the next release"
        warnings.warn(message, FutureWarning, stacklevel=2)
        self.set_num_negatives(count)

    def negatives(self) -> Negatives | None:
        """Return the sampler of negative edges for the split's batches; None without negatives."""
        form, ratio = self.sampling.neg_sampling, self.sampling.neg_sampling_ratio
        amount = ratio if form is not None else self.num_negatives
        if not self.seeds_are_edges or not amount:
            return None
        time = None if self.sampling.temporal_strategy is None else "time"
        return Negatives(self.store, target_edge_type(self.store), self.split, self.seed, amount, form, time)

    def next_epoch(self) -> int:
        """Return the number of the epoch that starts now, and advance the counter.

        Call it with the first batch and not before: Lightning creates iterators that it never uses.
        """
        if self.clock is not None:
            self.epoch = self.clock()
        self.epoch += 1
        return self.epoch - 1

    def random_key(self, epoch: int, step: int) -> int:
        """Return the key of a step's random numbers, equal on all ranks of a job.

        Validation and test use the same keys in every epoch.
        """
        return int(key(self.seed, SPLITS.index(self.split), epoch if self.split == "train" else 0, step))

    def steps(self, graph: Batch, seeds: Tensor | EdgeSeeds | None = None, first: int = 0) -> Iterator[Batch]:
        """Yield the whole graph once for each group of its seeds: one epoch without sampling.

        Args:
            graph: every node and edge.
            seeds: what :meth:`seeds` returned for it, computed once for all epochs; None computes them.
            first: number of the first step, in an epoch that is resumed.
        """
        self.refuse_sampling("this strategy draws no neighbours")
        epoch = self.next_epoch()
        graph = self.targeted(graph)
        seeds = self.seeds(graph) if seeds is None else seeds
        if isinstance(seeds, Tensor):
            for positions in self.step_positions(seeds.numel(), epoch)[first:]:
                yield with_seeds(graph, seeds[positions])
        else:
            for step, (end, positions) in enumerate(self._edge_steps(seeds, epoch)[first:], first):
                batch = with_edges(graph, seeds, positions, epoch)
                if end is not None:
                    batch.edge_label_end = end
                batch.random_key = self.random_key(epoch, step)
                yield batch

    def step_positions(self, count: int, epoch: int) -> Sequence[Tensor]:
        """Return, for each step of an epoch, the positions of its seeds among ``count`` seeds, int64."""
        if self.batch_size is None:
            return (torch.arange(count),)
        return epoch_order(count, self.seed + epoch if self.shuffle else None).split(self.batch_size)

    def _edge_steps(self, seeds: EdgeSeeds, epoch: int) -> Sequence[tuple[int | None, Tensor]]:
        """Return, for each step of an epoch, the end of edges that is to be found and the positions of the edges.

        The end is 0 for heads, 1 for tails, and None for both.
        """
        if self._orders_queries:
            return seeds.query_steps(self.batch_size, self.seed + epoch if self.shuffle else None)
        return [(None, positions) for positions in self.step_positions(len(seeds), epoch)]

    @property
    def _orders_queries(self) -> bool:
        return self.by_query and self.seeds_are_edges and self.split == "train"


def epoch_order(count: int, seed: int | None) -> Tensor:
    """Return the numbers below ``count`` in the order of an epoch, int64; None leaves them ascending."""
    if seed is None:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def has_split(store: Store, split: str) -> bool:
    """Return whether the store has the mask of ``train``, ``val`` or ``test``."""
    return f"{split}_mask" in store.node_tensors(target_type(store))


def target_type(store: Store) -> str:
    """Return the node type with labels; in a homogeneous graph the only type."""
    target = store.facts.get("target")
    return target if isinstance(target, str) else store.node_types[0]


def target_edge_type(store: Store) -> tuple[str, str, str]:
    """Return the edge type that is predicted; in a homogeneous graph the only type."""
    source, relation, target = store.facts.get("target_edge") or store.edge_types[0]
    return source, relation, target


def num_link_seeds(store: Store, split: str) -> int:
    """Return the number of edges of a split, over all parts."""
    return store.num_split_edges(split, target_edge_type(store))


def full_batch(shard: GraphShard, split: str, dtype: torch.dtype | None = None) -> Data:
    """Return a full batch: all nodes and edges of a shard, with the split's nodes as seeds.

    Args:
        shard: the rank's part, with n owned nodes, h halo nodes and E edges.
        split: ``train``, ``val``, ``test`` or ``predict``.
        dtype: of ``x`` and floating-point edge data; None: as stored.

    Returns:
        What :func:`graph_batch` returns, with

        * ``seeds`` int64 ``[s]``, local ids of the owned nodes that are in the split, ascending (``predict``: all
          owned nodes). **A batch's loss and metrics are over these nodes only.** A rank may have none;
        * ``batch_size`` s.
    """
    return split_batch(graph_batch(shard, dtype), split)


def split_batch(batch: Batch, split: str) -> Batch:
    """Return a shallow copy of a shard's batch with ``seeds`` and ``batch_size``; see :func:`full_batch`.

    In a heterogeneous batch they are nodes of the type ``target``.
    """
    return with_seeds(batch, node_seeds(batch, split).sort().values)


def hetero_shard_batch(shard: HeteroShard, store: Store, dtype: torch.dtype | None = None) -> HeteroData:
    """Return a typed shard as a ``HeteroData`` with every tensor of ``node_data`` and ``edge_data``, and with

    * ``edge_index`` int64 ``[2, E]`` of each edge type, local ids (sources owned or halo, targets owned);
    * ``num_nodes`` n of each node type, the number of owned nodes and of rows of its ``x``;
    * ``n_id`` int64 ``[n]`` of each node type, global ids of the owned nodes;
    * ``target``, the node type that the labels belong to (str).
    """
    batch = HeteroData()
    for node_type, nodes in shard.nodes.items():
        batch[node_type].num_nodes = nodes.num_local
        for name, tensor in shard.node_data[node_type].items():
            batch[node_type][name] = _cast(tensor, dtype) if name == "x" else tensor
        batch[node_type].n_id = torch.arange(int(nodes.offsets[nodes.part]), int(nodes.offsets[nodes.part + 1]))
    for edge_type, edge_index in shard.edge_index.items():
        batch[edge_type].edge_index = edge_index
        for name, tensor in shard.edge_data[edge_type].items():
            batch[edge_type][name] = _cast(tensor, dtype)
    batch.target = target_type(store)
    return batch


def graph_batch(shard: GraphShard, dtype: torch.dtype | None = None) -> Data:
    """Return a shard as a ``Data`` with every tensor of ``node_data`` and ``edge_data``, and with

    * ``edge_index`` int64 ``[2, E]``, local ids (sources up to n+h-1, targets up to n-1);
    * ``num_nodes`` n, the number of owned nodes and of rows of ``x``;
    * ``n_id`` int64 ``[n]``, global ids of the owned nodes.

    ``x`` is dense, or a sparse CSR tensor if it is sparse in the store.
    """
    batch = Data(edge_index=shard.edge_index, num_nodes=shard.num_local)
    for name, tensor in shard.node_data.items():
        batch[name] = _cast(tensor, dtype) if name == "x" else tensor
    for name, tensor in shard.edge_data.items():
        batch[name] = _cast(tensor, dtype)
    batch.n_id = torch.arange(int(shard.offsets[shard.part]), int(shard.offsets[shard.part + 1]))
    return batch


def hetero_batch(graph: HeteroData, store: Store, dtype: torch.dtype | None = None) -> HeteroData:
    """Return a whole heterogeneous graph as a batch: a copy without held-out edges, with

    * ``n_id`` int64 ``[n]`` of each node type, global ids;
    * ``target``, the node type that the labels belong to (str).
    """
    batch = HeteroData()
    for node_type in graph.node_types:
        for name, value in graph[node_type].items():
            batch[node_type][name] = _cast(value, dtype) if name == "x" else value
        batch[node_type].n_id = torch.arange(int(graph[node_type].num_nodes or 0))
    for edge_type in graph.edge_types:
        for name, value in graph[edge_type].items():
            if not name.startswith(HELD_OUT_PREFIXES):
                batch[edge_type][name] = _cast(value, dtype)
    batch.target = target_type(store)
    return batch


def node_seeds(graph: Data | HeteroData, split: str) -> Tensor:
    """Return the local ids of a split's nodes, in the order of the source data."""
    nodes = graph[graph.target] if isinstance(graph, HeteroData) else graph
    if split == "predict":
        seeds = torch.arange(int(nodes.num_nodes or 0), device=nodes.orig_id.device)
    elif f"{split}_mask" not in nodes:
        raise _no_split(split)
    else:
        seeds = nodes[f"{split}_mask"].nonzero().flatten()
    return seeds[torch.argsort(nodes.orig_id[seeds])]


def with_seeds(batch: Batch, seeds: Tensor) -> Batch:
    """Return a shallow copy of a batch with these seeds."""
    copied = copy.copy(batch)
    copied.seeds, copied.batch_size = seeds, seeds.numel()
    return copied


def with_edges(batch: Batch, edges: EdgeSeeds, chosen: Tensor, epoch: int = 0) -> Batch:
    """Return a shallow copy of a batch, with the chosen edges of a split as its seeds.

    Its entries are those of :meth:`~gtrain.data.batches.scored_edges.ScoredEdges.entries` and
    :meth:`EdgeSeeds.known_entries`.
    """
    copied = copy.copy(batch)
    edges.select(chosen, epoch).put_into(copied, edges.edge_type)
    for name, value in edges.known_entries(chosen).items():
        copied[name] = value
    copied.seeds, copied.batch_size = chosen, chosen.numel()
    if isinstance(copied, HeteroData):
        copied.target = edges.edge_type
    return copied


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if isinstance(tensor, Tensor) and dtype and tensor.is_floating_point() else tensor


def _no_split(split: str) -> DataError:
    return DataError(
        f"the stored graph has no {split} split, because it was prepared without labels",
        hint="give the labels (data.labels=FILE for an edge list), or choose a task that needs none",
    )


def prefetched(batches: Iterator[Item], count: int, thread_name: str, *, joined: bool = True) -> Generator[Item]:
    """Prefetch batches in a background thread.

    Args:
        batches: iterator, used by the thread only; its exceptions are raised here.
        count: batches to prefetch, at least 1.
        thread_name: prefix of the thread's name.
        joined: whether closing the generator waits for the batch in progress.
    """
    thread = ThreadPoolExecutor(1, thread_name)
    # One thread advances the iterator, so that its items stay in order; the queue bounds how far it runs ahead.
    ahead = deque(thread.submit(next, batches, None) for _ in range(count))
    try:
        while (batch := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next, batches, None))
            yield batch
            # Release it now, so that its memory serves a later batch.
            del batch
    finally:
        thread.shutdown(joined, cancel_futures=True)
