"""Sampling by the owners of other parts: one request and one reply for each owner and hop, and who replies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.sampling import scratch
from gtrain.graph.sampling.hop import Choice, Frontier, choose
from gtrain.graph.sampling.rules import hop_key
from gtrain.wire import Message
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.sampling.kernels import count, narrow
from gtrain_pyg.structure.hosted import Structure
from gtrain_pyg.structure.needs import Needs

Array = NDArray[Any]
METHOD = "sample"


@dataclass(frozen=True)
class SampleRequest:
    """In-edges of one part's nodes to be chosen, for all edge types of a hop.

    Attributes:
        needs: how edges are chosen.
        key: of :func:`gtrain.graph.sampling.batch_key`.
        hop: number of the hop.
        counts: for each edge type of the graph how many edges of each node, -1 all.
        frontiers: for each node type of the graph the nodes, numbered within the part, with their subgraphs where
            these are disjoint, and their limits where there are times.
    """

    needs: Needs
    key: int
    hop: int
    counts: list[int]
    frontiers: list[Frontier]

    def message(self, pool: Any, dtype: DTypeLike) -> tuple[dict[str, Any], list[Tensor]]:
        """Fields and tensors of the request.

        Args:
            pool: where its memory comes from.
            dtype: in which the nodes' numbers fit.
        """
        sizes = [frontier.node.size for frontier in self.frontiers]
        fields: dict[str, Any] = {
            "needs": asdict(self.needs),
            "key": f"{self.key:x}",  # it may be above 2**63
            "hop": self.hop,
            "counts": self.counts,
            "sizes": sizes,
        }
        tensors = [self._column("node", pool.take((sum(sizes),), dtype))]
        for name in ("subgraph", "limit"):
            fields[name] = any(_size(getattr(frontier, name)) for frontier in self.frontiers)
            if fields[name]:
                tensors.append(self._column(name, pool.take((sum(sizes),), np.int64)))
        return fields, tensors

    def _column(self, name: str, out: Array) -> Tensor:
        """One array of all frontiers, end to end; what a frontier does not have is 0."""
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
            limits: for each node type how many nodes the part has.

        Raises:
            DataError: a node is out of range, or the message fits no graph of these types.
        """
        fields, tensors = message.fields, list(message.tensors)
        sizes = fields["sizes"]
        if len(sizes) != len(limits) or sum(sizes) != tensors[0].numel():
            raise DataError(
                f"A request for the neighbours of {tensors[0].numel()} nodes of {len(sizes)} types reached a part with "
                f"{len(limits)} types.",
                hint="have all ranks open the same store.",
            )
        bounds = np.cumsum([0, *sizes]).tolist()
        node = tensors.pop(0).numpy().astype(np.int64, copy=False)
        subgraph = tensors.pop(0).numpy() if fields["subgraph"] else None
        limit = tensors.pop(0).numpy() if fields["limit"] else None
        frontiers = []
        for start, stop, size in zip(bounds, bounds[1:], limits, strict=False):
            part = slice(start, stop)
            _check_range(node[part], size)
            frontiers.append(
                Frontier(
                    node[part],
                    node[:0] if subgraph is None else subgraph[part],
                    np.arange(stop - start),
                    None if limit is None else limit[part],
                )
            )
        return cls(Needs(**fields["needs"]), int(fields["key"], 16), fields["hop"], fields["counts"], frontiers)


