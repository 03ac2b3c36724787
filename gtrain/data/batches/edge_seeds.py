"""Edges as the seeds of a link task: their ends, their negatives, and the known edges for filtered ranking."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.negatives import Negatives
from gtrain.data.batches.scored_edges import EdgeType, ScoredEdges
from gtrain.graph.shard.whole import held_out_edges
from gtrain.graph.store import Store

_OPTIONAL = ("type", "weight", "time")


@dataclass(frozen=True)
class EdgeSeeds:
    """The S edges of one split, in the order of the source data. Ids are local: rows of the graph's node tensors.

    Attributes:
        index: int64 ``[2, S]``, sources (heads) and targets (tails).
        extra: ``type`` int64 (relation), ``weight`` (float) and ``time`` int64, those that the data has, ``[S]`` each.
        known: the edges of all splits, which filtered ranking excludes; None on the train split.
        edge_type: the edge type of a heterogeneous graph; None in a homogeneous one.
        edge_id: int64 ``[S]``, positions among the split's edges of the source data.
        negatives: draws negative edges; None: the batch has none.
    """

    index: Tensor
    extra: dict[str, Tensor]
    known: KnownEdges | None
    edge_type: EdgeType | None
    edge_id: Tensor
    negatives: Negatives | None = None

    def __len__(self) -> int:
        return self.index.size(1)

    def select(self, chosen: Tensor, epoch: int = 0) -> ScoredEdges:
        """Return the chosen seeds with their negative edges.

        Args:
            chosen: int64 ``[B]``, positions in this split.
            epoch: number of the epoch.
        """
        source, target = self.index[:, chosen]
        extra, edge_id = {name: value[chosen] for name, value in self.extra.items()}, self.edge_id[chosen]
        edges = ScoredEdges(source, target, extra, edge_id=edge_id)
        return edges if self.negatives is None else self.negatives(edges, edge_id, epoch)

    def query_steps(self, size: int | None, seed: int | None) -> list[tuple[int, Tensor]]:
        """Cut the edges into the steps of an epoch in which each edge occurs twice: once to find each of its ends.

        The edges of a query, which have the given end and the relation in common, follow each other.

        Args:
            size: edges of a step; None: all.
            seed: of the order of queries and steps; None leaves both in ascending order.

        Returns:
            Steps, each as the end to be found, 0 for heads or 1 for tails, and positions in this split, int64 ``[B]``.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        relation = self.extra.get("type")
        steps: list[tuple[int, Tensor]] = []
        for end in (0, 1):
            given = self.index[1 - end]
            key = given if relation is None or not len(self) else given * (int(relation.max()) + 1) + relation
            queries, query = key.unique(return_inverse=True)
            if generator is not None:
                query = torch.randperm(len(queries), generator=generator)[query]
            steps += [(end, positions) for positions in query.argsort(stable=True).split(size or max(len(self), 1))]
        if generator is None:
            return steps
        return [steps[number] for number in torch.randperm(len(steps), generator=generator).tolist()]

    def known_entries(self, chosen: Tensor) -> dict[str, Tensor]:
        """Return the batch's entries for filtered ranking: all known answers of each chosen seed, in CSR form.

        Returns:
            ``known_tail_ptr`` int64 ``[B + 1]`` and ``known_tail`` (for seed (h, r, t) all t' such that (h, r, t') is
            in the data), ``known_head_ptr`` and ``known_head`` alike. Empty on the train split.
        """
        if self.known is None:
            return {}
        (source, target), relation = self.index[:, chosen], self.extra.get("type")
        relation = None if relation is None else relation[chosen]
        entries = {}
        entries["known_tail_ptr"], entries["known_tail"] = self.known.tails(source, relation)
        entries["known_head_ptr"], entries["known_head"] = self.known.heads(target, relation)
        return entries


