"""docs/summary.schema.json: the contract of summary.json, held against what gtrain.run.report writes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from helpers import REPO
from small_graphs import messy_graph, random_parts, stored

from gtrain.callbacks.checkpoint import RunCheckpoint
from gtrain.callbacks.recorder import RunRecorder
from gtrain.run import report
from gtrain.run.task import _best
from gtrain.strategy.counters import Counters, PeakMemory

SCHEMA = json.loads((REPO / "docs" / "summary.schema.json").read_text())


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """A summary of two epochs and three ranks, made by the code that a run uses, read back from its file."""
    store = stored(tmp_path / "store", messy_graph(), random_parts(40, 3))
    counters = Counters(bytes_sent=7, bytes_received=9, comm_seconds=0.5, wait_seconds=0.25, bound_bytes=6)
    recorder = RunRecorder(counters)
    recorder.epoch_seconds, recorder.epochs_trained = [0.5, 1.5], 1.75  # one epoch was limited to 3/4 of its batches
    recorder.history = [{"epoch": 0, "train/loss": float("nan")}, {"epoch": 1, "train/loss": 0.5}]
    ranks = [report.rank_figures(rank, PeakMemory(), recorder, counters) for rank in range(3)]
    stop = {"patience": 2, "threshold": float("inf"), "names": ["a", float("nan")], "folder": Path("run")}
    config = {"verb": "train", "trainer": {"num_nodes": 3, "devices": 1}, "callbacks": {"stop": stop}}
    choices = {"strategy": "sar", "data": "planted", "model": "gcn"}
    data = SimpleNamespace(work=(40, "nodes/s"), open_store=lambda: store)  # all that a summary asks of a data module
    metrics = {
        "val/acc": 0.5,
        "test/acc": 0.75,
        "test/loss": float("inf"),
        "test/auc": float("nan"),
        "data/best_acc": 0.9,
    }
    epoch_of = {"val/acc": 11, "test/acc": 6, "test/loss": 6, "test/auc": 6}
    epoch_metrics = report.EpochMetrics(metrics, epoch_of, report.BestScore("val/acc", 0.625, 6, "max"))
    made = report.summary(config, choices, data, recorder, epoch_metrics, ranks, 2.5, {"strategy.matmul": "int8"})
    report.write(tmp_path / "summary.json", made)
    loaded: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    return loaded


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_what_is_written_is_what_is_promised(content: dict[str, Any]) -> None:
    jsonschema.validate(content, SCHEMA)
    assert content["throughput"] == {"value": 40 * 1.75 / 2.0, "unit": "nodes/s"}
    assert content["resolved"] == {"strategy.matmul": "int8"}
    stop = {"patience": 2, "threshold": None, "names": ["a", None], "folder": "run"}
    assert content["config"]["callbacks"] == {"stop": stop} and content["config"]["trainer"]["num_nodes"] == 3
    undefined = {"test/loss": None, "test/auc": None}
    assert content["metrics"] == {"val/acc": 0.5, "test/acc": 0.75, **undefined, "data/best_acc": 0.9}
    assert content["metrics_epoch"] == {"val/acc": 11, "test/acc": 6, "test/loss": 6, "test/auc": 6}
    assert content["best"] == {"name": "val/acc", "value": 0.625, "epoch": 6, "direction": "max"}
    assert [epoch["train/loss"] for epoch in content["history"]] == [None, 0.5]
    assert (content["world_size"], len(content["store"]["halo"])) == (3, 3)
    rank = content["ranks"][2]
    assert [rank[key] for key in ("bytes_sent", "bytes_received", "comm_bound_bytes")] == [7, 9, 6]
    assert rank["peak_rss_bytes"] >= rank["baseline_rss_bytes"] > rank["baseline_anonymous_bytes"] > 50e6
    assert rank["peak_rss_bytes"] >= rank["peak_anonymous_bytes"] >= rank["baseline_anonymous_bytes"]


def test_a_bound_counts_in_training_alone_and_is_null_until_stated() -> None:
    counters = Counters()
    counters.needed(5)
    assert counters.bound_bytes is None  # evaluation
    counters.start()
    assert counters.bound_bytes is None
    counters.needed(0)
    assert counters.bound_bytes == 0  # nothing to send is a bound, too
    counters.needed(5)
    counters.stop()
    counters.needed(7)
    assert counters.bound_bytes == 5


def test_the_closing_table_says_which_epoch_each_value_is_of(
    content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report.print_summary(content, Path("run"))
    cells = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: row[1:] for row in cells if row}
    assert rows["val/acc"] == ["0.5000", "12"] and rows["best val/acc"] == ["0.6250", "7"]  # as people count them
    assert rows["test/acc"] == ["0.7500", "7"] and rows["test/auc"] == ["-", "7"]
    assert rows["data/best_acc"] == ["0.9000", "expected best"]
    report.print_summary({**content, "best": None}, Path("run"))
    printed = capsys.readouterr().out
    assert "best val" not in printed and "ranked against" not in printed


def test_the_closing_table_has_names_as_they_are(content: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    content["metrics"] |= {"test/f1[macro]": 0.5, "test/acc[/a]": 0.25}
    content["best"]["name"], content["resolved"] = "val/f1[macro]", {"strategy.parts[0]": "[a,b]"}
    report.print_summary({**content, "data": "[mine]"}, Path("[run]"))
    printed = capsys.readouterr().out
    for text in ("data=[mine]", "test/f1[macro]", "test/acc[/a]", "best val/f1[macro]", "strategy.parts[0]", "[a,b]"):
        assert text in printed
    assert "run folder: [run]" in printed


@pytest.mark.parametrize(("mode", "expected"), [("min", "min"), ("max", "max"), ("auto", "max")])
def test_the_best_score_has_the_mode_of_the_checkpoint(mode: str, expected: str) -> None:
    checkpoint = RunCheckpoint(monitor="val/surprise", mode=mode)
    checkpoint.best_model_score = torch.tensor(0.5)
    best = _best(SimpleNamespace(checkpoint_callback=checkpoint))  # type: ignore[arg-type]
    assert best == report.BestScore("val/surprise", 0.5, None, expected)


def test_the_closing_table_names_a_ranking_among_a_sample(
    content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    content["config"]["model"] = {"num_candidates": 1000}
    report.print_summary(content, Path("run"))
    assert re.search("ranked against .* 1,000 sampled candidates", capsys.readouterr().out)


@pytest.mark.parametrize(("bound", "shown"), [(3 * 2**20, True), (None, False)])
def test_the_closing_table_shows_a_bound_where_there_is_one(
    content: dict[str, Any], capsys: pytest.CaptureFixture[str], bound: int | None, shown: bool
) -> None:
    for rank in content["ranks"]:
        rank["comm_bound_bytes"] = bound
    report.print_summary(content, Path("run"))
    printed = capsys.readouterr().out
    assert (" 3.0 " in printed) == shown and "run folder: run" in printed


def test_every_key_is_required_and_described(content: dict[str, Any]) -> None:
    """A key that the code drops or adds fails one of these two, here and in the parts of the summary."""
    places: list[tuple[Any, dict[str, Any]]] = [
        (content, SCHEMA),
        (content["ranks"][0], SCHEMA["properties"]["ranks"]["items"]),
        (content["store"], SCHEMA["properties"]["store"]),
        (content["throughput"], SCHEMA["properties"]["throughput"]),
    ]
    for found, schema in places:
        assert set(found) == set(schema["properties"]) == set(schema["required"])
        assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verb",), "fit"),
        (("epochs",), -1),
        (("epochs",), 1.5),
        (("metrics", "test/acc"), "high"),
        (("ranks", 0, "bytes_sent"), 0.5),
        (("ranks", 0, "spare"), 1),
        (("throughput", "unit"), "rows"),
        (("spare",), 1),
        (("history", 0, "epoch"), None),
    ],
)
def test_what_is_wrong_is_refused(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    changed = copy.deepcopy(content)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, SCHEMA)
