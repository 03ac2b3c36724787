"""One call of a convolution's ``propagate``, taken apart so that it can be run block by block."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.aggr import Aggregation, MaxAggregation, MeanAggregation, MinAggregation, SumAggregation
from torch_geometric.nn.conv import MessagePassing

from gtrain.graph.shard import GraphShard

REDUCTIONS: dict[type[Aggregation], str] = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
}


def reduction(conv: MessagePassing) -> str | None:
    """How blocks of messages combine, or None where they cannot be combined block by block.

    They can when ``message`` sees one edge at a time (it asks for no ``index``, ``ptr`` or ``dim_size``, over which a
    softmax or a norm would be taken), when the aggregation is a plain sum, mean, maximum or minimum, and when
    ``update`` sees nothing but the aggregate.
    """
    cls = type(conv)
    inspector = conv.inspector
    if cls.aggregate is not MessagePassing.aggregate or conv.decomposed_layers > 1 or conv.explain:
        return None
    if set(inspector.get_param_names("message")) & MessagePassing.special_args:
        return None
    if inspector.get_param_names("update", exclude=[0]):
        return None
    return REDUCTIONS.get(type(conv.aggr_module))


@dataclass
class EdgeBlocks:
    """Edges sorted into the blocks of their sources.

    Attributes:
        ids: per block, int64 positions in ``edge_index``.
        sources: per block, int64 rows of the block's source tensor.
        targets: per block, int64 local ids.
        in_degree: int64 [num_local], edges that arrive over all blocks.
    """

    ids: list[Tensor]
    sources: list[Tensor]
    targets: list[Tensor]
    in_degree: Tensor


class BlockIndex:
    """:class:`EdgeBlocks` by ``edge_index``, remembered as long as that tensor lives."""

    def __init__(self, shard: GraphShard) -> None:
        self._shard = shard
        self._known: Any = WeakIdKeyDictionary()

    def __call__(self, edge_index: Tensor) -> EdgeBlocks:
        """The blocks of ``edge_index`` [2, E], in the shard's local ids; convs may have added or removed edges."""
        if edge_index not in self._known:
            self._known[edge_index] = self._sort(edge_index)
        blocks: EdgeBlocks = self._known[edge_index]
        return blocks

    def _sort(self, edge_index: Tensor) -> EdgeBlocks:
        ptr = self._shard.block_ptr.to(edge_index.device)
        block = torch.bucketize(edge_index[0], ptr[1:-1], right=True)
        # an empty block repeats a boundary; right=True then skips it, as it should
        ids = [(block == r).nonzero().view(-1) for r in range(len(ptr) - 1)]
        return EdgeBlocks(
            ids,
            [edge_index[0, i] - ptr[r] for r, i in enumerate(ids)],
            [edge_index[1, i] for i in ids],
            torch.bincount(edge_index[1], minlength=self._shard.num_local),
        )


@dataclass
class PropagateCall:
    """The arguments of one ``propagate`` by what a block needs of them.

    Attributes:
        conv: the convolution.
        blocks: its edges.
        reduce: sum, mean, max or min.
        num_local: targets.
        names, kinds, tensors: the arguments that autograd must know: ``source`` rows (fetched from their owners),
            ``target`` rows (local), ``edge`` values (one row an edge).
        constants: everything else, handed to each block as it is.
    """

    conv: MessagePassing
    blocks: EdgeBlocks
    reduce: str
    num_local: int
    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, conv: MessagePassing, blocks: EdgeBlocks, reduce: str, num_local: int, kwargs: dict[str, Any]
    ) -> PropagateCall:
        """Sort the keyword arguments of ``propagate`` by their use in ``message``."""
        call = cls(conv, blocks, reduce, num_local)
        wanted, num_edges = conv._user_args, sum(map(len, blocks.ids))
        for name, value in kwargs.items():
            as_source, as_target = f"{name}_j" in wanted, f"{name}_i" in wanted
            if as_source or as_target:
                source, target = value if isinstance(value, (tuple, list)) else (value, value)
                call._add(name, "source", source if as_source else None)
                call._add(name, "target", target if as_target else None)
            elif isinstance(value, Tensor) and value.dim() and value.size(0) == num_edges:
                call._add(name, "edge", value)
            elif name in wanted:
                call.constants[name] = value
        return call

    def _add(self, name: str, kind: str, tensor: Tensor | None) -> None:
        if tensor is None:
            self.constants.setdefault(name, None)
            return
        self.names.append(name)
        self.kinds.append(kind)
        self.tensors.append(tensor)

    @property
    def sources(self) -> list[int]:
        """Positions of the tensors whose rows cross the wire."""
        return [i for i, kind in enumerate(self.kinds) if kind == "source"]

    def message(self, r: int, tensors: list[Tensor]) -> Tensor:
        """Messages of block r [E_r, ...]; ``tensors`` as in :attr:`tensors`, sources replaced by the block's rows."""
        ids, targets = self.blocks.ids[r], self.blocks.targets[r]
        edge_index = torch.stack([self.blocks.sources[r], targets])
        pairs: dict[str, list[Tensor | None]] = {}
        arguments: dict[str, Any] = dict(self.constants)
        rows = 0
        for name, kind, tensor in zip(self.names, self.kinds, tensors, strict=True):
            if kind == "edge":
                arguments[name] = tensor.index_select(0, ids)
            else:
                pairs.setdefault(name, [None, None])[kind == "target"] = tensor
                rows = tensor.size(0) if kind == "source" else rows
        arguments.update({name: tuple(pair) for name, pair in pairs.items()})
        collected = self.conv._collect(self.conv._user_args, edge_index, [rows, self.num_local], arguments)
        messages: Tensor = self.conv.message(**self.conv.inspector.collect_param_data("message", collected))
        return messages


_parameter_use: weakref.WeakKeyDictionary[MessagePassing, list[Tensor]] = weakref.WeakKeyDictionary()


def message_parameters(call: PropagateCall) -> list[Tensor]:
    """Parameters of the convolution that ``message`` itself uses (most use none), found by a call with no edges."""
    if call.conv not in _parameter_use:
        candidates = [p for p in call.conv.parameters() if p.requires_grad]
        _parameter_use[call.conv] = candidates if candidates and _uses_parameters(call) else []
    return _parameter_use[call.conv]


def _uses_parameters(call: PropagateCall) -> bool:
    empty = torch.empty(0, dtype=torch.int64, device=call.blocks.in_degree.device)
    nothing = EdgeBlocks([empty], [empty], [empty], call.blocks.in_degree)
    probe = PropagateCall(
        call.conv, nothing, call.reduce, call.num_local, call.names, call.kinds, call.tensors, call.constants
    )
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        return probe.message(0, [tensor.detach() for tensor in call.tensors]).requires_grad
