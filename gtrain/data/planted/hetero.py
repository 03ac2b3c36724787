"""A generated heterogeneous graph whose best possible accuracy is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch_geometric.data import HeteroData

from gtrain.data.config import PlantedHeteroConfig, PlantedHeteroParameters
from gtrain.data.module import OUTLINE
from gtrain.data.planted.common import (
    Floats,
    Ints,
    PlantedSource,
    class_features,
    expected_accuracy,
    log_odds,
    noisy_labels,
    power_law,
)
from gtrain.data.planted.pairs import draw_between, draw_pairs, room_between
from gtrain.errors import ConfigError

RELATIONS = {"writes": "author", "cites": "paper", "mentions": "term"}
"""Relations by the node type that they join papers with."""


_EDGE_TYPES = [
    ("author", "writes", "paper"),
    ("paper", "written_by", "author"),
    ("paper", "cites", "paper"),
    ("paper", "cited_by", "paper"),
    ("paper", "mentions", "term"),
    ("term", "mentioned_in", "paper"),
]


@dataclass
class HeteroModel(PlantedHeteroParameters):
    """The parameters of the generator, checked; see :class:`PlantedHeteroData` for their meaning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for node_type in ("paper", "author", "term"):
            if self.num_nodes(node_type) < self.num_classes:
                raise ConfigError(
                    f"data.num_{node_type}s={self.num_nodes(node_type)} is less than "
                    f"data.num_classes={self.num_classes}",
                    hint=f"raise data.num_{node_type}s, or lower data.num_classes",
                )
        for relation in RELATIONS:
            self._check_density(relation)

    def num_nodes(self, node_type: str) -> int:
        """Nodes of a type."""
        return int(getattr(self, f"num_{node_type}s"))

    def homophily(self, relation: str) -> float:
        """Share of a relation's edges that stay within a class."""
        return float(getattr(self, f"{relation}_homophily"))

    def pairs(self, relation: str) -> tuple[int, int]:
        """Edges of a relation within classes and between classes, one direction counted."""
        total = int(getattr(self, f"num_{relation}"))
        inside = round(self.homophily(relation) * total)
        return inside, total - inside

    def _check_density(self, relation: str) -> None:
        sizes = [
            np.bincount(np.arange(self.num_nodes(node_type)) % self.num_classes)
            for node_type in ("paper", RELATIONS[relation])
        ]
        room = room_between(*sizes)
        if relation == "cites":
            # Two different papers: an unordered pair is cited once.
            room = (room[0] - self.num_papers) // 2, room[1] // 2
        for wanted, pairs, where in zip(self.pairs(relation), room, ("within", "between"), strict=True):
            if wanted > pairs // 2:
                raise ConfigError(
                    f"data.num_{relation}={sum(self.pairs(relation))} and data.{relation}_homophily="
                    f"{self.homophily(relation):g} ask for {wanted} node pairs {where} classes, and half of the "
                    f"{pairs} pairs is the limit",
                    hint=f"lower data.num_{relation}, or raise the number of nodes",
                )


class PlantedHeteroData(PlantedSource[HeteroModel, PlantedHeteroConfig]):
    """Papers, their authors and their terms: a planted partition with three node types and six relations.

    Nodes of every type have a class; classes have equal sizes. Each of the three kinds of edges (author *writes* paper,
    paper *cites* paper, paper *mentions* term) has a homophily: the share of the edges that join two nodes of one
    class. The others join nodes of two classes, all pairs of classes equally often. Within the classes, ends are drawn
    in proportion to weights from a power law. No edge occurs twice, and no two papers cite each other. Each kind is
    stored in both directions, the reverse ones as ``written_by``, ``cited_by`` and ``mentioned_in``. Papers and authors
    have features ``feature_signal * mean[class] + N(0, I)`` of different widths, terms have none. Papers have labels:
    the class with probability ``1 - label_noise``, else another class at random.

    **The best possible accuracy** (fact ``best_acc``) is derived as for :class:`~gtrain.data.planted.PlantedData`. A
    classifier that knows every parameter, the paper's own features and the true class of all its neighbours has

        p(c) proportional to  exp(-|x_i - s m_c|^2 / 2) * product over relations r, neighbours j of w_r[c, c_j]

    with ``w_r`` proportional to the homophily h_r for equal classes and to ``(1 - h_r) / (k - 1)`` for two different
    ones of k; label noise turns p into the label's posterior, whose largest value is right with that probability.
    ``best_acc`` is the mean over papers. It is an upper bound, because a trained model has to infer the neighbours'
    classes. A model that does not distinguish relations cannot weigh them by their homophily.

    Its settings are those of :class:`~gtrain.data.config.PlantedHeteroConfig`.
    """

    name = "planted_hetero"
    outline = {
        **OUTLINE,
        "num_nodes": {"paper": 16, "author": 16, "term": 16},
        "num_features": {"paper": 16, "author": 8, "term": None},
        "sparse_features": [],
        "target": "paper",
        "edge_types": _EDGE_TYPES,
    }

    def read(self) -> HeteroData:
        """Generate the graph."""
        data, best = generate(self.model, self.seed)
        self._facts = {"best_acc": best}
        return data


