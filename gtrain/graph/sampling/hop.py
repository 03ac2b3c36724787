"""One hop: choose in-edges of a frontier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import DataError
from gtrain.graph.sampling import number, pick, reservoir, spans
from gtrain.graph.sampling.columns import Columns
from gtrain.graph.sampling.rules import Rule, check_count, checked_ids, checked_times, hop_key
from gtrain.graph.sampling.scratch import Edges, Spans, empty, read_only

Array = NDArray[Any]

_PIECE = 1 << 22  # in-edges that are listed at a time where whole columns have to be


@dataclass(frozen=True)
class Frontier:
    """The nodes whose in-edges are to be chosen.

    Attributes:
        node: int64 ``[f]``, their numbers as targets of the edge type.
        subgraph: int64 ``[f]``, the subgraph of each; empty where there is only one.
        target: int64 ``[f]``, the local id of each, which edges name them by.
        limit: int64 ``[f]``, the time up to which the edges of each may be chosen; None without times.
        name: int64 ``[f]``, the ids that name their random streams; None: ``node`` and the columns' ``first_target``.
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
        """The same nodes, with limits only where the rule knows times."""
        return self if rule.temporal is not None else replace(self, limit=None)


@dataclass(frozen=True)
class Choice:
    """What is to be chosen of each frontier node.

    Attributes:
        count: number of edges, -1 all.
        key: of :func:`gtrain.graph.sampling.rules.hop_key`.
        rule: how.
    """

    count: int
    key: np.uint64
    rule: Rule


@dataclass(frozen=True)
class HopSample:
    """Edges that :func:`sample_hop` chose, int64 ``[e]`` each, in the order of the given nodes.

    Attributes:
        position: positions in the columns' arrays.
        column: which of the given nodes each edge points at, ``0 .. f-1``.
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
    """Choose in-edges of nodes: one step of a sampler, by itself.

    What is chosen for a node is the same whatever nodes it is asked together with, and the same as the samplers of this
    package choose for the same key, hop, relation, id (``columns.first_target`` plus its number) and subgraph.

    Args:
        columns: the edges of one type, or those of one part.
        nodes: targets, ``0 .. N-1``.
        count: how many edges of each node, -1 all.
        key: of :func:`gtrain.graph.sampling.rules.batch_key`.
        hop: 0 for the seeds' own neighbours.
        relation: the place of the edge type in the graph's order.
        rule: how; None: without replacement and without times.
        subgraph: the subgraph of each node; None where there is only one.
        seed_time: with times, the time of each subgraph's seed.

    Shapes:
        nodes, subgraph ``[f]``; seed_time ``[number of subgraphs]``; whole numbers.

    Raises:
        ConfigError: ``count`` or the rule cannot be used.
        DataError: a node is out of range, or times are missing.
    """
    rule = rule or Rule()
    temporal = rule.temporal is not None
    if temporal and (subgraph is None or seed_time is None):
        raise DataError("sampling by times needs the time of each seed.", hint="give subgraph= and seed_time=.")
    rule.check(columns)
    limits = checked_times(seed_time, np.size(seed_time), "seed_time") if temporal else None
    node = checked_ids(nodes, columns.num_targets, "nodes")
    owner = empty() if subgraph is None else checked_ids(subgraph, 2**32 if limits is None else limits.size, "subgraph")
    if subgraph is not None and owner.size != node.size:
        raise DataError(f"subgraph has {owner.size} values for {node.size} nodes.", hint="give each node's subgraph.")
    edges = Edges()
    choice = Choice(check_count(count), hop_key(key, hop, relation), rule)
    choose(
        columns,
        Frontier(node, owner, np.arange(node.size), None if limits is None else limits[owner]),
        choice,
        edges,
        Spans(),
    )
    return HopSample(edges.position[: edges.size], edges.column[: edges.size], edges.row[: edges.size])


def choose(columns: Columns, frontier: Frontier, choice: Choice, edges: Edges, work: Spans) -> None:
    """Append chosen edges: ``position``, ``column`` (targets) and ``row`` (sources). Nothing is checked here."""
    begin, available = work.of(frontier.node.size)
    if frontier.limit is None or columns.loose_time is not None:
        spans.spans(columns.indptr, frontier.node, begin, available)
    else:
        spans.spans_until(columns.indptr, frontier.node, columns.edge_time, frontier.limit, begin, available)
    start = edges.size
    if frontier.limit is None or columns.loose_time is None:
        _pick(begin, available, columns.weight, columns.indices, columns, frontier, choice, edges)
    elif choice.rule.temporal == "last" and choice.count >= 0:
        edges.reserve(spans.room(available, choice.count, False))
        times = (columns.loose_time, frontier.limit)
        edges.size += reservoir.pick_latest(begin, available, *times, choice.count, frontier.target, *edges.free[:2])
        number.gather(columns.indices, edges.position[start : edges.size], edges.row[start : edges.size])
    else:
        for piece in pieces(available):
            _pick_candidates(begin[piece], available[piece], columns, frontier[piece], choice, edges, work)
        number.gather(columns.indices, edges.position[start : edges.size], edges.row[start : edges.size])


def pieces(available: Array) -> Iterator[slice]:
    """Cut a frontier so that each piece has a bounded number of in-edges, or is one node."""
    total = np.cumsum(available)
    start = 0
    while start < available.size:
        limit = (int(total[start - 1]) if start else 0) + _PIECE
        stop = max(start + 1, int(np.searchsorted(total, limit, side="right")))
        yield slice(start, stop)
        start = stop


def _pick(
    begin: Array,
    available: Array,
    weight: Array | None,
    indices: Array,
    columns: Columns,
    frontier: Frontier,
    choice: Choice,
    edges: Edges,
) -> None:
    count, again = choice.count, choice.rule.replace
    edges.reserve(spans.room(available, count, again))
    name, first = (frontier.node, columns.first_target) if frontier.name is None else (frontier.name, 0)
    named = (name, first, frontier.subgraph, choice.key)
    written = (frontier.target, *edges.free)
    if weight is not None:
        start = edges.size
        edges.size += reservoir.pick_weighted(begin, available, weight, *named, count, again, *written[:3])
        number.gather(indices, edges.position[start : edges.size], edges.row[start : edges.size])
    elif choice.rule.temporal == "last" or count < 0:
        edges.size += pick.pick_last(begin, available, count, indices, *written)
    else:
        edges.size += pick.pick_uniform(begin, available, *named, count, again, indices, *written)


def _pick_candidates(
    begin: Array,
    available: Array,
    columns: Columns,
    frontier: Frontier,
    choice: Choice,
    edges: Edges,
    work: Spans,
) -> None:
    """List the edges that are not too late, choose among the list, and translate back."""
    candidate = work.candidates(int(available.sum()))
    found = spans.candidates_until(columns.loose_time, frontier.limit, begin, available, candidate)
    weight = None if columns.weight is None else work.weights(columns.weight, candidate[:found])
    start = edges.size
    _pick(begin, available, weight, read_only(candidate), columns, frontier, choice, edges)
    edges.position[start : edges.size] = edges.row[start : edges.size]
