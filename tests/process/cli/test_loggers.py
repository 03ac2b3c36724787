"""``logger=[csv,...]``: what the trackers of experiments receive, read back from where they write."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from helpers import ok, summary
from lightning.pytorch.loggers import CSVLogger

from gtrain.callbacks.loggers import log_configuration, make_loggers
from gtrain.run import build

DATA = ("data=planted", "data.num_nodes=300", "data.num_edges=1500", "trainer.num_nodes=2", "trainer.max_epochs=3")

Series = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with all loggers."""
    for library in ("mlflow", "tensorboard", "wandb"):
        pytest.importorskip(library, reason=f"the extra {library} is not installed")
    folder = tmp_path_factory.mktemp("loggers")
    all_of_them = ("logger=[csv,tensorboard,wandb,mlflow]", "logger.wandb.offline=true")
    ok(forked.gtrain("strategy=sar", *DATA, *all_of_them, "hydra.run.dir=run", cwd=folder))
    ok(forked.gtrain("predict", "run=run", cwd=folder))  # it has nothing to log, and makes no run of a tracker
    return folder


def logged(folder: Path) -> Series:
    """``metrics.csv`` and the figures of ranks: what each tracker should have."""
    series: Series = {}
    with open(folder / "run" / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if text and name not in ("step", "epoch"):
                    series.setdefault(name, []).append((int(row["step"]), float(text)))
    steps = max(step for values in series.values() for step, _ in values)
    for rank in summary(folder / "run")["ranks"]:
        for name in ("bytes_sent", "bytes_received", "peak_anonymous_bytes", "wait_seconds"):
            series[f"rank_{rank['rank']}/{name}"] = [(steps, rank[name])]
    assert len(series["val/loss"]) == 3 and len(series["test/loss"]) == 1 and "rank_1/bytes_sent" in series
    return series


def check(found: Series, folder: Path, tolerance: float = 1e-12) -> None:
    for name, values in logged(folder).items():
        assert [step for step, _ in found[name]] == pytest.approx([step for step, _ in values], abs=1), name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in values], rel=tolerance), name


@pytest.mark.slow
def test_tensorboard(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run"))
    events.Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    check(found, folder, 1e-6)  # it writes float32
    assert "num_nodes: 300" in (folder / "run" / "hparams.yaml").read_text()


@pytest.mark.slow
def test_mlflow(folder: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("gtrain")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    names = list(run.data.metrics)
    history = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    check({name: [(each.step, each.value) for each in values] for name, values in history.items()}, folder)
    assert run.info.status == "FINISHED" and run.info.run_name == f"{folder.name}/run"
    assert run.data.params["data/num_nodes"] == "300" and run.data.params["strategy/name"] == "sar"


@pytest.mark.slow
def test_wandb_offline(folder: Path) -> None:
    (file,) = (folder / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    found: Series = {}
    ended, config = None, {}
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "exit":
            ended = record.exit.exit_code
        for item in record.run.config.update:
            config[item.key] = json.loads(item.value_json)
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for name in set(row) - {"epoch", "trainer/global_step"}:
            if not name.startswith("_"):
                found.setdefault(name, []).append((row["trainer/global_step"], row[name]))
    check(found, folder)
    assert ended == 0


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a run's file: messages of Protocol Buffers, in the blocks of 32 KiB of LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, message = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (left := -position % 32768) and left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        message += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole message, or the last part of one
            yield Record.FromString(message)
            message = b""


@pytest.mark.slow
def test_commands_that_start_at_once_share_a_new_database(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    command = ("strategy=sar", *DATA, "logger=[csv,mlflow]", "trainer.max_epochs=1")
    programs = [forked.Program("-m", "gtrain", *command, f"hydra.run.dir=run{each}", cwd=tmp_path) for each in range(4)]
    for program in programs:
        ok(program.end())
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("gtrain")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * 4
    assert all("test/acc" in run.data.metrics for run in runs)


@pytest.mark.slow
def test_a_restarted_job_goes_on_in_its_run_of_mlflow(tmp_path: Path) -> None:
    """Its configuration names the checkpoint that it goes on from, and MLflow refuses to change a parameter."""
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    tracker = {"_target_": "lightning.pytorch.loggers.MLFlowLogger", "tracking_uri": f"sqlite:///{tmp_path / 'm.db'}"}
    config = {"ckpt_path": None, "trainer": {"num_nodes": 2}, "callbacks": [{"a": 1}, {"b": [2]}]}
    for again in (False, True):
        loggers = make_loggers(
            {"mlflow": tracker}, lambda node, _: build.make(node, "logger.mlflow"), tmp_path, continues=again
        )
        log_configuration(loggers, {**config, "ckpt_path": "last.ckpt", "more": 5} if again else config)
    (run,) = mlflow.MlflowClient(tracker["tracking_uri"]).search_runs(["1"])
    assert run.data.params == {
        "ckpt_path": "None",
        "trainer/num_nodes": "2",
        "callbacks/0/a": "1",
        "callbacks/1/b": "[2]",
        "more": "5",
    }


def test_trackers_connect_where_no_cache_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nocache")
    made = make_loggers({"mine": {"_target_": "Mine"}}, lambda node, _: CSVLogger(tmp_path), tmp_path)
    assert len(made) == 1
