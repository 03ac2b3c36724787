"""How many nodes, edges and halo rows the ranks have: counted from a store, or computed from assumptions.

A graph with several node types has such numbers for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gtrain.graph.owners import count_by_owner
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType, edge_key

EDGES_AT_ONCE = 1 << 24
_CERTAIN = 1e9  # an exponent that stands for infinity, which times 0 would be NaN


@dataclass(frozen=True)
class EvenMatrix(Sequence[Sequence[float]]):
    """A matrix of P x P equal numbers with zeros on its diagonal, which takes no memory for them.

    Attributes:
        size: P.
        value: the number beside the diagonal.
    """

    size: int
    value: float

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: Any) -> Any:
        if not 0 <= row < self.size:
            raise IndexError(row)
        numbers = [self.value] * self.size
        numbers[row] = 0.0
        return numbers

    @property
    def sums(self) -> list[float]:
        """The sum of each row, and of each column."""
        return [self.value * (self.size - 1)] * self.size


@dataclass(frozen=True)
class Parts:
    """A graph, or its nodes of one type, in P parts, one for each rank. Lists have one entry per part.

    Attributes:
        nodes: nodes that a part owns.
        edges: directed edges that point at them.
        seeds: training nodes among them.
        reads: ``reads[p][q]``, distinct nodes of part q that the edges of part p read: the halo, by owner.
        targets: ``targets[p][q]``, distinct nodes of part p with an edge from part q; zeros for nodes of one type.
        cut: directed edges between parts.
        origin: a clause that says whether these numbers were counted or assumed.
        exact: whether they were counted.
    """

    nodes: list[float]
    edges: list[float]
    seeds: list[float]
    reads: Sequence[Sequence[float]]
    targets: Sequence[Sequence[float]]
    cut: float
    origin: str
    exact: bool

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def halo(self) -> list[float]:
        """Distinct remote nodes that a part's edges read."""
        return _row_sums(self.reads)

    @cached_property
    def served(self) -> list[float]:
        """Rows that a part sends to its readers for one exchange."""
        return _column_sums(self.reads)

    @cached_property
    def sent_targets(self) -> list[float]:
        """Entries of ``targets`` for other parts, summed over the owners of the sources."""
        return [total - own for total, own in zip(_row_sums(self.targets), self._own_targets, strict=True)]

    @cached_property
    def received_targets(self) -> list[float]:
        """Entries of ``targets`` for other parts, summed over the owners of the targets."""
        return [total - own for total, own in zip(_column_sums(self.targets), self._own_targets, strict=True)]

    @property
    def _own_targets(self) -> list[float]:
        even = isinstance(self.targets, EvenMatrix)
        return [0.0 if even else self.targets[part][part] for part in range(len(self))]


def _row_sums(matrix: Sequence[Sequence[float]]) -> list[float]:
    return matrix.sums if isinstance(matrix, EvenMatrix) else [sum(row) for row in matrix]


def _column_sums(matrix: Sequence[Sequence[float]]) -> list[float]:
    return matrix.sums if isinstance(matrix, EvenMatrix) else [sum(column) for column in zip(*matrix, strict=True)]


def count_parts(store: Store) -> Parts:
    """Count the parts of a store of a homogeneous graph, by one pass over its edges."""
    offsets, num_parts = store.offsets, store.num_parts
    reads, targets, edges = [], [], []
    for part in range(num_parts):
        indptr, indices = store.edge("indptr", part), store.edge("indices", part)
        reads.append(_reads(part, [indices], offsets))
        edges.append(float(len(indices)))
        targets.append(_targets_by_owner(indptr, indices, offsets) if num_parts > 1 else [0.0])
    partition = store.manifest.partition
    return Parts(
        [float(count) for count in partition.nodes],
        edges,
        [float(count) for count in partition.train_nodes],
        reads,
        targets,
        float(partition.edge_cut),
        f"counted in the store, which {partition.partitioner} partitioned",
        True,
    )


def count_queries(store: Store) -> int:
    """Count the distinct pairs of a relation and an end of an edge, for both ends, in a homogeneous graph."""
    keys: tuple[list[Tensor], list[Tensor]] = ([], [])
    for part in range(store.num_parts):
        indptr, source = store.edge("indptr", part), store.edge("indices", part).long()
        target = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff()) + int(store.offsets[part])
        typed = "edge_type" in store.edge_tensors()
        relation = store.edge("edge_type", part).long() if typed else torch.zeros_like(source)
        for ends, found in zip((source, target), keys, strict=True):
            found.append(relation * store.num_nodes + ends)
    return sum(len(torch.cat(found).unique()) for found in keys)


