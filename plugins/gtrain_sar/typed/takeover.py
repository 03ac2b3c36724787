"""Taking over networks for graphs with types: layers over all relations, and convolutions of single ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.fx import GraphModule
from torch_geometric.nn import HeteroConv
from torch_geometric.nn.conv import HGTConv, MessagePassing
from torch_geometric.nn.conv.hetero_conv import group

from gtrain.graph.store.manifest import EdgeType
from gtrain_sar.config import Schedule
from gtrain_sar.edges import BlockIndex
from gtrain_sar.normalize import GcnNorm
from gtrain_sar.takeover import Takeover
from gtrain_sar.typed.calls import Ends, LayerCall
from gtrain_sar.typed.graph import TypedGraph, has_typed_convolutions
from gtrain_sar.typed.layer import TypedLayer
from gtrain_sar.typed.relations import Relation, Relations

OVER_ALL_TYPES: tuple[type[nn.Module], ...] = (HGTConv,)
"""Convolutions that take dictionaries by type and pass messages once for all of them."""


class TypedTakeover(Takeover):
    """Runs a module's convolutions over the shards of a graph with types.

    Args:
        relations: the shard's.
        schedule: how blocks are worked off.
    """

    typed: ClassVar[bool] = True

    def __init__(self, relations: Relations, schedule: Schedule) -> None:
        self.relations = relations
        self._shadows: dict[nn.Module, dict[str, Callable[..., Any]]] = defaultdict(dict)
        super().__init__(next(iter(relations.exchanges.values())), schedule)
        for exchange in relations.exchanges.values():
            exchange.constants = self.constants
        self._norms: dict[Relation, GcnNorm] = {}
        self._functions._replacements["gcn_norm"] = self._gcn_norm

    def install(self, module: nn.Module) -> None:
        self._undo += self.relations.install(module)
        super().install(module)
        for layer in module.modules():
            if type(layer).forward is HeteroConv.forward:
                self._shadow(layer, "forward", partial(self._hetero_conv, TypedLayer(self), layer))
            elif isinstance(layer, OVER_ALL_TYPES):
                self._shadow(layer, "forward", partial(self._over_all_types, TypedLayer(self), layer))
            elif isinstance(layer, GraphModule) and has_typed_convolutions(layer, self.relations):
                self._shadow(layer, "forward", TypedGraph(layer, self).forward)

    def uninstall(self) -> None:
        super().uninstall()
        self._shadows.clear()

    def edges(self) -> BlockIndex:
        return self.relations.of().edges

    @contextmanager
    def plain(self, module: nn.Module, **shadows: Callable[..., Any]) -> Iterator[None]:
        """Give ``module`` and its layers their own methods back for a while; batch norms stay synchronised.

        Args:
            module: a convolution.
            shadows: by name, what its convolutions have in place of their own methods; called with the convolution.
        """
        norms = nn.modules.batchnorm._BatchNorm
        taken = [layer for layer in module.modules() if layer in self._shadows and not isinstance(layer, norms)]
        before = [dict(layer.__dict__) for layer in taken]
        for layer in taken:
            for name in self._shadows[layer]:
                layer.__dict__.pop(name, None)
            if isinstance(layer, MessagePassing):
                layer.__dict__.update({name: partial(function, layer) for name, function in shadows.items()})
        try:
            yield
        finally:
            for layer, attributes in zip(taken, before, strict=True):
                for name in {*self._shadows[layer], *shadows}:
                    layer.__dict__.pop(name, None)
                    if name in attributes:
                        layer.__dict__[name] = attributes[name]

    def _shadow(self, layer: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self._shadows[layer][name] = function
        super()._shadow(layer, name, function)

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
        found: dict[str, list[Tensor]] = defaultdict(list)
        for (edge_type, _), result in zip(calls, runner.run([call for _, call in calls]), strict=True):
            found[edge_type[2]].append(result)
        return {node_type: group(results, layer.aggr) for node_type, results in found.items()}

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

    def _over_all_types(self, runner: TypedLayer, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward over own and halo rows of all types that edges start at."""
        sources = {edge_type[0] for edge_type in self.relations.by_type}

        def replace(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            return {
                key: Ends(self.relations.exchanges[key], tensor, pair=False) if key in sources else tensor
                for key, tensor in value.items()
            }

        counts = {kind: exchange.shard.num_local for kind, exchange in self.relations.exchanges.items()}
        named = {name: replace(value) for name, value in kwargs.items()}
        function = partial(type(layer).forward, layer)
        return runner.whole(LayerCall(layer, None, counts, tuple(map(replace, args)), named, function))
