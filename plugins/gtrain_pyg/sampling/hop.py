"""One hop over all parts: this rank samples the parts that it reads while the owners of the others sample theirs.

Each owner gets one request and sends one reply per hop.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.sampling import scratch
from gtrain.graph.sampling.hop import Choice, Frontier, choose, hop_key
from gtrain.graph.sampling.scratch import EdgeBuffer
from gtrain.graph.store.manifest import EdgeType
from gtrain.wire import Message
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.graph_structure import GraphStructure, ReplicaIndex, SamplingGraph, SamplingInputs
from gtrain_pyg.peers import Array, Peers
from gtrain_pyg.sampling.kernels import (
    EdgeColumns,
    SampleReply,
    count_edges,
    index_dtype,
    merge_edges,
    repeat_targets,
    replica_rows,
)
from gtrain_pyg.sampling.state import SamplerState

METHOD = "sample"

_SLICE = 1 << 14  # nodes of a type whose in-edges are listed at a time for an induced subgraph


@dataclass(frozen=True)
class SampleRequest:
    """A request to choose in-edges of one part's nodes, for all edge types of a hop.

    Attributes:
        inputs: the tensors and the rule by which edges are chosen.
        key: of :func:`gtrain.graph.sampling.batch_key`.
        hop: number of the hop.
        counts: for each edge type of the graph, edges per node, -1 all.
        frontiers: for each node type of the graph, the nodes by their numbers within the part, with their subgraphs if
            these are disjoint, and their limits if sampling is temporal.
        weighted: see :class:`gtrain.graph.sampling.hop.Choice`.
    """

    inputs: SamplingInputs
    key: int
    hop: int
    counts: list[int]
    frontiers: list[Frontier]
    weighted: bool = True

    def message(self, pool: BufferPool, dtype: DTypeLike) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the fields and tensors of the request.

        Args:
            pool: memory of the tensors.
            dtype: an integer dtype that holds the nodes' numbers.
        """
        sizes = [frontier.node.size for frontier in self.frontiers]
        fields: dict[str, Any] = {
            "needs": asdict(self.inputs),
            "key": f"{self.key:x}",  # hexadecimal: it may exceed 2**63
            "hop": self.hop,
            "counts": self.counts,
            "sizes": sizes,
            "weighted": self.weighted,
        }
        tensors = [self._column("node", pool.take(sum(sizes), dtype))]
        for name in ("subgraph", "limit"):
            fields[name] = any(_size(getattr(frontier, name)) for frontier in self.frontiers)
            if fields[name]:
                tensors.append(self._column(name, pool.take(sum(sizes))))
        return fields, tensors

    def _column(self, name: str, out: Array) -> Tensor:
        """Concatenate an attribute of all frontiers; 0 for a frontier without it."""
        start = 0
        for frontier in self.frontiers:
            stop = start + frontier.node.size
            column = getattr(frontier, name)
            out[start:stop] = column if _size(column) else 0
            start = stop
        return torch.from_numpy(out)

    @classmethod
    def read(cls, message: Message, limits: Sequence[int]) -> SampleRequest:
        """Read a request.

        Args:
            message: as :meth:`message` made it.
            limits: the part's nodes of each node type.

        Raises:
            DataError: a node is out of range, or the request is for a graph of other types.
        """
        fields, tensors = message.fields, list(message.tensors)
        sizes = fields["sizes"]
        if len(sizes) != len(limits) or sum(sizes) != tensors[0].numel():
            raise DataError(
                f"A request for the neighbours of {tensors[0].numel()} nodes of {len(sizes)} types reached a part with "
                f"{len(limits)} types.",
                hint="have all ranks open the same store.",
            )
        # The wire may carry int32; the kernels are compiled for int64.
        node = tensors.pop(0).numpy().astype(np.int64, copy=False)
        subgraph = tensors.pop(0).numpy() if fields["subgraph"] else None
        limit = tensors.pop(0).numpy() if fields["limit"] else None
        frontiers, start = [], 0
        for size, num_nodes in zip(sizes, limits, strict=True):
            part = slice(start, start + size)
            if size and (node[part].min() < 0 or node[part].max() >= num_nodes):
                raise DataError(
                    f"A request names node {int(node[part].max())} of a part with {num_nodes} nodes of that type.",
                    hint="have all ranks open the same store.",
                )
            frontiers.append(
                Frontier(
                    node[part],
                    node[:0] if subgraph is None else subgraph[part],
                    np.arange(size),
                    None if limit is None else limit[part],
                )
            )
            start = part.stop
        inputs = SamplingInputs(**fields["needs"])
        return cls(inputs, int(fields["key"], 16), fields["hop"], fields["counts"], frontiers, fields["weighted"])


