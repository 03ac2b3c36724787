"""Training in bfloat16: near the losses of float32, and the same with any strategy and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from helpers import rest_exhaustive

SMALL = ["data.num_nodes=400", "data.num_edges=4000", "data.num_features=24", "data.num_classes=4"]
SETTINGS = ["callbacks=none", "logger=none", "trainer.limit_test_batches=0", "trainer.max_epochs=6", "model.dropout=0"]
MODELS = {
    "gcn": ["model=gcn"],
    "sage": ["model=sage"],
    "gat": ["model=gat", "model.hidden_channels=16", "model.heads=4"],
}
NEAR_FLOAT32 = {"bf16-mixed": 0.01, "bf16-true": 0.03}
"""Relative difference of losses from those of float32. Parameters of bfloat16 lose small updates."""
Runner = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def sweep(tmp_path: Path) -> Runner:
    """Runs a sweep and returns the summaries of its jobs in order."""

    def run(*overrides: str, name: str) -> list[dict[str, Any]]:
        return forked.sweep(tmp_path / name, *SMALL, *SETTINGS, *overrides)

    return run


def worst(expected: dict[str, Any], actual: dict[str, Any], name: str = "train/loss") -> float:
    """Largest relative difference of a value over the epochs."""
    pairs = list(zip(expected["history"], actual["history"], strict=True))
    assert len(pairs) == 6
    return max(abs(a[name] - b[name]) / abs(a[name]) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("model", rest_exhaustive(["sage", "gcn", "gat"], "gat"))
def test_full_batch(sweep: Runner, model: str) -> None:
    exact, mixed, low = sweep(
        "strategy=single", "trainer.precision=32-true,bf16-mixed,bf16-true", *MODELS[model], name="single"
    )
    ranks = "strategy=sar", "trainer.num_nodes=2", *MODELS[model]
    sharded = sweep(*ranks, "mode=1,2,3", "trainer.precision=bf16-mixed", name="sar")
    as_written = "strategy=single", "strategy.layers=plain", "trainer.precision=bf16-mixed"
    (plain,) = sweep(*as_written, *MODELS[model], name="plain")
    for run in (mixed, plain, *sharded):
        assert 0 < worst(exact, run) < NEAR_FLOAT32["bf16-mixed"]
        assert worst(mixed, run) < NEAR_FLOAT32["bf16-mixed"]
    assert 0 < worst(exact, low) < NEAR_FLOAT32["bf16-true"]
    for run in sweep(*ranks, "mode=1,2,3", "trainer.precision=bf16-true", name="true"):
        assert 0 < worst(exact, run) < NEAR_FLOAT32["bf16-true"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
def test_mini_batches(sweep: Runner, model: str) -> None:
    arguments = "strategy=pyg", "data.batch_size=64", "data.num_neighbors=[5,5]", "trainer.num_nodes=2", *MODELS[model]
    exact, mixed, low = sweep(*arguments, "trainer.precision=32-true,bf16-mixed,bf16-true", name="precisions")
    assert 0 < worst(exact, mixed) < NEAR_FLOAT32["bf16-mixed"]
    assert 0 < worst(exact, low) < NEAR_FLOAT32["bf16-true"]
    wire = "strategy.transport=tcp", "strategy.wire_dtype=bfloat16"
    (rounded,) = sweep(*arguments, "trainer.precision=bf16-mixed", *wire, name="wire")
    assert 0 < worst(exact, rounded) < NEAR_FLOAT32["bf16-mixed"]


@pytest.mark.slow
def test_messages_that_layers_compute(sweep: Runner) -> None:
    """Mode 1 computes them again in the backward pass, which is outside of autocast."""
    network = "model=sage", "model._target_=torch_geometric.nn.EdgeCNN", "model.aggr=mean", "model.hidden_channels=16"
    exact, mixed = sweep("strategy=single", "trainer.precision=32-true,bf16-mixed", *network, name="single")
    arguments = "strategy=sar", "trainer.num_nodes=2", "trainer.precision=bf16-mixed", *network
    for run in sweep(*arguments, "mode=1,2", name="sar"):
        assert 0 < worst(exact, run) < NEAR_FLOAT32["bf16-mixed"]
        assert worst(mixed, run) < NEAR_FLOAT32["bf16-mixed"]
