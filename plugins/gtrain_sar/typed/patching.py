"""Patching networks for graphs with types: layers over all relations, and convolutions of single ones.

A layer is a ``HeteroConv``, a convolution over all types, or the calls of a ``to_hetero`` graph for each edge type.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch_geometric.nn import HeteroConv
from torch_geometric.nn.conv import HGTConv, MessagePassing
from torch_geometric.nn.conv.hetero_conv import group

from gtrain.graph.store.manifest import EdgeType
from gtrain_sar.config import Schedule
from gtrain_sar.edges import BlockIndex
from gtrain_sar.halo import HaloExchange
from gtrain_sar.normalize import GcnNorm
from gtrain_sar.patching import Patcher
from gtrain_sar.typed.layer import Ends, ExtendedRun, LayerCall, LayerContext, TypedLayer
from gtrain_sar.typed.relations import Relation, Relations

OVER_ALL_TYPES: tuple[type[nn.Module], ...] = (HGTConv,)
"""Convolutions that take dictionaries by type and pass messages once for all of them."""


class TypedPatcher(Patcher):
    """Patches a module so that its convolutions run over the shards of a graph with types.

    Args:
        relations: the shard's.
        schedule: how blocks are worked off.
    """

    typed: ClassVar[bool] = True

    def __init__(self, relations: Relations, schedule: Schedule) -> None:
        self.relations = relations
        super().__init__(next(iter(relations.exchanges.values())), schedule)
        for exchange in relations.exchanges.values():
            exchange.constants = self.constants
        self.context = LayerContext(relations, self.patches, self.constants, schedule)
        self._norms: dict[Relation, GcnNorm] = {}
        self._functions.replacements["gcn_norm"] = self._gcn_norm

    def install(self, module: nn.Module) -> None:
        self.patches.undo_with(*self.relations.install(module))
        super().install(module)
        for layer in module.modules():
            if type(layer).forward is HeteroConv.forward:
                runner = TypedLayer(self.context)
                self.patches.add(layer, "forward", partial(self._hetero_conv, runner, layer))
            elif isinstance(layer, OVER_ALL_TYPES):
                self.patches.add(layer, "forward", partial(self._over_all_types, layer))
            elif isinstance(layer, GraphModule) and has_typed_convolutions(layer, self.relations):
                self.patches.add(layer, "forward", TypedGraph(layer, self.context).forward)

    def edges(self) -> BlockIndex:
        return self.relations.of().edges

    def _gcn_norm(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        relation = self.relations.of()
        if relation not in self._norms:
            self._norms[relation] = GcnNorm(relation.source, self.constants)
        return self._norms[relation](*args, **kwargs)

    # ------------------------------------------------------------------------ what runs instead

    def _hetero_conv(self, runner: TypedLayer, layer: HeteroConv, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """``HeteroConv.forward`` over the shard."""
        pairs = [(edge_type, self._call_of(edge_type, conv, args, kwargs)) for edge_type, conv in layer.convs.items()]
        calls = [(edge_type, call) for edge_type, call in pairs if call is not None]
        by_target: dict[str, list[Tensor]] = defaultdict(list)
        for (edge_type, _), result in zip(calls, runner.run([call for _, call in calls]), strict=True):
            by_target[edge_type[2]].append(result)
        return {node_type: group(results, layer.aggr) for node_type, results in by_target.items()}

    def _call_of(
        self, edge_type: EdgeType, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LayerCall | None:
        """The call that ``HeteroConv`` makes for an edge type; None where there are no edges of it."""
        if not any(edge_type in by_type for by_type in (*args, *kwargs.values())):
            return None
        relation = self.relations.by_type[edge_type]
        positional = [value for by_type in args for value in self._argument(edge_type, by_type)]
        named = {
            name.removesuffix("_dict"): value
            for name, by_type in kwargs.items()
            for value in self._argument(edge_type, by_type)
        }
        return LayerCall(conv, relation, relation.num_targets, tuple(positional), named)

    def _argument(self, edge_type: EdgeType, by_type: dict[Any, Any]) -> list[Any]:
        """What a dictionary has for an edge type; nothing, where it knows neither the type nor its ends."""
        if edge_type in by_type:
            return [by_type[edge_type]]
        source, _, target = edge_type
        if source not in by_type and target not in by_type:
            return []
        exchange = self.relations.exchanges[source]
        if source == target:
            return [Ends(exchange, by_type[source], pair=False)]
        return [Ends(exchange, by_type.get(source), by_type.get(target))]

    def _over_all_types(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward over own and halo rows of all types that edges start at."""
        sources = {edge_type[0] for edge_type in self.relations.by_type}

        def replace(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            return {
                key: Ends(self.relations.exchanges[key], tensor, pair=False) if key in sources else tensor
                for key, tensor in value.items()
            }

        counts = {node_type: exchange.shard.num_local for node_type, exchange in self.relations.exchanges.items()}
        named = {name: replace(value) for name, value in kwargs.items()}
        function = partial(type(layer).forward, layer)
        call = LayerCall(layer, None, counts, tuple(map(replace, args)), named, function)
        return ExtendedRun([call], self.context).results()[0]


def has_typed_convolutions(module: GraphModule, relations: Relations) -> bool:
    """Whether the graph calls convolutions that are named after edge types."""
    return any(_edge_type(module, node, relations) is not None for node in module.graph.nodes)


def _edge_type(module: nn.Module, node: Node, relations: Relations) -> EdgeType | None:
    if node.op != "call_module" or not isinstance(module.get_submodule(str(node.target)), MessagePassing):
        return None
    return relations.by_name.get(str(node.target).rpartition(".")[2])


class TypedGraph(Interpreter):
    """Runs the graph call by call, and all convolutions of a layer together where the first of them is due.

    Args:
        module: what ``to_hetero`` returned.
        context: how layers are run.
    """

    def __init__(self, module: GraphModule, context: LayerContext) -> None:
        super().__init__(module)
        self._signature = inspect.signature(module.forward)
        self._context = context
        self._layers: dict[str, TypedLayer] = {}
        self._done: dict[Node, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's ``forward``."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self._done.clear()
        try:
            return self.run(*bound.args, *bound.kwargs.values())
        finally:
            self.env.clear()

    def run_node(self, n: Node) -> Any:
        """A value of the graph."""
        if n not in self._done and self._type_of(n) is not None:
            self._run_layer(str(n.target).rpartition(".")[0])
        return self._done.pop(n) if n in self._done else super().run_node(n)

    def _run_layer(self, name: str) -> None:
        nodes = [node for node in self.module.graph.nodes if self._is_due(node, name)]  # type: ignore[union-attr]
        layer = self._layers.setdefault(name, TypedLayer(self._context))
        results = layer.run([self._call(node) for node in nodes])
        self._done.update(zip(nodes, results, strict=True))

    def _is_due(self, node: Node, name: str) -> bool:
        of_layer = self._type_of(node) is not None and str(node.target).rpartition(".")[0] == name
        ready = all(value in self.env for value in node.all_input_nodes)
        return of_layer and ready and node not in self.env and node not in self._done

    def _type_of(self, node: Node) -> EdgeType | None:
        return _edge_type(self.module, node, self._context.relations)

    def _call(self, node: Node) -> LayerCall:
        edge_type = self._type_of(node)
        assert edge_type is not None
        relation = self._context.relations.by_type[edge_type]
        conv, exchange = self.module.get_submodule(str(node.target)), relation.source
        names = [name for name in inspect.signature(type(conv).forward).parameters if name != "self"]
        args, kwargs = map_arg((node.args, node.kwargs), lambda value: self.env[value])
        positional = tuple(_argument(name, value, exchange) for name, value in zip(names, args, strict=False))
        named = {name: _argument(name, value, exchange) for name, value in kwargs.items()}
        return LayerCall(conv, relation, relation.num_targets, positional, named)


def _argument(name: str, value: Any, exchange: HaloExchange) -> Any:
    """Pairs of tensors, and tensors whose name is not one of edge data (by ``to_hetero``'s rule), belong to nodes."""
    if isinstance(value, tuple) and len(value) == 2 and any(isinstance(v, Tensor) for v in value):
        return Ends(exchange, *value)
    of_edges = "edge" in name or "adj" in name
    return Ends(exchange, value, pair=False) if isinstance(value, Tensor) and not of_edges else value