def read_replies(message: Message, frontiers: Sequence[int]) -> list[SampleReply]:
    """Read the replies to a request, one for each edge type requested.

    Args:
        message: the owner's.
        frontiers: the nodes requested for each edge type.

    Raises:
        DataError: the message does not fit the request.
    """
    edges = message.fields["edges"]
    counts, source, position = (tensor.numpy() for tensor in message.tensors)
    nodes, bounds = (np.cumsum([0, *sizes]).tolist() for sizes in (frontiers, edges))
    if len(edges) != len(frontiers) or counts.size != nodes[-1] or not source.size == position.size == bounds[-1]:
        raise DataError(
            f"A reply has {counts.size} nodes of {len(edges)} edge types; {nodes[-1]} of {len(frontiers)} were "
            "requested.",
            hint="have all ranks run the same version of gtrain on the same store.",
        )
    replies = []
    for i in range(len(edges)):
        part = slice(bounds[i], bounds[i + 1])
        reply = SampleReply(counts[nodes[i] : nodes[i + 1]], source[part], position[part])
        if reply.counts.sum(dtype=np.int64) != edges[i]:
            raise DataError("The counts of a reply do not add up to its edges.", hint="report this.")
        replies.append(reply)
    return replies


def _size(array: Array | None) -> int:
    return 0 if array is None else array.size


def serve_sampling(structure: GraphStructure, peers: Peers, pool: BufferPool) -> None:
    """Register the handler that samples this rank's part for other ranks; every rank calls it once."""
    peers.handle(METHOD, SampleServer(structure, structure.hosting.rank, pool))


class SampleServer:
    """Replies to :class:`SampleRequest` for one part. Threads may share it.

    Args:
        structure: the edges that this rank reads.
        part: the part of this rank.
        pool: memory of the replies.
    """

    def __init__(self, structure: GraphStructure, part: int, pool: BufferPool) -> None:
        self._structure, self._part, self._pool = structure, part, pool
        book = structure.book
        self._sizes = [int(np.diff(starts)[part]) for starts in book.offsets.values()]
        self._source_dtype = index_dtype(max(int(starts[-1]) for starts in book.offsets.values()))
        edges = [int(np.diff(starts)[part]) for starts in book.edge_offsets.values()]
        self._position_dtype = index_dtype(max(edges, default=0))
        # Several threads serve the requests of peers; each needs its own buffers.
        self._memory = threading.local()

    def __call__(self, message: Message) -> Message:
        """Return the field ``edges``, the number of edges of each edge type requested, and the three tensors."""
        request = SampleRequest.read(message, self._sizes)
        chosen = self._choose(request)
        edges = [sampled.size for sampled, _ in chosen]
        counts = self._pool.take(sum(size for _, size in chosen), np.int32)
        source = self._pool.take(sum(edges), self._source_dtype)
        position = self._pool.take(sum(edges), self._position_dtype)
        node = edge = 0
        for sampled, size in chosen:
            nodes, part = slice(node, node + size), slice(edge, edge + sampled.size)
            source[part], position[part] = sampled.row[: sampled.size], sampled.position[: sampled.size]
            count_edges(sampled.column[: sampled.size], counts[nodes])
            node, edge = nodes.stop, part.stop
        return Message({"edges": edges}, [torch.from_numpy(array) for array in (counts, source, position)])

    def _choose(self, request: SampleRequest) -> list[tuple[scratch.EdgeBuffer, int]]:
        """Return the chosen edges of each edge type requested, with the number of its frontier nodes."""
        graph, store = self._structure.graph(request.inputs), self._structure.store
        memory, chosen = self._memory, []
        if not hasattr(memory, "spans"):
            memory.spans, memory.edges = scratch.SpanBuffer(), [scratch.EdgeBuffer() for _ in store.edge_types]
        frontiers = dict(zip(store.node_types, request.frontiers, strict=True))
        for relation, (edge_type, number) in enumerate(zip(store.edge_types, request.counts, strict=True)):
            frontier = frontiers[edge_type[2]]
            # Edge types without a choice are not listed in the reply; the requesting rank knows which these are.
            if number == 0 or not frontier.node.size:
                continue
            columns, rule, edges = graph.columns[edge_type][self._part], graph.rules[edge_type], memory.edges[relation]
            edges.size = 0
            choice = Choice(number, hop_key(request.key, request.hop, relation), rule, request.weighted)
            choose(columns, frontier.under(rule), choice, edges, memory.spans)
            chosen.append((edges, frontier.node.size))
        return chosen