def distinct(entries: float, rows: float) -> float:
    """Return the expected number of distinct ids among entries that are drawn evenly from the rows of a table."""
    return -rows * math.expm1(-entries / rows) if rows else 0.0


@dataclass(frozen=True)
class Uses:
    """How often each of several rows is used: columns of sparse features by nodes, or nodes by edges.

    Attributes:
        times: float64, the different numbers of nodes, or edges, that use a row.
        rows: int64, for each of these the rows that are used as often.
        total: all nodes, or edges.
    """

    times: Tensor
    rows: Tensor
    total: int

    @classmethod
    def of(cls, counts: Tensor, total: int, scale: float = 1.0) -> Uses:
        """Return the uses of rows, given the ``scale``-th part of those of each row as int64."""
        times, rows = counts.unique(return_counts=True)
        return cls(times * scale, rows, total)

    def distinct(self, drawn: float, others: float = 0.0) -> float:
        """Return the expected number of rows that are used.

        Args:
            drawn: nodes, or edges, that are drawn at random, each at most once.
            others: further uses, each of a row drawn at random.
        """
        share = min(drawn / max(self.total, 1), 1.0)
        missed = math.log1p(-share) if share < 1 else -_CERTAIN
        exponents = self.times * missed - others / max(int(self.rows.sum()), 1)
        return float(-(exponents.expm1() * self.rows).sum())


def count_columns(store: Store) -> list[Uses]:
    """Count the entries in each column of the sparse features of each node type, of many by a part of them."""
    uses = []
    for name, spec in store.manifest.node_types.items():
        if "x" in spec.tensors and spec.tensors["x"].nnz:
            num_nodes, num_columns = spec.tensors["x"].shape
            counts, limit = torch.zeros(num_columns, dtype=torch.int64), EDGES_AT_ONCE // store.num_parts
            for part in range(store.num_parts):
                ids = store.node("x", part, name).col_indices()[:limit]
                counts += torch.bincount(ids, minlength=num_columns)
            uses.append(Uses.of(counts, num_nodes, spec.tensors["x"].nnz / int(counts.sum())))
    return uses


def count_ends(store: Store) -> Uses:
    """Count the edges that start or end at each node of a homogeneous graph; a loop counts twice."""
    ends = torch.zeros(store.num_nodes, dtype=torch.int64)
    for part in range(store.num_parts):
        ends[int(store.offsets[part]) : int(store.offsets[part + 1])] += store.edge("indptr", part).diff()
        for sources in store.edge("indices", part).split(EDGES_AT_ONCE):
            ends += torch.bincount(sources, minlength=len(ends))
    return Uses.of(ends, store.num_edges)


def count_parts_by_type(store: Store) -> dict[str, Parts]:
    """Count the parts of a store with several types, by one pass over its edges.

    Returns:
        By node type: its nodes, the edges of all types that point at them, and the halo of the type. One exchange of
        its rows serves all edges that start there.
    """
    numbers, partition = range(store.num_parts), store.manifest.partition
    origin = f"counted in the store, which {partition.partitioner} partitioned"
    counted = {}
    for node_type in store.node_types:
        offsets = store.offsets_of(node_type)
        into = [edge_type for edge_type in store.edge_types if edge_type[2] == node_type]
        starting = [edge_type for edge_type in store.edge_types if edge_type[0] == node_type]
        counted[node_type] = Parts(
            [float(count) for count in offsets.diff()],
            [float(sum(len(store.edge("indices", part, edge_type)) for edge_type in into)) for part in numbers],
            [float(n) if node_type == store.facts.get("target") else 0.0 for n in partition.train_nodes],
            [
                _reads(part, [store.edge("indices", part, edge_type) for edge_type in starting], offsets)
                for part in numbers
            ],
            [[0.0] * store.num_parts for _ in numbers],
            float(sum(partition.edge_cut_by_type[edge_key(edge_type)] for edge_type in into)),
            origin,
            True,
        )
    return counted


def count_sources(store: Store, edge_type: EdgeType) -> Sequence[Sequence[float]]:
    """Count the distinct sources of a part's edges of one type, by owner: :attr:`Parts.reads` of that type alone."""
    offsets = store.offsets_of(edge_type[0])
    return [_reads(part, [store.edge("indices", part, edge_type)], offsets) for part in range(store.num_parts)]


