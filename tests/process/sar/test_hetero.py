"""Graphs with types under sar: exact on 1 to 4 ranks and in every mode, each row sent once, runs as one process's.

Over each number of ranks in another mode; ``GTRAIN_ALL=1`` has two over most.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import gtrain, python
from helpers import REPO, ok, summary

CASES = "all" if os.environ.get("GTRAIN_ALL") else "turns"
PROGRAM = REPO / "tests" / "assets" / "sar_hetero_program.py"
SETTINGS = ["callbacks=none", "logger=none", "model.dropout=0.5", "trainer.precision=64-true"]
SMALL = [
    "data=planted_hetero",
    *(f"data.num_{what}={count}" for what, count in {"papers": 300, "authors": 150, "terms": 40}.items()),
    *(f"data.num_{what}={count}" for what, count in {"writes": 900, "cites": 900, "mentions": 800}.items()),
]

Results = dict[int, dict[str, dict[str, dict[str, float]]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By world size, case and mode: the worst relative differences from PyG on the whole graph."""
    folder = tmp_path_factory.mktemp("hetero")
    done = ok(python(str(PROGRAM), str(folder), "--cases", CASES, cwd=folder))
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {int(size): json.loads(body) for _, size, body in lines}


def wrong(results: Results, wanted: Callable[[str], bool]) -> list[str]:
    """One line for each figure above 1e-10."""
    return [
        f"{size} ranks, {case}, {mode}: {what} {figure:.1e}"
        for size, cases in results.items()
        for case, modes in cases.items()
        if wanted(case)
        for mode, figures in modes.items()
        for what, figure in figures.items()
        if not figure <= 1e-10
    ]


@pytest.mark.slow
def test_networks_over_types_and_relations_are_exact(results: Results) -> None:
    assert sorted(results) == [1, 2, 3, 4]
    assert {len([case for case in cases if ": " not in case]) for cases in results.values()} == {21}
    for case in results[1]:
        assert {mode for cases in results.values() for mode in cases[case]} == {"mode 1", "mode 2", "mode 3"}, case
    assert not wrong(results, lambda case: ": " not in case)


@pytest.mark.slow
def test_what_is_kept_of_constant_inputs_and_replayed_dropout_change_nothing(results: Results) -> None:
    assert not wrong(results, lambda case: case.startswith(("constants: ", "dropout: ")))


@pytest.mark.slow
def test_a_row_is_sent_once_for_all_relations_in_one_message_to_each_peer(results: Results) -> None:
    assert not wrong(results, lambda case: case.startswith("traffic: "))


# ------------------------------------------------------------------------------------------------------------ commands


def compare(folder: Path, epochs: int, *arguments: str, ranks: str = "2", modes: str = "1,2,3") -> None:
    """Loss curves of sar in some modes beside those of one process."""
    settings = [*arguments, *SETTINGS, f"trainer.max_epochs={epochs}", "trainer.limit_test_batches=0"]
    ok(gtrain("strategy=single", *settings, f"hydra.run.dir={folder / 'single'}", cwd=folder))
    sharded = ["--multirun", "strategy=sar", f"mode={modes}", f"trainer.num_nodes={ranks}"]
    ok(gtrain(*sharded, *settings, f"hydra.sweep.dir={folder / 'sar'}", cwd=folder))
    expected = curves(folder / "single")
    for run_dir in sorted(path for path in (folder / "sar").iterdir() if path.name.isdigit()):
        assert curves(run_dir) == pytest.approx(expected, rel=1e-10)


def curves(run_dir: Path) -> list[float]:
    history: list[dict[str, Any]] = summary(run_dir)["history"]
    return [entry[name] for entry in history for name in ("train/loss", "val/loss") if name in entry]


def test_runs_on_a_planted_graph(tmp_path: Path) -> None:
    compare(tmp_path, 5, *SMALL, "model=hetero_sage", modes="1,3")


@pytest.mark.slow
def test_acm(tmp_path: Path, real_data: Callable[[str], Path]) -> None:
    compare(tmp_path, 3, "data=heco", f"data.root={real_data('hetero')}", "model=hetero_sage", modes="2")


@pytest.mark.slow
def test_aifb(tmp_path: Path, real_data: Callable[[str], Path]) -> None:
    compare(tmp_path, 3, "data=entities", f"data.root={real_data('rdf')}", "model=rgcn", modes="1")


@pytest.mark.slow
def test_a_model_that_one_process_trained_predicts_over_shards(tmp_path: Path) -> None:
    arguments = [*SMALL, "model=hgt", "model.hidden_channels=16", *SETTINGS[2:]]
    trained = tmp_path / "single"
    ok(gtrain("strategy=single", *arguments, "trainer.max_epochs=3", f"hydra.run.dir={trained}", cwd=tmp_path))
    checkpoint = trained / "checkpoints" / "last.ckpt"
    found = {}
    for strategy, ranks in (("single", 1), ("sar", 3)):
        where = [f"ckpt_path={checkpoint}", f"output={strategy}.npy", f"trainer.num_nodes={ranks}"]
        ok(gtrain("predict", f"strategy={strategy}", *arguments, *where, cwd=tmp_path))
        found[strategy] = np.load(tmp_path / f"{strategy}.npy")
    assert found["single"].shape == (300, 4)
    np.testing.assert_allclose(found["sar"], found["single"], rtol=1e-6)
