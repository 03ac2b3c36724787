"""A task on a relational database: what happened before the question is used, and what happened later is not."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
from helpers import ok, summary
from relational import purchases

SETTINGS = ("data=relbench", "data.name=large", "model=hetero_sage", "strategy=pyg", "data.batch_size=100")
SETTINGS += ("data.num_neighbors=[12,12]", "trainer.max_epochs=12", "model.optimizer.lr=0.01")


def auc(folder: Path, decided_by: str, *settings: str) -> float:
    path = purchases(folder / decided_by, decided_by)
    run = f"hydra.run.dir={folder}/run"
    ok(forked.gtrain(*SETTINGS, f"data.path={path}", *settings, run, cwd=folder))
    return float(summary(folder / "run")["metrics"]["test/auc"])


@pytest.mark.slow
def test_the_past_is_used(tmp_path: Path) -> None:
    assert auc(tmp_path, "past", "data.temporal_strategy=last", "trainer.num_nodes=2", "data.num_neighbors=[1,1]") > 0.9


@pytest.mark.slow
def test_the_future_is_not(tmp_path: Path) -> None:
    assert 0.35 < auc(tmp_path, "future") < 0.65
