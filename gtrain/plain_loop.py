"""A sharded graph for training loops without a Lightning Trainer, by the strategies that the Trainer runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch.plugins import DoublePrecision, Precision
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data, HeteroData

from gtrain import backends
from gtrain.data.batches.loader import SeedLoader
from gtrain.data.module import GraphDataModule
from gtrain.errors import ConfigError
from gtrain.graph.store import Store
from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.gradients import sum_gradients
from gtrain.strategy.store_sharing import prepare_shared

_GIVEN: WeakSet[GraphStrategy] = WeakSet()
"""Strategies that have a graph, which another one would replace."""


class ShardedGraph:
    """A graph of which each rank has one part. All ranks call its methods in the same order.

    Args:
        strategy: exchanges the halos; its group is formed.
        store: has one part per rank.

    Attributes:
        data: this rank's part, on the CPU. Its node tensors have a row for each of the rank's n nodes, and ``orig_id``
            (int64 ``[n]``) has their numbers in the graph that was given. ``edge_index`` has the edges that end at
            these nodes. Its sources may be nodes of other ranks: only modules inside of :meth:`exchange` can use it.
        rank: number of this process.
        num_ranks: number of parts.
    """

    def __init__(self, strategy: GraphStrategy, store: Store) -> None:
        self._strategy = strategy
        self._module: Module | None = None
        self.rank, self.num_ranks = strategy.group.rank, strategy.group.size
        # An epoch in full batch is one batch.
        (self.data,) = strategy.batches(strategy.open_shard(store), SeedLoader(store, "predict"))

    @contextmanager
    def exchange(self, module: Module) -> Iterator[None]:
        """Make the convolutions of a module exchange halos, forward and backward, until the context ends.

        Every convolution of PyG inside of the module reads the rows of all neighbours, and a batch norm computes the
        statistics of all nodes. Parameters and buffers become those of rank 0. Dropout draws other masks on each rank.

        Raises:
            ConfigError: the strategy does not serve a layer, or the graph exchanges for another module already.
        """
        if self._module is not None:
            raise ConfigError(
                f"exchange() was called with a {type(module).__name__} inside of exchange() with a "
                f"{type(self._module).__name__}.",
                hint="put both modules into one torch.nn.ModuleList.",
            )
        self._strategy.check_module(module)
        self._strategy.broadcast_module(module)
        self._module = module
        try:
            self._strategy.install(module)
            yield
        finally:
            self._strategy.uninstall(module)
            self._module = None

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, without a gradient; equal on all ranks, bit for bit."""
        return self._strategy.group.all_reduce(value.detach().clone())

    def sum_gradients(self, module: Module) -> None:
        """Replace the gradients of a module's parameters with their sums over all ranks; call it after the backward
        pass. They are those of one process if the losses of all ranks add up to its loss."""
        sum_gradients(self._strategy.group, module.parameters())


def shard(
    data: Data | HeteroData | GraphDataModule[Any], strategy: str | GraphStrategy = "sar", **settings: Any
) -> ShardedGraph:
    """Divide a graph among the ranks of this job: those of :func:`gtrain.run_local`, of torchrun or of srun.

    The first call partitions the graph and writes it to a store, which later calls and runs open. All ranks call this.

    Args:
        data: the graph, the same on all ranks, which may delete it afterwards; or a data module with one part per rank,
            for graphs that are too large for each process.
        strategy: a full-batch strategy whose ranks have one part each, by name or with settings,
            ``SarStrategy(mode=2)``.
        settings: those of :meth:`GraphDataModule.from_pyg`, such as ``partitioner`` and ``store``.

    Returns:
        This rank's part. Floating-point features and edge data are float64 if ``x`` is, and float32 otherwise.

    Raises:
        ConfigError: the strategy does not train in full batch on parts or has a graph already, or a setting is wrong.
        DataError: the graph is not valid.
    """
    made = backends.get(strategy).load_strategy()() if isinstance(strategy, str) else strategy
    if made in _GIVEN:
        raise ConfigError(
            f"shard() was given the same {type(made).__name__} for a second graph.", hint="make one for each graph."
        )
    if not (made.full_batch and made.serves.part_per_rank):
        names = [name for name, each in backends.usable().items() if _shards_in_full_batch(each)]
        raise ConfigError(
            f"shard() was given strategy={made.strategy_name}, which does not train in full batch on a part per rank.",
            hint=f"give {' or '.join(names)}.",
        )
    if not isinstance(data, GraphDataModule):
        data = GraphDataModule.from_pyg(data, **{"num_parts": made.world_size, **settings})
    assert made.cluster_environment is not None
    prepare_shared(data, made.cluster_environment)
    store = data.open_store()
    features = {store.node("x", 0, name).dtype for name in store.node_types if "x" in store.node_tensors(name)}
    made.precision_plugin = DoublePrecision() if torch.float64 in features else Precision()
    made.group = made.make_group()
    _GIVEN.add(made)
    return ShardedGraph(made, store)


def _shards_in_full_batch(backend: backends.Backend) -> bool:
    return backend.serves.part_per_rank and bool(backend.load_strategy().full_batch)
