"""``RGCNConv``: one aggregation for all relations; PyG passes messages once per relation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.conv import RGCNConv

from gtrain.errors import ConfigError
from gtrain_sar.config import Schedule
from gtrain_sar.edges import EdgeBlockCache, EdgeBlocks, sort_edges
from gtrain_sar.linear import LinearCall, aggregate
from gtrain_sar.propagate_call import reduction


class RelationalConv:
    """Runs the calls of ``propagate`` of one ``RGCNConv``.

    A target has a row for each relation, ``relation * n + target`` with n local nodes. The aggregates of all relations
    are then one sparse product with local and halo rows, which are sent once. The convolution reads the result relation
    by relation.

    Args:
        conv: the convolution.
        edges: returns the blocks of edges between the same nodes; called when the convolution runs.
        schedule: when blocks are fetched.
        fallback: runs the other calls of ``propagate``: of a maximum, or over ids instead of features.
    """

    def __init__(
        self,
        conv: RGCNConv,
        edges: Callable[[], EdgeBlockCache],
        schedule: Schedule,
        fallback: Callable[..., Tensor],
    ) -> None:
        self._conv, self._edges, self._schedule, self._fallback = conv, edges, schedule, fallback
        self._expanded: Any = WeakIdKeyDictionary()  # edge_index -> (edge_type, blocks)
        self._inputs: tuple[Any, Any, Any] = (None, None, None)  # x, edge_index, edge_type
        self._aggregates: list[Tensor] = []  # of the relations that the convolution has not read yet, last first

    def watch(self) -> list[Callable[[], Any]]:
        """Record the inputs of each call of the convolution; return the actions that undo it."""
        hooks = [
            self._conv.register_forward_pre_hook(self._note, with_kwargs=True),
            self._conv.register_forward_hook(self._forget, always_call=True),
        ]
        return [hook.remove for hook in hooks]

    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        """Return the aggregate of the next relation, [n, in_channels]."""
        if not self._aggregates:
            x, edges, edge_type = self._inputs
            if not self._serves(x, edges, edge_type, kwargs):
                return self._fallback(edge_index, size=size, **kwargs)
            self._aggregates = list(self._aggregate(kwargs["x"], edges, edge_type).unbind(0))[::-1]
        return self._aggregates.pop()

    def _serves(self, x: Any, edges: Any, edge_type: Any, kwargs: dict[str, Any]) -> bool:
        plain = type(self._conv).forward is RGCNConv.forward and type(self._conv).message is RGCNConv.message
        rows: Tensor = kwargs["x"]
        of_features = rows is (x[0] if isinstance(x, tuple) else x) and rows.is_floating_point()
        whole = isinstance(edges, Tensor) and isinstance(edge_type, Tensor) and kwargs.get("edge_type_ptr") is None
        return plain and of_features and whole and reduction(self._conv) in ("sum", "mean")

    def _aggregate(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """[num_relations, n, in_channels]."""
        cached = self._expanded.get(edge_index)
        if cached is None or cached[0] is not edge_type:
            cached = self._expanded[edge_index] = edge_type, self._expand(edge_index, edge_type)
        (out,) = aggregate([LinearCall(cached[1], x, None, reduction(self._conv) == "mean")], self._schedule)
        return out.view(self._conv.num_relations, -1, *out.shape[1:])

    def _expand(self, edge_index: Tensor, edge_type: Tensor) -> EdgeBlocks:
        edges = self._edges()
        expanded = torch.stack([edge_index[0], edge_type * edges.num_targets + edge_index[1]])
        return sort_edges(expanded, edges.exchange, self._conv.num_relations * edges.num_targets)

    def _note(self, conv: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        inputs = dict(zip(("x", "edge_index", "edge_type"), args, strict=False)) | kwargs
        if inputs.get("x") is None:
            raise ConfigError(
                f"{type(conv).__name__} was called without features; it would use a node's position in its part as id.",
                hint="use gtrain.model.relational.IdRGCNConv, give it batch.orig_id as x, or set strategy=single.",
            )
        self._inputs, self._aggregates = (inputs["x"], inputs.get("edge_index"), inputs.get("edge_type")), []

    def _forget(self, *_: Any) -> None:
        self._inputs, self._aggregates = (None, None, None), []
