"""``run=FOLDER`` and ``gtrain runs`` as a user types them: what is trained, tested and predicted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from forked import gtrain
from helpers import ok, only_run, summary

SMALL = ("data.num_nodes=300", "data.num_edges=2400", "data.num_features=16", "data.num_classes=4")
SETTINGS = (*SMALL, "strategy=single", "model=sage", "model.hidden_channels=20", "seed=3")


def test_a_run_goes_on_and_is_tested_without_its_settings(tmp_path: Path) -> None:
    ok(gtrain(*SETTINGS, "trainer.max_epochs=2", cwd=tmp_path))
    first = only_run(tmp_path)
    ok(gtrain("run=last", "trainer.max_epochs=4", "hydra.run.dir=on", cwd=tmp_path))
    on = summary(tmp_path / "on")
    assert [row["epoch"] for row in on["history"]] == [2, 3] and on["config"]["model"]["hidden_channels"] == 20
    assert on["config"]["run"] == str(first) and on["config"]["trainer"]["max_epochs"] == 4
    ok(gtrain("test", f"run={first}", "hydra.run.dir=test", cwd=tmp_path))
    trained, tested = summary(first)["metrics"], summary(tmp_path / "test")["metrics"]
    assert tested["test/loss"] == pytest.approx(trained["test/loss"], rel=1e-6) and tested["test/acc"] > 0
    done = gtrain("run=on", "trainer.max_epochs=3", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "max_epochs=3 was set" in done.stderr and "has completed 4 epochs already" in done.stderr
    listed = json.loads(ok(gtrain("runs", "format=json", cwd=tmp_path)).stdout)
    kinds = [(run["verb"], run["model"], run["strategy"], run["epochs"], run["state"]) for run in listed]
    assert kinds == [("train", "sage", "single", 2, "complete"), ("train", "sage", "single", 4, "complete"),
                     ("train", "sage", "single", None, "refused")]  # fmt: skip
    assert listed[1]["best"] == on["best"]["value"] and listed[0]["folder"] == str(first.relative_to(tmp_path / "runs"))


def test_the_best_epoch_of_a_run_is_the_best_of_one_that_goes_on_from_it(tmp_path: Path) -> None:
    ok(gtrain(*SETTINGS, "trainer.max_epochs=40", "model.optimizer.lr=0.1", "hydra.run.dir=first", cwd=tmp_path))
    ok(gtrain("run=first", "trainer.max_epochs=41", "hydra.run.dir=on", cwd=tmp_path))
    first, on = (summary(tmp_path / name) for name in ("first", "on"))
    assert on["best"] == first["best"] and on["best"]["epoch"] < 39, "no later epoch is better"
    for verb in ("test", "predict"):
        ok(gtrain(verb, "run=on", f"hydra.run.dir={verb}", cwd=tmp_path))
    assert summary(tmp_path / "test")["metrics"]["test/loss"] == first["metrics"]["test/loss"]
    ok(gtrain("predict", "run=first", "output=before.npy", cwd=tmp_path))
    ok(gtrain("predict", "run=on", "output=after.npy", "ckpt_path=best", cwd=tmp_path))
    assert (np.load(tmp_path / "before.npy") == np.load(tmp_path / "after.npy")).all()


@pytest.mark.slow
def test_the_strategy_of_a_run_is_swapped_and_a_job_of_a_sweep_is_a_run(tmp_path: Path) -> None:
    swept = (
        "strategy=single",
        "strategy.layers=plain",
        "trainer.precision=64-true",
        "seed=1,2",
        "trainer.max_epochs=2",
    )
    ok(gtrain("--multirun", *SMALL, *swept, "hydra.sweep.dir=sweep", cwd=tmp_path))
    done = gtrain(
        "test", "run=sweep/1", "strategy=sar", "mode=3", "trainer.num_nodes=2", "hydra.run.dir=test", cwd=tmp_path
    )
    ok(done)
    found, trained = summary(tmp_path / "test"), summary(tmp_path / "sweep" / "1")
    assert (found["strategy"], found["world_size"], found["config"]["seed"]) == ("sar", 2, 2)
    assert found["metrics"]["test/loss"] == pytest.approx(trained["metrics"]["test/loss"], rel=1e-9)
    assert ok(gtrain("runs", "sweep", cwd=tmp_path)).stdout.count("complete") == 2


@pytest.mark.slow
def test_a_run_with_files_of_its_own_from_another_folder(tmp_path: Path) -> None:
    home, there = tmp_path / "home", tmp_path / "there"
    (home / "conf" / "model").mkdir(parents=True)
    there.mkdir()
    (home / "conf" / "model" / "mine.yaml").write_text("defaults: [gcn]\nhidden_channels: 12\n")
    ring = "".join(f"{node} {(node + 1) % 60}\n{node} {(node + 7) % 60}\n" for node in range(60))
    (home / "edges.txt").write_text(ring)
    (home / "labels.txt").write_text("".join(f"{node // 30}\n" for node in range(60)))
    data = ("data=edges", "data.path=edges.txt", "data.labels=labels.txt", "data.features=degree")
    settings = (*data, "strategy=single", "model=mine", "trainer.max_epochs=2", "hydra.run.dir=run")
    ok(gtrain("--config-dir", "conf", *settings, cwd=home))
    typed = (
        "--config-dir",
        "conf",
        "predict",
        "ckpt_path=run/checkpoints/best.ckpt",
        "output=typed.npy",
        *settings[:-2],
    )
    ok(gtrain(*typed, cwd=home))
    expected = np.load(home / "typed.npy")
    ok(gtrain("predict", "run=../home/run", "output=scores.npy", cwd=there))
    assert np.array_equal(np.load(there / "scores.npy"), expected) and expected.shape == (60, 2)
    assert not (there / "data").exists(), "the store of the run is used"
    ok(gtrain("export", f"run={os.path.relpath(home / 'run', there)}", "output=rows.npy", cwd=there))
    assert np.load(there / "rows.npy").shape == (60, 12)
