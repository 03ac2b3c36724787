"""Link prediction with any network that maps node features and edges to embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from gtrain.errors import ConfigError
from gtrain.model.decoders import Decoder
from gtrain.model.edge_model import EdgeModel
from gtrain.model.inputs import input_names, run_network
from gtrain.model.optimizers import MakeOptimizer, configured, with_tables
from gtrain.model.ranking import ranks
from gtrain.model.spread import spread_ranks
from gtrain.protocols import NodeBatches, Spread, entry

Batch: TypeAlias = Data | HeteroData


class LinkPredictor(EdgeModel):
    """Binary cross-entropy of true edges against edges whose target is drawn at random.

    Validation and test rank each true edge's target among all nodes, and its source likewise, leaving out what is
    known to be true elsewhere (filtered MRR, hits@1, hits@10, mean of both sides), and compute the area under the ROC
    curve against one random edge for each true one. The random edges come with the batch.

    Args:
        network: called with those of the batch's attributes that its ``forward`` names; returns ``[N, D]`` embeddings,
            by node type where it takes ``x_dict``.
        decoder: scores an edge from the embeddings of its ends.
        encoder: makes the features that the network gets; None: the graph's own.
        num_negatives: random edges for each true one in training.
        filtered: whether validation and test leave known edges out of the ranking.
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        sparse_optimizer: the same for the encoder's tables; None: ``optimizer`` has them too.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once an epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler looks at.

    Shapes:
        batch: a graph with ``edge_label_index`` [2, B] and ``dst_neg_index`` [B, num_negatives], the false targets;
        ``edge_label_type`` and ``edge_label_weight`` [B] where there are relations and weights; ``known_tail_ptr``,
        ``known_tail``, ``known_head_ptr``, ``known_head`` on validation and test. Where nodes belong to several ranks,
        instead of the last four ``spread``, see :class:`~gtrain.model.spread.Spread`; and where they are encoded in
        several batches, ``node_batches``, see :meth:`embeddings`.
    """

    weighs_loss = True
    """Whether the weight of an edge is the factor of its loss."""
    encodes_nodes = True
    """Whether validation and test score edges against all nodes: a strategy that samples gives ``node_batches``."""

    def __init__(
        self,
        network: nn.Module,
        decoder: Decoder,
        *,
        encoder: nn.Module | None = None,
        num_negatives: int = 1,
        filtered: bool = True,
        optimizer: MakeOptimizer | None = None,
        sparse_optimizer: MakeOptimizer | None = None,
        scheduler: Callable[..., Any] | None = None,
        monitor: str = "val/loss",
    ) -> None:
        super().__init__()
        if num_negatives < 1:
            raise ConfigError(f"model.num_negatives={num_negatives} was set.", hint="set 1 or more.")
        self.encoder, self.network, self.decoder = encoder, network, decoder
        self.num_negatives, self.filtered = num_negatives, filtered
        self._make_optimizer, self._make_scheduler, self._monitor = optimizer, scheduler, monitor
        self._make_sparse = sparse_optimizer
        self._inputs = input_names(network)
        self.edge_data = frozenset({"edge_weight", *(["edge_type"] if decoder.reads_relation else [])})

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Embeddings of the nodes that edges begin at and of those that they end at, [N, D] each.

        ``edge_label_index`` and ``dst_neg_index`` are rows of these. With ``spread``, the first are the rank's own.
        """
        source, target = self.embeddings(batch)
        spread: Spread | None = entry(batch, "spread")
        return (source, target) if spread is None else spread.rows(source, target)

    def embeddings(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Embeddings of the batch's own nodes of the sources' type and of the targets', [N, D] each.

        ``node_batches`` of a batch, where it has them, are a mapping from node type (``node`` where there is one) to a
        function that returns batches of such nodes: together they have every own node once, as ``seeds`` (local ids
        [S]), and ``input_id`` [S] says which row of the result each is. The batch itself needs no graph then.
        """
        parts: NodeBatches | None = entry(batch, "node_batches")
        source, _, target = batch.target if isinstance(batch, HeteroData) else ("node", "to", "node")
        if parts is not None:
            found = {kind: self._encoded(parts[kind]()) for kind in dict.fromkeys((source, target))}
            return found[source], found[target]
        rows = run_network(self.network, self._inputs, self.encoder, batch)
        return (rows[source], rows[target]) if isinstance(rows, dict) else (rows, rows)

    def _encoded(self, batches: Iterable[Batch]) -> Tensor:
        """Embeddings of the seeds of several batches, in the order of their ``input_id``."""
        rows, places = [], []
        for number, batch in enumerate(batches):
            rows.append(self.predict_step(batch, number))
            nodes = batch[batch.target] if isinstance(batch, HeteroData) else batch
            places.append(nodes.input_id)
        return torch.cat(rows)[torch.cat(places).argsort()]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss, weight, _, _ = self._loss(batch, self(batch), "train")
        return {"loss": loss, "weight": weight}

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Embeddings of the seeds, which are nodes here."""
        found = run_network(self.network, self._inputs, self.encoder, batch)
        embeddings: Tensor = found[batch.target] if isinstance(found, dict) else found
        return embeddings[batch.seeds]

    def configure_optimizers(self) -> Any:
        make = with_tables(self, self._make_sparse, self._make_optimizer)
        return configured(self.parameters(), make, self._make_scheduler, self._monitor)

    def _loss(
        self, batch: Batch, embeddings: tuple[Tensor, Tensor], split: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean loss over the edges of the batch, the weight of that mean, the scores of true and of false edges."""
        true, false = self._scores(batch, embeddings)
        each = F.softplus(-true) + F.softplus(false).mean(1)
        loss, weight = self._mean(each, entry(batch, "edge_label_weight"), split)
        return loss, weight, true, false

    def _scores(self, batch: Batch, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Scores of the true edges [B], and of those with false targets [B, num_negatives]."""
        (head, tail), (source, target) = batch.edge_label_index, embeddings
        heads, relation = source[head], entry(batch, "edge_label_type")
        false = [self.decoder(heads, target[ids], relation) for ids in self._false_targets(batch).unbind(1)]
        return self.decoder(heads, target[tail], relation), torch.stack(false, dim=1)

    def _false_targets(self, batch: Batch) -> Tensor:
        """The batch's ``dst_neg_index``."""
        found: Tensor | None = entry(batch, "dst_neg_index")
        shape = (batch.edge_label_index.size(1), self.num_negatives)
        if found is None or found.shape != shape:
            there = "none" if found is None else f"dst_neg_index of the shape {list(found.shape)}"
            raise ConfigError(
                f"model.num_negatives={self.num_negatives} was set, and the batch should have dst_neg_index of the "
                f"shape {list(shape)}, the false targets; it has {there}.",
                hint="train with one of gtrain's strategies, or set SeedLoader.num_negatives.",
            )
        return found

    def _evaluate(self, batch: Batch, split: str) -> None:
        embeddings = self(batch)
        _, _, true, false = self._loss(batch, embeddings, split)
        self._log_scores(split, self._ranks(batch, embeddings), true, false[:, 0])

    def _ranks(self, batch: Batch, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Ranks of the targets and of the sources."""
        (head, tail), (source, target) = batch.edge_label_index, embeddings
        relation = entry(batch, "edge_label_type")
        spread: Spread | None = entry(batch, "spread")
        if spread is not None:
            own = source[: spread.num_own[0]], target[: spread.num_own[1]]
            return spread_ranks(self.decoder, spread, own, (source[head], target[tail]), relation, self.filtered)

        def part(rows: slice) -> Tensor | None:
            return None if relation is None else relation[rows]

        known = [entry(batch, name) if self.filtered else None for name in _KNOWN]
        tails = ranks(
            lambda rows: self.decoder.tails(source[head[rows]], part(rows), target),
            tail,
            known[0],
            known[1],
            target.size(0),
        )
        heads = ranks(
            lambda rows: self.decoder.heads(target[tail[rows]], part(rows), source),
            head,
            known[2],
            known[3],
            source.size(0),
        )
        return tails, heads


_KNOWN = ("known_tail_ptr", "known_tail", "known_head_ptr", "known_head")
