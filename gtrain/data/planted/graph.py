"""A generated graph whose best possible accuracy is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch_geometric.data import Data

from gtrain.data.config import PlantedConfig, PlantedParameters
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
from gtrain.data.planted.pairs import draw_pairs
from gtrain.errors import ConfigError


@dataclass
class PlantedModel(PlantedParameters):
    """The parameters of the generator, checked; see :class:`PlantedData` for their meaning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_classes > self.num_nodes:
            raise ConfigError(
                f"data.num_classes={self.num_classes} is more than data.num_nodes={self.num_nodes}",
                hint="lower data.num_classes, or raise data.num_nodes",
            )
        if self.num_edges < self.num_loops + 2:
            raise ConfigError(
                f"data.num_edges={self.num_edges} leaves no edges beside the self-loops of {self.num_nodes} nodes",
                hint="raise data.num_edges, or set data.self_loops=false",
            )
        self._check_density()

    @property
    def num_loops(self) -> int:
        """Edges from a node to itself."""
        return self.num_nodes if self.self_loops else 0

    @property
    def pairs(self) -> tuple[int, int]:
        """Undirected edges inside classes and between classes."""
        total = (self.num_edges - self.num_loops) // 2
        inside = round(self.homophily * total)
        return inside, total - inside

    @property
    def class_sizes(self) -> Ints:
        """Nodes of each class, which differ by one at most."""
        return np.bincount(np.arange(self.num_nodes) % self.num_classes)

    def _check_density(self) -> None:
        sizes = self.class_sizes.tolist()
        pairs_inside = sum(n * (n - 1) // 2 for n in sizes)
        pairs_between = math.comb(self.num_nodes, 2) - pairs_inside
        regions = ("inside classes", "between classes")
        for pairs, limit, region in zip(self.pairs, (pairs_inside, pairs_between), regions, strict=True):
            if pairs > limit:
                raise ConfigError(
                    f"data.num_edges={self.num_edges} and data.homophily={self.homophily:g} ask for {pairs} node "
                    f"pairs {region}, and {self.num_nodes} nodes in {self.num_classes} classes have {limit}",
                    hint="lower data.num_edges, or raise data.num_nodes",
                )


class PlantedData(PlantedSource[PlantedModel, PlantedConfig]):
    """A degree-corrected planted partition (Karrer and Newman 2011) with Gaussian features.

    Every node has a class; classes have equal sizes. Node i has a weight ``theta_i`` from a power law. Of the
    undirected edges the share ``homophily`` joins two nodes of one class, the others nodes of two classes, all pairs of
    classes equally often. Within the classes, ends are drawn in proportion to the weights. There are no parallel edges;
    with ``self_loops`` every node has a loop, otherwise none. Features are ``feature_signal * mean[class] + N(0, I)``
    with unit vectors as means. The label is the class with probability ``1 - label_noise``, else another class at
    random.

    **The best possible accuracy** (fact ``best_acc``) is that of a classifier that knows every parameter, the node's
    features and the true class of every other node. With edges as independent Poisson counts of mean
    ``theta_i theta_j w[c_i, c_j]``, ``w`` proportional to ``homophily`` for equal classes and to
    ``(1 - homophily) / (k - 1)`` for two different ones of k, the posterior of node i's class is

        p(c) proportional to  exp(-|x_i - s m_c|^2 / 2) * product over neighbours j of w[c, c_j]

    The pairs without an edge contribute ``exp(-theta_i sum_j theta_j w[c, c_j])``, the same for all c since classes
    have equal total weight, and cancel; so does ``theta_i``. Given the classes of its neighbours, the rest of the graph
    has no information about node i. Label noise e turns p into the label's posterior,
    ``q(c) = (1 - e) p(c) + e (1 - p(c)) / (k - 1)``. Choosing the largest q is right with probability ``max_c q(c)``;
    ``best_acc`` is its mean over this graph's nodes.

    It is an upper bound, because a trained model has to infer its neighbours' classes. The bound is tight if features
    and second neighbours almost determine these. The generated graph differs from the Poisson model (it is simple, and
    its edge counts are fixed), which matters only if almost all pairs are joined. The accuracy on n test nodes varies
    around its expectation a by ``sqrt(a (1 - a) / n)``.

    Its settings are those of :class:`~gtrain.data.config.PlantedConfig`.
    """

    name = "planted"
    outline = OUTLINE

    def read(self) -> Data:
        """Generate the graph."""
        data, best = generate(self.model, self.seed)
        self._facts = {"best_acc": best}
        return data


def generate(model: PlantedModel, seed: int) -> tuple[Data, float]:
    """Draw a graph from the model, and compute the best possible accuracy on it."""
    rng = np.random.default_rng(seed)
    classes = rng.permutation(np.arange(model.num_nodes) % model.num_classes)
    one_way = draw_pairs(classes, power_law(model.num_nodes, model.degree_exponent, rng), *model.pairs, rng)
    edges = np.concatenate([one_way, one_way[::-1]], axis=1)
    x, likelihood = class_features(classes, model.num_classes, model.num_features, model.feature_signal, rng)
    labels = noisy_labels(classes, model.num_classes, model.label_noise, rng)
    best = best_accuracy(likelihood, neighbour_classes(edges, classes, model.num_classes), model)
    if model.self_loops:
        edges = np.concatenate([edges, np.tile(np.arange(model.num_nodes), (2, 1))], axis=1)
    data = Data(x=torch.from_numpy(x), edge_index=torch.from_numpy(edges), y=torch.from_numpy(labels))
    return data, best


def best_accuracy(likelihood: Floats, neighbours: Ints, model: PlantedModel) -> float:
    """Return the mean over nodes of the largest posterior of a label.

    Args:
        likelihood: log-likelihood of each node's features under each class, up to a constant for each node.
        neighbours: number of neighbours of each node in each class.
        model: the generator's parameters.

    Shapes:
        likelihood ``[N, k]``, neighbours ``[N, k]``.
    """
    evidence = likelihood + neighbours * log_odds(model.homophily, model.num_classes)
    return expected_accuracy(evidence, model.label_noise)


def neighbour_classes(edges: Ints, classes: Ints, num_classes: int) -> Ints:
    """Count the neighbours of each node in each class, ``[N, k]``."""
    keys = edges[1] * num_classes + classes[edges[0]]
    return np.bincount(keys, minlength=classes.size * num_classes).reshape(-1, num_classes)