@dataclass(frozen=True)
class HopOptions:
    """What a hop samples.

    Attributes:
        key: of the batch, see :func:`gtrain.graph.sampling.batch_key`.
        number: number of the hop, from 0.
        counts: edges per node by edge type, -1 all.
        induced: keep the edges from nodes that were sampled before, whatever their weights, and add no nodes.
    """

    key: int
    number: int
    counts: Mapping[EdgeType, int]
    induced: bool = False


@dataclass
class _RemotePart:
    """A hop's frontier in one part that this rank does not read.

    Attributes:
        splits: the frontier by node type.
        reply: the owner's pending reply; None if nothing was requested.
        edges: the reply by edge type, once received.
    """

    splits: dict[str, FrontierSplit]
    reply: Future[Message] | None = None
    edges: dict[EdgeType, SampleReply] = field(default_factory=dict)


class HopSampler:
    """Chooses the edges of a hop. Threads may share it, each with its state.

    Args:
        structure: the edges that this rank reads.
        peers: the other ranks.
        pool: memory of the requests.
        graph: the columns to sample from.
    """

    def __init__(self, structure: GraphStructure, peers: Peers, pool: BufferPool, graph: SamplingGraph) -> None:
        self._structure, self._peers, self._pool, self._graph = structure, peers, pool, graph
        book = structure.book
        self._remote = [part for part in range(book.num_parts) if part not in structure.parts]
        self._dtype = index_dtype(max((int(np.diff(starts).max()) for starts in book.offsets.values()), default=0))

    def sample(self, state: SamplerState, hop: HopOptions, low: Mapping[str, int], high: Mapping[str, int]) -> None:
        """Append the edges that a hop chooses and give their sources local ids.

        Args:
            state: of this thread.
            hop: what to sample.
            low: by node type, the local id of the frontier's first node.
            high: by node type, the local id after its last.
        """
        state.group_frontiers(low, high, {edge_type[2] for edge_type, count in hop.counts.items() if count})
        # Requests leave first, so that the owners sample while this rank does.
        remote = {part: request for part in self._remote if (request := self._request(state, hop, part)) is not None}
        chosen = {
            edge_type: self._choose(state, hop, edge_type, remote)
            for edge_type in self._graph.columns
            if hop.counts[edge_type] and state.frontiers[edge_type[2]].bounds[-1]
        }
        for part, request in remote.items():
            self._receive(part, request, hop)
        for edge_type, segments in chosen.items():
            self._number(state, edge_type, self._join(state, edge_type, segments, remote), hop)

    def induce(self, state: SamplerState) -> None:
        """Replace the chosen edges by all edges between sampled nodes of the same subgraph."""
        counts = {name: nodes.count for name, nodes in state.nodes.items()}
        for edges in state.edges.values():
            edges.size = 0
        all_edges = HopOptions(0, 0, dict.fromkeys(state.edges, -1), induced=True)
        for start in range(0, max(counts.values()), _SLICE):
            low = {name: min(start, count) for name, count in counts.items()}
            self.sample(state, all_edges, low, {name: min(start + _SLICE, count) for name, count in counts.items()})

    # ------------------------------------------------------------------------------------------ remote parts

    def _request(self, state: SamplerState, hop: HopOptions, part: int) -> _RemotePart | None:
        """Split a part's frontier and request the edges of nodes without copies; None if the frontier is empty."""
        if not any(frontier.size(part) for frontier in state.frontiers.values()):
            return None
        splits = {}
        for node_type, frontier in state.frontiers.items():
            index = self._graph.members[node_type][part] if self._graph.members else None
            first = int(self._structure.book.offsets[node_type][part])
            splits[node_type] = FrontierSplit.of(frontier.of_part(part), index, first)
        remote, frontiers = _RemotePart(splits), [split.requested for split in splits.values()]
        if any(requested.node.size for requested in frontiers):
            counts = list(hop.counts.values())
            request = SampleRequest(
                self._graph.inputs, hop.key, hop.number, counts, frontiers, weighted=not hop.induced
            )
            remote.reply = self._peers.request(part, METHOD, *request.message(self._pool, self._dtype))
        return remote

    def _receive(self, part: int, remote: _RemotePart, hop: HopOptions) -> None:
        """Wait for an owner's reply, which has the edge types whose frontier was not empty."""
        if remote.reply is not None:
            requested = {
                edge_type: size
                for edge_type, count in hop.counts.items()
                if count and (size := remote.splits[edge_type[2]].requested.node.size)
            }
            replies = read_replies(self._peers.wait(part, remote.reply), list(requested.values()))
            remote.edges = dict(zip(requested, replies, strict=True))

    # ------------------------------------------------------------------------------------------ parts read here

    def _choose(
        self, state: SamplerState, hop: HopOptions, edge_type: EdgeType, remote: Mapping[int, _RemotePart]
    ) -> dict[int, slice]:
        """Choose edges of the parts that this rank reads, and of its replicas of others.

        Returns:
            By part: the range in ``state.edges`` of a part that is read here, these are consecutive at the end; the
            range in ``state.copied`` of the edges chosen in a replica.
        """
        frontiers, book = state.frontiers[edge_type[2]], self._structure.book
        rule, number = self._graph.rules[edge_type], self._structure.store.edge_types.index(edge_type)
        key = hop_key(hop.key, hop.number, number)
        choice = Choice(hop.counts[edge_type], key, rule, weighted=not hop.induced)
        state.copied[edge_type].size, segments = 0, {}
        for part in range(book.num_parts):
            if not frontiers.size(part):
                continue
            edges: EdgeBuffer
            if part in remote:
                frontier, edges = remote[part].splits[edge_type[2]].copied, state.copied[edge_type]
                columns = self._graph.replicas[edge_type][part].columns if self._graph.replicas else None
            else:
                frontier, edges = frontiers.of_part(part), state.edges[edge_type]
                columns = self._graph.columns[edge_type].get(part)
            start = edges.size
            if columns is not None and frontier.node.size:
                choose(columns, frontier.under(rule), choice, edges, state.spans)
                if part not in remote:
                    # From positions within the part to global positions.
                    edges.position[start : edges.size] += book.edge_offsets[edge_type][part]
            segments[part] = slice(start, edges.size)
        return segments

    # ------------------------------------------------------------------------------------------ all parts

    def _join(
        self, state: SamplerState, edge_type: EdgeType, chosen: Mapping[int, slice], remote: Mapping[int, _RemotePart]
    ) -> slice:
        """Order the new edges of one type by part, ``row`` still global ids, and return their range.

        Remote edges are inserted between those that were chosen here. Parts are written from the last to the first:
        moving a part back makes room for the parts before it without a copy.
        """
        edges = state.edges[edge_type]
        replies = {part: remote[part].edges.get(edge_type) or _no_edges() for part in chosen if part in remote}
        sizes = {part: segment.stop - segment.start for part, segment in chosen.items()}
        first = edges.size - sum(size for part, size in sizes.items() if part not in remote)
        for part, reply in replies.items():
            sizes[part] += reply.source.size
        start = stop = first + sum(sizes.values())
        edges.reserve(stop - edges.size)
        edges.size = stop
        for part, segment in reversed(list(chosen.items())):
            start -= sizes[part]
            if part in remote:
                split = remote[part].splits[edge_type[2]]
                self._write_remote(
                    state, edge_type, part, segment, split, replies[part], slice(start, start + sizes[part])
                )
            else:
                edges.move(segment, start)
        return slice(first, stop)

    def _write_remote(
        self,
        state: SamplerState,
        edge_type: EdgeType,
        part: int,
        segment: slice,
        split: FrontierSplit,
        reply: SampleReply,
        new: slice,
    ) -> None:
        """Write the edges of a remote part, chosen in the replica and by the owner, in the order of the frontier."""
        edges, copied = state.edges[edge_type], state.copied[edge_type]
        target = state.frontiers[edge_type[2]].of_part(part).target
        first_edge = self._structure.book.edge_offsets[edge_type][part]
        out = EdgeColumns(edges.row[new], edges.column[new], edges.position[new])
        if split.rows is None:
            out.row[:] = reply.source
            np.add(reply.position, first_edge, out=out.position)
            repeat_targets(reply.counts, target, out.column)
            return
        shift = self._graph.replicas[edge_type][part].shift
        chosen = EdgeColumns(copied.row[segment], copied.column[segment], copied.position[segment])
        merge_edges(split.rows, shift, chosen, reply, target, first_edge, out)

    def _number(self, state: SamplerState, edge_type: EdgeType, new: slice, hop: HopOptions) -> None:
        """Give the sources of new edges local ids; an induced subgraph drops edges from nodes not sampled."""
        edges, sources, subgraph = state.edges[edge_type], state.nodes[edge_type[0]], state.nodes[edge_type[2]].batch
        if hop.induced:
            edges.size = new.start + sources.keep(edges.row[new], edges.column[new], edges.position[new], subgraph)
        else:
            sources.number(edges.row[new], edges.column[new], subgraph)


