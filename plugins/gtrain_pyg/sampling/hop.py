"""One hop over all parts: hosted parts are sampled here while the owners of the others sample theirs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling.hop import Choice, Frontier, choose
from gtrain.graph.sampling.rules import hop_key
from gtrain.graph.sampling.scratch import Edges
from gtrain.graph.store.manifest import EdgeType
from gtrain.wire import Message
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.sampling.kernels import merge, narrow, rows_of, spread
from gtrain_pyg.sampling.remote import METHOD, SampleReply, SampleRequest
from gtrain_pyg.sampling.state import SamplerState
from gtrain_pyg.structure.hosted import Graph, Structure
from gtrain_pyg.structure.replica import Members

Array = NDArray[Any]
_SLICE = 1 << 14  # nodes of a type whose in-edges are listed at a time where all of them are


@dataclass(frozen=True)
class Hop:
    """What a hop samples.

    Attributes:
        key: of the batch.
        number: of the hop, from 0.
        counts: edges of each node by edge type, -1 all.
        induced: keep the edges from nodes that were sampled before, and add no nodes.
    """

    key: int
    number: int
    counts: Mapping[EdgeType, int]
    induced: bool = False


@dataclass
class _Remote:
    """What a hop has of one part that is not hosted.

    Attributes:
        shares: its nodes, by node type.
        future: the owner's answer; None where it was not asked.
        answers: the same by edge type, when it is there.
    """

    shares: dict[str, Share]
    future: Future[Message] | None = None
    answers: dict[EdgeType, SampleReply] = field(default_factory=dict)


class HopSampler:
    """Chooses the edges of a hop. Threads may share it, each with a state of its own.

    Args:
        structure: what this rank reads by itself.
        peers: the other ranks.
        pool: where requests get their memory.
        graph: the columns to sample from.
    """

    def __init__(self, structure: Structure, peers: Peers, pool: Any, graph: Graph) -> None:
        self._structure, self._peers, self._pool, self._graph = structure, peers, pool, graph
        book = structure.book
        self._remote = [part for part in range(book.num_parts) if part not in structure.parts]
        self._ids = narrow(max((int(np.diff(starts).max()) for starts in book.offsets.values()), default=0))

    def sample(self, state: SamplerState, hop: Hop, low: Mapping[str, int], high: Mapping[str, int]) -> None:
        """Append the edges that a hop chooses and number their sources.

        Args:
            state: of this thread.
            hop: what is chosen.
            low: by node type, the local id of the frontier's first node.
            high: by node type, the local id after its last.
        """
        state.cut(low, high, {kind[2] for kind, count in hop.counts.items() if count})
        remote = {part: owner for part in self._remote if (owner := self._ask(state, hop, part)) is not None}
        kinds = [kind for kind in self._graph.columns if hop.counts[kind] and state.frontiers[kind[2]].bounds[-1]]
        chosen = {kind: self._choose(state, hop, kind, remote) for kind in kinds}
        for owner in remote.values():
            self._receive(owner, hop)
        for kind, segments in chosen.items():
            self._number(state, kind, self._join(state, kind, segments, remote), hop)

    def induce(self, state: SamplerState) -> None:
        """Replace the chosen edges by all that lead from sampled nodes to sampled nodes, within a subgraph."""
        counts = {name: nodes.count for name, nodes in state.nodes.items()}
        for edges in state.edges.values():
            edges.size = 0
        everything = Hop(0, 0, dict.fromkeys(state.edges, -1), induced=True)
        for start in range(0, max(counts.values()), _SLICE):
            low = {name: min(start, count) for name, count in counts.items()}
            self.sample(state, everything, low, {name: min(start + _SLICE, count) for name, count in counts.items()})

    # ------------------------------------------------------------------------------------------ other parts

    def _ask(self, state: SamplerState, hop: Hop, part: int) -> _Remote | None:
        """Divide a part's nodes, and ask its owner about those whose in-edges are not copied; None without nodes."""
        shares = {}
        for name, cut in state.frontiers.items():
            members = self._graph.members[name][part] if self._graph.members else None
            shares[name] = Share.of(cut.piece(part), members, int(self._structure.book.offsets[name][part]))
        if not any(cut.size(part) for cut in state.frontiers.values()):
            return None
        remote = _Remote(shares)
        asked = [share.asked for share in shares.values()]
        if any(frontier.node.size for frontier in asked):
            request = SampleRequest(self._graph.needs, hop.key, hop.number, list(hop.counts.values()), asked)
            remote.future = self._peers.ask(part, METHOD, *request.message(self._pool, self._ids))
        return remote

    def _receive(self, remote: _Remote, hop: Hop) -> None:
        """Wait for an owner's answer. It is for the edge types that some node was asked about, and no others."""
        if remote.future is not None:
            sizes = {kind: remote.shares[kind[2]].asked.node.size for kind, count in hop.counts.items() if count}
            asked = {kind: size for kind, size in sizes.items() if size}
            replies = SampleReply.read(self._peers.wait(remote.future), list(asked.values()))
            remote.answers = dict(zip(asked, replies, strict=True))

    # ------------------------------------------------------------------------------------------ here

    def _choose(self, state: SamplerState, hop: Hop, kind: EdgeType, remote: Mapping[int, _Remote]) -> dict[int, slice]:
        """Choose edges of hosted parts, and copied ones of others.

        Returns:
            By part, where in ``state.edges`` those of a hosted part are, at its end and side by side; and where in
            ``state.picked`` the copied ones of another part.
        """
        cut, book = state.frontiers[kind[2]], self._structure.book
        rule, number = self._graph.rules[kind], self._structure.edge_types.index(kind)
        choice = Choice(hop.counts[kind], hop_key(hop.key, hop.number, number), rule)
        state.picked[kind].size, segments = 0, {}
        for part in range(book.num_parts):
            if not cut.size(part):
                continue
            frontier, columns = cut.piece(part), self._graph.columns[kind].get(part)
            edges: Edges = state.edges[kind]
            if part in remote:
                frontier, edges = remote[part].shares[kind[2]].copied, state.picked[kind]
                columns = self._graph.replicas[kind][part].columns if self._graph.replicas else None
            start = edges.size
            if columns is not None and frontier.node.size:
                choose(columns, frontier.under(rule), choice, edges, state.spans)
                if part not in remote:
                    edges.position[start : edges.size] += book.edge_offsets[kind][part]
            segments[part] = slice(start, edges.size)
        return segments

    # ------------------------------------------------------------------------------------------ together

    def _join(
        self, state: SamplerState, kind: EdgeType, chosen: Mapping[int, slice], remote: Mapping[int, _Remote]
    ) -> slice:
        """Bring the edges of one type together, part by part, ``row`` still global ids; tell where they are."""
        edges = state.edges[kind]
        answers = {part: remote[part].answers.get(kind) or self._nothing() for part in chosen if part in remote}
        sizes = {part: own.stop - own.start for part, own in chosen.items()}
        here = sum(size for part, size in sizes.items() if part not in remote)
        first = edges.size - here
        for part, answer in answers.items():
            sizes[part] += answer.source.size
        stop = first + sum(sizes.values())
        edges.reserve(stop - edges.size)
        edges.size, new = stop, slice(first, stop)
        for part, own in reversed([*chosen.items()]):  # what is moved to the back makes room for what comes before
            start = stop - sizes[part]
            if part in remote:
                self._join_remote(state, kind, part, own, remote[part].shares[kind[2]], answers[part], start)
            else:
                edges.move(own, start)
            stop = start
        return new

    def _join_remote(
        self, state: SamplerState, kind: EdgeType, part: int, own: slice, share: Share, answer: SampleReply, start: int
    ) -> None:
        """Write the edges of a part that is not hosted: copied ones and the owner's, in the order of the frontier."""
        edges, picked = state.edges[kind], state.picked[kind]
        target, offset = state.frontiers[kind[2]].piece(part).target, self._structure.book.edge_offsets[kind][part]
        new = slice(start, start + own.stop - own.start + answer.source.size)
        row, column, position = edges.row[new], edges.column[new], edges.position[new]
        if share.rows is None:
            row[:] = answer.source
            np.add(answer.position, offset, out=position)
            spread(answer.counts, target, column)
            return
        replica = self._graph.replicas[kind][part]
        copied = (replica.shift, picked.row[own], picked.position[own], picked.column[own])
        told = (answer.counts, answer.source, answer.position)
        merge(share.rows, *copied, *told, target, offset, row, column, position)

    def _nothing(self) -> SampleReply:
        none = np.empty(0, np.int32)
        return SampleReply(none, none, none)

    def _number(self, state: SamplerState, kind: EdgeType, new: slice, hop: Hop) -> None:
        """Number the sources of new edges; where the subgraph is induced, drop those from nodes not sampled."""
        edges, sources, subgraph = state.edges[kind], state.nodes[kind[0]], state.nodes[kind[2]].batch
        if hop.induced:
            edges.size = new.start + sources.keep(edges.row[new], edges.column[new], edges.position[new], subgraph)
        else:
            sources.number(edges.row[new], edges.column[new], subgraph)


