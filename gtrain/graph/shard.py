"""The graph shard: the piece of a graph that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.graph.store import Store
from gtrain.graph.whole import whole_edges, whole_indptr, whole_nodes


@dataclass(frozen=True)
class GraphShard:
    """One part of a graph, with the edges that point at its nodes.

    Three id spaces occur. A *global id* is a node's number in the store, ``0 .. N-1``, contiguous for each part. A
    *local id* is a node's number in this shard: the shard's own nodes come first, then the *halo* (the remote nodes
    that its edges read), owner by owner. An *orig id* is a node's number in the source data, kept in
    ``node_data["orig_id"]``. With P parts, n own nodes, h halo nodes and E_p edges:

    Attributes:
        part: the part that this shard is, ``0 .. P-1``.
        num_parts: P.
        offsets: int64 ``[P + 1]``, global ids; part p owns ``offsets[p] .. offsets[p+1]-1``.
        edge_index: int64 ``[2, E_p]``, local ids; row 0 the sources, ``0 .. n+h-1``, row 1 the targets, ``0 .. n-1``.
            Edges are grouped by the block of their source, block 0 first, and sorted by target and then source within
            a block; where the graph has ``edge_time``, by target, time and source.
        blocks: P part numbers, the owner of each block in order: ``part, part-1, part-2, ...`` modulo P. Every shard
            has P blocks, some of them perhaps empty, so that in round r each rank reads from one rank and is read by
            one.
        block_ptr: int64 ``[P + 1]``, local ids; block r holds ``block_ptr[r] .. block_ptr[r+1]-1``, and block 0 is
            the own nodes.
        halo: for each block an int64 tensor of global ids, ascending: ``halo[r][i]`` is the node with the local id
            ``block_ptr[r] + i``. ``halo[0]`` is empty: the own nodes are not listed.
        node_data: tensors ``[n, ...]`` of the own nodes, by name: ``orig_id`` (int64) always; ``x`` (dense, or
            ``torch.sparse_csr``), ``y``, ``train_mask``, ``val_mask``, ``test_mask`` (bool) and others where the data
            has them.
        edge_data: tensors ``[E_p, ...]`` in the order of ``edge_index``, by name: ``edge_id`` (int64, the edge's
            position in the source data) always; ``edge_weight``, ``edge_attr`` and others where the data has them.

    No field is ever None; what the data does not have is absent from ``node_data`` or ``edge_data``.

    Example: two parts own the global ids 0, 1 and 2, 3. The edges 0 -> 1, 3 -> 1 and 2 -> 0 point at part 0, whose
    shard has ``blocks (0, 1)``, ``halo ([], [2, 3])``, ``block_ptr [0, 2, 4]`` and, since block 0 comes first,
    ``edge_index [[0, 2, 3], [1, 0, 1]]``.
    """

    part: int
    num_parts: int
    offsets: Tensor
    edge_index: Tensor
    blocks: tuple[int, ...]
    block_ptr: Tensor
    halo: tuple[Tensor, ...]
    node_data: dict[str, Tensor]
    edge_data: dict[str, Tensor]

    @property
    def num_local(self) -> int:
        """n, the number of nodes that the shard owns."""
        return int(self.block_ptr[1])

    @property
    def num_halo(self) -> int:
        """h, the number of distinct remote nodes that the shard reads."""
        return int(self.block_ptr[-1]) - self.num_local

    def global_id(self, local_id: Tensor) -> Tensor:
        """Return the global ids (int64) of local ids of any shape."""
        first = int(self.offsets[self.part])
        table = torch.cat([torch.arange(first, first + self.num_local), *self.halo])
        return table[local_id]


def load_shard(store: Store, part: int) -> GraphShard:
    """Verify one part of a store and open it; node tensors stay memory-mapped.

    Raises:
        StoreError: a file of the part is damaged.
    """
    store.verify(part)
    return _shard(
        part,
        store.offsets,
        indptr=store.edge("indptr", part),
        indices=store.edge("indices", part).to(torch.int64),
        node_data={name: store.node(name, part) for name in store.node_tensors()},
        edge_data={name: store.edge(name, part) for name in store.edge_tensors() if name != "indices"},
    )


def load_whole(store: Store) -> GraphShard:
    """Verify a store and return the whole graph as one shard, part 0 of 1, its nodes in the order of the global ids.

    Raises:
        StoreError: a file is damaged, or the graph has node types or edge types.
    """
    if store.num_parts == 1:
        return load_shard(store, 0)
    for part in range(store.num_parts):
        store.verify(part)
    return _shard(
        0,
        torch.tensor([0, store.num_nodes]),
        indptr=whole_indptr(store),
        indices=whole_edges(store, "indices").to(torch.int64),
        node_data={name: whole_nodes(store, name) for name in store.node_tensors()},
        edge_data={name: whole_edges(store, name) for name in store.edge_tensors() if name != "indices"},
    )


def _shard(
    part: int,
    offsets: Tensor,
    indptr: Tensor,
    indices: Tensor,
    node_data: dict[str, Tensor],
    edge_data: dict[str, Tensor],
) -> GraphShard:
    """Turn in-edges by column, with global sources, into a shard."""
    num_parts, num_local = offsets.numel() - 1, indptr.numel() - 1
    target = torch.repeat_interleave(torch.arange(num_local), indptr.diff())
    if num_parts == 1:
        empty = torch.empty(0, dtype=torch.int64)
        edge_index = torch.stack([indices, target])
        return GraphShard(part, 1, offsets, edge_index, (0,), offsets.clone(), (empty,), node_data, edge_data)
    owner = torch.searchsorted(offsets, indices, right=True) - 1
    block = (part - owner) % num_parts
    order = torch.argsort(block, stable=True)
    sources = indices[order].split(torch.bincount(block, minlength=num_parts).tolist())
    halo = (indices[:0], *(group.unique() for group in sources[1:]))
    sizes = torch.tensor([num_local, *(ids.numel() for ids in halo[1:])])
    block_ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    local = [sources[0] - offsets[part]]
    local += [block_ptr[r] + torch.searchsorted(halo[r], sources[r]) for r in range(1, num_parts)]
    return GraphShard(
        part=part,
        num_parts=num_parts,
        offsets=offsets,
        edge_index=torch.stack([torch.cat(local), target[order]]),
        blocks=tuple((part - r) % num_parts for r in range(num_parts)),
        block_ptr=block_ptr,
        halo=halo,
        node_data=node_data,
        edge_data={name: tensor[order] for name, tensor in edge_data.items()},
    )
