"""Strategies train on a GPU what they train on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import gtrain
from helpers import ok, summary

GRAPH = ["data.num_nodes=600", "data.num_edges=4800", "model.dropout=0"]
RANKS = [*GRAPH, "trainer.num_nodes=2"]
CASES = {
    "single": ["strategy=single", *GRAPH],
    "sar 1": ["strategy=sar", "mode=1", "model=gat", *RANKS],
    "sar 2": ["strategy=sar", "mode=2", "model=sage", *RANKS],
    "sar 3": ["strategy=sar", "mode=3", *RANKS],
    "sar, typed": [
        "strategy=sar",
        "data=planted_hetero",
        "model=hetero_sage",
        "trainer.num_nodes=2",
        "model.dropout=0",
    ],
    "sar, links": ["strategy=sar", "model=link_sage", *RANKS],
    "pyg": ["strategy=pyg", "model=sage", "data.batch_size=64", "data.num_neighbors=[5,5]", *RANKS],
    "embeddings": ["strategy=single", "data=planted_kg", "model=kg", "model.n3=0.01", "model.max_norm=2"],
    "buckets": ["strategy=pbg", "data=planted_kg", "model=kg", "data.batch_size=1000", "strategy.matmul=float32"],
    "sparse rows": ["strategy=single", "data=planted_sparse", "model=sparse", "model.dropout=0", "data.num_rows=2000"],
}


@pytest.mark.parametrize("case", CASES)
def test_gpus_train_what_cpus_train(case: str, tmp_path: Path) -> None:
    """To a thousandth after three epochs: sums run in another order there, and Adam makes much of little gradients."""
    losses = []
    for accelerator in ("cpu", "gpu"):
        where = [f"trainer.accelerator={accelerator}", f"hydra.run.dir={accelerator}", "trainer.max_epochs=3"]
        ok(gtrain(*CASES[case], *where, cwd=tmp_path))
        losses.append([epoch["train/loss"] for epoch in summary(tmp_path / accelerator)["history"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
