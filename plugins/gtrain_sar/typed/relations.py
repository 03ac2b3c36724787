"""Which nodes a convolution reads and writes: an edge type's, in a graph with types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.conv import MessagePassing

from gtrain.errors import ConfigError
from gtrain.graph.shard.hetero import HeteroShard
from gtrain.graph.store.manifest import EdgeType
from gtrain.strategy.group import Group
from gtrain_sar.edges import BlockIndex
from gtrain_sar.halo import HaloExchange


@dataclass(eq=False)
class Relation:
    """The two ends of some edges.

    Attributes:
        source: the exchange of the nodes that they start at.
        target: the exchange of the nodes that they point at.
        num_targets: own nodes that they point at.
        edges: their blocks.
    """

    source: HaloExchange
    target: HaloExchange
    num_targets: int
    edges: BlockIndex = field(init=False)

    def __post_init__(self) -> None:
        self.edges = BlockIndex(self.source, self.num_targets, self.target)


class Relations:
    """The relations of a typed shard, and which of them a convolution is working on.

    A layer that calls a convolution for an edge type says so (:meth:`inside`). For others it is told by the
    ``edge_index`` that the convolution is called with, if it is one of the batch's, or else by the convolution's name
    in the model, if its last part is ``source__relation__target``, as ``to_hetero`` names them.

    Args:
        group: the ranks.
        shard: this rank's part.
        make: makes the exchange of a node type's rows.

    Attributes:
        group: the ranks.
        exchanges: of each node type.
    """

    def __init__(self, group: Group, shard: HeteroShard, make: Callable[..., HaloExchange] = HaloExchange) -> None:
        self.group = group
        self.exchanges = {
            node_type: make(group, nodes, orig_id=shard.node_data[node_type].get("orig_id"))
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

    def know(self, edge_index: Mapping[EdgeType, Tensor]) -> None:
        """Tell which tensors are the edges of which type."""
        for edge_type, tensor in edge_index.items():
            self._of_edges[tensor] = self.by_type[edge_type]

    def install(self, module: nn.Module) -> list[Callable[[], Any]]:
        """Watch the calls of every convolution in ``module``; returns how to undo it."""
        undo: list[Callable[[], Any]] = [self._of_conv.clear]
        for name, layer in module.named_modules():
            if isinstance(layer, MessagePassing):
                edge_type = self.by_name.get(name.rpartition(".")[2])
                if edge_type is not None:
                    self._of_conv[layer] = self.by_type[edge_type]
                undo.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                undo.append(layer.register_forward_hook(self._leave, always_call=True).remove)
        return undo

    def of(self) -> Relation:
        """What the convolution works on whose call is running.

        Raises:
            ConfigError: it cannot be told.
        """
        if self._current and self._current[-1] is not None:
            return self._current[-1]
        raise ConfigError(
            f"strategy=sar cannot tell which edge type {self._running or 'a convolution'} works on: the edges that it "
            "was called with are not the batch's.",
            hint="call it with batch.edge_index_dict[...] as it is, or keep it in a ModuleDict under "
            "source__relation__target.",
        )

    @contextmanager
    def inside(self, relation: Relation | None) -> Iterator[None]:
        """Convolutions that are called meanwhile work on this relation, unless their edges say otherwise."""
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
        relation: Relation | None = next((self._of_edges[t] for t in tensors if t in self._of_edges), None)
        return relation


def name_of(edge_type: EdgeType) -> str:
    """An edge type as ``to_hetero`` and common practice name it in a ``ModuleDict``."""
    return "__".join(edge_type).replace(" ", "_").replace("-", "_").replace(":", "_")
