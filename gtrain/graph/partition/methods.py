"""Partitioning methods: METIS, KaMinPar, streaming (LDG, Fennel), random, and assignments from a file."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.errors import ConfigError, DataError
from gtrain.graph.partition import kaminpar, metis
from gtrain.graph.partition.adjacency import Adjacency, node_weights
from gtrain.graph.partition.clusters import locality_order
from gtrain.graph.store.csc import EdgeView, SortedColumns
from gtrain.graph.store.tables import EdgeArrays

METHODS = ("metis", "kaminpar", "random", "file", "ldg", "fennel")

AUTO = "auto"
"""The method that suits the size of the graph, of those that are installed; see :func:`choose_method`."""

LARGE_EDGES = 4_000_000
"""Number of edges from which :data:`AUTO` is ``kaminpar``: METIS takes ten times longer by then."""

log = logging.getLogger("gtrain")

STREAMING = ("ldg", "fennel")
"""Methods for graphs whose edges do not fit in memory."""

ORDERING = ("metis", "kaminpar")
"""Methods after which neighbours get nearby numbers within a part."""

UNEVEN = 1.1
"""A part's largest multiple of its share, beyond which METIS is tried besides KaMinPar."""

SLACK = 0.05
"""Fraction by which a part may exceed its share of a group."""

PASSES = 5
"""Streaming passes over the nodes."""

Ints = NDArray[np.int64]


def possible_methods(method: str) -> tuple[str, ...]:
    """Return the methods that a setting may mean on this machine: first that of small graphs, last that of large ones.

    :data:`AUTO` means ``metis`` and ``kaminpar``, as far as they are installed, or else ``ldg``.
    """
    if method != AUTO:
        return (method,)
    installed = {"metis": metis.available(), "kaminpar": kaminpar.available()}
    return tuple(name for name, present in installed.items() if present) or ("ldg",)


def choose_method(method: str, num_edges: int) -> str:
    """Return the method that a setting means for a graph; see :func:`possible_methods`."""
    return possible_methods(method)[-1 if num_edges >= LARGE_EDGES else 0]


def check_installed(method: str) -> None:
    """Raise a ConfigError if a method needs a package that is not installed."""
    for name, module in (("metis", metis), ("kaminpar", kaminpar)):
        if method == name:
            module.check_available()


def needs_adjacency(method: str, num_edges: int) -> bool:
    """Return whether a method partitions and orders the nodes by :func:`adjacency_of` the graph.

    ``metis`` makes the graph itself, and METIS orders the nodes, if the graph is small.
    """
    return method == "kaminpar" or (method == "metis" and num_edges >= LARGE_EDGES)


def explain_choice(num_edges: int) -> str:
    """Return why :data:`AUTO` is the method that :func:`choose_method` returns, in one clause."""
    size = f"{'at least' if num_edges >= LARGE_EDGES else 'fewer than'} {LARGE_EDGES:,} edges"
    possible = possible_methods(AUTO)
    if len(possible) == 2:
        return f"data.partitioner=auto for {size}"
    if possible == ("metis",) and num_edges >= LARGE_EDGES:
        return f"data.partitioner=auto; for {size} kaminpar would be faster, and is not installed"
    if possible == ("ldg",):
        return "data.partitioner=auto; pymetis and kaminpar, which cut fewer edges, are not installed"
    return "data.partitioner=auto, of what is installed"


