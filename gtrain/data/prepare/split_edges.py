"""Split the edges of a link task: hold edges out for validation and test."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.prepare.split import SplitOptions
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store.manifest import HELD_OUT, EdgeType
from gtrain.graph.store.tables import HELD_OUT_PREFIXES

log = logging.getLogger("gtrain")


def split_edges(graph: Data | HeteroData, target: EdgeType | None, options: SplitOptions) -> dict[str, int]:
    """Move held-out edges from the graph to ``val_edge_*`` and ``test_edge_*``.

    The two directions of an undirected edge (with equal time and relation) are held out together, and so are edges
    without times that the data repeat. The held-out edges' counterparts in a reverse edge type are removed, so that
    messages do not leak an edge to predict. Such held-out edges are listed once.

    Args:
        graph: changed in place.
        target: the edge type to split; None for a homogeneous graph.
        options: ``public`` uses the data's held-out edges, also those of train; ``random`` and ``time`` hold out
            fractions.

    Returns:
        Number of edges of train, val and test.

    Raises:
        ConfigError: the kind of split does not suit the data.
        DataError: no train edge remains.
    """
    edges = graph[target] if isinstance(graph, HeteroData) else graph.stores[0]
    if options.kind == "public":
        if not any(f"{split}_edge_index" in edges for split in HELD_OUT):
            raise ConfigError(
                "data.task=link with data.split=public, and the data holds no edges out",
                hint="set data.split=random or, for edges with times, data.split=time",
            )
        return _count(edges)
    drop_held_out(graph)
    group, representative = _groups(edges, graph, target)
    order = _order(edges, representative, options)
    sizes = options.sizes(order.numel())
    side = torch.zeros(order.numel(), dtype=torch.int8)  # 0 train, 1 val, 2 test
    side[order[sizes[0] : sizes[0] + sizes[1]]], side[order[sizes[0] + sizes[1] :]] = 1, 2
    if isinstance(graph, HeteroData) and target is not None:
        _drop_reverse(graph, target, side[group])
    _move(edges, side[group], representative)
    if edges.edge_index.size(1) == 0:
        raise DataError(
            f"no train edge remains: data.split={options.kind} of {order.numel()} edges",
            hint="raise data.train_fraction, or give the graph more edges",
        )
    return _count(edges)


def drop_held_out(graph: Data | HeteroData) -> None:
    """Delete the data's held-out edges, for another split or a node task."""
    for store in graph.stores:
        for name in [key for key in store if key.startswith(HELD_OUT_PREFIXES)]:
            del store[name]


def _groups(edges: Any, graph: Data | HeteroData, target: EdgeType | None) -> tuple[Tensor, Tensor]:
    """Return the group of each edge [E], and the first edge of each group [G]; a group is not split."""
    edge_index = edges.edge_index
    everyone = torch.arange(edge_index.size(1))
    same_type = not isinstance(graph, HeteroData) or (target is not None and target[0] == target[2])
    if not edge_index.numel():
        return everyone, everyone
    if not same_type:
        return _repeated(edges)
    nodes: Any = graph[target[0]] if isinstance(graph, HeteroData) and target is not None else graph
    num_nodes = int(nodes.num_nodes or 0)
    low, high = edge_index.min(dim=0).values, edge_index.max(dim=0).values
    # Renumbered from 0, so that the product with the number of marks below does not overflow.
    pair = torch.unique(low * num_nodes + high, return_inverse=True)[1]
    way = (edge_index[1] - edge_index[0]).sign()
    for mark in _marks(edges, way):
        group = torch.unique(pair * (int(mark.max()) + 1) + mark, return_inverse=True)[1]
        # The list is undirected under these marks if each group with an edge one way has one the other way.
        there, back = torch.unique(group[way > 0]), torch.unique(group[way < 0])
        if there.numel() and torch.equal(there, back):
            return group, _first_of(group)
    return _repeated(edges)


