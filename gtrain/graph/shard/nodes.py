"""Find the halo of a part, and number its nodes locally: the nodes it owns, then the halo that its edges read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.graph.owners import count_by_owner, owner_of


@dataclass(frozen=True)
class ShardNodes:
    """The nodes of a shard: of a homogeneous graph, or of one node type of a heterogeneous graph.

    Three id spaces occur. A *global id* is a node's number in the store, ``0 .. N-1``, contiguous per part; each node
    type has a separate numbering. A *local id* is a node's number in this shard: first the nodes that the part owns,
    then the *halo* (the remote nodes that its edges read), owner by owner. An *original id* is a node's number in the
    source data. With P parts, n owned nodes and h halo nodes:

    Attributes:
        part: number of this part, ``0 .. P-1``.
        num_parts: P.
        offsets: int64 ``[P + 1]``, global ids; part p owns ``offsets[p] .. offsets[p+1]-1``.
        blocks: P part numbers, the owner of each block: ``part, part-1, part-2, ...`` modulo P. Every shard has P
            blocks, possibly empty, so that in round r each rank reads from one rank and is read by one.
        block_ptr: int64 ``[P + 1]``, local ids; block r holds ``block_ptr[r] .. block_ptr[r+1]-1``, and block 0 holds
            the owned nodes.
        halo: for each block an int64 tensor of global ids, ascending: ``halo[r][i]`` is the node with the local id
            ``block_ptr[r] + i``. ``halo[0]`` is empty: owned nodes are not listed.
    """

    part: int
    num_parts: int
    offsets: Tensor
    blocks: tuple[int, ...]
    block_ptr: Tensor
    halo: tuple[Tensor, ...]

    @property
    def num_local(self) -> int:
        """n, the number of owned nodes."""
        return int(self.block_ptr[1])

    @property
    def num_halo(self) -> int:
        """h, the number of halo nodes."""
        return int(self.block_ptr[-1]) - self.num_local

    def global_id(self, local_id: Tensor) -> Tensor:
        """Return the global ids (int64) of local ids of any shape."""
        first = int(self.offsets[self.part])
        table = torch.cat([torch.arange(first, first + self.num_local), *self.halo])
        return table[local_id]

    def by_block(self, global_id: Tensor) -> tuple[Tensor | None, Tensor]:
        """Group nodes by block, stably.

        Args:
            global_id: int64 ``[E]``, owned nodes or halo nodes.

        Returns:
            The permutation, int64 ``[E]`` positions in ``global_id``, or None if it is the identity; and the local ids
            in the new order, int64 ``[E]``.
        """
        if self.num_parts == 1:
            return None, global_id
        global_id = global_id.contiguous()
        owner = owner_of(global_id, self.offsets)
        block = (self.part - owner) % self.num_parts
        order = torch.argsort(block, stable=True)
        groups = global_id[order].split(torch.bincount(block, minlength=self.num_parts).tolist())
        local = [groups[0] - self.offsets[self.part]]
        # Each halo is ascending: a binary search gives a node's position in it.
        local += [self.block_ptr[r] + torch.searchsorted(self.halo[r], groups[r]) for r in range(1, self.num_parts)]
        return order, torch.cat(local)


def shard_nodes(part: int, offsets: Tensor, read: Iterable[Tensor]) -> ShardNodes:
    """Number the nodes that a part owns and the halo that it reads.

    Args:
        part: number of the part.
        offsets: int64 ``[P + 1]``, global ids; part p owns ``offsets[p] .. offsets[p+1]-1``.
        read: int64 tensors of global ids of the sources of the part's edges, in any order.
    """
    num_parts, first, last = offsets.numel() - 1, offsets[part], offsets[part + 1]
    # Each tensor is reduced to distinct ids first: all sources at once would take as much memory as the edges.
    remote = [ids[(ids < first) | (ids >= last)].unique() for ids in read] if num_parts > 1 else []
    halo_ids = torch.cat(remote).unique() if remote else offsets[:0]
    # Ascending global ids are grouped by owner, since parts are ranges.
    owned = halo_ids.split(count_by_owner(halo_ids, offsets))
    blocks = tuple((part - r) % num_parts for r in range(num_parts))
    halo = (offsets[:0], *(owned[owner] for owner in blocks[1:]))
    sizes = torch.tensor([int(last - first), *(ids.numel() for ids in halo[1:])])
    block_ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return ShardNodes(part, num_parts, offsets, blocks, block_ptr, halo)
