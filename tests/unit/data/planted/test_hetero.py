"""gtrain.data.planted.hetero: the generator, and the accuracy that nothing can beat."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

from gtrain.data.planted.hetero import RELATIONS, HeteroModel, PlantedHeteroData, generate
from gtrain.errors import ConfigError

REVERSE = {"writes": "written_by", "cites": "cited_by", "mentions": "mentioned_in"}


def both_ways(data: HeteroData, relation: str) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    (there,) = (t for t in data.edge_types if t[1] == relation)
    return there, (there[2], REVERSE[relation], there[0])


@pytest.mark.parametrize(
    "model",
    [
        HeteroModel(),
        HeteroModel(num_papers=61, num_authors=30, num_terms=4, num_writes=0, num_cites=200, num_mentions=50),
        HeteroModel(num_papers=300, num_writes=20000, num_cites=5000, writes_homophily=1.0, cites_homophily=0.0),
    ],
)
def test_the_graph_is_what_was_asked_for(model: HeteroModel) -> None:
    data, _ = generate(model, seed=1)
    assert data.validate()
    assert data.node_types == ["paper", "author", "term"] and "x" not in data["term"]
    assert data["paper"].x.shape == (model.num_papers, model.num_features) and "y" not in data["author"]
    assert data["author"].x.shape == (model.num_authors, model.num_author_features)
    for relation, count in (("writes", model.num_writes), ("cites", model.num_cites), ("mentions", model.num_mentions)):
        there, back = both_ways(data, relation)
        edges = data[there].edge_index
        assert edges.shape == (2, count) and torch.unique(edges, dim=1).size(1) == count
        assert torch.equal(data[back].edge_index, edges.flip(0))
    cites = data["paper", "cites", "paper"].edge_index
    assert (cites[0] != cites[1]).all() and torch.unique(cites.sort(dim=0).values, dim=1).size(1) == model.num_cites


def test_homophily_of_each_relation() -> None:
    """Papers of one class that share a term, author or citation tell what share stays within a class."""
    model = HeteroModel(label_noise=0.0, cites_homophily=0.65)
    data, _ = generate(model, seed=0)
    source, target = data["paper", "cites", "paper"].edge_index
    same = data["paper"].y[source] == data["paper"].y[target]
    assert int(same.sum()) == round(0.65 * model.num_cites)
    for relation, other in (("writes", "author"), ("mentions", "term")):
        papers, others = data[both_ways(data, relation)[int(relation == "writes")]].edge_index
        votes = torch.zeros(model.num_nodes(other), 4).index_put_(
            (others, data["paper"].y[papers]), torch.ones(papers.numel()), accumulate=True
        )
        share = votes.max(dim=1).values.sum() / votes.sum()  # the majority is the class, where there are many papers
        assert share >= model.homophily(relation) - 0.02


def test_seeded() -> None:
    model = HeteroModel(num_papers=300, num_authors=90, num_writes=500, num_cites=500)
    (one, best), (again, same), (other, _) = (generate(model, seed) for seed in (4, 4, 5))
    writes = ("author", "writes", "paper")
    assert torch.equal(one["paper"].x, again["paper"].x) and best == same
    assert torch.equal(one[writes].edge_index, again[writes].edge_index)
    assert not torch.equal(one[writes].edge_index, other[writes].edge_index)


def test_without_information_the_best_is_the_best_guess() -> None:
    flat = {f"{relation}_homophily": 1 / 4 for relation in RELATIONS}
    _, best = generate(HeteroModel(feature_signal=0.0, **flat), seed=0)
    assert best == pytest.approx(0.9 * 1 / 4 + 0.1 * 3 / 4 / 3, abs=1e-9)


def test_features_alone_against_the_closed_form() -> None:
    """Two classes and useless relations: accuracy Phi(|m1 - m2| / 2), mixed with the noise."""
    flat = {f"{relation}_homophily": 1 / 2 for relation in RELATIONS}
    model = HeteroModel(num_papers=60_000, num_classes=2, num_features=3, feature_signal=1.2, **flat)
    _, best = generate(model, seed=3)
    data, _ = generate(HeteroModel(**{**vars(model), "label_noise": 0.0}), seed=3)
    x, y = data["paper"].x, data["paper"].y
    distance = float((x[y == 0].mean(0) - x[y == 1].mean(0)).norm())
    right = 0.5 * (1 + math.erf(distance / 2 / math.sqrt(2)))
    assert best == pytest.approx(0.9 * right + 0.1 * (1 - right), abs=0.005)


def test_best_acc_is_what_an_oracle_scores() -> None:
    """Terms and authors are asked for their true class, which many papers show; citations for the papers' own."""
    model = HeteroModel(num_papers=20000, num_authors=200, num_terms=100, num_writes=40000, num_mentions=40000)
    data, best = generate(model, seed=2)
    y = generate(HeteroModel(**{**vars(model), "label_noise": 0.0}), seed=2)[0]["paper"].y
    means = torch.stack([data["paper"].x[y == c].mean(0) for c in range(4)])
    score = -(torch.cdist(data["paper"].x, means) ** 2) / 2
    for relation, other in RELATIONS.items():
        there, back = both_ways(data, relation)
        papers, others = data[there if there[0] == "paper" else back].edge_index
        classes = y
        if other != "paper":
            votes = torch.zeros(model.num_nodes(other), 4)
            votes.index_put_((others, y[papers]), torch.ones(papers.numel()), accumulate=True)
            classes = votes.argmax(dim=1)
        else:
            papers, others = torch.cat([papers, others]), torch.cat([others, papers])
        homophily = model.homophily(relation)
        weight = math.log(homophily / ((1 - homophily) / 3))
        score.index_put_((papers, classes[others]), torch.full((papers.numel(),), weight), accumulate=True)
    right = (score.argmax(1) == data["paper"].y).float().mean().item()
    assert right == pytest.approx(best, abs=4 * math.sqrt(best * (1 - best) / 20000))


