"""Generated events between nodes whose communities change over time, with the best possible AUC known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch_geometric.data import Data

from gtrain.data.config import PlantedTemporalConfig, PlantedTemporalParameters
from gtrain.data.module import EVENTS_OUTLINE
from gtrain.data.planted.common import Ints, PlantedSource, expected_auc, power_law
from gtrain.errors import ConfigError

PERIODS = 50
"""Number of periods of equal length, between which communities change."""


@dataclass
class TemporalModel(PlantedTemporalParameters):
    """The parameters of the generator, checked; see :class:`PlantedTemporalData` for their meaning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_communities > self.num_nodes // 2:
            raise ConfigError(
                f"data.num_communities={self.num_communities} leaves nodes without a partner: data.num_nodes="
                f"{self.num_nodes} gives each community {self.num_nodes / self.num_communities:.2g}",
                hint=f"set data.num_communities={self.num_nodes // 2} or less, or raise data.num_nodes",
            )

    @property
    def sizes(self) -> Ints:
        """Nodes of each community at any time, which differ by one at most."""
        return np.bincount(np.arange(self.num_nodes) % self.num_communities)


class PlantedTemporalData(PlantedSource[TemporalModel, PlantedTemporalConfig]):
    """Events (source, target, time) whose target is, with a known probability, in the source's community at that time.

    Times are integers, uniform in ``0 .. time_span - 1`` and sorted. The source of an event is drawn in proportion to
    an activity from a power law. With probability ``predictability`` the target is another node of the source's
    community, all equally likely; else it is any other node. Communities have equal sizes. At 50 times, evenly spread
    over the span, random nodes exchange their communities, so that each node moves ``drift`` times on average: models
    of old events become inaccurate.

    **The best possible AUC** (fact ``best_auc``) is that of distinguishing the target of an event from a uniform draw
    of all nodes except the source. A scorer that knows the current communities ranks by the likelihood ratio of the
    two, which depends only on whether the node is in the source's community of s nodes:
    ``predictability * (n - 1) / (s - 1) + 1 - predictability`` if it is, and ``1 - predictability`` if not. No order
    is better (Neyman and Pearson 1933). With equal sizes the area is ``(1 + a - b) / 2``, where
    ``b = (s - 1) / (n - 1)`` is the probability that another node is in the community, and
    ``a = predictability + (1 - predictability) * b`` that the target is. This is the expected value over all events; on
    n events the AUC varies by about ``0.3 / sqrt(n)``. A trained model has to infer the current communities from past
    events, so that it can come near this value only with a small ``drift``.

    Its settings are those of :class:`~gtrain.data.config.PlantedTemporalConfig`.
    """

    name = "planted_temporal"
    outline = EVENTS_OUTLINE

    def read(self) -> Data:
        """Generate the events."""
        data, _ = generate(self.model, self.seed)
        self._facts = {"best_auc": best_auc(self.model)}
        return data


def generate(model: TemporalModel, seed: int) -> tuple[Data, Ints]:
    """Draw events from the model.

    Returns:
        The graph, its edges in the order of time, and the community of each node in each period
        ``time * PERIODS // time_span``, ``[PERIODS, num_nodes]``.
    """
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, model.time_span, model.num_events))
    activity = np.cumsum(power_law(model.num_nodes, model.degree_exponent, rng))
    sources = np.searchsorted(activity, rng.random(model.num_events) * activity[-1], side="right")
    # Rounding may carry a draw over the end.
    sources = np.minimum(sources, model.num_nodes - 1)
    targets = np.empty(model.num_events, dtype=np.int64)
    period = times * PERIODS // model.time_span
    bounds = np.searchsorted(period, np.arange(PERIODS + 1))
    slots = _CommunitySlots(model, rng)
    history = np.empty((PERIODS, model.num_nodes), dtype=np.int64)
    for number in range(PERIODS):
        if number:
            slots.move(rng)
        history[number] = slots.community()
        events = slice(bounds[number], bounds[number + 1])
        targets[events] = slots.partners(sources[events], rng)
    data = Data(
        edge_index=torch.from_numpy(np.stack([sources, targets])),
        edge_time=torch.from_numpy(times),
        num_nodes=model.num_nodes,
    )
    return data, history


def best_auc(model: TemporalModel) -> float:
    """Return the area under the ROC curve of the likelihood ratio; see :class:`PlantedTemporalData`."""
    share = model.sizes / model.num_nodes  # of the sources
    chance = (model.sizes - 1) / (model.num_nodes - 1)
    outside = np.full_like(chance, 1 - model.predictability)
    score = np.concatenate([model.predictability / chance + outside, outside])
    inside = model.predictability + (1 - model.predictability) * chance
    return expected_auc(
        score,
        np.concatenate([share * inside, share * (1 - inside)]),
        np.concatenate([share * chance, share * (1 - chance)]),
    )


class _CommunitySlots:
    """Assigns nodes to slots; each community has a fixed range of slots, and nodes that move exchange their slots."""

    def __init__(self, model: TemporalModel, rng: np.random.Generator) -> None:
        self.model = model
        self.node = rng.permutation(model.num_nodes)  # by slot
        self.slot = np.argsort(self.node)  # by node
        self.owner = np.repeat(np.arange(model.num_communities), model.sizes)  # by slot
        self.first = np.cumsum(model.sizes) - model.sizes  # by community

    def community(self) -> Ints:
        """Return the community of each node."""
        return self.owner[self.slot]

    def move(self, rng: np.random.Generator) -> None:
        """Move the nodes that change their community between two periods."""
        movers = rng.permutation(self.model.num_nodes)
        expected = min(1.0, self.model.drift / (PERIODS - 1)) * movers.size
        movers = movers[: int(expected + rng.random())]
        slots = np.roll(self.slot[movers], 1)
        self.slot[movers] = slots
        self.node[slots] = movers

    def partners(self, sources: Ints, rng: np.random.Generator) -> Ints:
        """Draw another node for each source."""
        slot = self.slot[sources]
        community = self.owner[slot]
        near = rng.random(sources.size) < self.model.predictability
        first = np.where(near, self.first[community], 0)
        count = np.where(near, self.model.sizes[community], self.model.num_nodes)
        drawn = rng.integers(0, count - 1)  # the source's own slot is left out
        return self.node[first + drawn + (drawn >= slot - first)]
