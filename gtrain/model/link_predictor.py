"""Link prediction with any network that maps node features and edges to embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from gtrain.errors import ConfigError
from gtrain.model.configured import MakeOptimizer, configured
from gtrain.model.decoders import Decoder
from gtrain.model.edge_model import EdgeModel
from gtrain.model.inputs import input_names, run_network
from gtrain.model.ranking import ranks

Batch: TypeAlias = Data | HeteroData


class LinkPredictor(EdgeModel):
    """Binary cross-entropy of true edges against edges whose target is drawn at random.

    Validation and test rank each true edge's target among all nodes, and its source likewise, leaving out what is
    known to be true elsewhere (filtered MRR, hits@1, hits@10, mean of both sides), and compute the area under the ROC
    curve against one random edge for each true one.

    Args:
        network: called with those of the batch's attributes that its ``forward`` names; returns ``[N, D]`` embeddings,
            by node type where it takes ``x_dict``.
        decoder: scores an edge from the embeddings of its ends.
        encoder: makes the features that the network gets; None: the graph's own.
        num_negatives: random edges for each true one in training.
        filtered: whether validation and test leave known edges out of the ranking.
        optimizer: makes an optimizer from parameters; None: Adam with lr 0.01.
        scheduler: makes a learning-rate scheduler from the optimizer, stepped once an epoch; None: none.
        monitor: the logged value that a ``ReduceLROnPlateau`` scheduler looks at.

    Shapes:
        batch: a graph with ``edge_label_index`` [2, B]; ``edge_label_type`` and ``edge_label_weight`` [B] where there
        are relations and weights; ``known_tail_ptr``, ``known_tail``, ``known_head_ptr``, ``known_head`` on validation
        and test.
    """

    def __init__(
        self,
        network: nn.Module,
        decoder: Decoder,
        *,
        encoder: nn.Module | None = None,
        num_negatives: int = 1,
        filtered: bool = True,
        optimizer: MakeOptimizer | None = None,
        scheduler: Callable[..., Any] | None = None,
        monitor: str = "val/loss",
    ) -> None:
        super().__init__()
        if num_negatives < 1:
            raise ConfigError(f"model.num_negatives={num_negatives} was set.", hint="set 1 or more.")
        self.encoder, self.network, self.decoder = encoder, network, decoder
        self.num_negatives, self.filtered = num_negatives, filtered
        self._make_optimizer, self._make_scheduler, self._monitor = optimizer, scheduler, monitor
        self._inputs = input_names(network)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Embeddings of the nodes that edges begin at and of those that they end at, [N, D] each."""
        found = run_network(self.network, self._inputs, self.encoder, batch)
        if isinstance(found, dict):
            source, _, target = batch.target
            return found[source], found[target]
        return found, found

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss, weight, _, _ = self._loss(batch, self(batch), "train", None)
        return {"loss": loss, "weight": weight}

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Embeddings of the seeds, which are nodes here."""
        found = run_network(self.network, self._inputs, self.encoder, batch)
        embeddings: Tensor = found[batch.target] if isinstance(found, dict) else found
        return embeddings[batch.seeds]

    def configure_optimizers(self) -> Any:
        return configured(self.parameters(), self._make_optimizer, self._make_scheduler, self._monitor)

    def _loss(
        self, batch: Batch, embeddings: tuple[Tensor, Tensor], split: str, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean loss over the edges of the batch, the weight of that mean, the scores of true and of random edges."""
        true, false = self._scores(batch, embeddings, generator)
        each = F.softplus(-true) + F.softplus(false).mean(0)
        loss, weight = self._mean(each, getattr(batch, "edge_label_weight", None), split)
        return loss, weight, true, false

    def _scores(
        self, batch: Batch, embeddings: tuple[Tensor, Tensor], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Scores of the true edges [B], and with targets drawn uniformly over all nodes [num_negatives, B]."""
        (head, tail), (source, target) = batch.edge_label_index, embeddings
        heads, relation = source[head], getattr(batch, "edge_label_type", None)
        drawn = torch.randint(target.size(0), (self.num_negatives, tail.numel()), generator=generator)
        false = [self.decoder(heads, target[ids], relation) for ids in drawn]
        return self.decoder(heads, target[tail], relation), torch.stack(false)

    def _evaluate(self, batch: Batch, split: str) -> None:
        embeddings = self(batch)
        generator = torch.Generator().manual_seed(0)  # every epoch against the same edges
        _, _, true, false = self._loss(batch, embeddings, split, generator)
        self._log_scores(split, self._ranks(batch, embeddings), true, false[0])

    def _ranks(self, batch: Batch, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Ranks of the targets and of the sources."""
        (head, tail), (source, target) = batch.edge_label_index, embeddings
        relation = getattr(batch, "edge_label_type", None)

        def part(rows: slice) -> Tensor | None:
            return None if relation is None else relation[rows]

        known = [getattr(batch, name, None) if self.filtered else None for name in _KNOWN]
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
