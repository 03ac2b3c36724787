"""Cutting a graph into parts: which part owns which node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import HeteroData

from gtrain.errors import ConfigError, DataError
from gtrain.graph.partition import metis
from gtrain.graph.partition.locality import group_nodes

METHODS = ("metis", "random", "file", "ldg", "fennel")

AUTO = "auto"
"""``metis`` where pymetis is installed, else ``ldg``; :func:`installed_method` decides."""

STREAMING = ("ldg", "fennel")
"""Methods for graphs whose edges do not fit in memory."""

Ints = NDArray[np.int64]


def installed_method(method: str) -> str:
    """The method that ``method`` stands for on this machine: :data:`AUTO` is resolved, others are returned as given."""
    if method != AUTO:
        return method
    return "metis" if metis.available() else "ldg"


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
) -> Tensor:
    """Assign each node to a part; every part gets at least one node.

    Args:
        edge_index: directed edges: row 0 the sources, row 1 the targets; or two arrays, which may be memory maps.
        num_nodes: N, number of nodes.
        num_parts: P, number of parts.
        method: ``metis`` (few cut edges, balanced work), ``ldg`` or ``fennel`` (the same by streaming, where METIS
            takes too much memory; see :mod:`gtrain.graph.partition.streaming`), ``random`` (sizes differ by at most
            one) or ``file`` (the caller's own ``assignment``).
        seed: makes each method repeatable.
        train_mask: nodes of the train split, so that ``metis``, ``ldg`` and ``fennel`` balance them too; None when
            there is no split.
        assignment: the part of each node, for ``file`` only.
        origin: where the assignment comes from, for messages.

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
    parts = _cut(source, target, num_nodes, num_parts, method, seed, train, train)
    return torch.from_numpy(_fill_empty(parts, num_parts))


def partition_hetero(
    data: HeteroData,
    num_parts: int,
    method: str,
    *,
    seed: int = 0,
    assignment: Mapping[str, Tensor] | None = None,
    origin: str = "the partition file",
) -> dict[str, Tensor]:
    """Assign each node of a graph with types to a part; every part gets a node of some type.

    ``metis``, ``ldg`` and ``fennel`` cut the graph that has the nodes and edges of all types. METIS balances the sum
    of nodes, in-edges and training nodes over all types; the streaming methods balance each node type, and its training
    nodes, for itself, as ``random`` does too.

    Args:
        data: the graph; ``train_mask`` of a node type is balanced where there is one.
        num_parts: P, number of parts.
        method: as for :func:`partition_nodes`.
        seed: makes each method repeatable.
        assignment: the part of each node by node type, for ``file`` only.
        origin: where the assignment comes from, for messages.

    Returns:
        The part of each node by node type, ``[N_type]`` int64. A part may have no node of a type.

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
        parts = _fill_empty(_cut(source, target, num_nodes, num_parts, method, seed, train, group), num_parts)
    return {kind: torch.from_numpy(parts[first[kind] :][:size].copy()) for kind, size in sizes.items()}


def group_hetero(
    data: HeteroData, assignment: Mapping[str, Tensor], num_parts: int, *, seed: int = 0
) -> dict[str, NDArray[Any]] | None:
    """Gather the nodes of each part into groups of neighbours, whatever their types.

    Returns:
        The group of each node within its part by node type, ``[N_type]``; None where parts are too small for that.
    """
    sizes = {kind: int(data[kind].num_nodes or 0) for kind in data.node_types}
    first = _first_ids(sizes)
    parts = np.concatenate([assignment[kind].numpy() for kind in sizes])
    groups = group_nodes(*_joined_edges(data, first), parts, num_parts, seed=seed)
    return None if groups is None else {kind: groups[first[kind] :][:size] for kind, size in sizes.items()}


def read_assignment(path: str | Path) -> Tensor:
    """Read the part of each node from a ``.npy`` file, or from text with one integer for each node.

    Returns:
        ``[N]`` int64, in the order of the source data's nodes.

    Raises:
        DataError: the file is missing, or holds something else.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"data.partition_path={path}: there is no such file", hint="name a .npy or text file")
    wanted = "write one integer for each node, its part, as text or with numpy.save"
    try:
        values = np.load(path) if path.suffix == ".npy" else _read_integers(path)
    except Exception as err:  # numpy's reader of a garbled file may stumble in any way
        reason = str(err).split(". If you trust")[0]  # numpy's advice is to unpickle it
        raise DataError(
            f"data.partition_path={path}: cannot be read as one integer per node ({reason})", hint=wanted
        ) from err
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        found = f"{values.dtype} of shape {list(values.shape)}"
        raise DataError(
            f"data.partition_path={path}: holds {found}, and a partition is one integer for each node", hint=wanted
        )
    return torch.from_numpy(values.astype(np.int64))


