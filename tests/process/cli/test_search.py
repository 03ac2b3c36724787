"""``hparams_search=optuna``: trials that are jobs of several ranks."""

from __future__ import annotations

import csv
from pathlib import Path

import forked
import pytest
from helpers import ok, summary

optuna = pytest.importorskip("optuna", reason="the extra optuna is not installed")

SMALL = ("data.num_nodes=300", "data.num_edges=1500", "trainer.max_epochs=3", "trainer.enable_progress_bar=false")


@pytest.mark.slow
def test_all_ranks_end_when_the_pruner_says_so(tmp_path: Path) -> None:
    """Five trials have had scores that no accuracy reaches."""
    storage = f"sqlite:///{tmp_path / 'optuna.db'}"
    study = optuna.create_study(storage=storage, study_name="study", direction="maximize")
    perfect = {"value": 2.0, "intermediate_values": {0: 2.0, 1: 2.0, 2: 2.0}}
    for _ in range(5):
        study.add_trial(optuna.trial.create_trial(**perfect))
    trial = study.ask()
    reporter = (
        "+callbacks.trial={_target_:gtrain.callbacks.trial.TrialReporter,"
        f'storage:"{storage}",study:"study",number:{trial.number},pruner:"median"}}'
    )
    ok(forked.gtrain("strategy=sar", "trainer.num_nodes=2", *SMALL, reporter, "hydra.run.dir=run", cwd=tmp_path))
    seen = study.trials[trial.number]
    assert summary(tmp_path / "run")["epochs"] == 1
    assert seen.user_attrs == {"pruned": True}
    assert seen.intermediate_values == {0: summary(tmp_path / "run")["best"]["value"]}


@pytest.mark.slow
def test_a_search_ends_with_a_table_and_goes_on(tmp_path: Path) -> None:
    search = ("--multirun", "hparams_search=optuna", "strategy=single", "hydra.sweep.dir=search", *SMALL)
    first = ok(forked.gtrain(*search, "hydra.sweeper.trials=2", cwd=tmp_path)).stdout
    assert "best of 2 trials: " in first and " hidden_channels " in first
    said = ok(forked.gtrain(*search, "hydra.sweeper.trials=3", cwd=tmp_path)).stdout
    assert "goes on after 2 trials" in said
    with open(tmp_path / "search" / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["job"] for row in rows] == ["0", "1", "2"]
    best = max(rows, key=lambda row: float(row["best"]))
    study = optuna.load_study(study_name="gtrain", storage=f"sqlite:///{tmp_path / 'search' / 'optuna.db'}")
    assert study.best_value == float(best["best"])
    assert {key: best[key] for key in ("model.num_layers", "model.dropout")} == {
        key: str(study.best_params[key]) for key in ("model.num_layers", "model.dropout")
    }
