"""Base of the models that predict edges: loss, ranking metrics (MRR, hits) and area under the ROC curve.

A rank is the position of the true answer among all candidates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from gtrain.model.candidate_ranks import Chosen, Tiles, known_of, left_out, queries_at_once, rank
from gtrain.model.decoders import Decoder
from gtrain.model.module import MeanLoss, OptimizedModule, log_mean_loss, sum_in_float64
from gtrain.model.outputs import EdgeScores
from gtrain.protocols import Lists, Spread

NAMES = ("mrr", "hits@1", "hits@10")
EMBEDDED = 2000
"""Embeddings that a test step returns at most."""


class Ranking(Metric):
    """Mean reciprocal rank, mean rank, or share of ranks up to k; NaN without ranks.

    Args:
        name: ``mrr``, ``mean_rank`` or ``hits@<k>``.

    Shapes:
        ``update`` takes ranks ``[B]`` (from 1; halves where answers tie); B may be 0.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.limit = int(name.split("@")[1]) if "@" in name else None
        # float64: a float32 counter stops at 2**24 ranks.
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, ranks: Tensor) -> None:
        if self.limit is not None:
            values = (ranks <= self.limit).double()
        else:
            values = 1.0 / ranks if self.name == "mrr" else ranks
        sum_in_float64(self, self.total)
        self.total += values.double().sum()
        self.count += ranks.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class AveragePrecision(Metric):
    """Mean average precision of the k best candidates of each question, RelBench's MAP@k; NaN without questions.

    The average precision of a question with m answers is the sum, over the answers among the k best, of the share of
    answers among the candidates down to each, divided by min(m, k).

    Args:
        k: length of the list of best candidates.
        filtered: whether the other answers to a question were left out of the ranks.

    Shapes:
        ``update`` takes the source and the time of each answer's question, int64 ``[B]``, and the answers' ranks
        float64 ``[B]``. B may be 0: each rank must call it, since the answers to a question may be on several ranks.
    """

    full_state_update = False
    source: list[Tensor]
    time: list[Tensor]
    rank: list[Tensor]

    def __init__(self, k: int, filtered: bool) -> None:
        super().__init__()
        self.k, self.filtered = k, filtered
        for name in ("source", "time", "rank"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, source: Tensor, time: Tensor, ranks: Tensor) -> None:
        self.source.append(source)
        self.time.append(time.to(source))
        self.rank.append(ranks.to(source.device))

    def compute(self) -> Tensor:
        source, time, rank = (dim_zero_cat(state) for state in (self.source, self.time, self.rank))
        _, question, count = torch.stack([source, time]).unique(dim=1, return_inverse=True, return_counts=True)
        order = rank.argsort()
        order = order[question[order].argsort(stable=True)]  # by question, the best answer first
        rank, question = rank[order], question[order]
        place = torch.arange(len(rank), device=rank.device) - (count.cumsum(0) - count)[question] + 1
        position = rank + place - 1 if self.filtered else torch.maximum(rank, place.to(rank))
        precision = torch.where(position <= self.k, place / position, 0)
        return (precision / count.clamp(max=self.k)[question]).sum() / len(count)


