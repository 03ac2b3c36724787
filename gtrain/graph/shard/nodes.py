"""The nodes of one part: numbering those that it owns and those that its edges read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.graph.owners import count_by_owner, owner_of


@dataclass(frozen=True)
class ShardNodes:
    """The nodes that a rank knows: of a graph, or of one node type of a graph with types.

    Three id spaces occur. A *global id* is a node's number in the store, ``0 .. N-1``, contiguous for each part; each
    node type has its own. A *local id* is a node's number in this shard: the shard's own nodes come first, then the
    *halo* (the remote nodes that its edges read), owner by owner. An *orig id* is a node's number in the source data.
    With P parts, n own nodes and h halo nodes:

    Attributes:
        part: the part that this shard is, ``0 .. P-1``.
        num_parts: P.
        offsets: int64 ``[P + 1]``, global ids; part p owns ``offsets[p] .. offsets[p+1]-1``.
        blocks: P part numbers, the owner of each block in order: ``part, part-1, part-2, ...`` modulo P. Every shard
            has P blocks, some of them perhaps empty, so that in round r each rank reads from one rank and is read by
            one.
        block_ptr: int64 ``[P + 1]``, local ids; block r holds ``block_ptr[r] .. block_ptr[r+1]-1``, and block 0 is
            the own nodes.
        halo: for each block an int64 tensor of global ids, ascending: ``halo[r][i]`` is the node with the local id
            ``block_ptr[r] + i``. ``halo[0]`` is empty: the own nodes are not listed.
    """

    part: int
    num_parts: int
    offsets: Tensor
    blocks: tuple[int, ...]
    block_ptr: Tensor
    halo: tuple[Tensor, ...]

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

    def by_block(self, global_id: Tensor) -> tuple[Tensor | None, Tensor]:
        """Group known nodes by their block, in the order in which they come within each.

        Args:
            global_id: int64 ``[E]``, own nodes or nodes of the halo.

        Returns:
            int64 ``[E]``, positions in ``global_id``, or None where their order stays; and the local ids in the new
            order.
        """
        if self.num_parts == 1:
            return None, global_id
        global_id = global_id.contiguous()
        owner = owner_of(global_id, self.offsets)
        block = (self.part - owner) % self.num_parts
        order = torch.argsort(block, stable=True)
        groups = global_id[order].split(torch.bincount(block, minlength=self.num_parts).tolist())
        local = [groups[0] - self.offsets[self.part]]
        local += [self.block_ptr[r] + torch.searchsorted(self.halo[r], groups[r]) for r in range(1, self.num_parts)]
        return order, torch.cat(local)


def shard_nodes(part: int, offsets: Tensor, read: Iterable[Tensor]) -> ShardNodes:
    """Number the nodes that a part owns and those that it reads.

    Args:
        part: the part.
        offsets: int64 ``[P + 1]``, global ids; part p owns ``offsets[p] .. offsets[p+1]-1``.
        read: global ids (int64) of the sources of its edges, in any order and any number of tensors.
    """
    num_parts, first, last = offsets.numel() - 1, offsets[part], offsets[part + 1]
    remote = [ids[(ids < first) | (ids >= last)].unique() for ids in read] if num_parts > 1 else []
    halo_ids = torch.cat(remote).unique() if remote else offsets[:0]
    owned = halo_ids.split(count_by_owner(halo_ids, offsets))
    blocks = tuple((part - r) % num_parts for r in range(num_parts))
    halo = (offsets[:0], *(owned[owner] for owner in blocks[1:]))
    sizes = torch.tensor([int(last - first), *(ids.numel() for ids in halo[1:])])
    block_ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return ShardNodes(part, num_parts, offsets, blocks, block_ptr, halo)
