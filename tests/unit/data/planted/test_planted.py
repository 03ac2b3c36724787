"""gtrain.data.planted: the generator, and the accuracy that nothing can beat."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import GCNConv

from gtrain.data.planted import PlantedData, PlantedModel, best_accuracy, generate
from gtrain.data.planted.pairs import ClassSampler
from gtrain.errors import ConfigError


@pytest.mark.parametrize(
    "model",
    [
        PlantedModel(),
        PlantedModel(num_nodes=60, num_edges=1000, num_classes=3, homophily=0.5),
        PlantedModel(num_nodes=10, num_edges=90, num_classes=2, homophily=20 / 45),  # the complete graph
        PlantedModel(num_nodes=300, num_edges=4000, num_classes=5, homophily=1.0, degree_exponent=2.1),
        PlantedModel(num_nodes=300, num_edges=4001, num_classes=5, homophily=0.0),
    ],
)
def test_the_graph_is_what_was_asked_for(model: PlantedModel) -> None:
    data, _ = generate(PlantedModel(**{**vars(model), "label_noise": 0.0}), seed=1)
    assert data.num_edges == model.num_edges // 2 * 2
    assert data.x.shape == (model.num_nodes, model.num_features)
    assert data.is_undirected() and not data.has_self_loops() and data.coalesce().num_edges == data.num_edges
    same = data.y[data.edge_index[0]] == data.y[data.edge_index[1]]
    assert int(same.sum()) == 2 * model.pairs[0]
    sizes = data.y.bincount()
    assert sizes.max() - sizes.min() <= 1


def test_self_loops_count_as_edges_and_tell_nothing() -> None:
    """The same pairs as in a graph of as many edges less, and the same best accuracy."""
    data, best = generate(PlantedModel(num_nodes=400, num_edges=4400, self_loops=True), seed=1)
    plain, same = generate(PlantedModel(num_nodes=400, num_edges=4000), seed=1)
    loops = data.edge_index[0] == data.edge_index[1]
    assert data.num_edges == 4400 and torch.equal(data.edge_index[0][loops].sort().values, torch.arange(400))
    assert torch.equal(data.edge_index[:, ~loops], plain.edge_index) and best == same


def test_dense_groups_of_heavy_nodes_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heavy nodes have met each other soon, so that many rounds of drawing find few new pairs."""
    model = PlantedModel(num_nodes=20_000, num_edges=1_900_000, num_classes=40, degree_exponent=2.5)
    drawn: list[int] = []
    nodes = ClassSampler.nodes

    def counted(sampler: ClassSampler, classes: np.ndarray, *rest: Any) -> np.ndarray:
        drawn.append(classes.size)
        return nodes(sampler, classes, *rest)

    monkeypatch.setattr(ClassSampler, "nodes", counted)
    data, _ = generate(model, seed=0)
    assert data.num_edges == 1_900_000 and sum(drawn) < 1.5 * data.num_edges  # ends, of which each edge has one
    keys = data.edge_index[0] * model.num_nodes + data.edge_index[1]
    assert keys.unique().numel() == data.num_edges


def test_seeded() -> None:
    model = PlantedModel(num_nodes=200, num_edges=1000)
    (one, best), (again, same), (other, _) = (generate(model, seed) for seed in (4, 4, 5))
    assert torch.equal(one.x, again.x) and torch.equal(one.edge_index, again.edge_index) and best == same
    assert not torch.equal(one.x, other.x)


def test_label_noise() -> None:
    clean, _ = generate(PlantedModel(num_nodes=20000, label_noise=0.0), seed=0)
    noisy, _ = generate(PlantedModel(num_nodes=20000, label_noise=0.3), seed=0)
    wrong = noisy.y != clean.y
    assert wrong.float().mean() == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 20000))
    shift = ((noisy.y - clean.y) % 8)[wrong].bincount(minlength=8)
    assert shift[0] == 0 and shift[1:].min() > 0.8 * int(wrong.sum()) / 7


def test_without_information_the_best_is_the_best_guess() -> None:
    """Neither features nor edges tell of a class: only a class of 1/k can be guessed, right or wrong."""
    _, best = generate(PlantedModel(homophily=1 / 8, feature_signal=0.0, label_noise=0.1), seed=0)
    assert best == pytest.approx(1 / 8, abs=1e-9)


