"""Patches a module so that its convolutions and batch norms run over shards, and undoes the patches afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch_geometric
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing, RGCNConv
from torch_geometric.nn.norm import BatchNorm

from gtrain.engine.constants import Constants
from gtrain.engine.edges import EdgeBlockCache, EdgeBlocks
from gtrain.engine.fused_layers import FusedLayers
from gtrain.engine.halo import HaloExchange
from gtrain.engine.normalize import sharded_gcn_norm, synchronised_batch_norm
from gtrain.engine.patching import MethodPatches, PatchedFunctions, RunHook
from gtrain.engine.propagate import Propagation
from gtrain.engine.relations import RelationalConv, are_known
from gtrain.engine.schedule import Schedule
from gtrain.errors import ConfigError, DataError
from gtrain.nn import DglGraph
from gtrain_sar.whole_halo import WholeHalo, as_pair

_CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h")
"""Caches of a graph that convolutions with ``cached=True`` have; a shard's must not be used outside of the run."""
_GCN_NORM = inspect.signature(sharded_gcn_norm)


class Patcher:
    """Patches a module so that its convolutions run over shards.

    Args:
        exchange: this rank's halo.
        schedule: when blocks are fetched.
    """

    typed: ClassVar[bool] = False
    """Whether the graph has several types: their layers share exchanges, so no layer is computed in one function."""

    def __init__(self, exchange: HaloExchange, schedule: Schedule) -> None:
        self.exchange, self.schedule = exchange, schedule
        self.constants, self.patches = Constants(schedule), MethodPatches()
        exchange.constants = self.constants
        self.propagation = Propagation(schedule, self.constants, self.patches.add, WholeHalo())
        self._fused_layers = FusedLayers(schedule, self.constants, self._blocks)
        self._functions = PatchedFunctions(self.constants, self._gcn_norm)
        self._edges = EdgeBlockCache(exchange, exchange.shard.num_local)

    @property
    def exchanges(self) -> Mapping[str, HaloExchange]:
        """The exchange of each node type."""
        return {"node": self.exchange}

    def install(self, module: nn.Module) -> None:
        """Shadow the methods of every convolution and batch norm in ``module``."""
        single = [layer for layer in module.modules() if isinstance(layer, BatchNorm) and layer.allow_single_element]
        inner = {layer.module for layer in single}
        for layer in single:
            # Its own forward decides by the rank's rows, and then takes part in no exchange.
            self.patches.add(layer, "forward", partial(_inner_norm, layer))
        for layer in module.modules():
            if isinstance(layer, MessagePassing):
                self._patch(layer)
            elif isinstance(layer, DglGraph):
                self._patch_dgl_graph(layer)
            elif isinstance(layer, nn.BatchNorm1d) and type(layer).forward is nn.BatchNorm1d.forward:
                norm = partial(synchronised_batch_norm, layer, self.exchange.group, allow_single=layer in inner)
                self.patches.add(layer, "forward", norm)
        convs = [layer for layer in module.modules() if isinstance(layer, MessagePassing)]
        self.patches.undo_with(*self._functions.install(convs))

    def uninstall(self) -> None:
        """Undo every change."""
        self.patches.undo()

    def _patch(self, conv: MessagePassing) -> None:
        for name in _CACHES:
            if name in conv.__dict__:
                self.patches.undo_with(partial(conv.__dict__.__setitem__, name, conv.__dict__[name]))
                conv.__dict__[name] = None
        self.patches.undo_with(*self.propagation.watch(conv))
        self.patches.add(conv, "propagate", partial(self.propagate, conv))
        self.patches.add(conv, "edge_updater", partial(self.edge_updater, conv))
        if self.schedule.compiled:
            self.propagation.transforms.install(conv)
        fused = None if self.typed or "forward" in conv.__dict__ else self._fused_layers.forward_of(conv)
        if type(conv).forward is RGCNConv.forward:
            hook = conv.register_forward_pre_hook(RunHook(_check_relational), with_kwargs=True)
            self.patches.undo_with(hook.remove, _without_segments())
            if self.schedule.compiled and type(conv).message is RGCNConv.message:
                edges_of = partial(self._edges_of, conv)
                fused = RelationalConv(conv, edges_of, self.schedule, self.constants, whole=False).forward
        if fused is not None:
            self.patches.add(conv, "forward", fused)

    def _patch_dgl_graph(self, layer: DglGraph) -> None:
        # Loads DGL, which the model has loaded already.
        from gtrain_sar.dgl.graph import DglShards

        shards = DglShards(self._edges, self.schedule)
        self.patches.undo_with(shards.close)
        self.patches.add(layer, "forward", partial(shards.graph, layer))

    # ------------------------------------------------------------------------ replacements of methods

    def propagate(self, conv: MessagePassing, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        """``conv.propagate`` over the shard, which determines ``size``."""
        _check_ids(conv, kwargs)
        _check_nodes_first(conv, kwargs)
        edges = self.edges()
        check_arguments(conv, conv._user_args, kwargs, edges)
        return self.propagation.propagate(conv, edge_index, edges, kwargs)

    def edge_updater(self, conv: MessagePassing, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Any:
        """``conv.edge_updater`` over the shard."""
        edges = self.edges()
        check_arguments(conv, conv._edge_user_args, kwargs, edges)
        return self.propagation.edge_updater(conv, edge_index, edges, kwargs)

    def edges(self) -> EdgeBlockCache:
        """Return the blocks of edges between the nodes that the running convolution works on."""
        return self._edges

    def _blocks(self, edge_index: Tensor, num_sources: int, num_targets: int) -> EdgeBlocks:
        edges = self.edges()
        check_count_of_rows("a convolution", num_sources, edges.num_sources)
        check_count_of_rows("a convolution", num_targets, edges.num_targets)
        return edges(edge_index)

    def _edges_of(self, conv: MessagePassing, x: Any) -> EdgeBlockCache:
        edges = self.edges()
        check_rows(conv, as_pair(x), edges)
        return edges

    def _gcn_norm(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Callable[..., Any]]:
        """Return the arguments of :func:`sharded_gcn_norm` for those of PyG's ``gcn_norm``, and that function."""
        bound = _GCN_NORM.bind(self.edges().exchange, *args, **kwargs)
        bound.apply_defaults()
        return bound.args, sharded_gcn_norm


def _inner_norm(layer: BatchNorm, x: Tensor) -> Tensor:
    return layer.module(x)  # type: ignore[no-any-return]


def _without_segments() -> Callable[[], None]:
    """Keep ``RGCNConv`` from choosing by the rank's edges how often it passes messages; return what undoes it."""
    backend = torch_geometric.backend
    undo = partial(setattr, backend, "use_segment_matmul", backend.use_segment_matmul)
    backend.use_segment_matmul = False
    return undo


def _check_relational(conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an ``RGCNConv`` that makes up ids, or that has no weights for some edges.

    Each rank would find other edges without weights, and the ranks would then pass messages differently often.
    """
    types: Any = args[2] if len(args) > 2 else kwargs.get("edge_type")
    if isinstance(types, Tensor) and not are_known(types, conv.num_relations):  # type: ignore[arg-type]
        raise DataError(
            f"{type(conv).__name__} has {conv.num_relations} relations, and its edges have the types "
            f"{int(types.min())} to {int(types.max())}.",
            hint="set its num_relations to one more than the largest type of an edge; types start at 0.",
        )
    if (args[0] if args else kwargs.get("x")) is None:
        raise ConfigError(
            f"{type(conv).__name__} was called without features; it would use a node's position in its part as id.",
            hint="use gtrain.model.relational.IdRGCNConv, give it batch.orig_id as x, or set strategy=single.",
        )


def _check_ids(conv: MessagePassing, kwargs: dict[str, Any]) -> None:
    """Refuse a convolution that uses positions in ``edge_index`` as ids (``FastRGCNConv`` over ids)."""
    ids = any(
        isinstance(value, Tensor) and name == "x" and not value.is_floating_point() for name, value in kwargs.items()
    )
    if ids and "edge_index_j" in conv._user_args:
        raise ConfigError(
            f"{type(conv).__name__} was called with ids instead of features, and looks them up by the positions in "
            "edge_index, which differ between parts.",
            hint="use gtrain.model.relational.IdRGCNConv, give the nodes features, or set strategy=single.",
        )


def check_arguments(conv: MessagePassing, names: Any, kwargs: dict[str, Any], edges: EdgeBlockCache) -> None:
    """Refuse arguments of ``propagate`` or ``edge_updater`` without a row for each node of the part.

    Args:
        conv: the convolution.
        names: of the parameters of the methods that are called for each edge.
        kwargs: the arguments.
        edges: of the call.

    Raises:
        ConfigError: kernels would read or write beyond the rows.
    """
    for name, value in kwargs.items():
        read = [f"{name}_{end}" in names for end in "ji"]
        if any(read):
            # PyG takes the number of nodes from both values of a pair, though only one may be read.
            both = isinstance(value, (tuple, list))
            pair = [end if both or used else None for end, used in zip(as_pair(value), read, strict=True)]
            check_rows(conv, pair, edges)


def check_rows(conv: nn.Module, pair: Sequence[Any], edges: EdgeBlockCache) -> None:
    """Refuse values at sources and at targets, each None or a tensor, that lack a row for each node of the part."""
    for value, count in zip(pair, (edges.num_sources, edges.num_targets), strict=True):
        if isinstance(value, Tensor) and value.dim():
            check_count_of_rows(type(conv).__name__, value.size(0), count)


def check_count_of_rows(layer: str, rows: int, nodes: int) -> None:
    """Raise ConfigError unless a layer has as many rows as this rank has nodes."""
    if rows != nodes:
        raise ConfigError(
            f"{layer} was called with {rows} rows at one end of its edges, where this rank has {nodes} nodes; "
            "strategy=sar needs a row for each node of the part.",
            hint="give convolutions all rows of the batch, and select nodes in their result; or set strategy=single.",
        )


def _check_nodes_first(conv: MessagePassing, kwargs: dict[str, Any]) -> None:
    at_sources = [as_pair(value) for name, value in kwargs.items() if f"{name}_j" in conv._user_args]
    dims = [tensor.dim() for pair in at_sources for tensor in pair if isinstance(tensor, Tensor)]
    if any(conv.node_dim % dim for dim in dims if dim):
        raise ConfigError(
            f"{type(conv).__name__} was called with features of {max(dims)} dimensions and has "
            f"node_dim={conv.node_dim}; strategy=sar requires nodes to be the first dimension.",
            hint="use node_dim=0 and [nodes, ...], or strategy=single.",
        )
