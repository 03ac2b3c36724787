"""gtrain.data.planted.kg: the generator, and the ranks that nothing can beat."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gtrain.data.planted.kg import KGGraph, KGModel, PlantedKGData, as_data, best_scores, generate
from gtrain.errors import ConfigError

SMALL = KGModel(num_entities=100, num_relations=4, num_positions=20, num_triples=1200, noise=0.1, held_out=0.1)


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        KGModel(),
        KGModel(num_entities=103, num_relations=3, num_positions=20, num_triples=1545, noise=0.0),  # uneven positions
        KGModel(num_entities=60, num_relations=2, num_positions=20, num_triples=360, noise=0.0),  # all that rules allow
    ],
)
def test_triples_are_what_was_asked_for(model: KGModel) -> None:
    graph = generate(model, seed=1)
    triples = np.stack([graph.heads, graph.relations, graph.tails])
    assert triples.shape[1] == model.num_triples == np.unique(triples, axis=1).shape[1]
    assert int(graph.allowed.sum()) == model.counts[0]
    assert np.ptp(np.bincount(graph.positions, minlength=model.num_positions)) <= 1
    assert len(set(graph.shifts.tolist())) == model.num_relations
    data = as_data(graph)
    sizes = [data[f"{prefix}edge_index"].size(1) for prefix in ("", "val_", "test_")]
    assert sizes[1] == sizes[2] == int(model.held_out * model.num_triples) and sum(sizes) == model.num_triples


def test_seeded() -> None:
    one, again, other = (as_data(generate(SMALL, seed)) for seed in (4, 4, 5))
    assert torch.equal(one.edge_index, again.edge_index) and torch.equal(one.test_edge_type, again.test_edge_type)
    assert not torch.equal(one.edge_index, other.edge_index)


def simulated(graph: KGGraph, repeats: int, seed: int) -> list[float]:
    """Rank the test triples with a scorer that knows the rules: filtered, equals in random order."""
    rng = np.random.default_rng(seed)
    n = graph.positions.size
    true = {(h, r, t) for h, r, t in zip(graph.heads, graph.relations, graph.tails, strict=True)}
    ranks = []
    for h, r, t in list(zip(graph.heads, graph.relations, graph.tails, strict=True))[: graph.num_test]:
        shifted = (graph.positions + graph.shifts[r]) % graph.num_positions
        sides = [
            (shifted[h] == graph.positions, t, [(h, r, e) in true for e in range(n)]),
            (shifted == graph.positions[t], h, [(e, r, t) in true for e in range(n)]),
        ]
        for allowed, answer, known in sides:
            others = np.flatnonzero(~np.array(known))
            for _ in range(repeats):
                noise = rng.random(n)
                ranks.append(1 + int((allowed[others] + noise[others] > allowed[answer] + noise[answer]).sum()))
    found = np.array(ranks)
    return [float((1 / found).mean()), *(float((found <= k).mean()) for k in (1, 3, 10))]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_best_scores_are_what_an_oracle_scores(noise: float) -> None:
    model = KGModel(**{**vars(SMALL), "noise": noise})
    graph = generate(model, seed=2)
    repeats = 20
    scores = simulated(graph, repeats, seed=0)
    spread = 5 * 0.5 / math.sqrt(2 * graph.num_test * repeats)
    assert scores == pytest.approx(list(best_scores(graph).values()), abs=spread)
    assert 0.3 < scores[0] < 0.9


def test_where_rules_allow_nothing_else_the_best_is_1() -> None:
    graph = generate(KGModel(num_entities=60, num_relations=2, num_positions=20, num_triples=360, noise=0.0), seed=0)
    assert set(best_scores(graph).values()) == {1.0}


def test_one_open_query_by_hand() -> None:
    """Two entities at each of two positions, shift 0: heads know 2 tails, of which one is drawn for each."""
    graph = KGGraph(
        heads=np.array([0, 1]),
        relations=np.array([0, 0]),
        tails=np.array([0, 1]),
        positions=np.array([0, 0, 1, 1]),
        shifts=np.array([0]),
        num_test=1,
        types=np.zeros(4, dtype=np.int64),
        num_types=1,
        num_positions=2,
    )
    best = best_scores(graph)
    assert best["best_mrr"] == pytest.approx((1 + 1 / 2) / 2) and best["best_hits@1"] == pytest.approx(0.5)


@pytest.mark.slow
def test_complex_comes_near_and_not_above() -> None:
    """ComplEx with a softmax over all tails, from scratch: within 0.1 of best_mrr on the side of the tails."""
    model = KGModel(num_entities=200, num_relations=4, num_positions=40, num_triples=3600, noise=0.0)
    data, best = as_data(generate(model, seed=0)), best_scores(generate(model, seed=0))["best_mrr"]
    torch.manual_seed(0)
    entities = torch.nn.Parameter(torch.randn(200, 64, dtype=torch.cfloat) * 0.1)
    relations = torch.nn.Parameter(torch.randn(4, 64, dtype=torch.cfloat) * 0.1)
    optimizer = torch.optim.Adam([entities, relations], lr=0.02)

    def scores(edges: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        return (entities[edges[0]] * relations[types] @ entities.conj().T).real

    for _ in range(150):
        optimizer.zero_grad()
        penalty = 3e-4 * (entities.abs() ** 3).sum() / 200
        loss = torch.nn.functional.cross_entropy(scores(data.edge_index, data.edge_type), data.edge_index[1])
        (loss + penalty).backward()
        optimizer.step()
    known = torch.zeros(200, 4, 200, dtype=torch.bool)
    for prefix in ("", "val_", "test_"):
        heads, tails = data[f"{prefix}edge_index"]
        known[heads, data[f"{prefix}edge_type"], tails] = True
    heads, tails = data.test_edge_index
    with torch.no_grad():
        found = scores(data.test_edge_index, data.test_edge_type)
    answer = found.gather(1, tails[:, None])
    rank = 1 + ((found > answer) & ~known[heads, data.test_edge_type]).sum(dim=1)
    reached = float((1 / rank).mean())
    assert best - 0.1 < reached < best + 4 * 0.4 / math.sqrt(tails.numel())


def test_names() -> None:
    module = PlantedKGData(num_entities=60, num_relations=2, num_positions=20, num_triples=300)
    data = module.read()
    names = module.names()
    shifts = [int(name.removeprefix("shift_")) for name in names["relation"]]
    assert len(names["node"]) == 60 and names["node"][59] == "entity_59" and len(set(shifts)) == 2
    assert module.extra_facts()["num_relations"] == 2 and int(data.edge_type.max()) == 1


def test_the_store(tmp_path: Path) -> None:
    module = PlantedKGData(num_entities=60, num_relations=2, num_positions=20, num_triples=300, store=str(tmp_path))
    module.prepare_data()
    store, facts = module.open_store(), module.facts
    assert (store.num_nodes, store.num_edges, store.held_out_size("val"), store.held_out_size("test")) == (
        60,
        270,
        15,
        15,
    )
    assert facts["num_relations"] == 2 and 0 < facts["best_mrr"] < 1 and facts["best_hits@10"] >= facts["best_hits@3"]
    names = store.names("node")
    assert names is not None and names.decode(torch.tensor([59])) == ["entity_59"]
    other = PlantedKGData(
        num_entities=60, num_relations=2, num_positions=20, num_triples=300, seed=1, store=str(tmp_path)
    )
    assert other.store_path != module.store_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_triples": 60000, "noise": 0.0}, "asks for 60000 triples that rules allow, .* 10 .* 1000 .* 5 .* 50000"),
        ({"num_relations": 201}, "num_relations=201, and a ring of data.num_positions=200"),
        ({"num_positions": 1001}, "num_positions=1001 is more than data.num_entities=1000"),
        ({"noise": 1.0}, "as likely as one that a rule allows"),
        ({"noise": -0.1}, "noise=-0.1 was set; it must be at least 0 and at most 1"),
        ({"held_out": 0.5}, "held_out=0.5 was set; it must be a number above 0 and below 0.5"),
        ({"split": "random"}, "(?s)data.split=random was set.*the generator holds triples out itself"),
    ],
)
def test_impossible_graphs(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlantedKGData(**options)  # type: ignore[arg-type]
