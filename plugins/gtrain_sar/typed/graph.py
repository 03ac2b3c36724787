"""Networks that ``to_hetero`` made: a graph of calls in which a layer is one call for each edge type."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch_geometric.nn.conv import MessagePassing

from gtrain.graph.store.manifest import EdgeType
from gtrain_sar.halo import HaloExchange
from gtrain_sar.typed.calls import Ends, LayerCall
from gtrain_sar.typed.layer import TypedLayer
from gtrain_sar.typed.relations import Relations

if TYPE_CHECKING:
    from gtrain_sar.typed.takeover import TypedTakeover


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
        takeover: runs the network.
    """

    def __init__(self, module: GraphModule, takeover: TypedTakeover) -> None:
        super().__init__(module)
        self._signature = inspect.signature(module.forward)
        self._takeover = takeover
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
        layer = self._layers.setdefault(name, TypedLayer(self._takeover))
        results = layer.run([self._call(node) for node in nodes])
        self._done.update(zip(nodes, results, strict=True))

    def _is_due(self, node: Node, name: str) -> bool:
        of_layer = self._type_of(node) is not None and str(node.target).rpartition(".")[0] == name
        ready = all(value in self.env for value in node.all_input_nodes)
        return of_layer and ready and node not in self.env and node not in self._done

    def _type_of(self, node: Node) -> EdgeType | None:
        return _edge_type(self.module, node, self._takeover.relations)

    def _call(self, node: Node) -> LayerCall:
        edge_type = self._type_of(node)
        assert edge_type is not None
        relation = self._takeover.relations.by_type[edge_type]
        conv, exchange = self.module.get_submodule(str(node.target)), relation.source
        names = [name for name in inspect.signature(type(conv).forward).parameters if name != "self"]
        args, kwargs = map_arg((node.args, node.kwargs), lambda value: self.env[value])
        positional = tuple(_argument(name, value, exchange) for name, value in zip(names, args, strict=False))
        named = {name: _argument(name, value, exchange) for name, value in kwargs.items()}
        return LayerCall(conv, relation, relation.num_targets, positional, named)


def _argument(name: str, value: Any, exchange: HaloExchange) -> Any:
    """Pairs of tensors, and tensors that are not of edges by their name (as ``to_hetero`` tells them), are of nodes."""
    if isinstance(value, tuple) and len(value) == 2 and any(isinstance(v, Tensor) for v in value):
        return Ends(exchange, *value)
    of_edges = "edge" in name or "adj" in name
    return Ends(exchange, value, pair=False) if isinstance(value, Tensor) and not of_edges else value
