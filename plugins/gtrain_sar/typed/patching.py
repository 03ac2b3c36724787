"""Patches networks for graphs with types: layers over all relations, and convolutions of a single relation.

A layer is a ``HeteroConv``, a convolution over all types, or the calls that a ``to_hetero`` graph makes per edge type.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
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
from gtrain_sar.edges import EdgeBlockCache
from gtrain_sar.halo import HaloExchange
from gtrain_sar.patching import Patcher
from gtrain_sar.typed.layer import HaloRun, LayerCall, LayerContext, NodeArgument, TypedLayer
from gtrain_sar.typed.relations import Relations

OVER_ALL_TYPES: tuple[type[nn.Module], ...] = (HGTConv,)
"""Convolutions that take dictionaries by type and pass messages once for all types."""


class TypedPatcher(Patcher):
    """Patches a module so that its convolutions run over the shards of a graph with types.

    Args:
        relations: of the shard.
        schedule: when blocks are fetched.
    """

    typed: ClassVar[bool] = True

    def __init__(self, relations: Relations, schedule: Schedule) -> None:
        self.relations = relations
        super().__init__(next(iter(relations.exchanges.values())), schedule)
        for exchange in self.exchanges.values():
            exchange.constants = self.constants
        self.context = LayerContext(relations, self.patches, self.constants, schedule)

    @property
    def exchanges(self) -> Mapping[str, HaloExchange]:
        return self.relations.exchanges

    def install(self, module: nn.Module) -> None:
        self.patches.undo_with(*self.relations.install(module))
        super().install(module)
        for layer in module.modules():
            if type(layer).forward is HeteroConv.forward:
                self.patches.add(layer, "forward", partial(self._hetero_conv, TypedLayer(self.context), layer))
            elif isinstance(layer, OVER_ALL_TYPES):
                self.patches.add(layer, "forward", partial(self._over_all_types, layer))
            elif isinstance(layer, GraphModule) and has_typed_convolutions(layer, self.relations):
                self.patches.add(layer, "forward", TypedGraph(layer, self.context).forward)

    def edges(self) -> EdgeBlockCache:
        return self.relations.current().edges

    # ------------------------------------------------------------------------ replacements of methods

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
        """Return the call that ``HeteroConv`` makes for an edge type; None if its arguments do not name the type."""
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
        """Return a dictionary's entry for an edge type as a list, empty if it has neither the type nor its ends."""
        if edge_type in by_type:
            return [by_type[edge_type]]
        source, _, target = edge_type
        if source not in by_type and target not in by_type:
            return []
        exchange = self.exchanges[source]
        if source == target:
            return [NodeArgument(exchange, by_type[source], pair=False)]
        return [NodeArgument(exchange, by_type.get(source), by_type.get(target))]

    def _over_all_types(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's ``forward`` over local and halo rows of all types at which edges start."""
        sources = {edge_type[0] for edge_type in self.relations.by_type}

        def replace(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            return {
                key: NodeArgument(self.exchanges[key], tensor, pair=False) if key in sources else tensor
                for key, tensor in value.items()
            }

        counts = {node_type: exchange.shard.num_local for node_type, exchange in self.exchanges.items()}
        named = {name: replace(value) for name, value in kwargs.items()}
        function = partial(type(layer).forward, layer)
        call = LayerCall(layer, None, counts, tuple(map(replace, args)), named, function)
        return HaloRun([call], self.context).results()[0]


def has_typed_convolutions(module: GraphModule, relations: Relations) -> bool:
    """Whether the graph calls convolutions that are named after edge types."""
    return any(_edge_type(module, node, relations) is not None for node in module.graph.nodes)


def _edge_type(module: nn.Module, node: Node, relations: Relations) -> EdgeType | None:
    if node.op != "call_module" or not isinstance(module.get_submodule(str(node.target)), MessagePassing):
        return None
    return relations.by_name.get(str(node.target).rpartition(".")[2])


class TypedGraph(Interpreter):
    """Interprets the graph of a ``to_hetero`` network, and runs the convolutions of a layer together at the first one.

    Args:
        module: the network.
        context: shared by all layers.
    """

    def __init__(self, module: GraphModule, context: LayerContext) -> None:
        super().__init__(module)
        self._signature = inspect.signature(module.forward)
        self._context = context
        self._layers: dict[str, TypedLayer] = {}
        self._results: dict[Node, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's ``forward``."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self._results.clear()
        try:
            return self.run(*bound.args, *bound.kwargs.values())
        finally:
            self.env.clear()

    def run_node(self, n: Node) -> Any:
        """Compute a value of the graph."""
        if n not in self._results and self._type_of(n) is not None:
            self._run_layer(str(n.target).rpartition(".")[0])
        return self._results.pop(n) if n in self._results else super().run_node(n)

    def _run_layer(self, name: str) -> None:
        nodes = [node for node in self.module.graph.nodes if self._is_ready(node, name)]  # type: ignore[union-attr]
        layer = self._layers.setdefault(name, TypedLayer(self._context))
        results = layer.run([self._call(node) for node in nodes])
        self._results.update(zip(nodes, results, strict=True))

    def _is_ready(self, node: Node, name: str) -> bool:
        """Whether a node is a convolution of the layer whose inputs are known and that did not run yet."""
        of_layer = self._type_of(node) is not None and str(node.target).rpartition(".")[0] == name
        ready = all(value in self.env for value in node.all_input_nodes)
        return of_layer and ready and node not in self.env and node not in self._results

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
    """Wrap node data: pairs of tensors, and tensors whose name does not denote edge data by ``to_hetero``'s rule."""
    if isinstance(value, tuple) and len(value) == 2 and any(isinstance(v, Tensor) for v in value):
        return NodeArgument(exchange, *value)
    of_edges = "edge" in name or "adj" in name
    return NodeArgument(exchange, value, pair=False) if isinstance(value, Tensor) and not of_edges else value