def assume_parts_by_type(store: Store, num_parts: int, cut_share: float) -> dict[str, Parts]:
    """Compute even parts of a store with several types as :func:`assume_parts` does, by node type."""
    assumed = {}
    for node_type in store.node_types:
        edges = {"into": 0.0, "starting": 0.0}
        for edge_type in store.edge_types:
            edges["into"] += store.num_edges_of(edge_type) if edge_type[2] == node_type else 0
            edges["starting"] += store.num_edges_of(edge_type) if edge_type[0] == node_type else 0
        seeds = store.split_size("train") if node_type == store.facts.get("target") else 0
        nodes = max(store.num_nodes_of(node_type), 1)
        parts = assume_parts(nodes, edges["starting"], seeds, num_parts, cut_share)
        assumed[node_type] = replace(parts, edges=[edges["into"] / num_parts] * num_parts)
    return assumed


def _reads(part: int, sources: Iterable[Tensor], offsets: Tensor) -> list[float]:
    """Return for each owner the number of distinct nodes among the sources of a part's edges; 0 for the part itself."""
    chunks = [chunk.to(torch.int64).unique() for ids in sources for chunk in ids.split(EDGES_AT_ONCE)]
    distinct = torch.cat(chunks).unique() if chunks else offsets[:0]
    row = [float(count) for count in count_by_owner(distinct, offsets)]
    row[part] = 0.0
    return row


def _targets_by_owner(indptr: Tensor, indices: Tensor, offsets: Tensor) -> list[float]:
    """Return for each owner of sources the number of distinct targets that read one of its nodes."""
    num_parts = len(offsets) - 1
    # An edge's key is its target and the owner of its source; targets ascend, so keys of chunks share few targets.
    degrees, start = indptr.diff(), 0
    target = torch.repeat_interleave(torch.arange(len(degrees)), degrees)
    keys = []
    for chunk in indices.split(EDGES_AT_ONCE):
        owner = torch.searchsorted(offsets, chunk.to(torch.int64), right=True) - 1
        keys.append((target[start : start + len(chunk)] * num_parts + owner).unique())
        start += len(chunk)
    if not keys:
        return [0.0] * num_parts
    return [float(n) for n in torch.bincount(torch.cat(keys).unique() % num_parts, minlength=num_parts)]


def assume_parts(num_nodes: float, num_edges: float, seeds: float, num_parts: int, cut_share: float) -> Parts:
    """Compute even parts from the share of the edges that are cut.

    The cut edges of a part start at distinct nodes as balls fall into urns: ``c`` edges that start at ``r`` remote
    nodes at random read ``r * (1 - exp(-c / r))`` of them. A graph with hubs has a smaller halo.
    """
    nodes, edges = num_nodes / num_parts, num_edges / num_parts
    remote = num_nodes - nodes
    cut = edges * cut_share if num_parts > 1 else 0.0
    halo = remote * (1 - math.exp(-cut / remote)) if remote else 0.0
    others = max(num_parts - 1, 1)
    by_owner = nodes * (1 - math.exp(-cut / others / nodes))
    reads, targets = (EvenMatrix(num_parts, value) for value in (halo / others, by_owner))
    assumed = f"assumed: even parts, {cut_share:.0%} of the edges cut, their sources at random"
    origin = assumed if num_parts > 1 else "given by counts"
    return Parts(
        [nodes] * num_parts,
        [edges] * num_parts,
        [seeds / num_parts] * num_parts,
        reads,
        targets,
        cut * num_parts,
        origin,
        num_parts == 1,
    )


def count_ranges(store: Store, num_parts: int) -> Parts:
    """Count the halo of contiguous ranges of a store's nodes, as parts of equal size.

    Within a part of a store neighbours have nearby numbers, so that ranges are a quick cut. A
    partitioner finds a better one.
    """
    share = cut_of_ranges(store, num_parts)
    parts = assume_parts(store.num_nodes, store.num_edges, store.split_size("train"), num_parts, share)
    origin = (
        f"sampled: {share:.1%} of the edges cross {num_parts} ranges of the store's nodes, in {store.num_parts} parts"
    )
    return replace(parts, origin=origin, exact=False)


def cut_of_ranges(store: Store, num_parts: int, sample: int = 1 << 22) -> float:
    """Return the share of edges between ranges of equal size of the store's nodes, from a sample of the edges."""
    crossing = total = 0
    size = -(-store.num_nodes // num_parts)
    each = max(sample // store.num_parts, 1)
    for part in range(store.num_parts):
        indptr, indices = store.edge("indptr", part), store.edge("indices", part)
        first = int(store.offsets[part])
        count = min(each, len(indices))
        step = max(len(indices) // max(count, 1), 1)
        positions = torch.arange(0, len(indices), step)
        target = torch.searchsorted(indptr, positions, right=True) - 1 + first
        crossing += int((indices[positions].to(torch.int64) // size != target // size).sum())
        total += len(positions)
    return crossing / max(total, 1)
