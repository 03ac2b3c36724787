"""The training loss of embeddings: true edges against the negatives of their chunk, by groups of relations.

The losses are those of PyTorch-BigGraph (Lerer et al. 2019, section 3), before the sum over the edges. A masked
negative has the score minus infinity, which adds nothing to any of the losses.

Letters of shapes: B edges of a batch, C chunks, m slots of a chunk, u uniform negatives of a chunk, N entities of a
type, D columns of an embedding.

The edges of a chunk share their negatives (section 4.3 there): the answer of one edge is a negative of all others, so
that one matrix product gives each of m edges m - 1 negatives. Nodes drawn uniformly for the chunk are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gtrain.errors import ConfigError
from gtrain.kernels.splitmix import below, key
from gtrain.model.kg.queries import Queries
from gtrain.model.kg.schema import EmbeddingSchema, EntitySpec, GroupSpec
from gtrain.model.kg.scores import EdgeScores

DrawNodes: TypeAlias = Callable[[int, int, int, Tensor, int], Tensor]
"""Draws nodes for chunks, as :meth:`ChunkDraws.__call__` does."""

LOSSES = ("ranking", "logistic", "softmax")
LIMIT = 1 << 25
"""Scores and rows, in numbers, that a block of chunks may take. A batch that needs more is computed block by block, and
its backward pass recomputes each block."""
RowLookup = Callable[[Tensor], Tensor]
"""Returns rows ``[..., D]`` of ids ``[...]``."""
LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Returns the loss of each true edge ``[...]`` from its score ``[...]`` and those of its negatives ``[..., n]``."""


