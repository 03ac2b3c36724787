"""The serving side of distributed sampling: choosing in-edges of a part's own nodes for other ranks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gtrain.graph.sampling import scratch
from gtrain.graph.sampling.hop import Choice, choose
from gtrain.graph.sampling.rules import hop_key
from gtrain.wire import Message
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.sampling.kernels import count, narrow
from gtrain_pyg.sampling.questions import METHOD, Question
from gtrain_pyg.structure.hosted import Structure

Array = NDArray[Any]


def serve_sampling(structure: Structure, peers: Peers, pool: Any) -> None:
    """Have this rank answer for its part; called once, by every rank."""
    peers.handle(METHOD, Answering(structure, structure.hosting.rank, pool))


class Answering:
    """Answers :class:`Question` for one part. Threads may share it.

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
        question = Question.read(message, self._sizes)
        chosen = self._choose(question)
        edges = [found.size for found, _ in chosen]
        counts = self._pool.take((sum(size for _, size in chosen),), np.int32)
        source = self._pool.take((sum(edges),), self._ids)
        position = self._pool.take((sum(edges),), self._positions)
        node = edge = 0
        for found, size in chosen:
            nodes, part = slice(node, node + size), slice(edge, edge + found.size)
            source[part], position[part] = found.row[: found.size], found.position[: found.size]
            count(found.column[: found.size], counts[nodes])
            node, edge = nodes.stop, part.stop
        return Message({"edges": edges}, [torch.from_numpy(array) for array in (counts, source, position)])

    def _choose(self, question: Question) -> list[tuple[scratch.Edges, int]]:
        """For each edge type that is asked for the chosen edges, and how many nodes were asked about."""
        graph = self._structure.graph(question.needs)
        memory = self._of_this_thread()
        types, chosen = list(self._structure.node_types), []
        for relation, (kind, number) in enumerate(zip(self._structure.edge_types, question.counts, strict=True)):
            frontier = question.frontiers[types.index(kind[2])]
            if number == 0 or not frontier.node.size:
                continue
            columns, rule, edges = graph.columns[kind][self._part], graph.rules[kind], memory.edges[relation]
            edges.size = 0
            choice = Choice(number, hop_key(question.key, question.hop, relation), rule)
            choose(columns, frontier.under(rule), choice, edges, memory.spans)
            chosen.append((edges, frontier.node.size))
        return chosen

    def _of_this_thread(self) -> Any:
        memory = self._memory
        if not hasattr(memory, "spans"):
            memory.spans = scratch.Spans()
            memory.edges = [scratch.Edges() for _ in self._structure.edge_types]
        return memory
