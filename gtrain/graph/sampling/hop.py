"""One hop: choose in-edges of a frontier; and the keys from which its random numbers follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import ConfigError, DataError
from gtrain.graph.sampling import number, pick, reservoir, spans
from gtrain.graph.sampling.columns import Columns, readable
from gtrain.graph.sampling.options import checked_counts
from gtrain.graph.sampling.pick import ChosenEdges, Spans, Streams
from gtrain.graph.sampling.scratch import EdgeBuffer, SpanBuffer, empty, read_only
from gtrain.kernels.splitmix import key as hash_of
from gtrain.kernels.splitmix import mix_one

Array = NDArray[Any]

_PIECE = 1 << 22  # in-edges per piece where whole columns are listed


@dataclass(frozen=True)
class Rule:
    """How edges are chosen. If edges have weights, with probability proportional to them.

    Attributes:
        replace: with replacement: ``count`` draws for every node with an in-edge. Without: min(count, in-degree)
            distinct edges.
        temporal: None: ignore times; ``uniform``: draw from the edges not later than the seed; ``last``: take the
            latest of these, of equal times the last in the column (``replace`` then has no effect). The times are those
            of the source nodes if set, otherwise those of the edges.
    """

    replace: bool = False
    temporal: str | None = None

    def __post_init__(self) -> None:
        if self.temporal not in (None, "uniform", "last"):
            raise ConfigError(
                f"temporal={self.temporal!r} is not an option.",
                hint="set 'uniform', 'last', or None for sampling without times.",
            )

    def check(self, columns: Columns) -> None:
        """Raise DataError or ConfigError unless the rule can be applied to the columns."""
        if self.temporal is not None and columns.edge_time is None and columns.source_time is None:
            raise DataError(
                f"temporal={self.temporal} is set, but neither edges nor source nodes have times.",
                hint="set Columns(edge_time=...) or node_time=..., or temporal=None.",
            )
        if self.temporal == "last" and columns.weight is not None:
            raise ConfigError(
                "temporal=last was set for edges with weights, but the latest edges are taken regardless of weights.",
                hint="set temporal=uniform, or sample without weights.",
            )


def batch_key(seed: int, epoch: int, batch: int) -> int:
    """Return the 64-bit key of a batch, from which all its random numbers follow."""
    return hash_of(int(seed), int(epoch), int(batch))


def hop_key(of_batch: int, hop: int, relation: int) -> np.uint64:
    """Return the key of one hop of a batch and one edge type, given by its position in the graph's order."""
    return np.uint64(mix_one(mix_one(of_batch + hop) + relation))


@dataclass(frozen=True)
class Frontier:
    """The nodes whose in-edges are sampled.

    Attributes:
        node: int64 ``[f]``, numbers of the nodes as targets of the edge type.
        subgraph: int64 ``[f]``, the subgraph of each node; empty if there is only one.
        target: int64 ``[f]``, the local id of each node, for the output.
        limit: int64 ``[f]``, latest time of the edges of each node; None without times.
        name: int64 ``[f]``, ids that select the random streams; None: ``node`` plus the columns' ``first_target``.
    """

    node: Array
    subgraph: Array
    target: Array
    limit: Array | None = None
    name: Array | None = None

    def __getitem__(self, piece: slice) -> Frontier:
        limit = None if self.limit is None else self.limit[piece]
        name = None if self.name is None else self.name[piece]
        return Frontier(self.node[piece], self.subgraph[piece], self.target[piece], limit, name)

    def under(self, rule: Rule) -> Frontier:
        """Return the same frontier, without limits if the rule ignores times."""
        return self if rule.temporal is not None or self.limit is None else replace(self, limit=None)


@dataclass(frozen=True)
class Choice:
    """The fan-out of one hop.

    Attributes:
        count: number of edges per frontier node, -1 all.
        key: see :func:`hop_key`.
        rule: how the edges are chosen.
        weighted: whether the columns' weights are read; an induced subgraph has edges of weight 0, too.
    """

    count: int
    key: np.uint64
    rule: Rule
    weighted: bool = True


@dataclass(frozen=True)
class HopSample:
    """The result of :func:`sample_hop`: e edges, int64 ``[e]`` each, in the order of the frontier.

    Attributes:
        position: positions of the edges in the columns' arrays.
        column: index of each edge's target in the frontier, ``0 .. f-1``.
        source: ids of the edges' sources, as in ``Columns.indices``.
    """

    position: Array
    column: Array
    source: Array


def sample_hop(
    columns: Columns,
    nodes: Any,
    count: int,
    *,
    key: int,
    hop: int = 0,
    relation: int = 0,
    rule: Rule | None = None,
    subgraph: Any = None,
    seed_time: Any = None,
) -> HopSample:
    """Sample in-edges of nodes: one hop of a sampler.

    The edges of a node do not depend on the other nodes of the call, and equal those that the samplers of this package
    choose for the same key, hop, relation, id (``columns.first_target`` plus its number) and subgraph.

    Args:
        columns: the edges of one type, or those of one part.
        nodes: targets, ``0 .. N-1``.
        count: number of edges per node, -1 all.
        key: see :func:`batch_key`.
        hop: number of the hop; 0 samples the seeds' neighbours.
        relation: position of the edge type in the graph's order.
        rule: how the edges are chosen; None: without replacement and without times.
        subgraph: the subgraph of each node; None if there is only one.
        seed_time: the time of each subgraph's seed, for temporal sampling.

    Shapes:
        nodes, subgraph ``[f]``; seed_time ``[number of subgraphs]``; integers.

    Raises:
        ConfigError: ``count`` or the rule is invalid.
        DataError: a node is out of range, or times are missing.
    """
    rule = rule or Rule()
    temporal = rule.temporal is not None
    if temporal and (subgraph is None or seed_time is None):
        raise DataError("sampling by times needs the time of each seed.", hint="set subgraph= and seed_time=.")
    rule.check(columns)
    limits = checked_times(seed_time, np.size(seed_time), "seed_time") if temporal else None
    node = checked_ids(nodes, columns.num_targets, "nodes")
    owner = empty() if subgraph is None else checked_ids(subgraph, 2**32 if limits is None else limits.size, "subgraph")
    if subgraph is not None and owner.size != node.size:
        raise DataError(f"subgraph has {owner.size} values for {node.size} nodes.", hint="pass one subgraph per node.")
    edges = EdgeBuffer()
    choice = Choice(checked_counts([count])[0], hop_key(key, hop, relation), rule)
    choose(
        columns,
        Frontier(node, owner, np.arange(node.size), None if limits is None else limits[owner]),
        choice,
        edges,
        SpanBuffer(),
    )
    return HopSample(edges.position[: edges.size], edges.column[: edges.size], edges.row[: edges.size])