class ChunkDraws:
    """Draws the uniform negatives of chunks with a counter-based generator.

    The nodes of a chunk depend on the seed and the chunk alone: processes that share the chunks of a step draw the same
    nodes as one process that has all of them.

    Args:
        seed: of a step's draws; None: taken from torch's generator.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = int(torch.randint(1 << 62, ())) if seed is None else seed

    def __call__(self, group: int, end: int, size: int, chunk: Tensor, count: int) -> Tensor:
        """Draw nodes, int64 ``[C, count]``.

        Args:
            group: number of the group of relations.
            end: 0 for heads, 1 for tails.
            size: nodes to draw from.
            chunk: int64 ``[C]``, numbers of the chunks within the group's part of the step.
            count: nodes for each chunk.
        """
        return torch.from_numpy(below(size, key(self._seed, group, end), chunk.cpu().numpy(), count))


class EdgeChunks(NamedTuple):
    """B edges in C chunks of m slots.

    Attributes:
        edge: int64 ``[C, m]``, the edge in each slot; arbitrary if the slot is empty.
        filled: bool ``[C, m]``, whether the slot has an edge.
    """

    edge: Tensor
    filled: Tensor

    def split(self, chunks: int) -> list[EdgeChunks]:
        """Return blocks of this many chunks."""
        return [EdgeChunks(*pair) for pair in zip(self.edge.split(chunks), self.filled.split(chunks), strict=True)]

    def negative_mask(self, others: int) -> Tensor:
        """Return which candidates are negatives of which edge, bool ``[C, m, m + others]``.

        The candidates are the answers of the chunk's m slots, then ``others`` more, which all count. The edge's
        answer and empty slots do not count; the negatives of an empty slot are the others.
        """
        chunks, chunk_size = self.filled.shape
        inside = self.filled.unsqueeze(1) & ~torch.eye(chunk_size, dtype=torch.bool, device=self.filled.device)
        return torch.cat([inside, inside.new_ones(chunks, chunk_size, others)], dim=-1)


def in_order(edges: Tensor, chunk_size: int) -> EdgeChunks:
    """Cut edges ``[B]`` into chunks in their order; the last may have empty slots."""
    num_edges = len(edges)
    chunk_size = max(1, min(chunk_size, num_edges))
    slot = torch.arange(-(-num_edges // chunk_size) * chunk_size, device=edges.device).view(-1, chunk_size)
    return EdgeChunks(slot.clamp(max=max(num_edges - 1, 0)), slot < num_edges)


def by_relation(relation: Tensor, chunk_size: int) -> EdgeChunks:
    """Cut edges into chunks of one relation each, in their order within the relation.

    Args:
        relation: int64 ``[B]``.
        chunk_size: m.
    """
    order = relation.argsort(stable=True)
    _, counts = relation[order].unique_consecutive(return_counts=True)
    chunk_size = max(1, min(chunk_size, int(counts.max()) if counts.numel() else 1))
    # A relation fills whole chunks but for its last one: ceil(count / m) chunks.
    chunks_of = (counts + chunk_size - 1) // chunk_size
    # The relation of each chunk, numbered among the relations that occur. (C,)
    group = torch.repeat_interleave(torch.arange(counts.numel(), device=relation.device), chunks_of)
    first_chunk = chunks_of.cumsum(0) - chunks_of
    chunk = torch.arange(group.numel(), device=relation.device)
    begin = (chunk - first_chunk[group]) * chunk_size  # of each chunk, within its relation
    # Position of each slot's edge within its relation, then among the edges sorted by relation. (C, m)
    within = begin.unsqueeze(1) + torch.arange(chunk_size, device=relation.device)
    filled = within < counts[group].unsqueeze(1)
    slot = (counts.cumsum(0) - counts)[group].unsqueeze(1) + within
    return EdgeChunks(order[slot.clamp(max=max(order.numel() - 1, 0))], filled)


def ranking(margin: float) -> LossFunction:
    """Return a loss: the sum over negatives of ``max(0, margin - true + negative)``."""

    def loss(true: Tensor, negative: Tensor) -> Tensor:
        # relu(-inf) = 0, so masked negatives add nothing
        return (negative - true.unsqueeze(-1) + margin).relu().sum(-1)

    return loss


def logistic(true: Tensor, negative: Tensor) -> Tensor:
    """Return ``softplus(-true)`` plus the mean of ``softplus(negative)`` over the negatives."""
    count = torch.isfinite(negative).sum(-1).clamp(min=1)
    return F.softplus(-true) + F.softplus(negative).sum(-1) / count


def softmax(true: Tensor, negative: Tensor) -> Tensor:
    """Return the cross-entropy of classifying the true edge among itself and its negatives."""
    return torch.cat([true.unsqueeze(-1), negative], dim=-1).logsumexp(-1) - true


def make_loss(name: str, margin: float) -> LossFunction:
    """Return the loss of this name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in LOSSES:
        raise ConfigError(f"model.loss={name} was set.", hint=f"the losses are {', '.join(LOSSES)}.")
    return ranking(margin) if name == "ranking" else logistic if name == "logistic" else softmax


@dataclass(frozen=True)
class Triples:
    """B edges.

    Attributes:
        head, relation, tail: int64 ``[B]``, ids of the source data, or ids within a group and its entity types.
        weight: float ``[B]``; None: all 1.
        chunk: int64 ``[B]``, the number of each edge's chunk within its group. Set if these edges are only some chunks
            of a step, so that the negatives are those of the whole step; None: they are all edges of the step.
        end: the end that is to be found in this step, 0 for heads or 1 for tails; None: both.
    """

    head: Tensor
    relation: Tensor
    tail: Tensor
    weight: Tensor | None = None
    chunk: Tensor | None = None
    end: int | None = None

    def __len__(self) -> int:
        return self.head.numel()

    def select(self, rows: Tensor) -> Triples:
        """Return some of the edges."""
        weight, chunk = (None if value is None else value[rows] for value in (self.weight, self.chunk))
        return Triples(self.head[rows], self.relation[rows], self.tail[rows], weight, chunk, self.end)


