"""A task on a relational database: what happened before the question is used, and what happened later is not."""

from __future__ import annotations

from pathlib import Path

import forked
import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import ok, summary
from relational import amounts, purchases, recommendations

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


LINKS = (
    "data=relbench",
    "data.name=next",
    "model=hetero_sage",
    "model.task=link",
    "strategy=pyg",
    "model.score=val/mrr",
)
LINKS += ("data.batch_size=90", "data.num_neighbors=[4,4]", "trainer.max_epochs=10", "model.dropout=0")


def links(folder: Path, decided_by: str, *settings: str) -> dict[str, float]:
    """The scores: the answers are 2 of the 4 best of 48 items, so that the best possible AUC is about 0.97."""
    path = recommendations(folder / decided_by, decided_by)
    run = f"hydra.run.dir={folder}/run"
    ok(forked.gtrain(*LINKS, "model.optimizer.lr=0.02", f"data.path={path}", *settings, run, cwd=folder))
    return dict(summary(folder / "run")["metrics"])


@pytest.mark.slow
def test_past_rows_predict_links(tmp_path: Path) -> None:
    """Also in validation, whose latest reviews would be those of the test if items were encoded as of the end."""
    latest = ("data.temporal_strategy=last", "data.num_neighbors=[1,1]", "trainer.num_nodes=2")
    scores = links(tmp_path, "past", *latest)
    assert scores["test/auc"] > 0.9 and scores["test/mrr"] > 0.25
    assert scores["val/auc"] > 0.9 and scores["val/mrr"] > 0.25 and scores["test/map@10"] > 0.4
    ok(forked.gtrain("export", f"run={tmp_path}/run", f"output={tmp_path}/items.npy", cwd=tmp_path))
    # The items, which have no features, are told apart by their reviews.
    assert len(np.unique(np.load(tmp_path / "items.npy").round(5), axis=0)) == 48


@pytest.mark.slow
def test_future_rows_do_not(tmp_path: Path) -> None:
    scores = links(tmp_path, "future", "trainer.num_nodes=1")
    assert 0.4 < scores["test/auc"] < 0.6 and scores["test/mrr"] < 0.1


@pytest.mark.slow
def test_future_rows_would_if_times_were_ignored(tmp_path: Path) -> None:
    scores = links(tmp_path, "future", "trainer.num_nodes=1", "data.temporal_strategy=null")
    assert scores["test/auc"] > 0.9 and scores["test/mrr"] > 0.25


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_average_precision_is_that_of_the_lists_of_best_items(tmp_path: Path, ranks: int) -> None:
    """Without times in the sampling, so that exported embeddings are those that were ranked."""
    arguments = ["data.temporal_strategy=null", "data.num_neighbors=[-1,-1]", f"trainer.num_nodes={ranks}"]
    arguments += ["trainer.max_epochs=2", "model.eval_k=7", "model.filtered=false", "model.score=val/map@7"]
    scores = links(tmp_path, "past", *arguments)
    ok(forked.gtrain("export", f"run={tmp_path}/run", f"output={tmp_path}/items.npy", cwd=tmp_path))
    items, users = np.load(tmp_path / "items.npy"), np.load(tmp_path / "items.npy.types/users.npy")
    rows = pq.read_table(tmp_path / "past/tasks/next/test.parquet").to_pylist()
    found = []
    for row in rows:
        hits = np.isin(np.argsort(-(items @ users[row["user"]]))[:7], row["item"])
        if row["item"]:
            found.append((hits.cumsum() / np.arange(1, 8) * hits).sum() / min(len(row["item"]), 7))
    assert len(found) == 180 and scores["test/map@7"] == pytest.approx(np.mean(found), abs=1e-6)


@pytest.mark.slow
def test_numbers_are_predicted(tmp_path: Path) -> None:
    """An amount is the last purchase's: a model of the mean alone has an R2 of 0 and an MAE of 2.4."""
    arguments = ["data.name=amount", f"data.path={amounts(tmp_path / 'db')}", "trainer.num_nodes=2"]
    arguments += ["data.temporal_strategy=last", "data.num_neighbors=[1,1]", "trainer.max_epochs=20"]
    ok(forked.gtrain(*SETTINGS, *arguments, f"hydra.run.dir={tmp_path}/run", cwd=tmp_path))
    found = summary(tmp_path / "run")
    assert found["best"]["name"] == "val/mae" and found["best"]["value"] == min(e["val/mae"] for e in found["history"])
    assert found["metrics"]["test/r2"] > 0.8 and found["metrics"]["test/mae"] < 1
    ok(forked.gtrain("predict", f"run={tmp_path}/run", "output=p.parquet", cwd=tmp_path))
    predicted = pq.read_table(tmp_path / "p.parquet")
    assert predicted.column_names[:2] == ["user", "asked"] and "prediction" in predicted.column_names
