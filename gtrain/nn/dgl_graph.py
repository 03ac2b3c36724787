"""The graph argument of convolutions of ``dgl.nn``."""

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


def load_dgl(user: str) -> ModuleType:
    """Import DGL, which only models that use it load.

    Args:
        user: the model or layer that needs it, for the message, such as ``model=dgl_gat``.

    Raises:
        ConfigError: it is not installed, or the installed release does not work with this torch.
    """
    # Else DGL writes its choice of a backend to the home folder.
    os.environ.setdefault("DGLBACKEND", "pytorch")
    try:
        return importlib.import_module("dgl")
    except (ImportError, OSError) as err:
        raise ConfigError(
            f"{user} needs DGL 1.1.3, which cannot be imported here: {str(err).splitlines()[0]}.",
            hint="pip install 'gtrain[dgl]', with Python 3.11 on x86-64: DGL's later releases do not work with torch "
            f"{torch.__version__.split('+')[0]}.",
        ) from err


class DglGraph(nn.Module):
    """Turns ``edge_index`` into the graph that ``dgl.nn`` convolutions take as their first argument.

    In a single process that is DGL's graph. A strategy that shards the graph replaces ``forward`` and returns an object
    with the same interface over its part, so that convolutions work unchanged.

    Args:
        self_loops: give every node one edge to itself, in place of existing self-loops.

    Shapes:
        edge_index int64 [2, E], row 0 the sources; the result's edges are in this order, added loops last.
    """

    def __init__(self, self_loops: bool = False) -> None:
        super().__init__()
        self.self_loops = self_loops

    def forward(self, edge_index: Tensor, num_nodes: int) -> Any:
        """Return the graph, which is cached as long as the tensor ``edge_index`` lives."""
        dropout = active_dropout()
        if dropout is not None:
            dropout.add_edges(self.edges(edge_index, num_nodes))
        graphs = _graphs.setdefault(edge_index, {})
        key = num_nodes, self.self_loops
        if key not in graphs:
            # detached: rows of the tensor itself would keep it, and so this entry, alive
            source, target = self.edges(edge_index, num_nodes).detach()
            graphs[key] = load_dgl(type(self).__name__).graph((source, target), num_nodes=num_nodes)
            graphs[key].create_formats_()
        return graphs[key]

    def edges(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        """Return the edges of the graph, [2, E']: ``edge_index`` itself without ``self_loops``."""
        if not self.self_loops:
            return edge_index
        looped = _looped.setdefault(edge_index, {})
        if num_nodes not in looped:
            others = edge_index[:, edge_index[0] != edge_index[1]]
            nodes = torch.arange(num_nodes, device=edge_index.device)
            looped[num_nodes] = torch.cat([others, nodes.expand(2, -1)], dim=1)
        return looped[num_nodes]


_graphs: Any = WeakIdKeyDictionary()
_looped: Any = WeakIdKeyDictionary()
