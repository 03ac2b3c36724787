"""``RGCNConv``: all relations by one aggregation, where PyG passes messages once for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.conv import RGCNConv

from gtrain.errors import ConfigError
from gtrain_sar.config import Schedule
from gtrain_sar.edges import BlockIndex, EdgeBlocks, sort_edges
from gtrain_sar.linear import LinearCall, aggregate
from gtrain_sar.propagate_call import reduction


class RelationalConv:
    """Runs the calls of ``propagate`` of one ``RGCNConv``.

    A target has a place for each relation, ``relation * n + target`` with n own nodes, so that the aggregates of all
    relations are one product with own and halo rows, which cross the wire once. The convolution asks for them relation
    by relation.

    Args:
        conv: the convolution.
        edges: gives the blocks of edges between the same nodes; called when the convolution runs.
        schedule: how blocks are worked off.
        otherwise: runs a call of ``propagate`` that this does not: of a maximum, or over ids in place of features.
    """

    def __init__(
        self,
        conv: RGCNConv,
        edges: Callable[[], BlockIndex],
        schedule: Schedule,
        otherwise: Callable[..., Tensor],
    ) -> None:
        self._conv, self._edges, self._schedule, self._otherwise = conv, edges, schedule, otherwise
        self._expanded: Any = WeakIdKeyDictionary()  # edge_index -> (edge_type, blocks)
        self._given: tuple[Any, Any, Any] = (None, None, None)
        self._waiting: list[Tensor] = []

    def watch(self) -> list[Callable[[], Any]]:
        """Note what the convolution is called with; returns how to undo it."""
        hooks = [
            self._conv.register_forward_pre_hook(self._note, with_kwargs=True),
            self._conv.register_forward_hook(self._forget, always_call=True),
        ]
        return [hook.remove for hook in hooks]

    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        """What the relation whose turn it is brings to each own node, [n, in_channels]."""
        if not self._waiting:
            x, edges, kinds = self._given
            if not self._serves(x, edges, kinds, kwargs):
                return self._otherwise(edge_index, size=size, **kwargs)
            self._waiting = list(self._aggregate(kwargs["x"], edges, kinds).unbind(0))[::-1]
        return self._waiting.pop()

    def _serves(self, x: Any, edges: Any, kinds: Any, kwargs: dict[str, Any]) -> bool:
        plain = type(self._conv).forward is RGCNConv.forward and type(self._conv).message is RGCNConv.message
        rows: Tensor = kwargs["x"]
        of_features = rows is (x[0] if isinstance(x, tuple) else x) and rows.is_floating_point()
        whole = isinstance(edges, Tensor) and isinstance(kinds, Tensor) and kwargs.get("edge_type_ptr") is None
        return plain and of_features and whole and reduction(self._conv) in ("sum", "mean")

    def _aggregate(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """[num_relations, n, in_channels]."""
        known = self._expanded.get(edge_index)
        if known is None or known[0] is not edge_type:
            known = self._expanded[edge_index] = edge_type, self._expand(edge_index, edge_type)
        (out,) = aggregate([LinearCall(known[1], x, None, reduction(self._conv) == "mean")], self._schedule)
        return out.view(self._conv.num_relations, -1, *out.shape[1:])

    def _expand(self, edge_index: Tensor, edge_type: Tensor) -> EdgeBlocks:
        between = self._edges()
        places = torch.stack([edge_index[0], edge_type * between.num_targets + edge_index[1]])
        return sort_edges(places, between.exchange, self._conv.num_relations * between.num_targets)

    def _note(self, conv: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("x", "edge_index", "edge_type"), args, strict=False)) | kwargs
        if given.get("x") is None:
            raise ConfigError(
                f"{type(conv).__name__} was given no features, and takes a node's place in its part for its id.",
                hint="use gtrain.model.relational.IdRGCNConv, give it batch.orig_id as x, or set strategy=single.",
            )
        self._given, self._waiting = (given["x"], given.get("edge_index"), given.get("edge_type")), []

    def _forget(self, *_: Any) -> None:
        self._given, self._waiting = (None, None, None), []