def test_features_alone_against_the_closed_form() -> None:
    """Two classes with means m1 and m2 and no graph: accuracy Phi(|m1 - m2| / 2), mixed with the noise."""
    model = PlantedModel(
        num_nodes=100_000, num_classes=2, homophily=0.5, num_features=3, feature_signal=1.2, label_noise=0.2
    )
    _, best = generate(model, seed=3)
    data, _ = generate(PlantedModel(**{**vars(model), "label_noise": 0.0}), seed=3)
    distance = float((data.x[data.y == 0].mean(0) - data.x[data.y == 1].mean(0)).norm())
    right = 0.5 * (1 + math.erf(distance / 2 / math.sqrt(2)))
    assert best == pytest.approx(0.8 * right + 0.2 * (1 - right), abs=0.004)


def test_edges_alone_against_an_enumeration() -> None:
    """A node with d neighbours of known classes, two classes: the majority wins, and a tie is a guess."""
    model = PlantedModel(num_classes=2, homophily=0.8, label_noise=0.0)
    d, expected = 5, 0.0
    rows, chances = [], []
    for same in range(d + 1):
        chance = math.comb(d, same) * 0.8**same * 0.2 ** (d - same)
        expected += chance * (same > d / 2)
        rows.append([same, d - same])
        chances.append(chance)
    scores = [best_accuracy(np.zeros((1, 2)), np.array([row]), model) for row in rows]
    assert float(np.dot(chances, scores)) == pytest.approx(expected, abs=1e-12)


def test_the_oracle_reaches_it_and_a_gcn_nearly(tmp_path: Path) -> None:
    """A classifier told of the neighbours' classes scores best_acc; a plain GCN comes within 3 points."""
    module = PlantedData(store=str(tmp_path), num_nodes=4000, num_edges=40000)
    module.prepare_data()
    (batch,) = module.train_dataloader()
    best = module.facts["best_acc"]
    assert 0.88 < best < 0.9
    torch.manual_seed(0)
    first, second = GCNConv(64, 64), GCNConv(64, 8)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01, weight_decay=5e-4)

    def forward(training: bool) -> torch.Tensor:
        hidden = first(torch.dropout(batch.x, 0.5, training), batch.edge_index).relu()
        return second(torch.dropout(hidden, 0.5, training), batch.edge_index)

    for _ in range(30):
        optimizer.zero_grad()
        seeds = batch.seeds
        torch.nn.functional.cross_entropy(forward(True)[seeds], batch.y[seeds]).backward()
        optimizer.step()
    right = (forward(False).argmax(1) == batch.y)[~batch.train_mask].float().mean().item()
    assert best - 0.03 < right < best + 4 * math.sqrt(0.09 / 1600)


def test_best_acc_is_what_an_oracle_scores() -> None:
    model = PlantedModel(
        num_nodes=20000, num_edges=60000, num_classes=4, homophily=0.6, feature_signal=1.0, label_noise=0.15
    )
    data, best = generate(model, seed=2)
    classes = generate(PlantedModel(**{**vars(model), "label_noise": 0.0}), seed=2)[0].y
    means = torch.stack([data.x[classes == c].mean(0) for c in range(4)])  # 5000 nodes each: close to the truth
    neighbours = torch.zeros(20000, 4).index_put_(
        (data.edge_index[1], classes[data.edge_index[0]]), torch.ones(data.num_edges), accumulate=True
    )
    score = -(torch.cdist(data.x, means) ** 2) / 2 + neighbours * math.log(0.6 / (0.4 / 3))
    right = (score.argmax(1) == data.y).float().mean().item()
    assert right == pytest.approx(best, abs=4 * math.sqrt(best * (1 - best) / 20000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 10, "num_edges": 90, "num_classes": 2}, "36 node pairs inside classes, and 10 nodes in 2.*20"),
        ({"num_nodes": 10, "num_edges": 80, "num_classes": 2, "homophily": 0.1}, "36 node pairs between .* have 25"),
        ({"homophily": 1.2}, "homophily=1.2 was set; it must be at least 0 and at most 1"),
        ({"num_classes": 1}, "num_classes=1 was set; it must be at least 2"),
        ({"degree_exponent": 2.0}, "degree_exponent=2.0 was set; it must be a number above 2"),
        ({"num_nodes": 5, "num_edges": 4}, "num_classes=8 is more than data.num_nodes=5"),
        ({"num_nodes": 100, "num_edges": 101, "self_loops": True}, "no edges beside the self-loops of 100 nodes"),
        ({"split": "public"}, "has no masks"),
    ],
)
def test_impossible_graphs(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlantedData(**options)  # type: ignore[arg-type]