@dataclass(frozen=True)
class Share:
    """The f frontier nodes of one type that another part owns.

    Attributes:
        copied: those whose in-edges are copied, by their rows in the replica, named by global id.
        asked: the others, by their numbers within the part.
        rows: int64 ``[f]``, the row of each node, -1 for the others; None where there are no copies.
    """

    copied: Frontier
    asked: Frontier
    rows: Array | None = None

    @classmethod
    def of(cls, frontier: Frontier, members: Members | None, first: int) -> Share:
        """Divide a frontier.

        Args:
            frontier: numbers within the part.
            members: the nodes whose in-edges are copied; None: none are.
            first: the global id of the part's first node.
        """
        nobody = _some(frontier, frontier.node[:0])
        if members is None or not frontier.node.size:
            return cls(nobody, frontier)
        rows = np.empty(frontier.node.size, np.int64)
        copies = rows_of(frontier.node, members.bits, members.before, rows)
        if copies == 0:
            return cls(nobody, frontier, rows)
        name = frontier.node + first
        if copies == rows.size:
            return cls(replace(frontier, node=rows, name=name), nobody, rows)
        here, there = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
        copied = _some(replace(frontier, node=rows, name=name), here)
        return cls(copied, _some(frontier, there), rows)


def _some(frontier: Frontier, places: Array) -> Frontier:
    """The nodes at some places."""
    return Frontier(
        frontier.node[places],
        frontier.subgraph[places] if frontier.subgraph.size else frontier.subgraph,
        frontier.target[places],
        None if frontier.limit is None else frontier.limit[places],
        None if frontier.name is None else frontier.name[places],
    )