def generate(model: HeteroModel, seed: int) -> tuple[HeteroData, float]:
    """Draw a graph from the model, and compute the best possible accuracy on it."""
    rng = np.random.default_rng(seed)
    types = ("paper", "author", "term")
    classes = {t: rng.permutation(np.arange(model.num_nodes(t)) % model.num_classes) for t in types}
    weights = {t: power_law(model.num_nodes(t), model.degree_exponent, rng) for t in types}
    edges = {relation: _draw(model, relation, classes, weights, rng) for relation in RELATIONS}
    widths = {"paper": model.num_features, "author": model.num_author_features}
    features = {
        t: class_features(classes[t], model.num_classes, width, model.feature_signal, rng)
        for t, width in widths.items()
    }
    labels = noisy_labels(classes["paper"], model.num_classes, model.label_noise, rng)
    evidence = features["paper"][1] + sum(
        _relation_evidence(model, relation, edges[relation], classes) for relation in RELATIONS
    )
    data = _assemble(edges)
    for node_type in types:
        data[node_type].num_nodes = model.num_nodes(node_type)
        if node_type in features:
            data[node_type].x = torch.from_numpy(features[node_type][0])
    data["paper"].y = torch.from_numpy(labels)
    return data, expected_accuracy(evidence, model.label_noise)


def _draw(
    model: HeteroModel, relation: str, classes: dict[str, Ints], weights: dict[str, Floats], rng: np.random.Generator
) -> Ints:
    """Return the edges of a relation from papers to the other type, ``[2, E]``."""
    other = RELATIONS[relation]
    if other == "paper":
        pairs = draw_pairs(classes[other], weights[other], *model.pairs(relation), rng)
        flip = rng.random(pairs.shape[1]) < 0.5  # who cites whom
        return np.where(flip, pairs[::-1], pairs)
    return draw_between(
        (classes["paper"], weights["paper"]), (classes[other], weights[other]), *model.pairs(relation), rng
    )


def _relation_evidence(model: HeteroModel, relation: str, edges: Ints, classes: dict[str, Ints]) -> Floats:
    """Return what a relation tells of each paper's class: log-odds times neighbours of that class, ``[N, k]``."""
    papers, others = edges
    if relation == "cites":  # citing and cited papers tell alike
        papers, others = np.concatenate([edges, edges[::-1]], axis=1)
    k = model.num_classes
    keys = papers * k + classes[RELATIONS[relation]][others]
    counts = np.bincount(keys, minlength=model.num_papers * k).reshape(-1, k)
    return counts.astype(np.float64) * log_odds(model.homophily(relation), k)


def _assemble(edges: dict[str, Ints]) -> HeteroData:
    """Return the edges in both directions."""
    data = HeteroData()
    for node_type in ("paper", "author", "term"):
        data[node_type].num_nodes = 0  # fixes the order of the types
    there = {relation: torch.from_numpy(np.ascontiguousarray(pairs)) for relation, pairs in edges.items()}
    authors, papers, terms = there["writes"], there["cites"], there["mentions"]
    both_ways = (authors.flip(0), authors, papers, papers.flip(0), terms, terms.flip(0))
    for edge_type, edge_index in zip(_EDGE_TYPES, both_ways, strict=True):
        data[edge_type].edge_index = edge_index
    return data