@dataclass(frozen=True)
class SampleReply:
    """The chosen edges of one part, for each edge type that was asked for.

    Attributes:
        counts: int32 ``[f]``, how many edges of each frontier node.
        source: int32 or int64 ``[e]``, global ids.
        position: int32 or int64 ``[e]``, within the part.
    """

    counts: Array
    source: Array
    position: Array

    @staticmethod
    def read(message: Message, frontiers: Sequence[int]) -> list[SampleReply]:
        """The answers to a request, in its order.

        Args:
            message: the peer's.
            frontiers: nodes asked about for each edge type.

        Raises:
            DataError: it answers another request.
        """
        edges = message.fields["edges"]
        counts, source, position = (tensor.numpy() for tensor in message.tensors)
        nodes = np.cumsum([0, *frontiers]).tolist()
        bounds = np.cumsum([0, *edges]).tolist()
        if len(edges) != len(frontiers) or counts.size != nodes[-1] or not source.size == position.size == bounds[-1]:
            raise DataError(
                f"An answer has {counts.size} nodes of {len(edges)} edge types; {nodes[-1]} of {len(frontiers)} were "
                "asked for.",
                hint="have all ranks run the same version of gtrain on the same store.",
            )
        replies = []
        for i in range(len(edges)):
            own, part = slice(nodes[i], nodes[i + 1]), slice(bounds[i], bounds[i + 1])
            answer = SampleReply(counts[own], source[part], position[part])
            if answer.counts.sum(dtype=np.int64) != edges[i]:
                raise DataError("The counts of an answer do not add up.", hint="report this.")
            replies.append(answer)
        return replies


def _size(array: Array | None) -> int:
    return 0 if array is None else array.size


def _check_range(nodes: Array, size: int) -> None:
    if nodes.size and (nodes.min() < 0 or nodes.max() >= size):
        raise DataError(
            f"A request names node {int(nodes.max())} of a part with {size} nodes of that type.",
            hint="have all ranks open the same store.",
        )


def serve_sampling(structure: Structure, peers: Peers, pool: Any) -> None:
    """Have this rank answer for its part; called once, by every rank."""
    peers.handle(METHOD, SampleServer(structure, structure.hosting.rank, pool))


class SampleServer:
    """Answers :class:`SampleRequest` for one part. Threads may share it.

    Args:
        structure: what this rank reads.
        part: the part, its own.
        pool: where the answers' memory comes from.
    """

    def __init__(self, structure: Structure, part: int, pool: Any) -> None:
        self._structure, self._part, self._pool = structure, part, pool
        book = structure.book
        self._sizes = [int(np.diff(book.offsets[name])[part]) for name in structure.node_types]
        self._ids = narrow(max(book.count(name) for name in structure.node_types))
        edges = [book.edge_offsets[kind] for kind in structure.edge_types]
        self._positions = narrow(max((int(starts[part + 1] - starts[part]) for starts in edges), default=0))
        self._memory = threading.local()

    def __call__(self, message: Message) -> Message:
        """The answer: the field ``edges``, how many there are of each edge type asked for, and three tensors."""
        request = SampleRequest.read(message, self._sizes)
        chosen = self._choose(request)
        edges = [sampled.size for sampled, _ in chosen]
        counts = self._pool.take((sum(size for _, size in chosen),), np.int32)
        source = self._pool.take((sum(edges),), self._ids)
        position = self._pool.take((sum(edges),), self._positions)
        node = edge = 0
        for sampled, size in chosen:
            nodes, part = slice(node, node + size), slice(edge, edge + sampled.size)
            source[part], position[part] = sampled.row[: sampled.size], sampled.position[: sampled.size]
            count(sampled.column[: sampled.size], counts[nodes])
            node, edge = nodes.stop, part.stop
        return Message({"edges": edges}, [torch.from_numpy(array) for array in (counts, source, position)])

    def _choose(self, request: SampleRequest) -> list[tuple[scratch.Edges, int]]:
        """For each edge type that is asked for the chosen edges, and how many nodes were asked about."""
        graph = self._structure.graph(request.needs)
        memory = self._of_this_thread()
        types, chosen = list(self._structure.node_types), []
        for relation, (kind, number) in enumerate(zip(self._structure.edge_types, request.counts, strict=True)):
            frontier = request.frontiers[types.index(kind[2])]
            if number == 0 or not frontier.node.size:
                continue
            columns, rule, edges = graph.columns[kind][self._part], graph.rules[kind], memory.edges[relation]
            edges.size = 0
            choice = Choice(number, hop_key(request.key, request.hop, relation), rule)
            choose(columns, frontier.under(rule), choice, edges, memory.spans)
            chosen.append((edges, frontier.node.size))
        return chosen

    def _of_this_thread(self) -> Any:
        memory = self._memory
        if not hasattr(memory, "spans"):
            memory.spans = scratch.Spans()
            memory.edges = [scratch.Edges() for _ in self._structure.edge_types]
        return memory