def _read_integers(path: Path) -> Ints:
    words = path.read_text(encoding="utf-8-sig").split()
    for number, word in enumerate(words, start=1):
        if re.fullmatch(r"[+-]?\d+", word) is None:
            raise ValueError(f"entry {number} is {word!r}")
    return np.array(words, dtype=np.int64)


def _checked(assignment: Tensor | None, num_nodes: int, num_parts: int, origin: str) -> Tensor:
    """Return the caller's assignment as int64, or say what is wrong with it."""
    if assignment is None:
        raise ConfigError("data.partitioner=file without an assignment", hint="set data.partition_path=FILE")
    if assignment.dim() != 1 or assignment.numel() != num_nodes:
        found = "x".join(str(n) for n in assignment.shape)
        raise DataError(
            f"{origin} has {found} entries, and the graph has {num_nodes} nodes",
            hint="give one entry for each node, in the order of the source data's nodes",
        )
    parts = assignment.to(torch.int64)
    outside = ((parts < 0) | (parts >= num_parts)).nonzero()
    if outside.numel():
        node = int(outside[0])
        raise DataError(
            f"{origin} puts node {node} into part {int(parts[node])}, and parts are 0..{num_parts - 1}",
            hint=f"set data.num_parts={int(parts.max()) + 1}, or correct the file",
        )
    empty = (torch.bincount(parts, minlength=num_parts) == 0).nonzero().flatten().tolist()
    if empty:
        raise DataError(
            f"{origin} leaves part {empty[0]} of {num_parts} without a node",
            hint=f"put a node into part {empty[0]}, or number the parts without gaps and lower data.num_parts",
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
            f"more parts than nodes: {num_parts} parts were asked for and the graph has {num_nodes} nodes",
            hint="lower data.num_parts, or the strategy's setting that it comes from, or run on fewer ranks",
        )


def _cut(
    source: NDArray[Any],
    target: NDArray[Any],
    num_nodes: int,
    num_parts: int,
    method: str,
    seed: int,
    train: NDArray[np.bool_] | None,
    group: NDArray[Any] | None,
) -> Ints:
    """Run a method that looks at the edges; ``group`` is what the streaming methods balance."""
    if method not in STREAMING:
        return metis.metis_partition(source, target, num_nodes, num_parts, seed=seed, train_mask=train)
    from gtrain.graph.partition.streaming import stream_partition

    return stream_partition(source, target, num_nodes, num_parts, method, group=group, seed=seed)


def _random(num_nodes: int, num_parts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.empty(num_nodes, dtype=torch.int64)
    parts[torch.randperm(num_nodes, generator=generator)] = torch.arange(num_nodes) % num_parts
    return parts


def _random_by_type(sizes: list[int], num_parts: int, seed: int) -> Ints:
    """Deal the nodes of each type to the parts in turn; each type goes on where the last one stopped."""
    generator, dealt, parts = np.random.default_rng(seed), 0, []
    for size in sizes:
        parts.append((generator.permutation(size) + dealt) % num_parts)
        dealt += size
    return np.concatenate(parts)


def _first_ids(sizes: Mapping[str, int]) -> dict[str, int]:
    """The first id of each node type where all are counted in one row."""
    return dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))


def _joined_edges(data: HeteroData, first: dict[str, int]) -> tuple[Ints, Ints]:
    """Return the edges of all types, the ids of each node type counted from its ``first``."""
    ends: list[list[Ints]] = [[np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]]
    for edge_type in data.edge_types:
        for row, kind, end in zip(data[edge_type].edge_index.numpy(), edge_type[::2], ends, strict=True):
            end.append(row + first[kind])
    return np.concatenate(ends[0]), np.concatenate(ends[1])


def _train_mask(data: HeteroData, kind: str, size: int) -> NDArray[np.bool_]:
    mask = data[kind].get("train_mask")
    return mask.numpy().astype(bool) if isinstance(mask, Tensor) else np.zeros(size, dtype=bool)


def _joined_assignment(assignment: Mapping[str, Tensor] | None, sizes: dict[str, int], origin: str) -> Tensor | None:
    if assignment is None:
        return None
    for kind, size in sizes.items():
        found = assignment[kind].numel() if kind in assignment else 0
        if found != size:
            raise DataError(
                f"{origin} has {found} entries for {kind}, and the graph has {size} such nodes",
                hint="give one entry for each node, by node type, in the order of the source data's nodes",
            )
    return torch.cat([assignment[kind] for kind in sizes])


def _fill_empty(parts: Ints, num_parts: int) -> Ints:
    """Give each empty part the last node of the part that is largest then; METIS leaves some on tiny graphs."""
    sizes = np.bincount(parts, minlength=num_parts)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        parts[np.flatnonzero(parts == largest)[-1]] = empty
        sizes[largest] -= 1
        sizes[empty] += 1
    return parts
