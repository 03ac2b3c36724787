"""Bags of words train every strategy exactly as the same features in a dense store do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from helpers import rest_exhaustive

NODES, WORDS = 200, 90
SETTINGS = ["callbacks=none", "logger=none", "trainer.max_epochs=4", "trainer.precision=64-true", "model.dropout=0.4"]
Sweep = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def bags(tmp_path: Path) -> list[str]:
    """The settings of a graph whose features have four words in a row, which determine the label."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, NODES)
    words = np.zeros((NODES, WORDS), np.float32)
    for node, label in enumerate(labels):
        words[node, rng.integers(0, WORDS // 3, 4) + label * (WORDS // 3)] = rng.integers(1, 3)
    np.save(tmp_path / "words.npy", words)
    edges = rng.integers(0, NODES, (2, 900))
    (tmp_path / "edges.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in edges.T))
    (tmp_path / "labels.txt").write_text("".join(f"{label}\n" for label in labels))
    files = {"path": "edges.tsv", "features": "words.npy", "labels": "labels.txt"}
    return ["data=edges", *(f"data.{name}={tmp_path / file}" for name, file in files.items())]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    def run(*overrides: str, name: str) -> list[dict[str, Any]]:
        return forked.sweep(tmp_path / name, *SETTINGS, *overrides)

    return run


def losses(run: dict[str, Any]) -> list[float]:
    assert len(run["history"]) == 4
    return [epoch[name] for epoch in run["history"] for name in ("train/loss", "val/loss")]


@pytest.mark.parametrize(
    "model", ["sage", pytest.param("gcn", marks=pytest.mark.slow), pytest.param("gat", marks=pytest.mark.slow)]
)
def test_whole_graphs(sweep: Sweep, bags: list[str], model: str) -> None:
    arguments = [*bags, f"model={model}"]
    (dense,) = sweep("strategy=single", "strategy.layers=plain", "data.feature_layout=dense", *arguments, name="dense")
    runs = sweep("strategy=single", "strategy.layers=plain,auto", *arguments, name="single")
    runs += sweep("strategy=sar", "strategy.mode=1,2,3", "trainer.num_nodes=3", *arguments, name="sar")
    for run in runs:
        assert losses(run) == pytest.approx(losses(dense), rel=1e-10)


@pytest.mark.slow
def test_sampled_batches(sweep: Sweep, bags: list[str]) -> None:
    arguments = [*bags, "model=sage", "data.batch_size=30"]
    sampled = ["strategy=pyg", "data.num_neighbors=[-1,-1]", "strategy.seeds=global", *arguments]
    (dense,) = sweep(*sampled, "strategy.layers=plain", "data.feature_layout=dense", name="dense")
    runs = sweep(*sampled, "trainer.num_nodes=1", name="one")
    runs += sweep(*sampled, "strategy.transport=tcp", "strategy.cache_bytes=0,2000", name="two")
    for run in runs:
        assert losses(run) == pytest.approx(losses(dense), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", rest_exhaustive(["single", "sar", "pyg"], "sar"))
def test_bags_of_several_node_types(sweep: Sweep, real_data: Callable[[str], Path], strategy: str) -> None:
    """ACM: two of the three types have bags, whose layers are the linear ones of dense features."""
    arguments = ["data=heco", f"data.root={real_data('hetero')}", "model=hetero_sage", "model.hidden_channels=8"]
    (dense,) = sweep("strategy=single", "strategy.layers=plain", "data.feature_layout=dense", *arguments, name="dense")
    ranks = [] if strategy == "single" else ["trainer.num_nodes=2"]
    all_neighbours = ["data.num_neighbors=[-1,-1]"] if strategy == "pyg" else []
    (run,) = sweep(f"strategy={strategy}", *ranks, *all_neighbours, *arguments, name="bags")
    assert losses(run) == pytest.approx(losses(dense), rel=1e-10)


@pytest.mark.slow
def test_bags_of_a_social_network(sweep: Sweep, real_data: Callable[[str], Path]) -> None:
    arguments = ["data=musae", f"data.root={real_data('musae')}", "model=sage", "model.hidden_channels=8"]
    (dense,) = sweep("strategy=single", "data.feature_layout=dense", *arguments, name="dense")
    (run,) = sweep("strategy=single", *arguments, name="bags")
    assert losses(run) == pytest.approx(losses(dense), rel=1e-10)


@pytest.mark.slow
def test_a_model_of_sparse_rows_on_parameter_servers(sweep: Sweep, bags: list[str]) -> None:
    arguments = [*bags, "model=sparse", "data.batch_size=30"]
    (dense,) = sweep("strategy=single", "data.feature_layout=dense", *arguments, name="dense")
    for run in sweep("strategy=single", *arguments, name="single") + sweep("strategy=ps", *arguments, name="ps"):
        assert losses(run) == pytest.approx(losses(dense), rel=1e-10)


@pytest.mark.slow
def test_a_graph_with_a_layer_of_sparse_features_on_parameter_servers(sweep: Sweep, bags: list[str]) -> None:
    optimizer = "model.sparse_optimizer={_target_:gtrain.nn.Adagrad,lr:0.05}"
    arguments = [
        *bags,
        "model=gcn",
        "model.hidden_channels=8",
        "data.feature_layout=sparse",
        "data.num_parts=1",
        optimizer,
    ]
    (single,) = sweep("strategy=single", *arguments, name="single")
    (served,) = sweep("strategy=ps", *arguments, name="ps")
    assert losses(served) == pytest.approx(losses(single), rel=1e-10)
