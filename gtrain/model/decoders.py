"""Decoders score an edge from the embeddings of its two nodes."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from gtrain.errors import ConfigError


class Decoder(nn.Module):
    """Scores edges.

    Shapes:
        head and tail ``[B, D]``, relation int64 ``[B]`` or None; scores ``[B]``. Against all nodes: candidates
        ``[N, D]``, scores ``[B, N]``.
    """

    reads_relation: bool = True
    """Whether scores depend on the relation."""

    @abstractmethod
    def forward(self, head: Tensor, tail: Tensor, relation: Tensor | None) -> Tensor:
        """Return the scores of the edges head -> tail."""

    @abstractmethod
    def tails(self, head: Tensor, relation: Tensor | None, candidates: Tensor) -> Tensor:
        """Return the scores of the edges from each head to every candidate, for ranking, without gradients."""

    @abstractmethod
    def heads(self, tail: Tensor, relation: Tensor | None, candidates: Tensor) -> Tensor:
        """Return the scores of the edges from every candidate to each tail, for ranking, without gradients."""


class Dot(Decoder):
    """The inner product of the two embeddings; relations are ignored."""

    reads_relation = False

    def __init__(self, channels: int, num_relations: int | None) -> None:
        super().__init__()

    def forward(self, head: Tensor, tail: Tensor, relation: Tensor | None) -> Tensor:
        return (head * tail).sum(-1)

    def tails(self, head: Tensor, relation: Tensor | None, candidates: Tensor) -> Tensor:
        return head @ candidates.T

    def heads(self, tail: Tensor, relation: Tensor | None, candidates: Tensor) -> Tensor:
        return tail @ candidates.T


class DistMult(Decoder):
    """The inner product weighted by a vector per relation (Yang et al. 2015)."""

    def __init__(self, channels: int, num_relations: int | None) -> None:
        super().__init__()
        # Near 1, so that training starts from the inner product; the relations differ only by what they learn.
        self.weight = nn.Parameter(torch.ones(num_relations or 1, channels) + 0.1 * torch.randn(1, channels))

    def _weight(self, relation: Tensor | None) -> Tensor:
        return self.weight[0] if relation is None else self.weight[relation]

    def forward(self, head: Tensor, tail: Tensor, relation: Tensor | None) -> Tensor:
        return (head * self._weight(relation) * tail).sum(-1)

    def tails(self, head: Tensor, relation: Tensor | None, candidates: Tensor) -> Tensor:
        return (head * self._weight(relation)) @ candidates.T

    def heads(self, tail: Tensor, relation: Tensor | None, candidates: Tensor) -> Tensor:
        return (tail * self._weight(relation)) @ candidates.T


class PairMLP(Decoder):
    """A hidden layer over the concatenated embeddings, with an offset per relation."""

    def __init__(self, channels: int, num_relations: int | None) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(channels, channels), nn.Linear(channels, channels, bias=False)
        self.relation = nn.Embedding(num_relations or 1, channels)
        self.out = nn.Linear(channels, 1)

    def _offset(self, relation: Tensor | None) -> Tensor:
        return self.relation.weight[0] if relation is None else self.relation(relation)

    def forward(self, head: Tensor, tail: Tensor, relation: Tensor | None) -> Tensor:
        # A linear layer over concatenated rows is the sum of two. ``tails`` and ``heads`` compute that of candidates
        # once for all queries.
        hidden = self.source(head) + self.target(tail) + self._offset(relation)
        scores: Tensor = self.out(hidden.relu())
        return scores.squeeze(-1)

    def tails(self, head: Tensor, relation: Tensor | None, candidates: Tensor) -> Tensor:
        return self._all(self.source(self._own(head)) + self._offset(relation), self.target(self._own(candidates)))

    def heads(self, tail: Tensor, relation: Tensor | None, candidates: Tensor) -> Tensor:
        return self._all(self.target(self._own(tail)) + self._offset(relation), self.source(self._own(candidates)))

    def _own(self, rows: Tensor) -> Tensor:
        """Return rows in the dtype of the parameters."""
        return rows.to(self.out.weight.dtype)

    @torch.no_grad()
    def _all(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Score one query at a time, ``[N, D]`` hidden numbers in one buffer.

        The hidden layer of all pairs would not fit into memory; allocating it per query takes as long as the scores.
        """
        # In autocast the candidates have another dtype than the weight and the sums with offsets.
        weight, hidden = self.out.weight[0].to(candidates.dtype), torch.empty_like(candidates)
        scores = candidates.new_empty(len(queries), len(candidates))
        for query, row in zip(queries.to(candidates.dtype), scores, strict=True):
            torch.mv(torch.add(query, candidates, out=hidden).relu_(), weight, out=row)
        return scores + self.out.bias


DECODERS: dict[str, type[Decoder]] = {"dot": Dot, "distmult": DistMult, "mlp": PairMLP}


def make_decoder(name: str, channels: int, num_relations: int | None) -> Decoder:
    """Return the decoder of that name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in DECODERS:
        raise ConfigError(f"model.decoder={name} was set.", hint=f"the decoders are {', '.join(DECODERS)}.")
    decoder: Decoder = DECODERS[name](channels, num_relations)  # type: ignore[call-arg]
    return decoder