@dataclass(frozen=True)
class NegativeSampling:
    """Which negatives an edge is trained against.

    Attributes:
        batch: edges per chunk that serve as each other's negatives; 0: no edge serves as a negative.
        uniform: nodes drawn for each chunk and side.
        all: whether all nodes are negatives; ``batch`` and ``uniform`` are then ignored.
        heads, tails: whether heads and whether tails are replaced.
        self_negs: whether an edge's own head is among the negatives of its tail, and its tail among those of its head.

    Raises:
        ConfigError: an edge would have no negatives.
    """

    batch: int
    uniform: int
    all: bool
    heads: bool
    tails: bool
    self_negs: bool = False

    def __post_init__(self) -> None:
        settings = f"model.num_batch_negs={self.batch} and model.num_uniform_negs={self.uniform}"
        if self.batch < 0 or self.uniform < 0:
            raise ConfigError(f"{settings} were set; they must be 0 or more.", hint="50 is the default of both.")
        if not self.all and self.batch <= 1 and not self.uniform:
            raise ConfigError(
                f"{settings} were set, which gives an edge max(0, {self.batch} - 1) + {self.uniform} = 0 negatives.",
                hint="raise one of them, or set model.all_negs=true.",
            )
        if not (self.heads or self.tails):
            raise ConfigError(
                "model.head_negs=false and model.tail_negs=false leave no negatives.", hint="set one of them to true."
            )

    @property
    def chunk_size(self) -> int:
        """Edges per chunk."""
        return self.batch or self.uniform


