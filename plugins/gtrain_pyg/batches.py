"""Assemble a sampled subgraph and its rows into a batch: an ordinary ``Data`` or ``HeteroData``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.scored_edges import ScoredEdges
from gtrain_pyg.ranks.parts import NodeOrEdgeType
from gtrain_pyg.sampling.subgraph import Subgraph


@dataclass(frozen=True)
class SeedFields:
    """The fields of a batch that describe its s seeds.

    Attributes:
        target: the node type, or edge type, of the seeds.
        entries: entries of the batch as a whole: ``seeds``, ``batch_size``.
        input_id: int64 ``[s]``, positions among the seeds that the rank draws from.
        time: int64 ``[s]``, of each seed; None without times.
        edges: the true and false edges that the batch scores, by local ids; None if seeds are nodes.
    """

    target: NodeOrEdgeType
    entries: Mapping[str, Any]
    input_id: Tensor
    time: Tensor | None = None
    edges: ScoredEdges | None = None


def make_batch(
    subgraph: Subgraph,
    rows: Mapping[NodeOrEdgeType, Mapping[str, Tensor]],
    seeds: SeedFields,
    *,
    hetero: bool,
    trim: bool,
) -> Data | HeteroData:
    """Assemble a batch.

    Args:
        subgraph: what was sampled, with n nodes and e edges of each type.
        rows: node and edge tensors by type and name, in the order of the subgraph.
        seeds: the seeds it was grown from; they are its first nodes.
        hetero: make a ``HeteroData``.
        trim: whether layers may leave out what the seeds' results do not depend on.

    Returns:
        A batch with, by type in a ``HeteroData``:

        * the store's node tensors, ``[n, ...]``, and ``n_id`` int64 ``[n]``, global ids;
        * ``edge_index`` int64 ``[2, e]``, the store's edge tensors, ``[e, ...]``, and ``e_id`` int64 ``[e]``, the
          edges' positions in the source data;
        * ``num_sampled_nodes`` and ``num_sampled_edges``, per hop; ``batch`` int64 ``[n]``, the seed whose subgraph a
          node is in, if subgraphs are disjoint;

        and with ``batch_size`` s, ``seeds`` (local ids of nodes int64 ``[s]``, or positions of edges), ``input_id``,
        ``seed_time`` if seeds have times, and ``trim``.
    """
    batch: Data | HeteroData = HeteroData() if hetero else Data()
    for node_type, ids in subgraph.node.items():
        nodes = batch[node_type] if hetero else batch
        nodes.num_nodes = len(ids)
        for name, tensor in rows.get(node_type, {}).items():
            nodes[name] = tensor
        nodes.n_id = as_tensor(ids)
        nodes.num_sampled_nodes = subgraph.num_sampled_nodes[node_type]
        if subgraph.batch is not None:
            nodes.batch = as_tensor(subgraph.batch[node_type])
    for edge_type, index in subgraph.edge_index.items():
        edges = batch[edge_type] if hetero else batch
        edges.edge_index = as_tensor(index)
        for name, tensor in rows.get(edge_type, {}).items():
            edges["e_id" if name == "edge_id" else name] = tensor
        edges.num_sampled_edges = subgraph.num_sampled_edges[edge_type]
    for name, value in seeds.entries.items():
        batch[name] = value
    if seeds.edges is not None:
        seeds.edges.put_into(batch, seeds.target if hetero and not isinstance(seeds.target, str) else None)
    target = batch[seeds.target] if hetero else batch
    target.input_id, target.batch_size = seeds.input_id, seeds.input_id.numel()
    if seeds.time is not None:
        target.seed_time = seeds.time
    batch.trim = trim
    if hetero:
        batch.target = seeds.target
    return batch


def as_tensor(array: Any) -> Tensor:
    """Return a tensor over the memory of an array."""
    return array if isinstance(array, Tensor) else torch.from_numpy(array)
