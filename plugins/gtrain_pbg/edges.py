"""From buckets to batches: chunks of a bucket, edges that are held back, a worker's share, batches of one relation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.graph.store import Store
from gtrain.nn.recipe import ModelRecipe
from gtrain_pbg.order import Bucket


@dataclass
class EdgeList:
    """E edges of one bucket.

    Attributes:
        heads, tails: int64 ``[E]``, rows of their partitions.
        relation: int64 ``[E]``.
        weight: float ``[E]``; None: all 1.
    """

    heads: Tensor
    relation: Tensor
    tails: Tensor
    weight: Tensor | None

    def __len__(self) -> int:
        return self.heads.numel()

    @classmethod
    def empty(cls) -> EdgeList:
        """No edges."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(none, none, none, None)

    def select(self, rows: Tensor | slice) -> EdgeList:
        """Return some of the edges."""
        weight = None if self.weight is None else self.weight[rows]
        return EdgeList(self.heads[rows], self.relation[rows], self.tails[rows], weight)


@dataclass(frozen=True)
class BucketEdges:
    """Reads the edges that are trained.

    Attributes:
        store: with buckets.
        chunks: pieces of each edge set of a bucket.
        eval_fraction: share that is held back.
        shuffle: whether the order is random.
        seed: of all that is random.
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
        """Which buckets have edges, bool ``[P, P]``."""
        found = torch.zeros(self.store.num_parts, self.store.num_parts, dtype=torch.bool)
        found[tuple(torch.tensor(sorted(filled(self.store))).T)] = True
        return found

    def count(self) -> int:
        """Edges over all buckets, with those that are held back."""
        return self.store.num_edges

    def size(self, bucket: Bucket, chunk: int) -> int:
        """Edges of a chunk of a bucket, without those that are held back."""
        begin, end = self._span(self.store.bucket(*bucket), chunk)
        return end - begin - int((end - begin) * self.eval_fraction)

    def share(self, bucket: Bucket, chunk: int, epoch: int, worker: int, workers: int) -> tuple[EdgeList, EdgeList]:
        """One worker's edges of a chunk of a bucket, in their order, and those that are held back from all.

        Every worker computes the same order and takes its piece of it. The chunks of the first edge set come before
        those of the second.
        """
        columns = self.store.bucket(*bucket)
        begin, end = self._span(columns, chunk)
        place = torch.arange(begin, end)
        held = place[:0]
        if self.eval_fraction:
            drawn = torch.randperm(end - begin, generator=self._generator(chunk, *bucket))
            few = int((end - begin) * self.eval_fraction)
            held, place = place[drawn[:few].sort().values], place[drawn[few:].sort().values]
        if self.shuffle:
            place = place[torch.randperm(place.numel(), generator=self._generator(epoch, chunk, *bucket))]
        return self._take(columns, place.tensor_split(workers)[worker]), self._take(columns, held)

    def _span(self, columns: dict[str, Tensor], chunk: int) -> tuple[int, int]:
        """Where the edges of a chunk lie: those of an edge set are in one piece."""
        number, chunk = divmod(chunk, self.chunks)
        first, last = 0, columns["source"].numel()
        if "edge_set" in columns:
            first, last = torch.searchsorted(
                columns["edge_set"].contiguous(), torch.tensor([number, number + 1])
            ).tolist()
        count = last - first
        return first + count * chunk // self.chunks, first + count * (chunk + 1) // self.chunks

    def _take(self, columns: dict[str, Tensor], place: Tensor) -> EdgeList:
        heads, tails = (columns[name][place].to(torch.int64) for name in ("source", "target"))
        relation = columns["edge_type"][place].to(torch.int64) if "edge_type" in columns else torch.zeros_like(heads)
        weight = columns["edge_weight"][place].to(self.dtype) if "edge_weight" in columns else None
        return EdgeList(heads, relation, tails, weight)

    def _generator(self, *key: int) -> torch.Generator:
        return torch.Generator().manual_seed(mixed(self.seed, *key))


def passes_of(store: Store, chunks: int) -> int:
    """How often an epoch goes through the buckets: once for each chunk of each edge set."""
    return int(store.facts.get("edge_sets") or 1) * chunks


def filled(store: Store) -> set[Bucket]:
    """The buckets that have edges, the first if none has; of a type that is not cut, edges are in partition 0 alone."""
    (spec,) = store.manifest.edge_types.values()
    counts = spec.buckets or ()
    return {(i, j) for i, row in enumerate(counts) for j, count in enumerate(row) if count} or {(0, 0)}


def mixed(*key: int) -> int:
    """A seed that differs with every number of the key."""
    return random.Random(repr(key)).getrandbits(62)


class RelationGroups:
    """Which group of relations edges belong to.

    Args:
        recipe: has the groups.
    """

    def __init__(self, recipe: ModelRecipe) -> None:
        self._group, self._local = torch.zeros(2, recipe.num_relations, dtype=torch.int64)
        self._several = len(recipe.groups) > 1
        for number, group in enumerate(recipe.groups):
            members = torch.tensor(group.relations)
            self._group[members], self._local[members] = number, torch.arange(len(members))

    def of(self, edges: EdgeList) -> int:
        """The group of a batch, which has one."""
        return int(self._group[edges.relation[0]]) if self._several else 0

    def split(self, edges: EdgeList) -> Iterator[tuple[int, EdgeList]]:
        """Each group that some edges belong to, with these."""
        of = self._group[edges.relation]
        for number in of.unique().tolist():
            yield number, edges.select((of == number).nonzero().flatten())

    def localized(self, edges: EdgeList, head: int, tail: int) -> EdgeList:
        """Edges by numbers among their group's relations, and by rows that count from these."""
        if not (self._several or head or tail):
            return edges
        return EdgeList(edges.heads - head, self._local[edges.relation], edges.tails - tail, edges.weight)