def partition_nodes(
    edge_index: Tensor | tuple[NDArray[Any], NDArray[Any]],
    num_nodes: int,
    num_parts: int,
    method: str,
    *,
    seed: int = 0,
    train_mask: Tensor | None = None,
    assignment: Tensor | None = None,
    origin: str = "the partition file",
    adjacency: Adjacency | None = None,
) -> Tensor:
    """Assign each node to a part; every part gets at least one node.

    Args:
        edge_index: directed edges: row 0 the sources, row 1 the targets; or two arrays, which may be memory maps.
        num_nodes: N, number of nodes.
        num_parts: P, number of parts.
        method: ``metis`` or ``kaminpar`` (few cut edges, balanced work), ``ldg`` or ``fennel`` (the same goal by
            streaming, with less memory; see :func:`stream_partition`), ``random`` (sizes differ by at most one) or
            ``file`` (the caller's ``assignment``).
        seed: seed of the method.
        train_mask: nodes of the train split, which are balanced too, except by ``random``; None without a split.
        assignment: the part of each node, for ``file`` only.
        origin: source of the assignment, for messages.
        adjacency: the symmetric graph, if the caller has it: ``metis`` and ``kaminpar`` then do not make it.

    Shapes:
        edge_index ``[2, E]`` int64 or two of ``[E]`` int32 or int64, train_mask ``[N]`` bool, assignment ``[N]``
        integer.

    Returns:
        The part of each node, ``[N]`` int64.

    Raises:
        ConfigError: the method is unknown.
        DataError: there are more parts than nodes, or the assignment does not fit the graph.
    """
    _check(num_nodes, num_parts, method)
    if method == "file":
        return _checked(assignment, num_nodes, num_parts, origin)
    if num_parts == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    source, target = edge_index.numpy() if isinstance(edge_index, Tensor) else edge_index
    if method == "random" or not len(source):
        return _random(num_nodes, num_parts, seed)
    train = None if train_mask is None else train_mask.numpy().astype(bool)
    edges = _Edges(source, target, num_nodes, adjacency)
    parts = _cut(edges, num_parts, method, seed, train, train)
    return torch.from_numpy(_fill_empty(parts, num_parts))


def partition_hetero(
    data: HeteroData,
    num_parts: int,
    method: str,
    *,
    seed: int = 0,
    assignment: Mapping[str, Tensor] | None = None,
    origin: str = "the partition file",
    adjacency: Adjacency | None = None,
) -> dict[str, Tensor]:
    """Assign each node of a heterogeneous graph to a part; every part gets at least one node of some type.

    ``metis``, ``kaminpar``, ``ldg`` and ``fennel`` cut the graph with the nodes and edges of all types. The former two
    balance the sum of nodes, in-edges and training nodes over all types; ``ldg`` and ``fennel`` balance each node type,
    and its training nodes, separately; ``random`` balances each node type.

    Args:
        data: the graph; nodes in the ``train_mask`` of a node type are balanced.
        num_parts: P, number of parts.
        method: see :func:`partition_nodes`.
        seed: seed of the method.
        assignment: the part of each node by node type, for ``file`` only.
        origin: source of the assignment, for messages.
        adjacency: see :func:`partition_nodes`; the nodes of all types are numbered in the order of the types.

    Returns:
        The part of each node by node type, ``[N_type]`` int64. A part may have no node of some type.

    Raises:
        ConfigError: the method is unknown.
        DataError: there are more parts than nodes of all types, or the assignment does not fit the graph.
    """
    sizes = {kind: int(data[kind].num_nodes or 0) for kind in data.node_types}
    first = _first_ids(sizes)
    num_nodes = sum(sizes.values())
    _check(num_nodes, num_parts, method)
    source, target = _joined_edges(data, first)
    if method == "file":
        parts = _checked(_joined_assignment(assignment, sizes, origin), num_nodes, num_parts, origin).numpy()
    elif num_parts == 1:
        parts = np.zeros(num_nodes, dtype=np.int64)
    elif method == "random" or not source.size:
        parts = _random_by_type(list(sizes.values()), num_parts, seed)
    else:
        train = np.concatenate([_train_mask(data, kind, size) for kind, size in sizes.items()])
        group = np.repeat(np.arange(len(sizes)), list(sizes.values())) * 2 + train
        edges = _Edges(source, target, num_nodes, adjacency)
        parts = _fill_empty(_cut(edges, num_parts, method, seed, train, group), num_parts)
    return {kind: torch.from_numpy(parts[first[kind] :][:size].copy()) for kind, size in sizes.items()}


def adjacency_of(graph: Data | HeteroData | EdgeArrays) -> Adjacency:
    """Return the symmetric graph under the edges of all types, with the nodes in the order of their types."""
    if not isinstance(graph, HeteroData):
        return Adjacency.of(*edges_of(graph), int(graph.num_nodes or 0))
    first = _first_ids({kind: int(graph[kind].num_nodes or 0) for kind in graph.node_types})
    num_nodes = sum(int(graph[kind].num_nodes or 0) for kind in graph.node_types)
    return Adjacency.of(*_joined_edges(graph, first), num_nodes)


