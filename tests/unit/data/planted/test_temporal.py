"""gtrain.data.planted.temporal: the generator, and the AUC that nothing can beat."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from gtrain.data.planted.temporal import PERIODS, PlantedTemporalData, TemporalModel, best_auc, generate
from gtrain.errors import ConfigError


@pytest.mark.parametrize(
    "model",
    [
        TemporalModel(),
        TemporalModel(num_nodes=11, num_events=300, num_communities=5, drift=50, time_span=7, predictability=1.0),
        TemporalModel(num_nodes=50, num_events=1, num_communities=2, drift=0),
    ],
)
def test_events_are_what_was_asked_for(model: TemporalModel) -> None:
    data, history = generate(model, seed=1)
    assert data.validate() and data.num_nodes == model.num_nodes
    assert data.edge_index.shape == (2, model.num_events) and data.edge_time.dtype == torch.int64
    assert (data.edge_time.diff() >= 0).all()
    assert int(data.edge_time.min()) >= 0 and int(data.edge_time.max()) < model.time_span
    assert (data.edge_index[0] != data.edge_index[1]).all()
    sizes = np.sort(np.bincount(history[0]))
    assert all((np.sort(np.bincount(communities)) == sizes).all() for communities in history)
    if model.predictability == 1.0:
        period = data.edge_time.numpy() * PERIODS // model.time_span
        source, target = data.edge_index.numpy()
        assert (history[period, source] == history[period, target]).all()


def test_seeded() -> None:
    model = TemporalModel(num_events=500)
    one, again, other = (generate(model, seed)[0] for seed in (4, 4, 5))
    assert torch.equal(one.edge_index, again.edge_index) and torch.equal(one.edge_time, again.edge_time)
    assert not torch.equal(one.edge_index, other.edge_index)


@pytest.mark.parametrize("drift", [0.0, 0.5, 3.0])
def test_drift_is_moves_for_each_node(drift: float) -> None:
    model = TemporalModel(num_nodes=5000, num_communities=50, drift=drift, num_events=10)
    _, history = generate(model, seed=0)
    moves = (history[1:] != history[:-1]).sum() / model.num_nodes
    expected = drift * (1 - 1 / 50)  # some move to another seat of their community
    assert moves == pytest.approx(expected, abs=4 * math.sqrt(drift / 5000) + 0.01)


@pytest.mark.parametrize("model", [TemporalModel(), TemporalModel(num_nodes=60, num_communities=7, predictability=0.6)])
def test_the_oracle_reaches_the_best_auc(model: TemporalModel) -> None:
    data, history = generate(model, seed=2)
    source, target = data.edge_index.numpy()
    rng = np.random.default_rng(0)
    other = rng.integers(0, model.num_nodes - 1, source.size)
    other += other >= source  # any node but the source
    period = data.edge_time.numpy() * PERIODS // model.time_span
    sizes = np.bincount(history[0])

    def ratio(nodes: np.ndarray) -> np.ndarray:
        community = history[period, source]
        near = (model.num_nodes - 1) / (sizes[community] - 1)
        return model.predictability * near * (history[period, nodes] == community)

    scores = np.concatenate([ratio(target), ratio(other)])
    labels = np.repeat([1, 0], source.size)
    assert roc_auc_score(labels, scores) == pytest.approx(best_auc(model), abs=4 * 0.3 / math.sqrt(source.size))


def test_best_auc_by_hand() -> None:
    """10 nodes in 2 communities: another node is in the source's with b = 4/9, the target with a = 1/2 + b / 2."""
    model = TemporalModel(num_nodes=10, num_communities=2, predictability=0.5)
    b = 4 / 9
    assert best_auc(model) == pytest.approx((1 + (0.5 + 0.5 * b) - b) / 2, abs=1e-12)
    assert best_auc(TemporalModel(predictability=0.0)) == pytest.approx(0.5, abs=1e-12)


def test_old_events_go_stale() -> None:
    """Whom a node met early tells whom it meets late only as far as nodes stay."""
    reached = {}
    for drift in (0.0, 2.0):
        model = TemporalModel(num_nodes=300, num_communities=10, num_events=30000, drift=drift)
        data, _ = generate(model, seed=0)
        early, late = data.edge_index[:, :20000], data.edge_index[:, 25000:]
        met = torch.zeros(300, 300).index_put_((early[0], early[1]), torch.ones(20000), accumulate=True)
        common = (met + met.T) @ (met + met.T)
        other = torch.randint(0, 300, (5000,), generator=torch.Generator().manual_seed(0))
        scores = torch.cat([common[late[0], late[1]], common[late[0], other]])
        reached[drift] = roc_auc_score(np.repeat([1, 0], 5000), scores.numpy())
    best = best_auc(model)
    assert best - 0.04 < reached[0.0] < best + 4 * 0.3 / math.sqrt(5000)
    assert reached[2.0] < best - 0.1


def test_the_past_trains_and_the_future_tests(tmp_path: Path) -> None:
    module = PlantedTemporalData(num_events=1000, store=str(tmp_path))
    module.prepare_data()
    store = module.open_store()
    assert (store.num_edges, store.held_out_size("val"), store.held_out_size("test")) == (600, 200, 200)
    assert store.edge("edge_time", 0).max() <= store.held_out("edge_time", 0, "val").min()
    assert store.held_out("edge_time", 0, "val").max() <= store.held_out("edge_time", 0, "test").min()
    assert module.facts["best_auc"] == best_auc(TemporalModel())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_communities": 501}, "num_communities=501 leaves nodes without a partner: data.num_nodes=1000"),
        ({"predictability": 1.5}, "predictability=1.5 was set; it must be at least 0 and at most 1"),
        ({"drift": 51.0}, "(?s)drift=51.0 was set; it must be at least 0 and at most 50.*nodes move at 50 times"),
        ({"time_span": 2**57}, "time_span=144115188075855872 was set; it must be .* at most 72057594037927936"),
        ({"num_events": 0}, "num_events=0 was set; it must be at least 1"),
        ({"split": "public"}, "generated events hold none out"),
    ],
)
def test_impossible_events(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlantedTemporalData(**options)  # type: ignore[arg-type]