class TrainingLoss:
    """The loss of each edge of a batch, both sides added, relation prediction and regularizers.

    Chunks keep the edges in the batch's order; with static relations, which transform the negatives, each chunk has
    one relation.

    Args:
        scores: of edges.
        loss: of the scores of true edges and negatives.
        negatives: sampling of negatives.
        n3: weight of the N3 regularizer.
        dura: weight of the DURA regularizer.
        relation_prediction: weight of the loss of predicting an edge's relation.
        sizes: entities of the heads' type and of the tails' type.
    """

    def __init__(
        self,
        scores: EdgeScores,
        loss: LossFunction,
        negatives: NegativeSampling,
        n3: float,
        dura: float,
        relation_prediction: float,
        sizes: tuple[int, int],
    ) -> None:
        self.scores, self.loss, self.negatives, self.sizes = scores, loss, negatives, sizes
        self.n3, self.dura, self.relation_prediction = n3, dura, relation_prediction

    def __call__(
        self, tables: tuple[RowLookup, RowLookup], edges: Triples, draw: Callable[[int, int, Tensor, int], Tensor]
    ) -> Tensor:
        """Return the unweighted loss of each edge, ``[B]``.

        Args:
            tables: embeddings of heads and of tails; the same object where they are of one type.
            edges: true ones.
            draw: draws the uniform negatives of chunks; a :class:`~gtrain.model.kg.training.ChunkDraws` of one group.
        """
        # Empty, but computed from the table, so that the loss has a gradient function as on other ranks.
        if not len(edges):
            return tables[0](edges.head).sum(-1)
        if edges.end is not None:
            return self._of_one_end(tables, edges, edges.end)
        blocks, device = self._blocks(edges), edges.head.device
        uniform = 0 if self.negatives.all else self.negatives.uniform
        losses, begin = [], 0
        for block in blocks:
            end = begin + len(block.edge)
            # The first slot of a chunk always has an edge, and all its edges have the same number.
            number = torch.arange(begin, end) if edges.chunk is None else edges.chunk[block.edge[:, 0]]
            drawn = torch.stack([draw(side, size, number, uniform) for side, size in enumerate(self.sizes)]).to(device)
            begin = end
            if len(blocks) > 1 and torch.is_grad_enabled():
                each = checkpoint(self._of_block, tables, edges, block, drawn, use_reentrant=False)
            else:
                each = self._of_block(tables, edges, block, drawn)
            losses.append(each[block.filled])
        # Back from the order of chunks to that of the batch.
        order = torch.cat([block.edge[block.filled] for block in blocks])
        return torch.cat(losses)[order.argsort()]

    def chunk_numbers(self, relation: Tensor) -> Tensor:
        """Return the number of each edge's chunk, ``[B]``, given the relations of all edges of a step.

        With all nodes as negatives each edge is a chunk: its loss does not depend on other edges.
        """
        if self.negatives.all:
            return torch.arange(len(relation), device=relation.device)
        chunk_size = self.negatives.chunk_size
        chunks = in_order(relation, chunk_size) if self.scores.reciprocal else by_relation(relation, chunk_size)
        number = torch.empty_like(relation)
        number[chunks.edge[chunks.filled]] = chunks.filled.nonzero()[:, 0]
        return number

    def _blocks(self, edges: Triples) -> list[EdgeChunks]:
        """Cut the batch into blocks of chunks."""
        every, reciprocal, most = self.negatives.all, self.scores.reciprocal, max(self.sizes)
        if not every:
            chunk_size = self.negatives.chunk_size
        elif reciprocal:
            chunk_size = LIMIT // most
        else:
            # A relation's last chunk has empty slots: small chunks waste fewer.
            chunk_size = min(LIMIT // most, -(-len(edges) // int(edges.relation.unique().numel())))
        chunks = in_order(edges.head, chunk_size) if reciprocal else by_relation(edges.relation, chunk_size)
        # Numbers of one chunk: scores [m, candidates], and rows [candidates, D] unless all chunks share the same rows.
        chunk_size, dim = chunks.edge.size(1), self.scores.dimension
        candidates = most if every else chunk_size + self.negatives.uniform
        size = chunk_size * candidates + (0 if every and reciprocal else candidates * dim)
        return chunks.split(max(1, LIMIT // size))

    def _of_block(
        self, tables: tuple[RowLookup, RowLookup], edges: Triples, chunks: EdgeChunks, drawn: Tensor
    ) -> Tensor:
        """Return the loss of each slot of these chunks, ``[C, m]``; drawn is ``[2, C, u]``, heads and tails."""
        head, tail, relation = (ids[chunks.edge] for ids in (edges.head, edges.tail, edges.relation))  # each [C, m]
        # rows [C, m, D] of the edges and [C, u, D] of the uniform negatives
        heads, more_heads, tails, more_tails = self._look_up(tables, (head, drawn[0], tail, drawn[1]))
        every_head, every_tail = self._all_rows(tables, head.device) if self.negatives.all else (None, None)
        losses = []
        if self.negatives.tails:
            losses.append(self._tail_loss(heads, relation, tails, more_tails, (head, tail), every_tail, chunks))
        if self.negatives.heads:
            queries = self._queries(self.scores.head_queries, tails, relation)
            negative = self._negative_scores(queries, heads, more_heads, head, every_head, chunks)
            losses.append(self._side_loss(queries, heads, tails, negative, head == tail))
        flat = (heads.flatten(0, 1), relation.flatten(), tails.flatten(0, 1))
        losses += [loss.view(head.shape) for loss in self._edge_losses(*flat)]
        return torch.stack(losses).sum(0)

    def _edge_losses(self, heads: Tensor, relation: Tensor, tails: Tensor, end: int | None = None) -> list[Tensor]:
        """Return the weighted losses of edges in which no negatives are, ``[B]`` each; ``end`` as in the scores."""
        scores = self.scores
        kinds = (
            (self.n3, scores.n3_norm),
            (self.dura, scores.dura_norm),
            (self.relation_prediction, scores.relation_loss),
        )
        return [weight * loss(heads, relation, tails, end) for weight, loss in kinds if weight]

    def _of_one_end(self, tables: tuple[RowLookup, RowLookup], edges: Triples, end: int) -> Tensor:
        """Return twice the loss of finding this end of the edges, ``[B]``: the mean of an edge's two is its loss."""
        every_head, every_tail = (rows.squeeze(0) for rows in self._all_rows(tables, edges.head.device))
        given, answer = (edges.head, edges.tail) if end else (edges.tail, edges.head)
        queries = Queries(edges.relation, given, answer, self.scores.num_relations)
        # The ends of the edges are read for the regularizers alone.
        ends = slice(None if self.n3 or self.dura or self.relation_prediction else 0)
        nothing = queries.given[:0]
        ids = edges.head[ends], queries.given if end else nothing, edges.tail[ends], nothing if end else queries.given
        read_head = every_head.__getitem__
        read_tail = read_head if tables[0] is tables[1] else every_tail.__getitem__
        blocks = self._look_up((read_head, read_tail), tuple(block.unsqueeze(0) for block in ids))
        heads, given_heads, tails, given_tails = (rows.squeeze(0) for rows in blocks)
        if end:
            rows, candidates = self.scores.tail_queries(given_heads.unsqueeze(1), queries.relation), every_tail
        else:
            rows, candidates = self.scores.head_queries(given_tails.unsqueeze(1), queries.relation), every_head
        loss = queries.losses(
            lambda some: self.scores.all_pairs(some, candidates), rows.squeeze(1), LIMIT // self.sizes[end]
        )
        for more in self._edge_losses(heads, edges.relation, tails, end):
            loss = loss + more
        return 2 * loss

    def _look_up(self, tables: tuple[RowLookup, RowLookup], ids: tuple[Tensor, ...]) -> list[Tensor]:
        """Return rows of two blocks of heads and two of tails; one lookup per table, because a table may be remote."""
        widths = [block.size(1) for block in ids]
        if tables[0] is tables[1]:
            return list(tables[0](torch.cat(ids, dim=1)).split(widths, dim=1))
        pairs = [tables[end](torch.cat(ids[2 * end : 2 * end + 2], dim=1)) for end in (0, 1)]
        return [rows for end in (0, 1) for rows in pairs[end].split(widths[2 * end : 2 * end + 2], dim=1)]

    def _all_rows(self, tables: tuple[RowLookup, RowLookup], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows ``[1, N, D]`` of all heads and of all tails."""
        heads, tails = (torch.arange(size, device=device) for size in self.sizes)
        every_head = tables[0](heads).unsqueeze(0)
        return every_head, every_head if tables[0] is tables[1] else tables[1](tails).unsqueeze(0)

    def _tail_loss(
        self,
        heads: Tensor,
        relation: Tensor,
        tails: Tensor,
        more: Tensor,
        ids: tuple[Tensor, Tensor],
        everything: Tensor | None,
        chunks: EdgeChunks,
    ) -> Tensor:
        """Return the loss of edges, whose ends have these ids, against other tails."""
        queries = self._queries(self.scores.tail_queries, heads, relation)
        if not self.scores.reciprocal:
            chunk_size = tails.size(1)
            transformed = self.scores.tail_candidates(torch.cat([tails, more], dim=1), relation[:, 0])
            tails, more = transformed[:, :chunk_size], transformed[:, chunk_size:]
            if everything is not None:
                everything = self.scores.tail_candidates(everything.expand(len(tails), -1, -1), relation[:, 0])
        negative = self._negative_scores(queries, tails, more, ids[1], everything, chunks)
        return self._side_loss(queries, tails, heads, negative, ids[0] == ids[1])

    def _queries(self, transform: Callable[[Tensor, Tensor], Tensor], rows: Tensor, relation: Tensor) -> Tensor:
        """Return queries ``[C, m, D]``, each transformed by its relation; static relations are one per chunk."""
        if not self.scores.reciprocal:
            return transform(rows, relation[:, 0])
        return transform(rows.flatten(0, 1).unsqueeze(1), relation.flatten()).view(rows.shape)

    def _negative_scores(
        self, queries: Tensor, answers: Tensor, more: Tensor, ids: Tensor, everything: Tensor | None, chunks: EdgeChunks
    ) -> Tensor:
        """Return the scores ``[C, m, n]`` of the candidates of one side; minus infinity for those that do not count.

        Shapes:
            queries and answers ``[C, m, D]``, more ``[C, u, D]``, ids of the answers ``[C, m]``, everything
            ``[1 or C, N, D]``.
        """
        if everything is not None:
            return self.scores.all_pairs(queries, everything).scatter(-1, ids.unsqueeze(-1), -torch.inf)
        if self.negatives.batch:
            negative = self.scores.all_pairs(queries, torch.cat([answers, more], dim=1))
            return negative.masked_fill(~chunks.negative_mask(more.size(1)), -torch.inf)
        return self.scores.all_pairs(queries, more)

    def _side_loss(self, queries: Tensor, answers: Tensor, given: Tensor, negative: Tensor, loop: Tensor) -> Tensor:
        """Return the loss ``[C, m]`` of the answers against negatives, with ``self_negs`` also the given ends."""
        true = self.scores.pairs(queries, answers)
        if self.negatives.self_negs:
            given_scores = self.scores.pairs(queries, given).masked_fill(loop, -torch.inf)
            negative = torch.cat([negative, given_scores.unsqueeze(-1)], dim=-1)
        # Sums of exponentials need single precision; products may be in bfloat16.
        return self.loss(true, negative.to(torch.promote_types(negative.dtype, true.dtype)))


class RelationGroup(nn.Module):
    """Relations that join the same two entity types by the same operator, and are trained together.

    Args:
        spec: of the group.
        entities: all types.
        comparator, reciprocal, bias, init_scale: see :class:`~gtrain.model.kg.scores.EdgeScores`.
        loss: of the scores of true edges and negatives.
        negatives: sampling of negatives.
        n3: weight of the N3 regularizer.
        dura: weight of the DURA regularizer.
        relation_prediction: weight of the loss of predicting an edge's relation among the group's.

    Attributes:
        scores: of the group's edges, whose relations are numbered from 0.
        loss: of the group's edges, by ids within their types.
    """

    def __init__(
        self,
        spec: GroupSpec,
        entities: Sequence[EntitySpec],
        *,
        comparator: str,
        reciprocal: bool,
        bias: bool,
        init_scale: float | None,
        loss: LossFunction,
        negatives: NegativeSampling,
        n3: float,
        dura: float,
        relation_prediction: float,
    ) -> None:
        super().__init__()
        self.spec = spec
        lhs, rhs = self.ends = entities[spec.lhs], entities[spec.rhs]
        size = len(spec.relations), lhs.dimension
        self.scores = EdgeScores(*size, spec.operator, comparator, reciprocal, bias, init_scale)
        self.loss = TrainingLoss(self.scores, loss, negatives, n3, dura, relation_prediction, (lhs.count, rhs.count))


class GroupedEdges(nn.Module):
    """Splits edges by the groups of their relations.

    Args:
        schema: the groups.
    """

    _group: Tensor
    _local: Tensor

    def __init__(self, schema: EmbeddingSchema) -> None:
        super().__init__()
        self._schema = schema
        of_relation, local = torch.zeros(2, schema.num_relations, dtype=torch.int64)
        for number, group in enumerate(schema.groups):
            members = torch.tensor(group.relations)
            of_relation[members], local[members] = number, torch.arange(len(members))
        self.register_buffer("_group", of_relation, persistent=False)
        self.register_buffer("_local", local, persistent=False)
        # A strategy divides a step's edges before they are on the model's device.
        self._on_host = of_relation, local

    def forward(self, edges: Triples) -> list[tuple[int, Tensor, Triples]]:
        """Return the number of each group that has edges, the positions ``[b]`` of its edges, and the edges themselves.

        Their ids are those within the group's relations and entity types. Without any edges, return the first group.
        """
        if len(self._schema.groups) == 1:
            return [(0, torch.arange(len(edges), device=edges.head.device), self._localized(0, edges))]
        of_edge = self._numbers(edges)[0][edges.relation]
        members = {number: (of_edge == number).nonzero().flatten() for number in of_edge.unique().tolist() or [0]}
        return [(number, rows, self._localized(number, edges.select(rows))) for number, rows in members.items()]

    def _localized(self, number: int, edges: Triples) -> Triples:
        group, entities = self._schema.groups[number], self._schema.entities
        head, tail = edges.head - entities[group.lhs].first, edges.tail - entities[group.rhs].first
        return Triples(head, self._numbers(edges)[1][edges.relation], tail, edges.weight, edges.chunk, edges.end)

    def _numbers(self, edges: Triples) -> tuple[Tensor, Tensor]:
        """Return the group of each relation and its number in that, on the device of the edges."""
        return self._on_host if edges.relation.device.type == "cpu" else (self._group, self._local)
