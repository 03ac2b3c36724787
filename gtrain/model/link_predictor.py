"""Link prediction with any network that maps node features and edges to embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torchmetrics import MetricCollection

from gtrain.engine.precision import sum_dtype, without_autocast
from gtrain.errors import ConfigError
from gtrain.model.candidate_ranks import ranks
from gtrain.model.decoders import Decoder
from gtrain.model.edge_model import EMBEDDED, AveragePrecision, EdgeModel, spread_ranks
from gtrain.model.inputs import input_names, run_network
from gtrain.model.module import MakeOptimizer
from gtrain.model.outputs import EdgeScores
from gtrain.protocols import NodeBatches, Spread, batch_entry

Batch: TypeAlias = Data | HeteroData


class LinkPredictor(EdgeModel):
    """Binary cross-entropy of true edges against negatives with random targets.

    Validation and test rank each true edge's target among all nodes, and its source likewise, leaving out other known
    edges (filtered MRR, hits@1, hits@10, mean over both sides), and compute the area under the ROC curve against one
    negative per true edge. The batch contains the negatives.

    Args:
        network: called with the batch's attributes that its ``forward`` names; returns ``[N, D]`` embeddings, by node
            type if it takes ``x_dict``.
        decoder: scores an edge from the embeddings of its endpoints.
        encoder: makes the network's input features; None: the graph's features.
        num_negatives: negatives per true edge in training.
        filtered: leave known edges out of the ranking in validation and test.
        eval_k: validation and test log ``map@<k>`` too, see :class:`~gtrain.model.edge_model.AveragePrecision`: the
            edges are answers to the questions of their sources at their times. None: they do not.
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for the encoder's tables; None: ``optimizer`` updates them too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once per epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler monitors.

    Shapes:
        batch: a graph with ``edge_label_index`` [2, B] and ``dst_neg_index`` [B, num_negatives], the negatives;
        ``edge_label_type`` and ``edge_label_weight`` [B] if edges have relations and weights; ``edge_label_time`` [B]
        if ``eval_k`` is set; ``known_tail_ptr``, ``known_tail``, ``known_head_ptr``, ``known_head`` in validation and
        test. If nodes belong to several ranks, the batch has ``spread`` instead of the last four, see
        :class:`~gtrain.protocols.Spread`; if they are encoded in several batches, also ``node_batches``, see
        :meth:`embeddings`.
    """

    weighs_loss = True
    """Whether the loss of an edge is multiplied by its weight."""
    encodes_nodes = True
    """Whether validation and test score edges against all nodes; a strategy that samples provides ``node_batches``."""

    def __init__(
        self,
        network: nn.Module,
        decoder: Decoder,
        *,
        encoder: nn.Module | None = None,
        num_negatives: int = 1,
        filtered: bool = True,
        eval_k: int | None = None,
        optimizer: MakeOptimizer | None = None,
        sparse_optimizer: MakeOptimizer | None = None,
        scheduler: Callable[..., Any] | None = None,
        monitor: str = "val/loss",
    ) -> None:
        super().__init__()
        if num_negatives < 1:
            raise ConfigError(f"model.num_negatives={num_negatives} was set.", hint="set 1 or more.")
        if eval_k is not None and eval_k < 1:
            raise ConfigError(f"model.eval_k={eval_k} was set.", hint="set 1 or more.")
        self.encoder, self.network, self.decoder = encoder, network, decoder
        self.num_negatives, self.filtered, self.eval_k = num_negatives, filtered, eval_k
        if eval_k is not None:
            self.val_map, self.test_map = (
                MetricCollection({f"map@{eval_k}": AveragePrecision(eval_k, filtered)}, prefix=f"{split}/")
                for split in ("val", "test")
            )
        self._set_optimizers(optimizer, sparse_optimizer, scheduler, monitor)
        self._inputs = input_names(network)
        self.edge_data = frozenset({"edge_weight", *(["edge_type"] if decoder.reads_relation else [])})

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the source nodes and of the target nodes of edges, [N, D] each.

        ``edge_label_index`` and ``dst_neg_index`` are indices of rows. With ``spread``, the rank's nodes come first.
        """
        source, target = self.embeddings(batch)
        spread: Spread | None = batch_entry(batch, "spread")
        return (source, target) if spread is None else spread.rows(source, target)

    def embeddings(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the rank's nodes of the sources' type and of the targets', [N, D] each.

        A batch may have ``node_batches``, a mapping from node type (``node`` in a homogeneous graph) to a function that
        returns batches: together they have each node of the rank once, as ``seeds`` (local ids [S]), and ``input_id``
        [S] is its row in the result. Such a batch does not need a graph itself.
        """
        node_batches: NodeBatches | None = batch_entry(batch, "node_batches")
        source, _, target = batch.target if isinstance(batch, HeteroData) else ("node", "to", "node")
        if node_batches is not None:
            encoded = {
                node_type: self._encoded(node_batches[node_type]()) for node_type in dict.fromkeys((source, target))
            }
            return encoded[source], encoded[target]
        rows = run_network(self.network, self._inputs, self.encoder, batch)
        return (rows[source], rows[target]) if isinstance(rows, dict) else (rows, rows)

    def _encoded(self, batches: Iterable[Batch]) -> Tensor:
        """Return the embeddings of the seeds of several batches, in the order of their ``input_id``, [S, D]."""
        rows, input_ids = [], []
        for number, batch in enumerate(batches):
            rows.append(self.predict_step(batch, number))
            nodes = batch[batch.target] if isinstance(batch, HeteroData) else batch
            input_ids.append(nodes.input_id)
        return torch.cat(rows)[torch.cat(input_ids).argsort()]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss, weight, _, _ = self._loss(batch, self(batch), "train")
        return {"loss": loss, "weight": weight}

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the embeddings of the seeds, which are nodes here, [S, D]."""
        output = run_network(self.network, self._inputs, self.encoder, batch)
        embeddings: Tensor = output[batch.target] if isinstance(output, dict) else output
        return embeddings[batch.seeds]

    def _loss(
        self, batch: Batch, embeddings: tuple[Tensor, Tensor], split: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the mean loss over the batch's edges, its weight, and the scores of true and of negative edges."""
        true, negative = self._scores(batch, embeddings)
        losses = F.softplus(-true) + F.softplus(negative).mean(1)
        loss, weight = self._mean(losses, batch_entry(batch, "edge_label_weight"), split)
        return loss, weight, true, negative

    def _scores(self, batch: Batch, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the scores of the true edges [B] and of the negatives [B, num_negatives]."""
        (head, tail), (source, target) = batch.edge_label_index, embeddings
        heads, relation = source[head], batch_entry(batch, "edge_label_type")
        negative = [self.decoder(heads, target[ids], relation) for ids in self._negative_targets(batch).unbind(1)]
        return self.decoder(heads, target[tail], relation), torch.stack(negative, dim=1)

    def _negative_targets(self, batch: Batch) -> Tensor:
        """Return the batch's ``dst_neg_index``, int64 [B, num_negatives].

        Raises:
            ConfigError: the batch does not have it, or in another shape.
        """
        negatives: Tensor | None = batch_entry(batch, "dst_neg_index")
        shape = (batch.edge_label_index.size(1), self.num_negatives)
        if negatives is None or negatives.shape != shape:
            actual = "none" if negatives is None else f"dst_neg_index of the shape {list(negatives.shape)}"
            raise ConfigError(
                f"model.num_negatives={self.num_negatives} was set, and the batch should have dst_neg_index of the "
                f"shape {list(shape)}, the negative targets; it has {actual}.",
                hint="train with one of gtrain's strategies, or set SeedLoader.num_negatives.",
            )
        return negatives

    def _evaluate(self, batch: Batch, split: str) -> EdgeScores:
        embeddings = self(batch)
        _, _, true, negative = self._loss(batch, embeddings, split)
        # Ranks need full precision: in bfloat16 many scores are equal.
        source, target = (rows.to(sum_dtype(rows.dtype)) for rows in embeddings)
        with without_autocast(source):
            tail_ranks, head_ranks = self._ranks(batch, (source, target))
        self._log_scores(split, (tail_ranks, head_ranks), true, negative[:, 0])
        self._log_precision(batch, tail_ranks, split)
        sources = embeddings[0][batch.edge_label_index[0, :EMBEDDED]] if split == "test" else None
        relation = batch_entry(batch, "edge_label_type")
        return EdgeScores(true, negative[:, 0], tail_ranks, head_ranks, relation, sources)

    def _log_precision(self, batch: Batch, tail_ranks: Tensor, split: str) -> None:
        if self.eval_k is None:
            return
        spread: Spread | None = batch_entry(batch, "spread")
        source = batch.edge_label_index[0] if spread is None else spread.source
        collection: MetricCollection = getattr(self, f"{split}_map")
        collection.update(source, batch.edge_label_time, tail_ranks)
        self.log_dict(collection, on_step=False, on_epoch=True, batch_size=1)

    def _ranks(self, batch: Batch, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the ranks of the targets and of the sources, float64 [B] each."""
        (head, tail), (source, target) = batch.edge_label_index, embeddings
        relation = batch_entry(batch, "edge_label_type")
        spread: Spread | None = batch_entry(batch, "spread")
        if spread is not None:
            local = source[: spread.num_own[0]], target[: spread.num_own[1]]
            return spread_ranks(self.decoder, spread, local, (source[head], target[tail]), relation, self.filtered)

        def relation_of(rows: slice) -> Tensor | None:
            return None if relation is None else relation[rows]

        known = [batch_entry(batch, name) if self.filtered else None for name in _KNOWN]
        tails = ranks(
            lambda rows, some: self.decoder.tails(source[head[rows]], relation_of(rows), target[some]),
            tail,
            known[0],
            known[1],
            target.size(0),
        )
        heads = ranks(
            lambda rows, some: self.decoder.heads(target[tail[rows]], relation_of(rows), source[some]),
            head,
            known[2],
            known[3],
            source.size(0),
        )
        return tails, heads


_KNOWN = ("known_tail_ptr", "known_tail", "known_head_ptr", "known_head")
"""Entries of a batch: the known targets of each edge's source, and the known sources of its target, in CSR form."""
