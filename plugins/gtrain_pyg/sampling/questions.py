"""What crosses between ranks when a hop is sampled: one question and one answer for each owner and hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.sampling.hop import Frontier
from gtrain.wire import Message
from gtrain_pyg.structure.needs import Needs

Array = NDArray[Any]
METHOD = "sample"


@dataclass(frozen=True)
class Question:
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
            found = getattr(frontier, name)
            out[start:stop] = found if _size(found) else 0
            start = stop
        return torch.from_numpy(out)

    @classmethod
    def read(cls, message: Message, limits: Sequence[int]) -> Question:
        """The question of a request.

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
class Answer:
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
    def read(message: Message, frontiers: Sequence[int]) -> list[Answer]:
        """The answers to a question, in its order.

        Args:
            message: the peer's.
            frontiers: nodes asked about for each edge type.

        Raises:
            DataError: it answers another question.
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
        found = []
        for i in range(len(edges)):
            own, part = slice(nodes[i], nodes[i + 1]), slice(bounds[i], bounds[i + 1])
            answer = Answer(counts[own], source[part], position[part])
            if answer.counts.sum(dtype=np.int64) != edges[i]:
                raise DataError("The counts of an answer do not add up.", hint="report this.")
            found.append(answer)
        return found


def _size(array: Array | None) -> int:
    return 0 if array is None else array.size


def _check_range(nodes: Array, size: int) -> None:
    if nodes.size and (nodes.min() < 0 or nodes.max() >= size):
        raise DataError(
            f"A request names node {int(nodes.max())} of a part with {size} nodes of that type.",
            hint="have all ranks open the same store.",
        )
