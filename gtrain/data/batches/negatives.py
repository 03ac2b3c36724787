"""Negative sampling with counter-based random numbers, independent of strategy, partitioning, ranks and batches.

The k-th negative target of an edge is a function of the seed, the split, the epoch, the edge's position in the source
data and k. It is uniform over the *original ids* of the node type, so that it does not depend on the partitioning.
Validation and test have the same negative edges in every epoch. A negative edge may by chance be a true one, as in PyG.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from gtrain.data.batches.scored_edges import FORMS, EdgeType, ScoredEdges
from gtrain.errors import ConfigError
from gtrain.graph.owners import owner_of
from gtrain.graph.store import Store
from gtrain.graph.store.numbering import GlobalIds
from gtrain.kernels.splitmix import below, key

_SPLITS = ("train", "val", "test")
_TRIES = 8  # draws to find a node that exists at the time of its edge


class Negatives:
    """Draws the endpoints of negative edges.

    Args:
        store: the graph.
        edge_type: the edges' type; None means the only one.
        split: ``train``, ``val`` or ``test``.
        seed: of the random numbers.
        amount: negative edges per true edge, above 0; an integer unless the form is ``binary``.
        form: see :class:`~gtrain.data.batches.scored_edges.ScoredEdges`.
        time: name of the node tensor with times. If the edge has a time, a node that is later than it
            is drawn again, a few times, and at last replaced by the earliest node. None: no times.

    Raises:
        ConfigError: the form is unknown, or the amount is not a valid number of edges.
    """

    def __init__(
        self,
        store: Store,
        edge_type: EdgeType | None,
        split: str,
        seed: int,
        amount: float,
        form: str | None = None,
        time: str | None = None,
    ) -> None:
        check_negatives(form, amount)
        self.split, self.seed, self.amount, self.form = split, seed, amount, form
        source, _, target = edge_type or store.edge_types[0]
        self._ends = tuple(_End(store, kind, time) for kind in (source, target))

    def __call__(self, edges: ScoredEdges, edge_id: Tensor, epoch: int) -> ScoredEdges:
        """Return true edges together with negative ones.

        Args:
            edges: true ones.
            edge_id: int64 ``[B]``, their positions among the split's edges of the source data.
            epoch: number of the epoch; only ``train`` depends on it.
        """
        draws, time = math.ceil(self.amount), edges.extra.get("time")
        targets = self._draw(1, edge_id, epoch, draws, time)
        if self.form != "binary":
            return replace(edges, form=self.form, negative_target=targets, edge_id=edge_id)
        total = math.ceil(edge_id.numel() * self.amount)
        sources = self._draw(0, edge_id, epoch, draws, time)
        # The first draw of every edge, then the second, ..., cut off at a fraction of the last round.
        flat = [drawn.t().reshape(-1)[:total] for drawn in (sources, targets)]
        return replace(edges, form=self.form, negative_source=flat[0], negative_target=flat[1], edge_id=edge_id)

    def _draw(self, side: int, edge_id: Tensor, epoch: int, draws: int, time: Tensor | None) -> Tensor:
        """Return the global ids of negative sources (side 0) or negative targets (side 1), ``[B, draws]``."""
        split = _SPLITS.index(self.split)
        words = (self.seed, split, epoch if self.split == "train" else 0, side)
        end = self._ends[side]
        drawn_ids = end.draw(edge_id, draws, *words, 0)
        if time is None or not end.timed:
            return drawn_ids
        limit = time.unsqueeze(1).expand_as(drawn_ids)
        for again in range(1, _TRIES):
            # Draw again, with another key, only the ends that do not exist yet at the time of their edge.
            late = end.time_of(drawn_ids) > limit
            if not late.any():
                return drawn_ids
            drawn_ids = torch.where(late, end.draw(edge_id, draws, *words, again), drawn_ids)
        return torch.where(end.time_of(drawn_ids) > limit, end.earliest, drawn_ids)


class _End:
    """The node type at one end of the edges, from which negatives are drawn."""

    def __init__(self, store: Store, kind: str, time: str | None) -> None:
        self._ids, self._count = GlobalIds(store, kind), store.num_nodes_of(kind)
        self._offsets = store.offsets_of(kind)
        self.timed = time is not None and time in store.node_tensors(kind)
        self._times = [store.node(str(time), part, kind) for part in range(store.num_parts)] if self.timed else []

    def draw(self, edge_id: Tensor, draws: int, *words: int) -> Tensor:
        """Return uniform draws of nodes, global ids ``[B, draws]``."""
        # Drawn as original ids and then mapped, so that the draw does not depend on the partitioning.
        return self._ids(torch.from_numpy(below(self._count, key(*words), edge_id.numpy(), draws)))

    def time_of(self, ids: Tensor) -> Tensor:
        """Return the times of nodes by global id, in the shape of ``ids``."""
        node_times = torch.empty_like(ids)
        part = owner_of(ids, self._offsets)
        for number, times in enumerate(self._times):
            mine = part == number
            node_times[mine] = times[ids[mine] - self._offsets[number]].to(node_times.dtype)
        return node_times

    @cached_property
    def earliest(self) -> int:
        """The node with the earliest time; of several, the one with the lowest original id."""
        everyone = torch.cat(self._times)
        first = (everyone == everyone.min()).nonzero().flatten()
        return int(first[torch.cat(self._ids.orig_ids)[first].argmin()])


def check_negatives(form: str | None, amount: float) -> None:
    """Check the settings of negative sampling.

    Raises:
        ConfigError: the form is unknown, or the amount is not a valid number of edges.
    """
    if form is not None and form not in FORMS:
        raise ConfigError(
            f"data.neg_sampling={form} was set.",
            hint="choose binary (negative edges, edge_label 1 and 0), triplet (negative targets), or null.",
        )
    if not amount > 0 or math.isinf(amount):
        raise ConfigError(
            f"data.neg_sampling_ratio={amount} was set; it is the number of negative edges per true edge.",
            hint="set a number above 0.",
        )
    if form != "binary" and amount != int(amount):
        raise ConfigError(
            f"data.neg_sampling_ratio={amount} was set; a triplet has a whole number of negative targets.",
            hint="set a whole number, or data.neg_sampling=binary.",
        )
