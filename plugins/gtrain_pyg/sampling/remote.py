"""Sampling of remote parts: one request and one reply per owner and hop, and the handler that replies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.sampling import scratch
from gtrain.graph.sampling.hop import Choice, Frontier, choose, hop_key
from gtrain.wire import Message
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.ranks.parts import Array
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.sampling.kernels import SampleReply, count_edges, index_dtype
from gtrain_pyg.structure.hosted import GraphStructure, SamplingInputs

METHOD = "sample"


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
    """

    inputs: SamplingInputs
    key: int
    hop: int
    counts: list[int]
    frontiers: list[Frontier]

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
        return cls(inputs, int(fields["key"], 16), fields["hop"], fields["counts"], frontiers)


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
            if number == 0 or not frontier.node.size:
                continue
            columns, rule, edges = graph.columns[edge_type][self._part], graph.rules[edge_type], memory.edges[relation]
            edges.size = 0
            choice = Choice(number, hop_key(request.key, request.hop, relation), rule)
            choose(columns, frontier.under(rule), choice, edges, memory.spans)
            chosen.append((edges, frontier.node.size))
        return chosen