def edges_of(graph: Data | EdgeArrays) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the sources and the targets of a graph with one type of edges; not copied, they may be memory maps."""
    if isinstance(graph, EdgeArrays):
        return graph.source, graph.target
    source, target = graph.edge_index.numpy()
    return source, target


def group_nodes(
    graph: Data | HeteroData | EdgeArrays,
    assignment: Mapping[str, Tensor],
    num_parts: int,
    *,
    seed: int = 0,
    adjacency: Adjacency | None = None,
) -> dict[str, NDArray[Any]] | None:
    """Order the nodes of each part so that neighbours of all types are near each other.

    With ``adjacency`` by :func:`.clusters.locality_order`, which takes seconds for millions of nodes; without by METIS,
    see :func:`.metis.group_nodes`.

    Args:
        graph: the graph.
        assignment: the part of each node by node type, ``[N_type]``.
        num_parts: P.
        seed: seed of METIS.
        adjacency: the symmetric graph, see :func:`adjacency_of`.

    Returns:
        Numbers that order the nodes of a part, by node type, ``[N_type]``; equal numbers leave the order of the source
        data. None if the parts are too small.
    """
    kinds = graph.node_types if isinstance(graph, HeteroData) else list(assignment)
    sizes = {kind: assignment[kind].numel() for kind in kinds}
    parts = np.concatenate([assignment[kind].numpy() for kind in kinds])
    if adjacency is not None:
        groups = locality_order(adjacency, parts, num_parts)
    else:
        source, target = _joined_edges(graph, _first_ids(sizes)) if isinstance(graph, HeteroData) else edges_of(graph)
        groups = metis.group_nodes(source, target, parts, num_parts, seed=seed)
    if groups is None:
        return None
    first = _first_ids(sizes)
    return {kind: groups[first[kind] :][:size] for kind, size in sizes.items()}


def read_assignment(path: str | Path) -> Tensor:
    """Read the part of each node from a ``.npy`` file, or from a text file with one integer per node.

    Returns:
        ``[N]`` int64, in the order of the source data's nodes.

    Raises:
        DataError: the file is missing, or does not hold one integer per node.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"data.partition_path={path}: the file does not exist", hint="set it to a .npy or text file")
    hint = "write the part of each node as one integer, as text or with numpy.save"
    try:
        values = np.load(path) if path.suffix == ".npy" else _read_integers(path)
    except Exception as err:
        # numpy raises various types for a damaged file. Its advice at the end of the message, to unpickle the file, is
        # dropped.
        reason = str(err).split(". If you trust")[0]
        raise DataError(
            f"data.partition_path={path}: cannot be read as one integer per node ({reason})", hint=hint
        ) from err
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise DataError(
            f"data.partition_path={path}: holds {values.dtype} of shape {list(values.shape)}, and a partition is one "
            "integer per node",
            hint=hint,
        )
    return torch.from_numpy(values.astype(np.int64))


def _read_integers(path: Path) -> Ints:
    words = path.read_text(encoding="utf-8-sig").split()
    for number, word in enumerate(words, start=1):
        if re.fullmatch(r"[+-]?\d+", word) is None:
            raise ValueError(f"entry {number} is {word!r}")
    return np.array(words, dtype=np.int64)


def _checked(assignment: Tensor | None, num_nodes: int, num_parts: int, origin: str) -> Tensor:
    """Return the caller's assignment as int64; raise if it does not fit the graph."""
    if assignment is None:
        raise ConfigError("data.partitioner=file without an assignment", hint="set data.partition_path=FILE")
    if assignment.dim() != 1 or assignment.numel() != num_nodes:
        shape = "x".join(str(n) for n in assignment.shape)
        raise DataError(
            f"{origin} has {shape} entries, and the graph has {num_nodes} nodes",
            hint="give one entry per node, in the order of the source data's nodes",
        )
    parts = assignment.to(torch.int64)
    outside = ((parts < 0) | (parts >= num_parts)).nonzero()
    if outside.numel():
        node = int(outside[0])
        raise DataError(
            f"{origin} puts node {node} into part {int(parts[node])}, and parts are 0..{num_parts - 1}",
            hint=f"set data.num_parts={int(parts.max()) + 1}, or correct {origin}",
        )
    empty = (torch.bincount(parts, minlength=num_parts) == 0).nonzero().flatten().tolist()
    if empty:
        raise DataError(
            f"{origin} leaves part {empty[0]} of {num_parts} without a node",
            hint=f"assign a node to part {empty[0]}, or number the parts without gaps and lower data.num_parts",
        )
    return parts


