"""The edge type that a convolution works on in a graph with types, and the exchanges of its node types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.conv import MessagePassing

from gtrain.errors import ConfigError
from gtrain.graph.shard.graph import HeteroShard
from gtrain.graph.store.manifest import EdgeType
from gtrain.strategy.group import Group
from gtrain_sar.edges import EdgeBlockCache
from gtrain_sar.halo import HaloExchange


@dataclass(eq=False)
class Relation:
    """An edge type of a shard.

    Attributes:
        source: the exchange of the nodes at which its edges start.
        target: the exchange of the nodes at which they end.
        num_targets: local nodes at which they end.
        edges: their blocks.
    """

    source: HaloExchange
    target: HaloExchange
    num_targets: int
    edges: EdgeBlockCache = field(init=False)

    def __post_init__(self) -> None:
        self.edges = EdgeBlockCache(self.source, self.num_targets, self.target)


class Relations:
    """The relations of a typed shard, and the relation that the running convolution works on.

    A layer that calls a convolution for an edge type declares it by :meth:`inside`. Otherwise the ``edge_index`` of the
    call decides, if it is one of the batch's, or else the last part of the convolution's name in the model, if that is
    ``source__relation__target``, the name that ``to_hetero`` gives.

    Args:
        group: the ranks.
        shard: this rank's part.
        create_exchange: creates the exchange of a node type's rows.

    Attributes:
        group: the ranks.
        exchanges: by node type.
        by_type: the relations by edge type.
        by_name: the edge types by name.
    """

    def __init__(
        self, group: Group, shard: HeteroShard, create_exchange: Callable[..., HaloExchange] = HaloExchange
    ) -> None:
        self.group = group
        self.exchanges = {
            node_type: create_exchange(group, nodes, orig_id=shard.node_data[node_type].get("orig_id"))
            for node_type, nodes in shard.nodes.items()
        }
        self.by_type: dict[EdgeType, Relation] = {
            edge_type: Relation(
                self.exchanges[edge_type[0]], self.exchanges[edge_type[2]], shard.nodes[edge_type[2]].num_local
            )
            for edge_type in shard.edge_index
        }
        self.by_name = {name_of(edge_type): edge_type for edge_type in shard.edge_index}
        self._of_edges: Any = WeakIdKeyDictionary()
        self._of_conv: dict[nn.Module, Relation] = {}
        self._current: list[Relation | None] = []
        self._running = ""

    def register(self, edge_index: Mapping[EdgeType, Tensor]) -> None:
        """Register the batch's edges of each type."""
        for edge_type, tensor in edge_index.items():
            self._of_edges[tensor] = self.by_type[edge_type]

    def install(self, module: nn.Module) -> list[Callable[[], Any]]:
        """Watch the calls of every convolution in ``module``; return the actions that undo it."""
        undo: list[Callable[[], Any]] = [self._of_conv.clear]
        for name, layer in module.named_modules():
            if isinstance(layer, MessagePassing):
                edge_type = self.by_name.get(name.rpartition(".")[2])
                if edge_type is not None:
                    self._of_conv[layer] = self.by_type[edge_type]
                undo.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                undo.append(layer.register_forward_hook(self._leave, always_call=True).remove)
        return undo

    def current(self) -> Relation:
        """Return the relation that the running convolution works on.

        Raises:
            ConfigError: neither its edges nor its name identify it.
        """
        if self._current and self._current[-1] is not None:
            return self._current[-1]
        raise ConfigError(
            f"strategy=sar does not know the edge type of {self._running or 'a convolution'}: it was called with edges "
            "that are not the batch's.",
            hint="call it with batch.edge_index_dict[...] unchanged, or keep it in a ModuleDict under "
            "source__relation__target.",
        )

    @contextmanager
    def inside(self, relation: Relation | None) -> Iterator[None]:
        """Convolutions called inside this context work on this relation, unless their edges identify another one."""
        self._current.append(relation)
        try:
            yield
        finally:
            self._current.pop()

    def _enter(self, conv: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running = type(conv).__name__
        outer = self._current[-1] if self._current else None
        self._current.append(self._by_edges(args, kwargs) or outer or self._of_conv.get(conv))

    def _leave(self, *_: Any) -> None:
        self._current.pop()

    def _by_edges(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Relation | None:
        tensors = (leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor))
        return next((self._of_edges[t] for t in tensors if t in self._of_edges), None)


def name_of(edge_type: EdgeType) -> str:
    """Return the name of an edge type in a ``ModuleDict``, as ``to_hetero`` and common practice form it."""
    return "__".join(edge_type).replace(" ", "_").replace("-", "_").replace(":", "_")
