"""``strategy=auto``: which strategy takes its place, and where a run goes on after a race."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from helpers import LIMIT, clean_environment, ok, show, summary

SETTINGS = ("model=sage", "data.num_nodes=800", "data.num_edges=8000", "trainer.num_nodes=2", "logger=none")


def test_auto_never_takes_what_exceeds_the_memory(tmp_path: Path) -> None:
    """One process needs more than this, and each of two ranks less, on a machine that is described."""
    machine = tmp_path / "machine.yaml"
    # Layers of 512 columns: the whole graph needs about 60 MB above imports, half of it about 30.
    machine.write_text("imports: 10e6\nmemory: 45e6\ncores: 2\n")
    auto = ("strategy=auto", "model.hidden_channels=512", f"plan.machine={machine}", "trainer.max_epochs=1")
    result = ok(forked.gtrain(*auto, *SETTINGS, "data.num_nodes=4000", "hydra.run.dir=run", cwd=tmp_path))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    fits = {row["strategy"]: row["fits"] for row in plan["rows"]}
    assert not fits["single"] and fits["sar"]
    assert "strategy=single would exceed the memory" in result.stderr, show(result)
    trained = summary(tmp_path / "run")
    assert trained["strategy"] == "sar" and trained["world_size"] == 2
    assert trained["resolved"]["strategy"] == plan["recommended"].removeprefix("strategy=")


def test_the_settings_are_those_of_the_named_configuration(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("defaults: [config, _self_]\nmodel: {hidden_channels: 24}\n")
    named = ("--config-dir", "conf", "--config-name", "mine", "strategy=auto")
    ok(forked.gtrain(*named, *SETTINGS, "trainer.max_epochs=1", "hydra.run.dir=run", cwd=tmp_path))
    assert summary(tmp_path / "run")["config"]["model"]["hidden_channels"] == 24


@pytest.mark.slow
def test_the_winner_of_a_race_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    settings = ("strategy=auto", "strategy.race_seconds=2", "trainer.max_epochs=1000", "trainer.max_time=00:00:00:06")
    result = ok(forked.gtrain(*settings, *SETTINGS, "hydra.run.dir=run", cwd=tmp_path))
    raced = {name: summary(tmp_path / "run" / "race" / name) for name in ("single", "sar")}
    scores = {name: content["best"]["value"] for name, content in raced.items()}
    last = summary(tmp_path / "run")
    best = last["strategy"]
    assert scores[best] == max(scores.values()), "with equal scores, either"
    assert f"strategy={best}" in result.stderr.rpartition("strategy=auto: ")[2].partition(" has")[0]
    words = "with equal scores" if len(set(scores.values())) == 1 else "the better score"
    assert words in result.stderr
    assert last["history"][0]["epoch"] == raced[best]["history"][-1]["epoch"] + 1


def test_what_no_strategy_accepts_is_refused_before_data_are_read(tmp_path: Path) -> None:
    for settings, message in (
        (["ckpt_path=none.ckpt"], "none.ckpt was set; no such checkpoint exists"),
        (["model.score=val/nope"], "the model does not log val/nope"),
        (["model._target_=nosuchpackage.Net"], "No module named 'nosuchpackage'"),
    ):
        result = forked.gtrain("strategy=auto", *settings, cwd=tmp_path)
        assert result.returncode == 1
        assert message in result.stderr and "strategy=auto: " not in result.stderr
        assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_plan_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    environment = {**clean_environment(), "TMPDIR": str(tmp_path / "tmp")}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    for settings in (["plan"], ["strategy=auto", "trainer.max_epochs=1"]):
        small = ("data.num_nodes=100", "data.num_edges=300", "callbacks=none")
        # A new interpreter, which imports torch and PyG itself.
        command = [sys.executable, "-m", "gtrain", *settings, *small]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert not list((tmp_path / "tmp").iterdir())


def test_auto_is_refused_for_other_verbs(tmp_path: Path) -> None:
    result = forked.gtrain("test", "strategy=auto", cwd=tmp_path)
    assert result.returncode == 1
    assert "strategy=auto was set with gtrain test" in result.stderr and "HINT: run gtrain plan" in result.stderr


@pytest.mark.slow
def test_ranks_that_a_launcher_started_do_not_choose(tmp_path: Path) -> None:
    """Each would make a plan, and race, for itself; they refuse before data are read."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    result = forked.gtrain(
        "strategy=auto", "trainer.devices=2", cwd=tmp_path, env={"TORCHELASTIC_RUN_ID": "1", **ranks}
    )
    assert result.returncode == 1
    assert "strategy=auto was set with cluster=torchrun; it chooses for" in result.stderr
    assert not (tmp_path / "data").exists()
