"""Chunks of edges that share their negatives, as in PyTorch-BigGraph (Lerer et al. 2019, section 4.3).

In a chunk the ends of all edges are compared with each other: the answer of one edge is a negative of the others. So m
edges give each other m - 1 negatives for the price of one matrix product. Nodes drawn uniformly, a set for each chunk,
are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gtrain.kernels.splitmix import below, key

DrawNodes: TypeAlias = Callable[[int, int, int, Tensor, int], Tensor]
"""Draws nodes for chunks, as :meth:`ChunkDraws.__call__` does."""


class ChunkDraws:
    """Draws the uniform negatives of chunks with a counter-based generator.

    The nodes of a chunk depend on the seed and the chunk alone: processes that share the chunks of a step draw the same
    nodes as one process that has all of them.

    Args:
        seed: of a step's draws; None: taken from torch's generator.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = int(torch.randint(1 << 62, ())) if seed is None else seed

    def __call__(self, group: int, end: int, size: int, chunk: Tensor, count: int) -> Tensor:
        """Draw nodes, int64 ``[C, count]``.

        Args:
            group: number of the group of relations.
            end: 0 for heads, 1 for tails.
            size: nodes to draw from.
            chunk: int64 ``[C]``, numbers of the chunks within the group's part of the step.
            count: nodes for each chunk.
        """
        return torch.from_numpy(below(size, key(self._seed, group, end), chunk.cpu().numpy(), count))


class EdgeChunks(NamedTuple):
    """B edges in C chunks of m slots.

    Attributes:
        edge: int64 ``[C, m]``, the edge in each slot; arbitrary if the slot is empty.
        filled: bool ``[C, m]``, whether the slot has an edge.
    """

    edge: Tensor
    filled: Tensor

    def split(self, chunks: int) -> list[EdgeChunks]:
        """Return blocks of this many chunks."""
        return [EdgeChunks(*pair) for pair in zip(self.edge.split(chunks), self.filled.split(chunks), strict=True)]

    def negative_mask(self, others: int) -> Tensor:
        """Return which candidates are negatives of which edge, bool ``[C, m, m + others]``.

        The candidates are the answers of the chunk's m slots, then ``others`` more, which all count. The edge's
        answer and empty slots do not count; the negatives of an empty slot are the others.
        """
        chunks, chunk_size = self.filled.shape
        inside = self.filled.unsqueeze(1) & ~torch.eye(chunk_size, dtype=torch.bool, device=self.filled.device)
        return torch.cat([inside, inside.new_ones(chunks, chunk_size, others)], dim=-1)


def in_order(edges: Tensor, chunk_size: int) -> EdgeChunks:
    """Cut edges ``[B]`` into chunks in their order; the last may have empty slots."""
    num_edges = len(edges)
    chunk_size = max(1, min(chunk_size, num_edges))
    slot = torch.arange(-(-num_edges // chunk_size) * chunk_size, device=edges.device).view(-1, chunk_size)
    return EdgeChunks(slot.clamp(max=max(num_edges - 1, 0)), slot < num_edges)


def by_relation(relation: Tensor, chunk_size: int) -> EdgeChunks:
    """Cut edges into chunks of one relation each, in their order within the relation.

    Args:
        relation: int64 ``[B]``.
        chunk_size: m.
    """
    order = relation.argsort(stable=True)
    _, counts = relation[order].unique_consecutive(return_counts=True)
    chunk_size = max(1, min(chunk_size, int(counts.max()) if counts.numel() else 1))
    chunks_of = (counts + chunk_size - 1) // chunk_size
    group = torch.repeat_interleave(torch.arange(counts.numel(), device=relation.device), chunks_of)
    first_chunk = chunks_of.cumsum(0) - chunks_of
    chunk = torch.arange(group.numel(), device=relation.device)
    begin = (chunk - first_chunk[group]) * chunk_size  # of each chunk, within its relation
    within = begin.unsqueeze(1) + torch.arange(chunk_size, device=relation.device)
    filled = within < counts[group].unsqueeze(1)
    slot = (counts.cumsum(0) - counts)[group].unsqueeze(1) + within
    return EdgeChunks(order[slot.clamp(max=max(order.numel() - 1, 0))], filled)