@pytest.mark.slow
def test_a_heterogeneous_network_comes_near_and_not_above() -> None:
    model = HeteroModel(num_papers=2000, num_authors=500, num_terms=100, num_writes=8000, num_cites=8000)
    data, best = generate(model, seed=0)
    data["term"].x = torch.eye(model.num_terms)
    torch.manual_seed(0)
    convs = [
        HeteroConv({t: SAGEConv((-1, -1), width, aggr="sum") for t in data.edge_types}, aggr="sum") for width in (32, 4)
    ]

    def forward(training: bool) -> torch.Tensor:
        hidden = convs[0](data.x_dict, data.edge_index_dict)
        hidden = {k: torch.dropout((v / 8).relu(), 0.5, training) for k, v in hidden.items()}
        return convs[1](hidden, data.edge_index_dict)["paper"]

    forward(False)
    parameters = [p for conv in convs for p in conv.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01, weight_decay=1e-3)
    train = torch.from_numpy(np.random.default_rng(0).random(2000) < 0.6)
    for _ in range(80):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(forward(True)[train], data["paper"].y[train]).backward()
        optimizer.step()
    right = (forward(False).argmax(1) == data["paper"].y)[~train].float().mean().item()
    assert best - 0.1 < right < best + 4 * math.sqrt(0.09 / 800)


def test_the_store(tmp_path: Path) -> None:
    module = PlantedHeteroData(num_papers=300, num_writes=500, num_cites=500, num_parts=2, store=str(tmp_path))
    module.prepare_data()
    store, facts = module.open_store(), module.facts
    assert store.num_nodes_of("paper") == 300 and store.num_edges_of(("author", "writes", "paper")) == 500
    assert facts["target"] == "paper" and facts["num_features"]["author"] == 16 and 0.5 < facts["best_acc"] < 0.91


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_writes": 8_000_000}, "num_writes=8000000 and data.writes_homophily=0.8 ask for .* within classes"),
        ({"num_terms": 3}, "num_terms=3 is less than data.num_classes=4"),
        ({"cites_homophily": 1.2}, "cites_homophily=1.2 was set; it must be at least 0 and at most 1"),
        ({"num_mentions": -1}, "num_mentions=-1 was set; it must be at least 0"),
        ({"degree_exponent": math.nan}, "degree_exponent=nan was set; it must be a number above 2, and finite"),
        ({"feature_signal": math.inf}, "feature_signal=inf was set; it must be at least 0, and finite"),
        ({"split": "public"}, "has no masks"),
    ],
)
def test_impossible_graphs(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlantedHeteroData(**options)  # type: ignore[arg-type]
