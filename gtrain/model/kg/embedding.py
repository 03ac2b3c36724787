"""Embeddings of the nodes of a graph, or of the entities of a knowledge graph, trained on its edges alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from gtrain.engine.precision import without_autocast, without_slow_autocast
from gtrain.errors import ConfigError
from gtrain.kernels import splitmix as mixing
from gtrain.model.edge_model import EMBEDDED, NAMES, EdgeModel
from gtrain.model.kg.evaluation import GroupRanks
from gtrain.model.kg.schema import EmbeddingSchema, GraphTypes, make_schema
from gtrain.model.kg.scores import BILINEAR, PREDICTS_RELATIONS
from gtrain.model.kg.tables import EntityTables
from gtrain.model.kg.training import (
    ChunkDraws,
    DrawNodes,
    GroupedEdges,
    NegativeSampling,
    RelationGroup,
    Triples,
    make_loss,
)
from gtrain.model.kinds import EMBEDDING
from gtrain.model.module import MakeOptimizer, log_mean_loss
from gtrain.model.outputs import EdgeScores
from gtrain.nn import Csr
from gtrain.nn.recipe import EdgeRecipe, ModelRecipe
from gtrain.protocols import batch_entry


class KGEmbedding(EdgeModel):
    """A vector for each node and an operator for each relation, so that true edges score higher than negative ones.

    It is PyTorch-BigGraph's model (Lerer et al. 2019). The score of (head, relation, tail) compares the head with the
    tail transformed by the relation's operator. With ``reciprocal`` (PyTorch-BigGraph's dynamic relations) an edge has
    two scores: to find the tail, the head is transformed and compared with tails; to find the head, the tail is
    transformed by a second set of parameters and compared with heads.

    A graph may have entity types: each has its table, negatives of an edge are drawn from the types that its
    relation joins, and its ends are ranked among those. Relations that join the same types by the same operator are
    trained together, as a :class:`~gtrain.model.kg.training.RelationGroup`.

    Validation and test rank each edge's tail among all nodes, and its head likewise, leaving out other known
    edges (filtered MRR, hits@1, hits@10, mean of both sides), and compute the area under the ROC curve against
    one random tail for each edge.

    Args:
        num_nodes: nodes of all types, N.
        num_relations: R; None: edges have no type, and there is one relation.
        entity_types: number of nodes by type, whose ids come one after the other; None: one type.
        relation_ends: types of heads and of tails by relation; None: one type.
        relation_names: names of the relations; None: they have no names.
        entity_bags: returns, for a featurized type, the features of each entity and their number: an embedding is the
            mean of its features' rows; None: no type is featurized.
        entities: settings of entity types, by name: ``dimension``.
        relations: settings of relations, each with a ``name`` (``*``: all without an entry): ``operator``,
            ``weight`` (a factor of its edges' loss) and ``all_negs``.
        dimension: columns of an embedding, D.
        operator: ``none``, ``translation``, ``diagonal``, ``linear``, ``affine``, ``complex_diagonal`` or ``rotation``.
        comparator: ``dot``, ``cos``, ``l2`` or ``squared_l2``.
        loss: ``ranking``, ``logistic`` or ``softmax``.
        margin: of the ranking loss.
        reciprocal: whether each direction has its relation parameters.
        bias: whether a node has a bias, added to its scores.
        init_scale: standard deviation of the initial embeddings.
        relation_init_scale: standard deviation of the initial relation parameters; None: operators start as the
            identity, whose scores are highest between a node and itself.
        num_batch_negs: edges of a chunk, whose ends are each other's negatives.
        num_uniform_negs: nodes drawn for each chunk and side as further negatives.
        all_negs: whether all nodes are negatives, instead of these two kinds.
        by_query: whether a training step finds one end of its edges, which are ordered by query: by the other end and
            the relation. An edge occurs twice in an epoch. The sum of losses is the same, and the scores of all nodes
            are computed once for all edges of a query. For ``all_negs``, ``reciprocal`` and the loss ``softmax``.
        head_negs: whether an edge's head is replaced in training.
        tail_negs: whether an edge's tail is replaced in training.
        self_negs: whether an edge's head is among the negatives of its tail, and its tail among those of its head; for
            relations that join a type with itself.
        max_norm: vectors that are longer are scaled to this length when training reads them; None: never.
        global_emb: whether a learned vector is added to all embeddings of a type.
        relation_weight: factor of the loss of each relation's edges, a number for each; None: all 1. It multiplies the
            ``weight`` of ``relations``.
        n3: weight of the N3 regularizer (Lacroix et al. 2018, eq. 4): sum of the cubed absolute values of an edge's
            two embeddings and its relation's parameters.
        dura: weight of the DURA regularizer (Zhang, Cai and Wang 2020), see
            :meth:`~gtrain.model.kg.scores.EdgeScores.dura_norm`; by inner products, with an operator that multiplies.
        relation_prediction: weight of a further loss (Chen et al. 2021, eq. 3): the cross-entropy of predicting an
            edge's relation from its ends, among the relations that join the same types by the same operator. With
            ``reciprocal`` it is the sum of both directions.
        filtered: whether validation and test leave known edges out of the ranking.
        num_candidates: nodes drawn for each edge and side, uniformly and with replacement, among which validation and
            test rank the edge's end; they depend on the edge alone. None: all nodes.
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for the table, whose gradient is then sparse unless ``all_negs``; None: ``optimizer``
            trains the table too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once per epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler reads.

    Shapes:
        batch: a graph with ``orig_id`` [n], rows of the table, and ``edge_label_index`` [2, B];
        ``edge_label_type`` and ``edge_label_weight`` [B] if edges have relations and weights; ``edge_label_end``
        with ``by_query``, see :class:`~gtrain.protocols.OrdersByQuery`; ``known_tail_ptr``, ``known_tail``,
        ``known_head_ptr``, ``known_head`` on validation and test; ``random_key``, the seed of uniform negatives (none:
        drawn from torch's generator), and ``edge_label_chunk`` [B] where a strategy shared the edges of a step among
        ranks, see :meth:`deal`.

    Raises:
        ConfigError: a setting is unknown or out of range, or the graph has several node types.
    """

    kind = EMBEDDING
    edge_data = frozenset({"edge_weight", "edge_type"})
    weighs_loss = True
    rank_names: ClassVar[tuple[str, ...]] = (*NAMES, "hits@50", "mean_rank")

    def __init__(
        self,
        num_nodes: int,
        num_relations: int | None = None,
        *,
        entity_types: Mapping[str, int] | None = None,
        relation_ends: Sequence[Sequence[str]] | None = None,
        relation_names: Sequence[str] | None = None,
        entity_bags: Callable[[str], tuple[Csr, int] | None] | None = None,
        entities: Mapping[str, Mapping[str, Any]] | None = None,
        relations: Sequence[Mapping[str, Any]] | None = None,
        dimension: int = 100,
        operator: str = "complex_diagonal",
        comparator: str = "dot",
        loss: str = "softmax",
        margin: float = 0.1,
        reciprocal: bool = True,
        bias: bool = False,
        init_scale: float = 0.001,
        relation_init_scale: float | None = None,
        num_batch_negs: int = 50,
        num_uniform_negs: int = 50,
        all_negs: bool = False,
        by_query: bool = False,
        head_negs: bool = True,
        tail_negs: bool = True,
        self_negs: bool = False,
        max_norm: float | None = None,
        global_emb: bool = False,
        relation_weight: Sequence[float] | None = None,
        n3: float = 0.0,
        dura: float = 0.0,
        relation_prediction: float = 0.0,
        filtered: bool = True,
        num_candidates: int | None = None,
        optimizer: MakeOptimizer | None = None,
        sparse_optimizer: MakeOptimizer | None = None,
        scheduler: Callable[..., Any] | None = None,
        monitor: str = "val/loss",
    ) -> None:
        super().__init__()
        weights = {"n3": n3, "dura": dura, "relation_prediction": relation_prediction}
        sizes = {
            "margin": margin,
            **weights,
            "init_scale": init_scale,
            "relation_init_scale": relation_init_scale or 0.0,
        }
        counts = {"dimension": dimension} | ({} if num_candidates is None else {"num_candidates": num_candidates})
        _check(num_nodes, counts, sizes, max_norm)
        if self_negs and (comparator != "dot" or not reciprocal):
            raise ConfigError(
                f"model.self_negs=true was set with model.comparator={comparator} model.reciprocal={reciprocal}; it "
                "needs inner products of queries transformed by their relations.",
                hint="set model.comparator=dot model.reciprocal=true, or model.self_negs=false.",
            )
        self.num_nodes, self.filtered, self.max_norm, self.by_query = num_nodes, filtered, max_norm, by_query
        self._num_candidates = num_candidates
        self._set_optimizers(optimizer, sparse_optimizer, scheduler, monitor)
        types = GraphTypes(entity_types or {"node": num_nodes}, relation_ends, relation_names, num_relations or 1)
        self.schema = make_schema(
            types,
            dimension=dimension,
            operator=operator,
            all_negs=all_negs,
            entities=entities,
            relations=relations,
            weights=relation_weight,
        )
        if by_query:
            exact = all(group.all_negs for group in self.schema.groups) and head_negs and tail_negs
            _check_by_query(exact, loss, reciprocal)
        if relation_prediction:
            _check_operators("relation_prediction", "acts on columns", self.schema, comparator, PREDICTS_RELATIONS)
        if dura:
            _check_operators("dura", "multiplies", self.schema, comparator, BILINEAR)
        self._grouped = GroupedEdges(self.schema)
        factors = self.schema.weights
        self._relation_weight: Tensor | None
        self.register_buffer("_relation_weight", None if factors is None else torch.tensor(factors), persistent=False)
        # With all nodes as negatives a gradient has every row: a sparse one would be larger than a dense one.
        dense = {end for group in self.schema.groups if group.all_negs for end in (group.lhs, group.rhs)}
        self.entities = EntityTables(
            self.schema.entities,
            bias=bias,
            init_scale=init_scale,
            sparse=[sparse_optimizer is not None and end not in dense for end in range(len(self.schema.entities))],
            bags=[None if entity_bags is None else entity_bags(spec.name) for spec in self.schema.entities],
            max_norm=max_norm,
            shared=global_emb,
        )
        negatives = NegativeSampling(num_batch_negs, num_uniform_negs, all_negs, head_negs, tail_negs)
        options: dict[str, Any] = {"comparator": comparator, "reciprocal": reciprocal, "bias": bias, **weights}
        options |= {"loss": make_loss(loss, margin), "init_scale": relation_init_scale}
        self.groups = nn.ModuleList(
            RelationGroup(
                spec,
                self.schema.entities,
                negatives=replace(
                    negatives, all=spec.all_negs, self_negs=self_negs and spec.lhs == spec.rhs and not spec.all_negs
                ),
                **options,
            )
            for spec in self.schema.groups
        )
        self._named: dict[str, Any] = {"comparator": comparator, "loss": loss, "margin": margin, **weights}

    def recipe(self) -> ModelRecipe:
        """Return what a training step computes, for a strategy with its own kernels."""
        entities = self.schema.entities
        return ModelRecipe(
            {spec.name: self.entities[number] for number, spec in enumerate(entities)},
            tuple(spec.first for spec in entities),
            tuple(self._recipe(group) for group in self._groups),
        )

    def _recipe(self, group: RelationGroup) -> EdgeRecipe:
        spec, scores, negatives, weight = group.spec, group.scores, group.loss.negatives, self.schema.weights
        ends = spec.lhs, spec.rhs
        return EdgeRecipe(
            tables=(self.entities[spec.lhs], self.entities[spec.rhs]),
            types=ends,
            bags=(self.entities.bags[spec.lhs], self.entities.bags[spec.rhs]),
            relations=spec.relations,
            dimension=scores.dimension,
            operator=spec.operator,
            **self._named,
            reciprocal=scores.reciprocal,
            bias=scores.bias,
            num_batch_negs=negatives.batch,
            num_uniform_negs=negatives.uniform,
            all_negs=negatives.all,
            head_negs=negatives.heads,
            tail_negs=negatives.tails,
            self_negs=negatives.self_negs,
            max_norm=self.max_norm,
            shifts=(self.entities.shift(spec.lhs), self.entities.shift(spec.rhs)) if self.entities.shifts else None,
            relation_weight=None if weight is None else tuple(weight[relation] for relation in spec.relations),
            forwards=dict(scores.forwards.named_parameters()),
            backwards={} if scores.backwards is None else dict(scores.backwards.named_parameters()),
        )

    @property
    def _groups(self) -> list[RelationGroup]:
        return list(self.groups)  # type: ignore[arg-type]

    def log_training(self, total: Tensor, weight: Tensor) -> Tensor:
        """Log the loss of a strategy that trains by the :meth:`recipe`: sums over edges of loss and weight.

        Returns:
            The mean loss.
        """
        return log_mean_loss(self, "train", total, weight)

    def forward(self, batch: Data) -> Tensor:
        """Return the scores of the batch's edges, [B], for finding the tail."""
        edges = self._edges(batch)
        return self._scored(edges, edges.tail)

    def training_step(self, batch: Data, batch_idx: int) -> dict[str, Tensor]:
        loss, weight = self._loss(self._edges(batch), "train", ChunkDraws(batch_entry(batch, "random_key")))
        return {"loss": loss, "weight": weight}

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Return the embeddings of the seeds, which are nodes, [S, D]; NaN in columns that a type does not have."""
        return self.entities.of_nodes(batch.orig_id[batch.seeds])

    def biases(self, batch: Data) -> Tensor | None:
        """Return the biases of the seeds, [S]; None without ``bias``."""
        return self.entities.biases_of(batch.orig_id[batch.seeds])

    @property
    def dimensions(self) -> dict[str, int]:
        """Columns of an embedding by type."""
        return {spec.name: spec.dimension for spec in self.schema.entities}

    def _edges(self, batch: Data) -> Triples:
        """Return the batch's edges by the ids of the source data."""
        if isinstance(batch, HeteroData):
            raise _several_types(batch.node_types)
        head, tail = batch.orig_id[batch.edge_label_index]
        relation = batch_entry(batch, "edge_label_type")
        return Triples(
            head,
            torch.zeros_like(head) if relation is None else relation,
            tail,
            batch_entry(batch, "edge_label_weight"),
            batch_entry(batch, "edge_label_chunk"),
            batch_entry(batch, "edge_label_end"),
        )

    def deal(self, relation: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return a rank's share of the edges of a step: whole chunks, whose edges are each other's negatives.

        A strategy that divides a step among ranks gives each rank's batch the edges at these positions, in this order,
        and the numbers as ``edge_label_chunk``. Losses are then those of one process with all edges.

        Args:
            relation: int64 ``[B]``, of all edges of the step.
            rank: number of the rank.
            ranks: number of ranks; a rank may get no edges.

        Returns:
            positions int64 ``[b]``, ascending, and the numbers of these edges' chunks within their group, ``[b]``.
        """
        unit, number, total = torch.zeros_like(relation), torch.zeros_like(relation), 0
        for group, positions, some in self._grouped(Triples(relation, relation, relation)):
            chunk = self._groups[group].loss.chunk_numbers(some.relation)
            number[positions], unit[positions] = chunk, chunk + total
            total += int(chunk.max()) + 1 if len(chunk) else 0
        # Consecutive chunks, in shares whose sizes differ by at most one chunk.
        mine = (unit * ranks // max(total, 1) == rank).nonzero().flatten()
        return mine, number[mine]

    def _loss(self, edges: Triples, split: str, draw: DrawNodes) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the edges (perhaps none), and the weight of that mean."""
        return self._mean(self.losses(edges, draw, training=split == "train"), self._weights(edges), split)

    def losses(self, edges: Triples, draw: DrawNodes | None = None, *, training: bool = True) -> Tensor:
        """Return the unweighted loss of each edge, ``[B]``.

        Args:
            edges: by the ids of the source data.
            draw: draws uniform negatives; None: with a seed from torch's generator.
            training: whether ``max_norm`` is applied to the rows that are read.
        """
        draw = draw or ChunkDraws()
        tables = self.entities.trained_rows if training else self.entities.rows

        def loss(number: int, edges: Triples) -> Tensor:
            group = self._groups[number]
            return group.loss((tables[group.spec.lhs], tables[group.spec.rhs]), edges, partial(draw, number))

        with without_slow_autocast(edges.head):
            return self._by_group(edges, loss)

    def _by_group(self, edges: Triples, compute: Callable[[int, Triples], Tensor]) -> Tensor:
        """Compute a value for each edge, group by group; return them in the order of the edges."""
        groups = self._grouped(edges)
        values = [compute(number, members) for number, _, members in groups]
        return (
            values[0] if len(groups) == 1 else torch.cat(values)[torch.cat([rows for _, rows, _ in groups]).argsort()]
        )

    def _weights(self, edges: Triples) -> Tensor | None:
        """Return the weight of each edge's loss; None: all the same."""
        if self._relation_weight is None:
            return edges.weight
        by_relation = self._relation_weight.to(self.entities[0].weight.dtype)[edges.relation]
        return by_relation if edges.weight is None else by_relation * edges.weight

    def _scored(self, edges: Triples, tail: Tensor) -> Tensor:
        """Return the scores of these tails, [B]."""

        def score(number: int, edges: Triples) -> Tensor:
            group = self._groups[number]
            heads, tails = GroupRanks(group, self.entities).ends(edges)
            return group.scores.of_edges(heads, edges.relation, tails)

        return self._by_group(replace(edges, tail=tail), score)

    def _evaluate(self, batch: Data, split: str) -> EdgeScores:
        # Ranks need full precision: in bfloat16 many scores are equal.
        with without_autocast(batch.orig_id):
            return self._evaluate_exactly(batch, split)

    def _evaluate_exactly(self, batch: Data, split: str) -> EdgeScores:
        edges = self._edges(batch)
        self._loss(edges, split, ChunkDraws(batch_entry(batch, "random_key") or 0))  # the same negatives every epoch
        true, negative = self._scored(edges, edges.tail), self._scored(edges, self._drawn(edges, batch.seeds))
        tail_ranks, head_ranks = self._ranks(batch, edges)
        self._log_scores(split, (tail_ranks, head_ranks), true, negative)
        sources = self.entities.of_nodes(edges.head[:EMBEDDED]) if split == "test" else None
        relation = edges.relation if batch_entry(batch, "edge_label_type") is not None else None
        return EdgeScores(true, negative, tail_ranks, head_ranks, relation, sources)

    def _drawn(self, edges: Triples, seeds: Tensor) -> Tensor:
        """Draw a false tail per edge, of the true tail's type, [B]; it depends on the edge's position in the split."""
        drawn = torch.empty_like(edges.tail)
        for number, positions, _ in self._grouped(edges):
            spec = self._groups[number].ends[1]
            others = mixing.below(spec.count, mixing.key(number), seeds[positions].cpu().numpy(), 1)[:, 0] + spec.first
            drawn[positions] = torch.from_numpy(others).to(drawn.device)
        return drawn

    def _ranks(self, batch: Data, edges: Triples) -> tuple[Tensor, Tensor]:
        """Return the ranks of the tails and of the heads among all nodes of their types, or a sample of them."""
        known = [
            Csr(batch.orig_id[batch[f"known_{side}"]], None, batch[f"known_{side}_ptr"])
            if self.filtered and f"known_{side}" in batch
            else None
            for side in ("tail", "head")
        ]
        ranks = torch.zeros(2, len(edges), dtype=torch.float64, device=edges.head.device)
        for number, positions, some in self._grouped(edges):
            sampled = None if self._num_candidates is None else self._candidates(number, batch.seeds[positions])
            ranks[:, positions] = torch.stack(
                GroupRanks(self._groups[number], self.entities).among_all(some, positions, known, sampled)
            )
        return ranks[0], ranks[1]

    def _candidates(self, number: int, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the candidates of a group's edges for tails and for heads, ``[B, K]`` each.

        Like :meth:`_drawn`, they depend on the edge's position in the split alone.
        """
        assert self._num_candidates is not None
        counters = seeds.cpu().numpy()
        tails, heads = (
            torch.from_numpy(mixing.below(end.count, mixing.key(number, side), counters, self._num_candidates))
            for side, end in enumerate(reversed(self._groups[number].ends))
        )
        return tails.to(seeds.device), heads.to(seeds.device)

    def sampled_ranks(
        self, rows: tuple[Tensor, Tensor], relation: Tensor, others: tuple[Tensor, Tensor], number: int
    ) -> list[Tensor]:
        """Rank the ends of a group's edges among each other and other nodes; see :class:`GroupRanks`."""
        return GroupRanks(self._groups[number], self.entities).among_some(rows, relation, others)


def _check(num_nodes: object, counts: dict[str, int], sizes: dict[str, float], max_norm: float | None) -> None:
    """Check the settings that no other part checks."""
    if isinstance(num_nodes, Mapping):
        # Not dict: the settings may come as a DictConfig.
        raise _several_types(list(num_nodes))
    for key, count in counts.items():
        if count < 1:
            raise ConfigError(f"model.{key}={count} was set; it must be at least 1.", hint=f"raise model.{key}.")
    for key, size in sizes.items():
        if not size >= 0:
            raise ConfigError(f"model.{key}={size} was set; it must be 0 or more.", hint=f"raise model.{key}.")
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(
            f"model.max_norm={max_norm} was set, and no vector is that short.",
            hint="set a length above 0, or null for none.",
        )


def _check_by_query(exact: bool, loss: str, reciprocal: bool) -> None:
    """Check that each end of an edge is classified among all nodes, by scores that the edges of a query share."""
    if not exact or loss != "softmax" or not reciprocal:
        raise ConfigError(
            f"model.by_query=true was set with model.loss={loss} model.reciprocal={str(reciprocal).lower()}"
            f"{'' if exact else ', and not all nodes are negatives of both ends'}; it computes the cross-entropy of "
            "each end among all nodes.",
            hint="set model.all_negs=true model.loss=softmax model.reciprocal=true, or model.by_query=false.",
        )


def _check_operators(
    setting: str, quality: str, schema: EmbeddingSchema, comparator: str, operators: Sequence[str]
) -> None:
    """Check that a setting of the model works with the comparator and with the operator of each group."""
    for operator in (group.operator for group in schema.groups):
        if comparator != "dot" or operator not in operators:
            raise ConfigError(
                f"model.{setting} was set with model.comparator={comparator} and the operator {operator}; it needs "
                f"inner products, and an operator that {quality}.",
                hint=f"set model.comparator=dot and one of the operators {', '.join(operators)}, or model.{setting}=0.",
            )


def _several_types(node_types: list[str]) -> ConfigError:
    return ConfigError(
        f"model=kg embeds the nodes of one type; this graph has the node types {', '.join(node_types)}.",
        hint="set model to hetero_sage or hgt.",
    )
