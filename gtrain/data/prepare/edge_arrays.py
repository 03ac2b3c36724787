"""Preparing an edge list that may be larger than memory: checked and encoded as it was read, split by position."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.prepare.split import SplitOptions
from gtrain.errors import ConfigError
from gtrain.graph.store.tables import EdgeArrays

_CHUNK = 1 << 22  # edges


def node_part(arrays: EdgeArrays) -> Data:
    """Return the nodes alone, as a graph without edges, so that they are checked and split like any other."""
    tensors = {name: _tensor(value) for name, value in arrays.node_tensors.items()}
    return Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=arrays.num_nodes, **tensors)


def take_nodes(arrays: EdgeArrays, nodes: Data) -> None:
    """Put the node tensors back, masks included."""
    keep = {name: value for name, value in nodes.to_dict().items() if isinstance(value, Tensor)}
    arrays.node_tensors = {name: value for name, value in keep.items() if name != "edge_index"}


def num_relations(arrays: EdgeArrays) -> int | None:
    """Return the largest ``edge_type`` + 1, or None without relations."""
    types = [held["edge_type"] for held in arrays.held_out.values() if "edge_type" in held]
    types += [arrays.edge_tensors["edge_type"]] if "edge_type" in arrays.edge_tensors else []
    found = [int(block.max()) for values in types for block in _blocks(values) if block.size]
    return max(found) + 1 if found else None


def split_arrays(arrays: EdgeArrays, options: SplitOptions) -> dict[str, int]:
    """Move edges into ``held_out`` by fractions, in place; an edge stands for itself, its reverse for another.

    ``random`` draws each edge's side on its own, so that sizes are the fractions up to chance; ``time`` cuts at the
    times below which the fractions lie.

    Returns:
        edges that train, validate and test.

    Raises:
        ConfigError: the kind of split does not suit an edge list.
    """
    if options.kind == "public" and arrays.held_out:
        held = {split: len(edges["source"]) for split, edges in arrays.held_out.items()}
        return {"train": arrays.num_edges, **held}
    side = _sides(arrays, options)
    pieces = {"source": arrays.source, "target": arrays.target, **arrays.edge_tensors}
    arrays.held_out = {
        split: {name: np.asarray(values)[side == number] for name, values in pieces.items()}
        for number, split in ((1, "val"), (2, "test"))
    }
    kept = {name: np.asarray(values)[side == 0] for name, values in pieces.items()}
    arrays.source, arrays.target = kept.pop("source"), kept.pop("target")
    arrays.edge_tensors = kept
    return {"train": arrays.num_edges, **{split: len(edges["source"]) for split, edges in arrays.held_out.items()}}


def _sides(arrays: EdgeArrays, options: SplitOptions) -> NDArray[np.uint8]:
    """Return 0 (train), 1 (val) or 2 (test) for each edge."""
    limits = np.cumsum([options.train_fraction, options.val_fraction])
    if options.kind == "random":
        rng = np.random.default_rng(options.seed)
        blocks = [np.searchsorted(limits, rng.random(len(b)), side="right") for b in _blocks(arrays.source)]
        return np.concatenate([np.minimum(block, 2).astype(np.uint8) for block in blocks])
    if options.kind != "time" or "edge_time" not in arrays.edge_tensors:
        raise ConfigError(
            f"data.task=link with data.split={options.kind}, and the edge list has no "
            f"{'times' if options.kind == 'time' else 'such split'}",
            hint="set data.split=random, or data.split=time where edges have times",
        )
    times = np.asarray(arrays.edge_tensors["edge_time"])
    cuts = np.quantile(times, np.minimum(limits, 1.0), method="higher")
    return np.searchsorted(cuts, times, side="left").clip(max=2).astype(np.uint8)


def _blocks(values: NDArray[Any]) -> list[NDArray[Any]]:
    return [values[start : start + _CHUNK] for start in range(0, max(len(values), 1), _CHUNK)]


def _tensor(value: NDArray[Any] | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
