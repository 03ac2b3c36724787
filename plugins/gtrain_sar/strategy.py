"""Full-batch training over a sharded graph."""

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
from gtrain.errors import ConfigError, DataError
from gtrain.graph.shard import GraphShard, load_shard
from gtrain.graph.shard.hetero import HeteroShard, load_hetero_shard
from gtrain.graph.shard.nodes import ShardNodes
from gtrain.graph.store import Store
from gtrain.memory.heap import give_back_freed
from gtrain.nn import DglGraph
from gtrain.nn.dropout import StepRows, rows_of
from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.group import Group
from gtrain.strategy.spread_edges import SpreadEdges
from gtrain_sar import SERVES, config, unsupported
from gtrain_sar.halo import HaloExchange
from gtrain_sar.patching import Patcher, load_kernels
from gtrain_sar.typed.patching import TypedPatcher
from gtrain_sar.typed.relations import Relations


class SarStrategy(GraphStrategy):
    """Every rank holds one part of the graph and trains on it in full batch, exactly as one process would on the whole.

    Its settings are those of :class:`gtrain_sar.config.SarConfig`.

    Raises:
        ConfigError: a setting means nothing, or ``bfloat16`` messages of ``float64`` tensors.
    """

    strategy_name: ClassVar[str] = "sar"
    serves: ClassVar[Serves] = SERVES
    watches_edges: ClassVar[bool] = False
    settings_type = config.SarConfig
    settings: config.SarConfig

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self.schedule = self.settings.schedule
        self.wire_dtype = torch.bfloat16 if self.settings.wire_dtype == "bfloat16" else None
        self._patcher: Patcher | None = None
        self._graph: Data | HeteroData | None = None
        self._module: nn.Module | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        if self.wire_dtype is not None and self.dtype == torch.float64:
            raise ConfigError(
                "strategy.wire_dtype=bfloat16 was set with trainer.precision=64-true: messages of 8 bits would carry "
                "tensors of 53.",
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
        self._patcher, self._graph = self._make_patcher(shard), None
        if self._module is not None:
            self._patcher.install(self._module)
        return shard

    def _make_patcher(self, shard: GraphShard | HeteroShard) -> Patcher:
        if isinstance(shard, HeteroShard):
            return TypedPatcher(Relations(self.group, shard, self._exchange), self.schedule)
        return Patcher(self._exchange(self.group, shard), self.schedule)

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
            self._graph = self._whole(shard, loader.store)
        if loader.seeds_are_edges:
            return LinkBatches(self._graph, SpreadEdges(self.group, loader), loader)
        return [split_batch(self._graph, loader.split)]

    def _whole(self, shard: GraphShard | HeteroShard, store: Store) -> Data | HeteroData:
        """The shard as a batch whose tensors serve all splits and epochs."""
        if isinstance(shard, GraphShard):
            graph: Data | HeteroData = graph_batch(shard, self.dtype).to(self.root_device)
        else:
            graph = hetero_shard_batch(shard, store, self.dtype).to(self.root_device)
        assert self._patcher is not None
        values = (value for stored in graph.stores for value in stored.values())
        self._patcher.constants.add(value for value in values if isinstance(value, Tensor))
        if isinstance(graph, HeteroData) and isinstance(self._patcher, TypedPatcher):
            self._patcher.relations.know(graph.edge_index_dict)
        return graph

    def dropout_rows(self, batch: Any) -> StepRows:
        assert self._patcher is not None
        if isinstance(self._patcher, TypedPatcher):
            return rows_of(batch, {t: each.all_ids for t, each in self._patcher.relations.exchanges.items()})
        return rows_of(batch, {"node": self._patcher.exchange.all_ids})

    def check_module(self, module: nn.Module) -> None:
        if unsupported.lacks_dgl_graph(module):
            raise ConfigError(
                f"strategy=sar does not serve {type(module).__name__}: it makes the graph for DGL itself.",
                hint="make the graph with a gtrain.nn.DglGraph, a layer of the module; see docs/dgl.md.",
            )
        if not any(isinstance(layer, MessagePassing | DglGraph) for layer in module.modules()):
            raise ConfigError(
                f"strategy=sar does not serve {type(module).__name__}: it has no message-passing layer, so there is "
                "nothing to aggregate.",
                hint="use strategy=single, or a model with convolutions of PyG or DGL.",
            )
        for name, layer in module.named_modules():
            why = unsupported.reason(layer)
            if why is not None:
                raise ConfigError(
                    f"strategy=sar does not serve {type(layer).__name__} ({name}): {why}.",
                    hint="use strategy=single, or another layer.",
                )

    def install(self, module: nn.Module) -> None:
        # the shard is opened with the first loader, which Lightning asks for after this
        self._module = module
        if self.root_device.type == "cpu":
            load_kernels(module, self.dtype)
        if self._patcher is not None:
            self._patcher.install(module)

    def uninstall(self, module: nn.Module) -> None:
        self._module = None
        if self._patcher is not None:
            self._patcher.uninstall()


def check_parts_agree(group: Group, shard: GraphShard | HeteroShard) -> None:
    """Compare types and the tensors' columns and element types of all ranks' parts.

    Raises:
        DataError: says on every rank what the first part has that differs, and how.
    """
    described = group.all_gather_object(_description(shard))
    for part, description in enumerate(described):
        for what in sorted({*described[0], *description}):
            here, there = description.get(what, "nothing"), described[0].get(what, "nothing")
            if here != there:
                raise DataError(
                    f"the parts of the graph differ: of {what}, part {part} has {here} and part 0 has {there}.",
                    hint="partition the graph anew, from one source, and give every machine the same store.",
                )


def _description(shard: GraphShard | HeteroShard) -> dict[str, str]:
    """What must be equal in all parts, in words."""
    if isinstance(shard, GraphShard):
        return {"the nodes": _tensors(shard.node_data), "the edges": _tensors(shard.edge_data)}
    nodes = {f"the node type {kind}": _tensors(tensors) for kind, tensors in shard.node_data.items()}
    edges = {f"the edge type {', '.join(kind)}": _tensors(tensors) for kind, tensors in shard.edge_data.items()}
    return nodes | edges


def _tensors(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {_columns(tensor)}" for name, tensor in sorted(tensors.items()))


def _columns(tensor: Tensor) -> str:
    columns = "".join(f" x {size}" for size in tensor.shape[1:])
    return f"({str(tensor.dtype).removeprefix('torch.')}{columns})"


class LinkBatches:
    """One batch an epoch. In training each epoch has other false edges.

    Args:
        graph: the shard as a batch.
        edges: this rank's edges of the split.
        loader: describes the split.
    """

    def __init__(self, graph: Data | HeteroData, edges: SpreadEdges, loader: SeedLoader) -> None:
        self._graph, self._edges, self._loader = graph, edges, loader
        self._fixed: Data | HeteroData | None = None

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Data | HeteroData]:
        epoch = self._loader.next_epoch()
        if self._loader.split == "train":
            yield self._edges.batch(self._graph, epoch)
            return
        if self._fixed is None:
            self._fixed = self._edges.batch(self._graph, 0)
        yield self._fixed