def spread_ranks(
    decoder: Decoder,
    spread: Spread,
    embeddings: tuple[Tensor, Tensor],
    endpoints: tuple[Tensor, Tensor],
    relation: Tensor | None,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    """Return the ranks of the targets and of the sources of this rank's edges among the nodes of all ranks.

    Each rank scores its nodes for the edges of all ranks and counts those that are better than the answer; an
    all-reduce adds the counts. Collective, for ranks without edges too. The result equals that of
    :func:`gtrain.model.candidate_ranks.ranks` over all nodes.

    Args:
        decoder: scores edges.
        spread: the batch's.
        embeddings: embeddings of the rank's nodes of the sources' type and of the targets', ``[num_own, D]``.
        endpoints: embeddings of the sources and of the targets of the edges, ``[B, D]``.
        relation: int64 ``[B]``, or None.
        filtered: leave out other true answers.

    Returns:
        float64 ``[B]`` each.
    """
    sources = _Candidates(decoder.heads, embeddings[0], spread.first[0])
    targets = _Candidates(decoder.tails, embeddings[1], spread.first[1])
    known_sources = spread.known_sources(relation) if filtered else None
    of_sources = _Queries(endpoints[0], spread.source, spread.target, relation)
    of_targets = _Queries(endpoints[1], spread.target, spread.source, relation, known_sources)
    return (
        _ranks(spread, targets, of_sources, spread.known_targets if filtered else None),
        _ranks(spread, sources, of_targets, None),
    )


class _Candidates:
    """The candidates that this rank owns: ids ``first`` and on, with embeddings ``[n, D]``."""

    def __init__(self, score: Callable[[Tensor, Tensor | None, Tensor], Tensor], rows: Tensor, first: int) -> None:
        self.score, self.rows, self.first = score, rows, first

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of ids, and which of them this rank owns."""
        index = ids - self.first
        return index, (index >= 0) & (index < len(self.rows))


class _Queries:
    """Edges with one end given, whose other end is ranked.

    Attributes:
        rows: ``[B, D]``, embeddings of the given ends.
        ids: int64 ``[B]`` on the CPU, the given ends.
        answer: int64 ``[B]`` on the CPU, the other ends.
        relation: int64 ``[B]`` on the CPU, or None.
        known: known answers of each edge, on the CPU, or None.
    """

    def __init__(
        self, rows: Tensor, ids: Tensor, answer: Tensor, relation: Tensor | None, known: Lists | None = None
    ) -> None:
        self.rows, self.ids, self.answer, self.known = rows, ids, answer, known
        self.relation = None if relation is None else relation.cpu()

    def gathered(self, spread: Spread, chosen: slice) -> tuple[list[int], _Queries]:
        """Return the number of each rank's chosen queries, and the queries of all ranks."""
        rows = spread.all_gather(self.rows[chosen])
        columns = [self.ids, self.answer] + ([] if self.relation is None else [self.relation])
        table = torch.cat(spread.all_gather(torch.stack(columns, dim=1)[chosen]))
        relation = None if self.relation is None else table[:, 2]
        known = None
        if self.known is not None:
            pointer, ids = self.known
            bounds = pointer[chosen.start : chosen.stop + 1]
            counts = torch.cat(spread.all_gather(bounds.diff()))
            flat = torch.cat(spread.all_gather(ids[int(bounds[0]) : int(bounds[-1])]))
            known = torch.cat([counts.new_zeros(1), counts.cumsum(0)]), flat
        return [len(part) for part in rows], _Queries(torch.cat(rows), table[:, 0], table[:, 1], relation, known)


def _ranks(
    spread: Spread,
    candidates: _Candidates,
    queries: _Queries,
    known_answers: Callable[[Tensor, Tensor | None], Lists] | None,
) -> Tensor:
    """Return the ranks of this rank's answers; ``known_answers`` returns those among the rank's candidates."""
    total = len(queries.ids)
    sizes = torch.stack(spread.all_gather(torch.tensor([total, len(candidates.rows)])))
    step = max(1, queries_at_once(int(sizes[:, 1].max()), queries.rows.device) // spread.size)
    blocks = [torch.empty(0, dtype=torch.float64)]
    # As many rounds on every rank: each round is collective.
    for start in range(0, int(sizes[:, 0].max()), step):
        counts, gathered = queries.gathered(spread, slice(min(start, total), min(start + step, total)))
        known = gathered.known if known_answers is None else known_answers(gathered.ids, gathered.relation)
        blocks.append(_counted(spread, candidates, gathered, known).split(counts)[spread.rank])
    return torch.cat(blocks)


def _counted(spread: Spread, candidates: _Candidates, queries: _Queries, known: Lists | None) -> Tensor:
    """Return the ranks of the answers of all ranks' queries, float64 ``[B]`` on the CPU."""
    device = queries.rows.device
    relation = None if queries.relation is None else queries.relation.to(device)

    def score(chosen: Chosen) -> Tensor:
        return candidates.score(queries.rows, relation, candidates.rows[chosen])

    tiles = Tiles(score, len(candidates.rows), device)
    index, owned = candidates.local(queries.answer)
    # Zero on ranks that do not own the answer, so that the sum is its score: one rank owns each answer.
    own = torch.where(owned.to(device), tiles.of(torch.where(owned, index, 0).to(device)), 0)
    own = spread.all_reduce(own)
    query, ids = left_out(queries.answer, *known_of(slice(0, len(own)), *(known or (None, None))))
    index, owned = candidates.local(ids)
    counts = tiles.compare(own, (query[owned].to(device), index[owned].to(device)))
    return rank(*spread.all_reduce(torch.stack(counts))).cpu()


class Auc(Metric):
    """Area under the ROC curve; NaN without true edges or without negatives.

    It is the probability that a true edge scores higher than a negative one, ties counted as 1/2.

    Torchmetrics' AUROC applies a sigmoid per batch, and only to batches with scores outside 0 .. 1, so that scores of
    different batches or ranks are not comparable.

    Shapes:
        ``update`` takes scores of true edges ``[A]`` and of negatives ``[B]``. A and B may be 0: each rank must
        call it, since the scores of all ranks are gathered.
    """

    full_state_update = False
    true: list[Tensor]
    negative: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("true", [], dist_reduce_fx="cat")
        self.add_state("negative", [], dist_reduce_fx="cat")

    def update(self, true: Tensor, negative: Tensor) -> None:
        self.true.append(true.detach().double())
        self.negative.append(negative.detach().double())

    def compute(self) -> Tensor:
        true, negative = dim_zero_cat(self.true).contiguous(), dim_zero_cat(self.negative).sort().values
        # The negatives' scores below each true one, plus those below or equal: ties count 1 of 2.
        below = torch.searchsorted(negative, true) + torch.searchsorted(negative, true, right=True)
        return below.double().sum() / (2 * true.numel() * negative.numel())  # 0 / 0 is NaN


class EdgeModel(OptimizedModule):
    """Base of the LightningModules whose seeds are edges; logs ``loss``, ``mrr``, ``hits@k`` and ``auc``."""

    rank_names: ClassVar[tuple[str, ...]] = NAMES
    """The metrics of ranks that it logs; see :class:`~gtrain.model.edge_model.Ranking`."""

    def __init__(self) -> None:
        super().__init__()
        self.train_loss, self.val_loss, self.test_loss = MeanLoss(), MeanLoss(), MeanLoss()
        self.val_ranks, self.test_ranks = (
            MetricCollection({n: Ranking(n) for n in self.rank_names}, prefix=f"{split}/", compute_groups=False)
            for split in ("val", "test")
        )
        self.val_auc, self.test_auc = Auc(), Auc()

    @abstractmethod
    def _evaluate(self, batch: Any, split: str) -> EdgeScores:
        """Log the loss and the scores of a batch of ``val`` or ``test``, and return the scores."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> EdgeScores:  # type: ignore[override]
        return self._evaluate(batch, "test")

    def embed(self, batch: Any) -> Tensor:
        """Return the seeds' embeddings, which ``predict_step`` returns."""
        embeddings: Tensor = self.predict_step(batch, 0)
        return embeddings

    def _mean(self, each: Tensor, weight: Tensor | None, split: str) -> tuple[Tensor, Tensor]:
        """Return the weighted mean of the edges' losses ``[B]``, and its weight; B may be 0."""
        weight = torch.ones_like(each) if weight is None else weight.to(each)
        total = weight.sum()
        return log_mean_loss(self, split, (each * weight).sum(), total), total

    def _log_scores(self, split: str, ranks: Iterable[Tensor], true: Tensor, negative: Tensor) -> None:
        """Update the metrics with ranks, and with scores of true and of negative edges; each may be empty."""
        auc: Auc = getattr(self, f"{split}_auc")
        auc.update(true, negative)
        collection: MetricCollection = getattr(self, f"{split}_ranks")
        for values in ranks:
            collection.update(values)
        self.log_dict(collection, on_step=False, on_epoch=True, batch_size=1)
        self.log(f"{split}/auc", auc, on_step=False, on_epoch=True, batch_size=1)
