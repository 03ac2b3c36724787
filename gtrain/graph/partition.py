"""Cutting a graph into parts: which part owns which node."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pymetis
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import ConfigError, DataError

METHODS = ("metis", "random", "file")

Ints = NDArray[np.int64]


def partition_nodes(
    edge_index: Tensor,
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
        edge_index: directed edges, row 0 the sources, row 1 the targets.
        num_nodes: N, number of nodes.
        num_parts: P, number of parts.
        method: ``metis`` (few cut edges, balanced work), ``random`` (sizes differ by at most one) or ``file`` (the
            caller's own ``assignment``).
        seed: makes ``metis`` and ``random`` repeatable.
        train_mask: nodes of the train split, so that ``metis`` balances them too; None when there is no split.
        assignment: the part of each node, for ``file`` only.
        origin: where the assignment comes from, for messages.

    Shapes:
        edge_index ``[2, E]`` int64, train_mask ``[N]`` bool, assignment ``[N]`` integer.

    Returns:
        The part of each node, ``[N]`` int64.

    Raises:
        ConfigError: the method is unknown.
        DataError: there are more parts than nodes, or the assignment does not fit the graph.
    """
    if method not in METHODS:
        raise ConfigError(
            f"data.partitioner={method!r} is not a partitioner", hint=f"choose one of {', '.join(METHODS)}"
        )
    if num_parts < 1:
        raise ConfigError(f"data.num_parts={num_parts} is not a number of parts", hint="set 1 or more")
    if num_parts > num_nodes:
        raise DataError(
            f"more parts than nodes: {num_parts} parts were asked for and the graph has {num_nodes} nodes",
            hint="lower data.num_parts, or run on fewer ranks",
        )
    if method == "file":
        return _checked(assignment, num_nodes, num_parts, origin)
    if num_parts == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    if method == "random" or edge_index.numel() == 0:
        return _random(num_nodes, num_parts, seed)
    parts = _metis(edge_index.numpy(), num_nodes, num_parts, seed, train_mask)
    return torch.from_numpy(_fill_empty(parts, num_parts))


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
    except (ValueError, OverflowError, EOFError) as err:
        raise DataError(
            f"data.partition_path={path}: cannot be read as one integer per node ({err})", hint=wanted
        ) from err
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        found = f"{values.dtype} of shape {list(values.shape)}"
        raise DataError(
            f"data.partition_path={path}: holds {found}, and a partition is one integer for each node", hint=wanted
        )
    return torch.from_numpy(values.astype(np.int64))


def _read_integers(path: Path) -> Ints:
    words = path.read_text().split()
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


def _random(num_nodes: int, num_parts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.empty(num_nodes, dtype=torch.int64)
    parts[torch.randperm(num_nodes, generator=generator)] = torch.arange(num_nodes) % num_parts
    return parts


def _metis(edges: Ints, num_nodes: int, num_parts: int, seed: int, train_mask: Tensor | None) -> Ints:
    """Run METIS (Karypis and Kumar 1998) on the symmetric, loop-free, simple graph under ``edges``."""
    starts, adjacent = _adjacency(edges, num_nodes)
    result = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(starts, adjacent),
        vweights=_weights(edges, num_nodes, train_mask),
        options=pymetis.Options(seed=seed % 2**31),
    )
    return np.asarray(result.vertex_part, dtype=np.int64)


def _adjacency(edges: Ints, num_nodes: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the CSR form that METIS wants: both directions of each edge once, no loops."""
    source, target = edges[:, edges[0] != edges[1]]
    keys = np.concatenate([source * num_nodes + target, target * num_nodes + source])
    keys.sort()
    if keys.size:
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
    if keys.size >= 2**31:
        raise DataError(
            f"METIS counts in 32 bits and the symmetric graph has {keys.size} edges", hint="set data.partitioner=random"
        )
    starts = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys // num_nodes, minlength=num_nodes), out=starts[1:])
    return starts.astype(np.int32), (keys % num_nodes).astype(np.int32)


def _weights(edges: Ints, num_nodes: int, train_mask: Tensor | None) -> NDArray[np.int32]:
    """Return one weight for each node: a node, its in-edges and its training seed count alike on the average.

    METIS balances a single weight here, ``a + b * in-degree + c * is_train`` with b and c such that the three sums are
    equal. The in-degree counts, since a part stores the edges that point at its nodes.
    """
    terms = [np.ones(num_nodes), np.bincount(edges[1], minlength=num_nodes).astype(float)]
    if train_mask is not None:
        terms.append(train_mask.numpy().astype(float))
    total = np.sum([term / term.mean() for term in terms if term.any()], axis=0)
    # METIS adds the weights up in 32 bits, so their sum has to stay below 2^31.
    scale = min(100.0, 2**29 / float(total.sum()))
    return np.maximum(1, np.rint(total * scale)).astype(np.int32)


def _fill_empty(parts: Ints, num_parts: int) -> Ints:
    """Give each empty part the last node of the part that is largest then; METIS leaves some on tiny graphs."""
    sizes = np.bincount(parts, minlength=num_parts)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        parts[np.flatnonzero(parts == largest)[-1]] = empty
        sizes[largest] -= 1
        sizes[empty] += 1
    return parts
