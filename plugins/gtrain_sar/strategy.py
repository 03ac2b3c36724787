"""The Lightning strategy of full-batch training over a sharded graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.conv import MessagePassing

from gtrain.backends import Serves
from gtrain.data.batches.loader import SeedLoader, graph_batch, hetero_shard_batch, split_batch
from gtrain.engine.halo import HaloExchange
from gtrain.engine.patching import load_kernels
from gtrain.engine.schedule import Schedule
from gtrain.errors import ConfigError, DataError
from gtrain.graph.shard import GraphShard, load_shard
from gtrain.graph.shard.graph import HeteroShard, load_hetero_shard
from gtrain.graph.shard.nodes import ShardNodes
from gtrain.graph.store import Store
from gtrain.memory.heap import give_back_freed
from gtrain.memory.reuse import free_large, keep_large
from gtrain.nn import DglGraph
from gtrain.nn.dropout import StepRows, rows_of
from gtrain.settings import as_typed
from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.group import Group
from gtrain.strategy.spread_edges import SpreadEdges
from gtrain_sar import SERVES, config, unsupported
from gtrain_sar.hetero import Relations, TypedPatcher
from gtrain_sar.patching import Patcher


class SarStrategy(GraphStrategy):
    """Trains in full batch on a graph of which each rank holds one part, as exactly as one process on the whole graph.

    Its settings are those of :class:`gtrain_sar.config.SarConfig`.

    Raises:
        ConfigError: a setting is not valid, or ``wire_dtype=bfloat16`` is set for ``float64`` tensors.
    """

    strategy_name: ClassVar[str] = "sar"
    serves: ClassVar[Serves] = SERVES
    watches_edges: ClassVar[bool] = False
    settings_type = config.SarConfig
    settings: config.SarConfig

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.schedule = schedule_of(self.settings)
        self.wire_dtype = torch.bfloat16 if self.settings.wire_dtype == "bfloat16" else None
        self._patcher: Patcher | None = None
        self._graph: Data | HeteroData | None = None
        self._module: nn.Module | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        if self.wire_dtype is not None and self.dtype == torch.float64:
            raise ConfigError(
                "strategy.wire_dtype=bfloat16 was set with trainer.precision=64-true: messages with 8 significant bits "
                "would carry tensors with 53.",
                hint="set strategy.wire_dtype=float32, which sends tensors as they are, or trainer.precision=32-true.",
            )
        give_back_freed()
        super().setup(trainer)

    def open_shard(self, store: Store) -> GraphShard | HeteroShard:
        self.serves.check_parts(self.strategy_name, store.num_parts, self.world_size)
        shard = (load_hetero_shard if store.is_hetero else load_shard)(store, self.global_rank)
        check_parts_agree(self.group, shard)
        if self._patcher is not None:  # of another graph
            self._patcher.uninstall()
        self._graph = None
        if isinstance(shard, HeteroShard):
            self._patcher = TypedPatcher(Relations(self.group, shard, self._exchange), self.schedule)
        else:
            self._patcher = Patcher(self._exchange(self.group, shard), self.schedule)
        if self._module is not None:
            self._patcher.install(self._module)
        return shard

    def _exchange(self, group: Group, nodes: ShardNodes, orig_id: Tensor | None = None) -> HaloExchange:
        exchange = HaloExchange(group, nodes, self.wire_dtype, orig_id)
        exchange.to(self.root_device)
        return exchange

    def batches(self, shard: GraphShard | HeteroShard, loader: SeedLoader) -> Iterable[Data | HeteroData]:
        if loader.batch_size is not None:  # a loader that no data module made
            raise ConfigError(
                f"data.batch_size={loader.batch_size} was set; strategy=sar trains on the whole graph at once.",
                hint="leave data.batch_size=null.",
            )
        loader.refuse_sampling("strategy=sar uses every neighbour")
        if self._graph is None:
            self._graph = self._batch_of_shard(shard, loader.store)
        if loader.seeds_are_edges:
            return LinkBatches(self._graph, SpreadEdges(self.group, loader), loader)
        return [split_batch(loader.targeted(self._graph), loader.split)]

    def _batch_of_shard(self, shard: GraphShard | HeteroShard, store: Store) -> Data | HeteroData:
        """Return the shard as a batch, whose tensors all splits and epochs share."""
        graph: Data | HeteroData
        if isinstance(shard, HeteroShard):
            graph = hetero_shard_batch(shard, store, self.dtype).to(self.root_device)
        else:
            graph = graph_batch(shard, self.dtype).to(self.root_device)
        assert self._patcher is not None
        values = (value for stored in graph.stores for value in stored.values())
        self._patcher.constants.add(value for value in values if isinstance(value, Tensor))
        if isinstance(graph, HeteroData) and isinstance(self._patcher, TypedPatcher):
            self._patcher.relations.register(graph.edge_index_dict)
        return graph

    def dropout_rows(self, batch: Any) -> StepRows:
        assert self._patcher is not None
        return rows_of(batch, {name: exchange.all_ids for name, exchange in self._patcher.exchanges.items()})

    def check_module(self, module: nn.Module) -> None:
        if unsupported.lacks_dgl_graph(module):
            raise ConfigError(
                f"strategy=sar does not serve {type(module).__name__}: it creates the graph for DGL itself.",
                hint="create the graph with a gtrain.nn.DglGraph, a layer of the module; see docs/dgl.md.",
            )
        if not any(isinstance(layer, MessagePassing | DglGraph) for layer in module.modules()):
            raise ConfigError(
                f"strategy=sar does not serve {type(module).__name__}: it has no message-passing layer, so there is "
                "nothing to aggregate.",
                hint="use strategy=single, or a model with convolutions of PyG or DGL.",
            )
        for name, layer in module.named_modules():
            reason = unsupported.reason(layer)
            if reason is not None:
                raise ConfigError(
                    f"strategy=sar does not serve {type(layer).__name__} ({name}): {reason}.",
                    hint="use strategy=single, or another layer.",
                )

    def install(self, module: nn.Module) -> None:
        # Lightning creates the first loader, and with it the shard, after this call
        self._module = module
        if self.root_device.type == "cpu":
            keep_large()
            load_kernels(module, self.dtype)
            if self.precision_plugin.precision == "bf16-mixed":
                load_kernels(module, torch.bfloat16)
        if self._patcher is not None:
            self._patcher.install(module)

    def uninstall(self, module: nn.Module) -> None:
        self._module = None
        free_large()
        if self._patcher is not None:
            self._patcher.uninstall()


def schedule_of(settings: config.SarConfig) -> Schedule:
    """Return the settings that the layer engine reads."""
    return Schedule(settings.mode, settings.prefetch, as_typed(settings.cache_inputs), settings.layers == "auto")


def check_parts_agree(group: Group, shard: GraphShard | HeteroShard) -> None:
    """Compare node types, edge types and the dtypes and columns of tensors between all ranks' parts.

    Raises:
        DataError: on every rank; names the first difference.
    """
    descriptions = group.all_gather_object(_description(shard))
    for part, description in enumerate(descriptions):
        for name in sorted({*descriptions[0], *description}):
            tensors, reference = description.get(name, "nothing"), descriptions[0].get(name, "nothing")
            if tensors != reference:
                raise DataError(
                    f"the parts of the graph differ in {name}: part {part} has {tensors}, part 0 has {reference}.",
                    hint="partition the graph again, from one source, and copy the same store to every machine.",
                )


def _description(shard: GraphShard | HeteroShard) -> dict[str, str]:
    """Describe in words what must be equal in all parts."""
    if isinstance(shard, GraphShard):
        return {"the nodes": _columns(shard.node_data), "the edges": _columns(shard.edge_data)}
    nodes = {f"the node type {node_type}": _columns(tensors) for node_type, tensors in shard.node_data.items()}
    edges = {f"the edge type {', '.join(names)}": _columns(tensors) for names, tensors in shard.edge_data.items()}
    return nodes | edges


def _columns(tensors: dict[str, Tensor]) -> str:
    """Describe dtype and columns of tensors: ``weight (float32), x (float32 x 16)``."""
    return ", ".join(
        f"{name} ({' x '.join([str(tensor.dtype).removeprefix('torch.'), *map(str, tensor.shape[1:])])})"
        for name, tensor in sorted(tensors.items())
    )


class LinkBatches:
    """One batch of true and negative edges per epoch. In training the negatives differ between epochs.

    Args:
        graph: the shard as a batch.
        edges: this rank's edges of the split.
        loader: describes the split.
    """

    def __init__(self, graph: Data | HeteroData, edges: SpreadEdges, loader: SeedLoader) -> None:
        self._graph, self._edges, self._loader = graph, edges, loader
        self._evaluated: Data | HeteroData | None = None

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Data | HeteroData]:
        epoch = self._loader.next_epoch()
        if self._loader.split == "train":
            yield self._edges.batch(self._graph, epoch)
        else:
            self._evaluated = self._evaluated or self._edges.batch(self._graph, 0)
            yield self._evaluated