def _repeated(edges: Any) -> tuple[Tensor, Tensor]:
    """Return groups of equal edges, as :func:`_groups`. Edges with times are events, each in a group by itself."""
    everyone = torch.arange(edges.edge_index.size(1))
    if isinstance(edges.get("edge_time"), Tensor):
        return everyone, everyone
    source, target = edges.edge_index
    group = source * (int(target.max()) + 1) + target
    if isinstance(relation := edges.get("edge_type"), Tensor):
        group = torch.unique(group, return_inverse=True)[1] * (int(relation.max()) + 1) + relation
    group = torch.unique(group, return_inverse=True)[1]
    if int(group.max()) + 1 == everyone.numel():
        return everyone, everyone
    return group, _first_of(group)


def _first_of(group: Tensor) -> Tensor:
    """Return the first member of each group ``[G]``, given the group of each edge ``[E]``."""
    first = torch.full((int(group.max()) + 1,), group.numel())
    return first.scatter_reduce_(0, group, torch.arange(group.numel()), "amin")


def _marks(edges: Any, way: Tensor) -> list[Tensor]:
    """Return candidate labels, ``[E]`` from 0, that both directions of an undirected edge must share.

    The label combines the time and the relation; in the second candidate, relations 2r and 2r + 1 are each other's
    reverse.

    Args:
        edges: the storage of the edges.
        way: 1 from the smaller id to the larger, -1 the other way, 0 for a self-loop.
    """
    time = torch.zeros_like(way)
    if isinstance(edges.get("edge_time"), Tensor):
        time = torch.unique(edges.edge_time, return_inverse=True)[1]
    if not isinstance(edges.get("edge_type"), Tensor):
        return [time]
    relation = edges.edge_type
    paired = torch.where(way < 0, relation ^ 1, torch.where(way == 0, relation & ~1, relation))
    times = int(time.max()) + 1
    return [relation * times + time, paired * times + time]


def _order(edges: Any, representative: Tensor, options: SplitOptions) -> Tensor:
    """Return the groups in the order in which they go to train, val and test."""
    if options.kind == "random":
        return options.permutation(representative.numel())
    if options.kind != "time":
        raise ConfigError(
            f"data.split={options.kind} splits nodes, and data.task=link predicts edges",
            hint="set data.split=random or data.split=time",
        )
    if "edge_time" not in edges:
        raise ConfigError("data.split=time, and the edges have no times", hint="set data.split=random")
    return torch.argsort(edges.edge_time[representative], stable=True)


def _move(edges: Any, side: Tensor, representative: Tensor) -> None:
    """Split each edge tensor into the train edges and the held-out edges."""
    once = torch.zeros(side.numel(), dtype=torch.bool).index_fill_(0, representative, True)
    for name in _edge_tensors(edges):
        prefixed = name if name.startswith("edge_") else f"edge_{name}"
        for number, split in enumerate(("val", "test"), start=1):
            keep = (side == number) & once
            edges[f"{split}_{prefixed}"] = edges[name][:, keep] if name == "edge_index" else edges[name][keep]
    _select(edges, side == 0)


def _edge_tensors(edges: Any) -> list[str]:
    return [name for name in edges if name == "edge_index" or edges.is_edge_attr(name)]


def _select(edges: Any, keep: Tensor) -> None:
    """Keep the edges under the mask ``[E]``, in place."""
    for name in _edge_tensors(edges):
        edges[name] = edges[name][:, keep] if name == "edge_index" else edges[name][keep]


def _drop_reverse(graph: HeteroData, target: EdgeType, side: Tensor) -> None:
    """Remove the counterparts of held-out edges from every edge type that mirrors the target."""
    source, target_nodes = graph[target].edge_index
    width = int(graph[target[0]].num_nodes or 0)
    keys = target_nodes * width + source
    for other in graph.edge_types:
        if other == target or (other[0], other[2]) != (target[2], target[0]):
            continue
        mirrored = graph[other].edge_index[0] * width + graph[other].edge_index[1]
        if torch.equal(torch.unique(mirrored), torch.unique(keys)):
            log.info("edges of %s mirror %s: the held-out edges are removed from both", other, target)
            _select(graph[other], ~torch.isin(mirrored, keys[side > 0]))


def _count(edges: Any) -> dict[str, int]:
    held = {split: edges[f"{split}_edge_index"] for split in HELD_OUT if f"{split}_edge_index" in edges}
    return {"train": edges.edge_index.size(1), **{split: index.size(1) for split, index in held.items()}}