def _check(num_nodes: int, num_parts: int, method: str) -> None:
    if method not in METHODS:
        raise ConfigError(
            f"data.partitioner={method!r} is not a partitioner", hint=f"choose one of {', '.join(METHODS)}"
        )
    if num_parts < 1:
        raise ConfigError(f"data.num_parts={num_parts} is not a number of parts", hint="set 1 or more")
    if num_parts > num_nodes:
        raise DataError(
            f"more parts than nodes: {num_parts} parts were requested, and the graph has {num_nodes} nodes",
            hint="lower trainer.num_nodes or trainer.devices, where each rank has a part; else data.num_parts, or the "
            "strategy's setting that it follows",
        )


class _Edges(NamedTuple):
    """Directed edges, and the symmetric graph under them if it is known."""

    source: NDArray[Any]
    target: NDArray[Any]
    num_nodes: int
    adjacency: Adjacency | None

    def symmetric(self) -> Adjacency:
        known = self.adjacency
        return Adjacency.of(self.source, self.target, self.num_nodes) if known is None else known


def _cut(
    edges: _Edges,
    num_parts: int,
    method: str,
    seed: int,
    train: NDArray[np.bool_] | None,
    group: NDArray[Any] | None,
) -> Ints:
    """Run a method that depends on the edges; ``group`` has the groups that the streaming methods balance."""
    source, target, num_nodes, _ = edges
    if method in STREAMING:
        return stream_partition(source, target, num_nodes, num_parts, method, group=group, seed=seed)
    graph, weights = edges.symmetric(), node_weights(target, num_nodes, train)
    if method == "metis":
        return metis.metis_partition(graph, num_parts, weights, seed=seed)
    parts = kaminpar.kaminpar_partition(graph, num_parts, weights, seed=seed)
    if not metis.fits(graph) or not uneven(parts, num_parts, target, train):
        return parts
    log.info("KaMinPar balances nodes, edges and training nodes together, and not each of them: METIS is tried too")
    others = metis.metis_partition(graph, num_parts, weights, seed=seed)
    return min(parts, others, key=lambda result: max(imbalances(result, num_parts, target, train)))


def imbalances(
    parts: Ints, num_parts: int, target: NDArray[Any], train: NDArray[np.bool_] | None
) -> tuple[float, float, float]:
    """Return largest part over mean part of the nodes, the in-edges and the training nodes; 1 without any."""
    counts = [np.bincount(members, minlength=num_parts) for members in _counted(parts, target, train)]
    nodes, edges, trained = (float(count.max() / max(count.mean(), 1e-9)) if count.any() else 1.0 for count in counts)
    return nodes, edges, trained


def uneven(parts: Ints, num_parts: int, target: NDArray[Any], train: NDArray[np.bool_] | None) -> bool:
    """Return whether a part has more than :data:`UNEVEN` times its share of something, beyond what chance explains."""
    counts = [np.bincount(members, minlength=num_parts) for members in _counted(parts, target, train)]
    return any(count.max() > UNEVEN * count.mean() + 3 * math.sqrt(count.mean()) for count in counts)


def _counted(parts: Ints, target: NDArray[Any], train: NDArray[np.bool_] | None) -> tuple[Ints, Ints, Ints]:
    """Return the parts of all nodes, of all edges, and of the training nodes."""
    return parts, parts[target], parts[:0] if train is None else parts[train]


