"""Embeddings of the nodes of a graph, or of the entities of a knowledge graph, trained on its edges alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from gtrain.errors import ConfigError
from gtrain.model.configured import MakeOptimizer, configured
from gtrain.model.edge_model import EdgeModel
from gtrain.model.edge_scores import EdgeScores
from gtrain.model.kg_losses import make_loss
from gtrain.model.kg_ranking import Queries, rank_ends
from gtrain.model.kg_training import Edges, Negatives, TrainingLoss
from gtrain.model.kinds import EMBEDDING
from gtrain.model.mean_loss import log_mean_loss
from gtrain.model.ranking import NAMES
from gtrain.model.table_optimizer import with_tables
from gtrain.nn import Csr, Embedding
from gtrain.nn.recipe import EdgeRecipe


class KGEmbedding(EdgeModel):
    """A vector for each node and an operator for each relation, so that true edges score higher than false ones.

    It is PyTorch-BigGraph's model (Lerer et al. 2019). The score of (head, relation, tail) compares the head with the
    tail that the relation's operator transformed. With ``reciprocal`` (PyTorch-BigGraph's dynamic relations) there are
    two scores: to find the tail, the head is transformed and compared with tails; to find the head, the tail is
    transformed by parameters of its own and compared with heads.

    Validation and test rank each edge's tail among all nodes, and its head likewise, leaving out what is known to be
    true elsewhere (filtered MRR, hits@1, hits@10, mean of both sides), and compute the area under the ROC curve against
    one random tail for each edge.

    Args:
        num_nodes: rows of the table, N.
        num_relations: R; None: edges have no type, and there is one relation.
        dimension: columns of an embedding, D.
        operator: ``none``, ``translation``, ``diagonal``, ``linear``, ``affine`` or ``complex_diagonal``.
        comparator: ``dot``, ``cos``, ``l2`` or ``squared_l2``.
        loss: ``ranking``, ``logistic`` or ``softmax``.
        margin: of the ranking loss.
        reciprocal: whether each direction has relation parameters of its own.
        bias: whether a node has a bias, added to its scores.
        init_scale: standard deviation of the initial embeddings.
        num_batch_negs: edges that serve each other as negatives, the edge itself counted: the size of a chunk.
        num_uniform_negs: nodes drawn for each chunk and side as further negatives.
        all_negs: all nodes are negatives, instead of those two.
        head_negs: whether an edge's head is replaced in training.
        tail_negs: whether an edge's tail is replaced in training.
        max_norm: vectors that are longer are scaled to this length when training reads them; None: never.
        global_emb: whether all embeddings have a learned vector in common, which is added to each.
        relation_weight: factor of the loss of each relation's edges, a number for each; None: all 1.
        n3: weight of the N3 regulariser (Lacroix et al. 2018, eq. 4): sum of the cubed absolute values of an edge's
            two embeddings and its relation's parameters.
        filtered: whether validation and test leave known edges out of the ranking.
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for the table; its gradient is then sparse, but for ``all_negs``; None: ``optimizer``
            has the table too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once an epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler looks at.

    Shapes:
        batch: a graph with ``orig_id`` [n], which number the table's rows, and ``edge_label_index`` [2, B];
        ``edge_label_type`` and ``edge_label_weight`` [B] where there are relations and weights; ``known_tail_ptr``,
        ``known_tail``, ``known_head_ptr``, ``known_head`` on validation and test.

    Raises:
        ConfigError: a setting is unknown or out of range, or the graph has several node types.
    """

    kind = EMBEDDING
    rank_names: ClassVar[tuple[str, ...]] = (*NAMES, "hits@50", "mean_rank")

    def __init__(
        self,
        num_nodes: int,
        num_relations: int | None = None,
        *,
        dimension: int = 100,
        operator: str = "complex_diagonal",
        comparator: str = "dot",
        loss: str = "softmax",
        margin: float = 0.1,
        reciprocal: bool = True,
        bias: bool = False,
        init_scale: float = 0.001,
        num_batch_negs: int = 50,
        num_uniform_negs: int = 50,
        all_negs: bool = False,
        head_negs: bool = True,
        tail_negs: bool = True,
        max_norm: float | None = None,
        global_emb: bool = False,
        relation_weight: Sequence[float] | None = None,
        n3: float = 0.0,
        filtered: bool = True,
        optimizer: MakeOptimizer | None = None,
        sparse_optimizer: MakeOptimizer | None = None,
        scheduler: Callable[..., Any] | None = None,
        monitor: str = "val/loss",
    ) -> None:
        super().__init__()
        sizes = {"margin": margin, "n3": n3, "init_scale": init_scale, "max_norm": max_norm or 0.0}
        _check(num_nodes, {"dimension": dimension}, sizes)
        self.num_nodes, self.dimension, self.filtered = num_nodes, dimension, filtered
        self.num_relations = num_relations or 1
        self._make_optimizer, self._make_sparse = optimizer, sparse_optimizer
        self._make_scheduler, self._monitor = scheduler, monitor
        sparse = sparse_optimizer is not None and not all_negs
        self.entities = Embedding(num_nodes, dimension + bias, init_std=init_scale, sparse=sparse)
        self.shift = nn.Parameter(torch.zeros(1, dimension)) if global_emb else None
        self.max_norm = max_norm
        self._relation_weight = _checked_weights(relation_weight, num_relations or 1)
        self.scores = EdgeScores(num_relations or 1, dimension, operator, comparator, reciprocal, bias)
        negatives = Negatives(num_batch_negs, num_uniform_negs, all_negs, head_negs, tail_negs)
        self._training_loss = TrainingLoss(self.scores, make_loss(loss, margin), negatives, n3, num_nodes)
        self._named = {"operator": operator, "comparator": comparator, "loss": loss}
        self._margin = margin

    def recipe(self) -> EdgeRecipe:
        """What a training step computes, for a strategy that does so by kernels of its own."""
        negatives, weight = self._training_loss.negatives, self._relation_weight
        backwards = self.scores.backwards
        return EdgeRecipe(
            table=self.entities,
            dimension=self.dimension,
            num_relations=self.num_relations,
            **self._named,
            margin=self._margin,
            reciprocal=self.scores.reciprocal,
            bias=self.scores.bias,
            num_batch_negs=negatives.batch,
            num_uniform_negs=negatives.uniform,
            all_negs=negatives.all,
            head_negs=negatives.heads,
            tail_negs=negatives.tails,
            n3=self._training_loss.n3,
            max_norm=self.max_norm,
            shift=self.shift,
            relation_weight=None if weight is None else tuple(weight.tolist()),
            forwards=dict(self.scores.forwards.named_parameters()),
            backwards={} if backwards is None else dict(backwards.named_parameters()),
        )

    def log_training(self, total: Tensor, weight: Tensor) -> Tensor:
        """Log what a strategy trained by the :meth:`recipe`: the loss summed over edges, and their weights' sum.

        Returns:
            The mean loss.
        """
        return log_mean_loss(self, "train", total, weight)

    def forward(self, batch: Data) -> Tensor:
        """Scores of the batch's edges, [B]: of finding the tail."""
        edges = self._edges(batch)
        return self._scored(edges, edges.tail)

    def training_step(self, batch: Data, batch_idx: int) -> dict[str, Tensor]:
        loss, weight = self._loss(self._edges(batch), "train", None)
        return {"loss": loss, "weight": weight}

    def predict_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Embeddings of the seeds, which are nodes here, [S, D]."""
        return self.embeddings(batch.orig_id[batch.seeds])[:, : self.dimension]

    def embeddings(self, ids: Tensor) -> Tensor:
        """Rows ``[..., D]`` of these nodes as they are compared: with what all have in common, and the bias last."""
        return self._shifted(self.entities(ids))

    def _shifted(self, rows: Tensor) -> Tensor:
        if self.shift is None:
            return rows
        d = self.dimension
        return torch.cat([rows[..., :d] + self.shift.view(-1), rows[..., d:]], dim=-1)

    def _read_in_training(self, ids: Tensor) -> Tensor:
        """Rows of these nodes; those that are too long are made shorter where they lie."""
        if self.max_norm is not None:
            self.entities.clip(ids, self.dimension, self.max_norm)
        return self.embeddings(ids)

    def configure_optimizers(self) -> Any:
        make = with_tables(self, self._make_sparse, self._make_optimizer)
        return configured(self.parameters(), make, self._make_scheduler, self._monitor)

    def _edges(self, batch: Data) -> Edges:
        """The batch's edges by the ids of the source data."""
        if isinstance(batch, HeteroData):
            raise _several_types(batch.node_types)
        head, tail = batch.orig_id[batch.edge_label_index]
        relation = getattr(batch, "edge_label_type", None)
        return Edges(
            head,
            torch.zeros_like(head) if relation is None else relation,
            tail,
            getattr(batch, "edge_label_weight", None),
        )

    def _loss(self, edges: Edges, split: str, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Mean loss over the edges (there may be none), and the weight of that mean."""
        table = self._read_in_training if split == "train" else self.embeddings
        return self._mean(self._training_loss(table, edges, generator), self._weights(edges), split)

    def _weights(self, edges: Edges) -> Tensor | None:
        """What each edge's loss counts; None: all the same."""
        if self._relation_weight is None:
            return edges.weight
        by_relation = self._relation_weight.to(self.entities.weight.dtype)[edges.relation]
        return by_relation if edges.weight is None else by_relation * edges.weight

    def _scored(self, edges: Edges, tail: Tensor) -> Tensor:
        """Scores of finding these tails, [B]."""
        heads, tails = self.embeddings(torch.stack([edges.head, tail]))
        return self.scores.of_edges(heads, edges.relation, tails)

    def _evaluate(self, batch: Data, split: str) -> None:
        edges, generator = self._edges(batch), torch.Generator().manual_seed(0)  # the same negatives every epoch
        self._loss(edges, split, generator)
        drawn = torch.randint(self.num_nodes, edges.tail.shape, generator=generator)
        true, false = self._scored(edges, edges.tail), self._scored(edges, drawn)
        self._log_scores(split, self._ranks(batch, edges), true, false)

    def _ranks(self, batch: Data, edges: Edges) -> tuple[Tensor, Tensor]:
        """Ranks of the tails and of the heads among all nodes."""
        tails, heads = (
            Csr(batch.orig_id[batch[f"known_{side}"]], None, batch[f"known_{side}_ptr"])
            if self.filtered and f"known_{side}" in batch
            else None
            for side in ("tail", "head")
        )
        given = self.embeddings(torch.stack([edges.head, edges.tail]))
        sides = (
            Queries(given[0], edges.relation, edges.tail, tails),
            Queries(given[1], edges.relation, edges.head, heads),
        )
        ranked = rank_ends(self.scores, self._blocks, self.num_nodes, tails=sides[0], heads=sides[1])
        return ranked[0], ranked[1]

    def sampled_ranks(self, heads: Tensor, relation: Tensor, tails: Tensor, others: Tensor) -> list[Tensor]:
        """Ranks of edges' ends among those of all these edges and some others, unfiltered: of tails, then of heads.

        Args:
            heads: rows of the table ``[B, D]``.
            relation: ``[B]``.
            tails: rows ``[B, D]``.
            others: rows ``[K, D]``.
        """
        heads, tails, others = self._shifted(heads), self._shifted(tails), self._shifted(others)
        everyone, first = torch.cat([tails, heads, others]), torch.arange(len(heads))
        sides = Queries(heads, relation, first, None), Queries(tails, relation, first + len(heads), None)
        block = torch.arange(len(everyone)), everyone
        return rank_ends(self.scores, lambda: iter([block]), len(everyone), tails=sides[0], heads=sides[1])

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and embeddings of all nodes, as the table's home has them."""
        for ids, rows in self.entities.home.blocks():
            yield ids, self._shifted(rows)


def _checked_weights(weights: Sequence[float] | None, num_relations: int) -> Tensor | None:
    if weights is None:
        return None
    found = torch.tensor([float(weight) for weight in weights])
    if found.numel() != num_relations or not bool((found >= 0).all()):
        raise ConfigError(
            f"model.relation_weight={list(weights)} was set; the graph has {num_relations} relations.",
            hint="give each relation a number that is 0 or more, or set model.relation_weight=null.",
        )
    return found


def _check(num_nodes: object, counts: dict[str, int], sizes: dict[str, float]) -> None:
    """Check what no other part checks."""
    if isinstance(num_nodes, Mapping):  # the settings may come as a DictConfig
        raise _several_types(list(num_nodes))
    for key, count in counts.items():
        if count < 1:
            raise ConfigError(f"model.{key}={count} was set; it must be at least 1.", hint=f"raise model.{key}.")
    for key, size in sizes.items():
        if not size >= 0:
            raise ConfigError(f"model.{key}={size} was set; it must be 0 or more.", hint=f"raise model.{key}.")


def _several_types(node_types: list[str]) -> ConfigError:
    return ConfigError(
        f"model=kg embeds the nodes of one type; this graph has the node types {', '.join(node_types)}.",
        hint="set model to hetero_sage or hgt.",
    )
