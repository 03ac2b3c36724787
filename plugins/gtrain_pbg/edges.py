"""From buckets to batches: edge chunks, held-out edges, a worker's share, batches of one relation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.graph.store import Store
from gtrain.nn.recipe import ModelRecipe
from gtrain_pbg.buckets import Bucket
from gtrain_pbg.step.layout import EdgeList


@dataclass(frozen=True)
class BucketEdges:
    """Reads the edges to train on.

    Attributes:
        store: with buckets.
        chunks: edge chunks per edge set of a bucket.
        eval_fraction: share of edges that is held out.
        shuffle: whether the order is random.
        seed: of all random choices.
        dtype: of weights.
    """

    store: Store
    chunks: int
    eval_fraction: float
    shuffle: bool
    seed: int
    dtype: torch.dtype

    @property
    def passes(self) -> int:
        """How often an epoch goes through the buckets; see :func:`passes_of`."""
        return passes_of(self.store, self.chunks)

    def filled(self) -> Tensor:
        """Return which buckets have edges, bool ``[P, P]``."""
        mask = torch.zeros(self.store.num_parts, self.store.num_parts, dtype=torch.bool)
        mask[tuple(torch.tensor(sorted(filled(self.store))).T)] = True
        return mask

    def size(self, bucket: Bucket, chunk: int) -> int:
        """Return the number of edges of a bucket's chunk, without those held out."""
        begin, end = self._span(self.store.bucket(*bucket), chunk)
        return end - begin - int((end - begin) * self.eval_fraction)

    def share(self, bucket: Bucket, chunk: int, epoch: int, worker: int, workers: int) -> tuple[EdgeList, EdgeList]:
        """Return one worker's edges of a bucket's chunk, in their order, and the edges held out from all workers.

        Every worker computes the same order and takes its piece of it. The chunks of the first edge set come before
        those of the second.
        """
        columns = self.store.bucket(*bucket)
        begin, end = self._span(columns, chunk)
        rows = torch.arange(begin, end)
        held = rows[:0]
        if self.eval_fraction:
            drawn = torch.randperm(end - begin, generator=self._generator(chunk, *bucket))
            count = int((end - begin) * self.eval_fraction)
            held, rows = rows[drawn[:count].sort().values], rows[drawn[count:].sort().values]
        if self.shuffle:
            rows = rows[torch.randperm(rows.numel(), generator=self._generator(epoch, chunk, *bucket))]
        return self._read(columns, rows.tensor_split(workers)[worker]), self._read(columns, held)

    def _span(self, columns: dict[str, Tensor], chunk: int) -> tuple[int, int]:
        """Return the range of a chunk's edges: the edges of an edge set are consecutive."""
        number, chunk = divmod(chunk, self.chunks)
        first, last = 0, columns["source"].numel()
        if "edge_set" in columns:
            edge_set, ends = columns["edge_set"].contiguous(), torch.tensor([number, number + 1])
            first, last = torch.searchsorted(edge_set, ends).tolist()
        count = last - first
        return first + count * chunk // self.chunks, first + count * (chunk + 1) // self.chunks

    def _read(self, columns: dict[str, Tensor], rows: Tensor) -> EdgeList:
        heads, tails = (columns[name][rows].to(torch.int64) for name in ("source", "target"))
        relation = columns["edge_type"][rows].to(torch.int64) if "edge_type" in columns else torch.zeros_like(heads)
        weight = columns["edge_weight"][rows].to(self.dtype) if "edge_weight" in columns else None
        return EdgeList(heads, relation, tails, weight)

    def _generator(self, *key: int) -> torch.Generator:
        return torch.Generator().manual_seed(mixed(self.seed, *key))


def passes_of(store: Store, chunks: int) -> int:
    """Return how often an epoch goes through the buckets: once for each chunk of each edge set."""
    return int(store.facts.get("edge_sets") or 1) * chunks


def filled(store: Store) -> set[Bucket]:
    """Return the buckets that have edges, or the first bucket if none has."""
    (spec,) = store.manifest.edge_types.values()
    counts = spec.buckets or ()
    return {(i, j) for i, row in enumerate(counts) for j, count in enumerate(row) if count} or {(0, 0)}


def mixed(*key: int) -> int:
    """Return a seed that depends on every number of the key."""
    return random.Random(repr(key)).getrandbits(62)


class RelationGroups:
    """Which group of relations edges belong to.

    Args:
        recipe: has the groups.

    Attributes:
        batching_keys: for each relation, a number that all edges of a batch have in common: its group, or the relation
            itself if relations are static; None: all edges have the same.
    """

    def __init__(self, recipe: ModelRecipe) -> None:
        self._group, self._local, keys = torch.zeros(3, recipe.num_relations, dtype=torch.int64)
        self._several = len(recipe.groups) > 1
        for number, group in enumerate(recipe.groups):
            members = torch.tensor(group.relations)
            self._group[members], self._local[members] = number, torch.arange(len(members))
            keys[members] = number if group.reciprocal else members
        self.batching_keys = keys if len(keys.unique()) > 1 else None

    def of(self, edges: EdgeList) -> int:
        """Return the group of a batch, whose edges are all of one."""
        return int(self._group[edges.relation[0]]) if self._several else 0

    def split(self, edges: EdgeList) -> Iterator[tuple[int, EdgeList]]:
        """Yield each group that edges belong to, with its edges."""
        of_edge = self._group[edges.relation]
        for number in of_edge.unique().tolist():
            yield number, edges.select((of_edge == number).nonzero().flatten())

    def localized(self, edges: EdgeList, head: int, tail: int) -> EdgeList:
        """Number edges by the relations of their group, and by rows that count from ``head`` and ``tail``."""
        if not (self._several or head or tail):
            return edges
        return EdgeList(edges.heads - head, self._local[edges.relation], edges.tails - tail, edges.weight)


def batches_of(edges: EdgeList, size: int, keys: Tensor | None, generator: torch.Generator) -> Iterator[EdgeList]:
    """Cut edges into as few batches as possible, whose sizes differ by one edge at most.

    The loss is a batch's mean, so a short last batch would move rows as far as a full one does, on few edges.

    Args:
        edges: in their order.
        size: most edges per batch.
        keys: of each relation; the edges of a batch have one key. It is drawn with a probability proportional to the
            remaining edges of each key, and the next of its edges are taken. None: all edges have the same key.
        generator: draws keys.
    """
    if keys is None or not len(edges):
        begin = 0
        while begin < len(edges):
            end = begin + _next_size(len(edges) - begin, size)
            yield edges.select(slice(begin, end))
            begin = end
        return
    of_edge = keys[edges.relation]
    order = of_edge.argsort(stable=True)
    edges = edges.select(order)
    _, remaining = of_edge[order].unique_consecutive(return_counts=True)
    position = remaining.cumsum(0) - remaining
    while int(remaining.sum()):
        drawn = int(torch.multinomial(remaining.double(), 1, generator=generator))
        count, begin = _next_size(int(remaining[drawn]), size), int(position[drawn])
        yield edges.select(slice(begin, begin + count))
        position[drawn] += count
        remaining[drawn] -= count


def _next_size(remaining: int, size: int) -> int:
    """Return the size of the next of the fewest batches of at most ``size`` edges that divide the edges evenly."""
    return -(-remaining // -(-remaining // size))