def choose(columns: Columns, frontier: Frontier, choice: Choice, edges: EdgeBuffer, work: SpanBuffer) -> None:
    """Append the chosen edges: ``position``, ``column`` (targets) and ``row`` (sources). Does not check its input."""
    eligible = Spans(*work.of(frontier.node.size))
    if frontier.limit is None or columns.source_time is not None:
        spans.spans(columns.indptr, frontier.node, *eligible)
    else:
        spans.spans_until(columns.indptr, frontier.node, columns.edge_time, frontier.limit, *eligible)
    start, weight = edges.size, columns.weight if choice.weighted else None
    if frontier.limit is None or columns.source_time is None:
        _pick(eligible, weight, columns.indices, columns, frontier, choice, edges)
    elif choice.rule.temporal == "last" and choice.count >= 0:
        edges.reserve(spans.capacity(eligible.available, choice.count, False))
        times = (columns.source_time, frontier.limit)
        edges.size += reservoir.pick_latest(eligible, *times, choice.count, frontier.target, ChosenEdges(*edges.free))
        number.gather(columns.indices, edges.position[start : edges.size], edges.row[start : edges.size])
    else:
        # Sources in any order of time: the eligible edges are not a range, so list them. In pieces, because a list of
        # all in-edges of a frontier of hubs could exceed memory.
        for piece in pieces(eligible.available):
            some = Spans(*(array[piece] for array in eligible))
            _pick_candidates(some, weight, columns, frontier[piece], choice, edges, work)
        number.gather(columns.indices, edges.position[start : edges.size], edges.row[start : edges.size])


def pieces(available: Array) -> Iterator[slice]:
    """Yield slices of a frontier, each with a bounded number of in-edges or of one node."""
    total = np.cumsum(available)
    start = 0
    while start < available.size:
        limit = (int(total[start - 1]) if start else 0) + _PIECE
        # At least one node, even if its in-edges exceed the bound.
        stop = max(start + 1, int(np.searchsorted(total, limit, side="right")))
        yield slice(start, stop)
        start = stop


def _pick(
    eligible: Spans,
    weight: Array | None,
    indices: Array,
    columns: Columns,
    frontier: Frontier,
    choice: Choice,
    edges: EdgeBuffer,
) -> None:
    count, again = choice.count, choice.rule.replace
    edges.reserve(spans.capacity(eligible.available, count, again))
    name, first = (frontier.node, columns.first_target) if frontier.name is None else (frontier.name, 0)
    streams = Streams(name, first, frontier.subgraph, choice.key)
    target, chosen = frontier.target, ChosenEdges(*edges.free)
    if weight is not None:
        start = edges.size
        edges.size += reservoir.pick_weighted(eligible, streams, weight, count, again, target, chosen)
        number.gather(indices, edges.position[start : edges.size], edges.row[start : edges.size])
    elif choice.rule.temporal == "last" or count < 0:
        edges.size += pick.pick_last(eligible, count, indices, target, chosen)
    else:
        edges.size += pick.pick_uniform(eligible, streams, count, again, indices, target, chosen)


def _pick_candidates(
    eligible: Spans,
    weight: Array | None,
    columns: Columns,
    frontier: Frontier,
    choice: Choice,
    edges: EdgeBuffer,
    work: SpanBuffer,
) -> None:
    """List the edges that are not too late, pick among the list, and translate its positions to the graph's."""
    candidate = work.candidates(int(eligible.available.sum()))
    total = spans.candidates_until(columns.source_time, frontier.limit, *eligible, candidate)
    weight = None if weight is None else work.weights(weight, candidate[:total])
    start = edges.size
    # The list takes the part of the sources, so what the kernel writes to ``row`` are positions in the graph.
    _pick(eligible, weight, read_only(candidate), columns, frontier, choice, edges)
    edges.position[start : edges.size] = edges.row[start : edges.size]


def checked_ids(ids: Any, size: int, name: str) -> Array:
    """Return ids as a new int64 vector.

    Raises:
        DataError: the ids are not integers, or one is out of range.
    """
    array = readable(ids, name, ("i8",))
    if array.size and (array.min() < 0 or array.max() >= size):
        wrong = int(array.min()) if array.min() < 0 else int(array.max())
        raise DataError(
            f"{name} hold {wrong}; the graph has {size} such nodes, 0 .. {size - 1}.",
            hint="pass numbers of this graph's nodes.",
        )
    return array.copy()


def checked_times(times: Any, size: int, name: str) -> Array:
    """Return times as a new int64 vector.

    Raises:
        DataError: the length is not ``size``, or the times are not integers.
    """
    array = readable(times, name, ("i8",))
    if array.size != size:
        raise DataError(f"{name} has {array.size} values for {size} seeds.", hint="pass one time per seed.")
    return array.copy()