@dataclass(frozen=True)
class FrontierSplit:
    """The f frontier nodes of one type in a remote part, split by whether this rank has copies of their in-edges.

    Attributes:
        copied: nodes with copies, by their rows in the replica; ``name`` has their global ids.
        requested: the others, by their numbers within the part.
        rows: int64 ``[f]``, the row of each node in the replica, -1 without; None if nothing is replicated.
    """

    copied: Frontier
    requested: Frontier
    rows: Array | None = None

    @classmethod
    def of(cls, frontier: Frontier, index: ReplicaIndex | None, first: int) -> FrontierSplit:
        """Split a frontier.

        Args:
            frontier: numbers within the part.
            index: the nodes whose in-edges are copied; None without a replica.
            first: the global id of the part's first node.
        """
        empty = _select(frontier, frontier.node[:0])
        if index is None or not frontier.node.size:
            return cls(empty, frontier)
        rows = np.empty(frontier.node.size, np.int64)
        copies = replica_rows(frontier.node, index.bits, index.before, rows)
        if copies == 0:
            return cls(empty, frontier, rows)
        in_replica = replace(frontier, node=rows, name=frontier.node + first)
        if copies == rows.size:
            return cls(in_replica, empty, rows)
        has_copy = rows >= 0
        return cls(_select(in_replica, has_copy), _select(frontier, ~has_copy), rows)


def _select(frontier: Frontier, index: Array) -> Frontier:
    """Return some nodes of a frontier, by indices or a mask."""
    return Frontier(
        frontier.node[index],
        frontier.subgraph[index] if frontier.subgraph.size else frontier.subgraph,
        frontier.target[index],
        None if frontier.limit is None else frontier.limit[index],
        None if frontier.name is None else frontier.name[index],
    )


def _no_edges() -> SampleReply:
    return SampleReply(*(np.empty(0, np.int32) for _ in range(3)))