def batching_keys(recipe: ModelRecipe) -> Tensor | None:
    """What edges of a batch have in common: a number for each relation; None: nothing.

    It is the group of their relation, and where relations are static the relation itself.
    """
    kinds = torch.zeros(recipe.num_relations, dtype=torch.int64)
    for number, group in enumerate(recipe.groups):
        members = torch.tensor(group.relations)
        kinds[members] = number if group.reciprocal else members
    return kinds if int(kinds.unique().numel()) > 1 else None


def batches_of(edges: EdgeList, size: int, kinds: Tensor | None, generator: torch.Generator) -> Iterator[EdgeList]:
    """Cut edges into as few batches as possible, whose sizes differ by one edge at most.

    The loss is a batch's mean, so a short last batch would move rows as far as a full one does, on few edges.

    Args:
        edges: in their order.
        size: edges of a batch at most.
        kinds: of each relation; each batch has edges of one kind: it is drawn with a probability proportional to the
            edges of each kind that are left, and the next of its edges are taken. None: all are of one.
        generator: draws kinds.
    """
    if kinds is None or not len(edges):
        begin = 0
        while begin < len(edges):
            end = begin + _next_size(len(edges) - begin, size)
            yield edges.select(slice(begin, end))
            begin = end
        return
    kind = kinds[edges.relation]
    order = kind.argsort(stable=True)
    edges = edges.select(order)
    _, counts = kind[order].unique_consecutive(return_counts=True)
    at = counts.cumsum(0) - counts
    left = counts.clone()
    while int(left.sum()):
        drawn = int(torch.multinomial(left.double(), 1, generator=generator))
        take = _next_size(int(left[drawn]), size)
        begin = int(at[drawn])
        yield edges.select(slice(begin, begin + take))
        at[drawn] += take
        left[drawn] -= take


def _next_size(left: int, size: int) -> int:
    """Edges of the next of the fewest batches of at most ``size`` that the edges left fill evenly."""
    return -(-left // -(-left // size))
