"""The graph that convolutions of ``dgl.nn`` are called with."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gtrain.errors import ConfigError
from gtrain.nn.dropout import active_dropout


def load_dgl(asked_by: str) -> ModuleType:
    """Import DGL, which no other model loads.

    Args:
        asked_by: what needs it, for the message, such as ``model=dgl_gat``.

    Raises:
        ConfigError: it is not installed, or the release that is does not work with this torch.
    """
    os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL writes its choice of a backend to the home folder
    try:
        return importlib.import_module("dgl")
    except (ImportError, OSError) as err:
        raise ConfigError(
            f"{asked_by} needs DGL 1.1.3, which cannot be imported here: {str(err).splitlines()[0]}.",
            hint="pip install 'gtrain[dgl]', with Python 3.11 on x86-64: DGL's later releases do not work with torch "
            f"{torch.__version__.split('+')[0]}.",
        ) from err


class DglGraph(nn.Module):
    """Turns ``edge_index`` into the graph that ``dgl.nn`` convolutions take as their first argument.

    On one process that is DGL's own graph. A strategy that shards the graph takes this layer over and returns an object
    with the same interface over the part that it holds, so that the convolutions need not be changed.

    Args:
        self_loops: give every node one edge to itself, in place of those that are there.

    Shapes:
        edge_index int64 [2, E], row 0 the sources; the result's edges are in this order, loops that were added last.
    """

    def __init__(self, self_loops: bool = False) -> None:
        super().__init__()
        self.self_loops = self_loops

    def forward(self, edge_index: Tensor, num_nodes: int) -> Any:
        """The graph; made once for each tensor ``edge_index``, as long as that lives."""
        dropout = active_dropout()
        if dropout is not None:
            dropout.add(self.edges(edge_index, num_nodes))
        known = _graphs.setdefault(edge_index, {})
        key = num_nodes, self.self_loops
        if key not in known:
            # aliases: rows of the tensor itself would keep it, and so this entry, alive
            source, target = self.edges(edge_index, num_nodes).detach()
            known[key] = load_dgl(type(self).__name__).graph((source, target), num_nodes=num_nodes)
            known[key].create_formats_()
        return known[key]

    def edges(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        """The edges of the graph, [2, E']: ``edge_index`` itself where no loops are wanted."""
        if not self.self_loops:
            return edge_index
        known = _looped.setdefault(edge_index, {})
        if num_nodes not in known:
            kept = edge_index[:, edge_index[0] != edge_index[1]]
            nodes = torch.arange(num_nodes, device=edge_index.device)
            known[num_nodes] = torch.cat([kept, nodes.expand(2, -1)], dim=1)
        found: Tensor = known[num_nodes]
        return found


_graphs: Any = WeakIdKeyDictionary()
_looped: Any = WeakIdKeyDictionary()