def _random(num_nodes: int, num_parts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.empty(num_nodes, dtype=torch.int64)
    parts[torch.randperm(num_nodes, generator=generator)] = torch.arange(num_nodes) % num_parts
    return parts


def _random_by_type(sizes: list[int], num_parts: int, seed: int) -> Ints:
    """Deal the nodes of each type round-robin to the parts; each type continues after the last type's last part."""
    generator, first = np.random.default_rng(seed), np.cumsum([0, *sizes])
    return np.concatenate(
        [(generator.permutation(n) + start) % num_parts for n, start in zip(sizes, first, strict=False)]
    )


def _first_ids(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the first id of each node type in a joint numbering of all types."""
    return dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))


def _joined_edges(data: HeteroData, first: dict[str, int]) -> tuple[Ints, Ints]:
    """Return sources and targets of the edges of all types, in the joint numbering that starts a type at ``first``."""
    edges = [np.empty((2, 0), dtype=np.int64)]
    for edge_type in data.edge_types:
        starts = [[first[edge_type[0]]], [first[edge_type[2]]]]
        edges.append(data[edge_type].edge_index.numpy() + starts)
    source, target = np.concatenate(edges, axis=1)
    return source, target


def _train_mask(data: HeteroData, kind: str, size: int) -> NDArray[np.bool_]:
    mask = data[kind].get("train_mask")
    return mask.numpy().astype(bool) if isinstance(mask, Tensor) else np.zeros(size, dtype=bool)


def _joined_assignment(assignment: Mapping[str, Tensor] | None, sizes: dict[str, int], origin: str) -> Tensor | None:
    if assignment is None:
        return None
    for name, size in sizes.items():
        entries = assignment[name].numel() if name in assignment else 0
        if entries != size:
            raise DataError(
                f"{origin} has {entries} entries for {name}, and the graph has {size} such nodes",
                hint="give one entry per node, by node type, in the order of the source data's nodes",
            )
    return torch.cat([assignment[name] for name in sizes])


def _fill_empty(parts: Ints, num_parts: int) -> Ints:
    """Move the last node of the largest part to each empty part; METIS leaves parts empty on tiny graphs."""
    sizes = np.bincount(parts, minlength=num_parts)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        parts[np.flatnonzero(parts == largest)[-1]] = empty
        sizes[largest] -= 1
        sizes[empty] += 1
    return parts


def stream_partition(
    source: NDArray[Any],
    target: NDArray[Any],
    num_nodes: int,
    num_parts: int,
    method: str,
    *,
    group: NDArray[Any] | None = None,
    seed: int = 0,
    slack: float = SLACK,
    passes: int = PASSES,
) -> Ints:
    """Assign each node to a part in passes over the nodes, for graphs beyond METIS's memory.

    LDG (Stanton and Kliot, KDD 2012) assigns node v to the part P with the most of its neighbours, weighted by the
    remaining capacity: ``|N(v) and P| * (1 - |P| / C)``. Fennel (Tsourakakis et al., WSDM 2014) subtracts the cost of a
    full part instead: ``|N(v) and P| - alpha * gamma * |P| ** (gamma - 1)``, with gamma = 1.5 and
    alpha = sqrt(k) * m / n ** 1.5 for k parts, n nodes and m edges.

    Two things differ from the papers. The nodes are streamed several times in the order of their ids, and a node that
    is not yet assigned in a pass counts with its part from the last pass (restreaming, Nishimura and Ugander,
    KDD 2013), so that a poor order costs less. And each *group* of nodes (training nodes and others; or node types) is
    balanced separately: no part takes more than ``1 + slack`` times its share of any group, rounded up.

    A pass over the edges (:mod:`gtrain.graph.store.csc`), which may be memory maps, collects the neighbours of a range
    of nodes. Memory: one range, and 12 bytes per node.

    Args:
        source: sources of the edges, ``[E]``; directions do not matter, and parallel edges count separately.
        target: targets, ``[E]``.
        num_nodes: N.
        num_parts: P.
        method: ``ldg`` or ``fennel``.
        group: ``[N]`` small integers from 0, the group of each node; None puts all nodes into one group.
        seed: breaks ties between parts.
        slack: fraction by which a part may exceed its share of a group.
        passes: passes over the nodes.

    Returns:
        The part of each node, ``[N]`` int64; a part may be empty only in tiny graphs.
    """
    from gtrain.graph import kernels

    groups = np.zeros(num_nodes, np.int32) if group is None else group.astype(np.int32)
    members = np.bincount(groups)
    capacity = np.ceil(members / num_parts * (1 + slack)).astype(np.int64)
    view = EdgeView(source, target, None, None, num_nodes, num_nodes, symmetric=True)
    view.check()
    columns = SortedColumns(view, sort=False)
    # The cost of a full part, alpha * gamma * (n/k) ** 0.5 with the paper's alpha, is 1.5 * m/n.
    fennel = 1.5 * len(source) / max(num_nodes, 1) + 1e-9 if method == "fennel" else 0.0
    part = np.full(num_nodes, -1, dtype=np.int32)
    for _ in range(passes):
        balance = kernels.Balance(groups, capacity, np.zeros((members.size, num_parts), dtype=np.int64))
        first = 0
        for piece in columns.between(0, num_nodes):
            kernels.assign(piece.indptr, piece.source, first, balance, fennel, seed, part)
            first += piece.indptr.size - 1
    return part.astype(np.int64)