class KnownEdges:
    """All edges of the data by (source, relation) and by (target, relation).

    Args:
        index: sources and targets of every edge, train, val and test.
        relation: relation of each edge; None if the graph has only one relation.
        num_relations: R. Needed if queries have relations with larger numbers than those of these edges.

    Shapes:
        index int64 ``[2, K]``, relation int64 ``[K]``.
    """

    def __init__(self, index: Tensor, relation: Tensor | None, num_relations: int = 1) -> None:
        largest = int(relation.max()) + 1 if relation is not None and relation.numel() else 1
        self._relations = max(largest, num_relations)
        self._by_source = self._sorted(index[0], relation, index[1])
        self._by_target = self._sorted(index[1], relation, index[0])

    def tails(self, source: Tensor, relation: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return, for each of B queries (source, relation), the known targets: pointers [B + 1] and ids."""
        return self._lookup(self._by_source, source, relation)

    def heads(self, target: Tensor, relation: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return, for each of B queries (target, relation), the known sources: pointers [B + 1] and ids."""
        return self._lookup(self._by_target, target, relation)

    # The index is a sorted array of keys: all answers of a query are one range, which two binary searches delimit.

    def _keys(self, node: Tensor, relation: Tensor | None) -> Tensor:
        """Return one number per pair (node, relation)."""
        return node if relation is None else node * self._relations + relation

    def _sorted(self, node: Tensor, relation: Tensor | None, answer: Tensor) -> tuple[Tensor, Tensor]:
        keys, order = self._keys(node, relation).sort()
        return keys.contiguous(), answer[order]

    def _lookup(self, table: tuple[Tensor, Tensor], node: Tensor, relation: Tensor | None) -> tuple[Tensor, Tensor]:
        keys, answers = table
        queries = self._keys(node, relation).contiguous()
        begin = torch.searchsorted(keys, queries)
        count = torch.searchsorted(keys, queries, right=True) - begin
        pointer = torch.cat([count.new_zeros(1), count.cumsum(0)])
        # position of each answer within its query's range: 0..count[i]-1 for query i, all queries end to end
        offset = torch.arange(int(pointer[-1])) - torch.repeat_interleave(pointer[:-1], count)
        return pointer, answers[torch.repeat_interleave(begin, count) + offset]


def edge_seeds(graph: Data | HeteroData, store: Store, split: str, negatives: Negatives | None = None) -> EdgeSeeds:
    """Return the edges of a split.

    Args:
        graph: the whole graph, its nodes in the order of the global ids.
        store: where the held-out edges are.
        split: ``train``, ``val`` or ``test``: the held-out edges. If training edges are not held out, ``train`` is
            every edge that messages pass along.
        negatives: draws their negative edges; None: the batches have none.
    """
    edge_type: EdgeType | None = None
    if isinstance(graph, HeteroData):
        edge_type = tuple(store.facts["target_edge"])
    held_out = store.holds_out("train", edge_type)
    index, edge_id, extra = _held_out(store, "train", edge_type) if held_out else _train(graph, edge_type)
    if split == "train":
        return EdgeSeeds(index, extra, None, edge_type, edge_id, negatives)
    others = {name: _held_out(store, name, edge_type) for name in ("val", "test")}
    everything = [(index, edge_id, extra), *others.values()]
    relations = [more["type"] for _, _, more in everything] if "type" in extra else None
    known = KnownEdges(
        torch.cat([edges for edges, _, _ in everything], dim=1), None if relations is None else torch.cat(relations)
    )
    index, edge_id, extra = others[split]
    return EdgeSeeds(index, extra, known, edge_type, edge_id, negatives)


_Edges = tuple[Tensor, Tensor, dict[str, Tensor]]


def _train(graph: Data | HeteroData, edge_type: EdgeType | None) -> _Edges:
    edges = graph if isinstance(graph, Data) else graph[edge_type]
    # The order of the source data: the same seeds in the same order for any number of parts.
    order = torch.argsort(edges.edge_id)
    extra = {name: edges[f"edge_{name}"][order] for name in _OPTIONAL if f"edge_{name}" in edges}
    return edges.edge_index[:, order], edges.edge_id[order], extra


def _held_out(store: Store, split: str, edge_type: EdgeType | None) -> _Edges:
    """Return the held-out edges of all parts, in the order of the source data."""
    edges = held_out_edges(store, split, edge_type)
    if not edges:
        names = [name for name in _OPTIONAL if f"edge_{name}" in store.edge_tensors(edge_type)]
        empty = torch.empty(0, dtype=torch.int64)
        return torch.stack([empty, empty]), empty, dict.fromkeys(names, empty)
    extra = {name: edges[f"edge_{name}"] for name in _OPTIONAL if f"edge_{name}" in edges}
    index = torch.stack([edges["source"], edges["target"]])
    return index, torch.arange(index.size(1)), extra
