"""What a run of several ranks tells of itself: a timeline of each rank, time waited, bytes beside their lower bound."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from forked import gtrain
from helpers import ok, summary

SMALL = ["data.num_nodes=300", "data.num_edges=2400", "data.num_features=16", "data.num_classes=4"]
SHORT = [*SMALL, "trainer.limit_test_batches=0", "logger=none", "callbacks=none", "hydra.run.dir=run"]


def trace(path: Path) -> dict[str, Any]:
    """A Chrome trace."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def stretches(content: dict[str, Any], start: str) -> list[dict[str, Any]]:
    """The events with a duration whose name starts so."""
    return [e for e in content["traceEvents"] if e.get("ph") == "X" and e["name"].startswith(start)]


def test_each_rank_leaves_a_timeline_of_operators_and_waits(tmp_path: Path) -> None:
    done = ok(gtrain("debug=profile", "trainer.max_epochs=4", *SHORT, cwd=tmp_path))
    assert "USDT" not in done.stderr
    files = sorted((tmp_path / "run" / "profile").glob("trace-*"))
    assert [file.name for file in files] == ["trace-rank0.json", "trace-rank1.json"]
    for rank, content in enumerate(map(trace, files)):
        assert content["gtrain_rank"] == str(rank)
        batches = stretches(content, "training batch")
        assert len(batches) == 2 and len(stretches(content, "validation batch")) == 2  # of the epochs 2 and 3
        assert len(stretches(content, "aten::mm")) + len(stretches(content, "aten::addmm")) > 0
        waits = Counter(event["name"] for event in stretches(content, "wait: "))
        assert waits["wait: all-reduce"] >= 4  # the loss's weight and the gradients of two epochs
        assert waits[f"wait: receive from rank {1 - rank}"] > 0 and waits[f"wait: send to rank {1 - rank}"] > 0
        inside = [e for e in stretches(content, "wait: receive") if within(e, batches)]
        assert inside, "a rank waits for halo rows while it trains"


def within(event: dict[str, Any], places: list[dict[str, Any]]) -> bool:
    """Whether an event lies in one of the others."""
    end = event["ts"] + event["dur"]
    return any(place["ts"] <= event["ts"] and end <= place["ts"] + place["dur"] for place in places)


@pytest.mark.parametrize(
    ("epochs", "batch_size", "recorded"),
    [(1, "null", 1), (3, "40", 5)],
    ids=["a run of one epoch", "no more batches than were asked for"],
)
def test_one_process_has_a_timeline_too(tmp_path: Path, epochs: int, batch_size: str, recorded: int) -> None:
    profile = ["debug=profile", "callbacks.timeline.max_batches=5", f"data.batch_size={batch_size}"]
    ok(gtrain("strategy=single", *profile, f"trainer.max_epochs={epochs}", *SHORT, cwd=tmp_path))
    (file,) = (tmp_path / "run" / "profile").glob("trace-*")
    content = trace(file)
    assert len(stretches(content, "training batch")) == recorded
    assert stretches(content, "aten::") and not stretches(content, "wait: ")


def test_no_timeline_unless_asked_and_what_is_wrong_is_named(tmp_path: Path) -> None:
    ok(gtrain("trainer.max_epochs=1", *SHORT, cwd=tmp_path))
    assert not (tmp_path / "run" / "profile").exists()
    wrong = gtrain("debug=profile", "callbacks.timeline.epochs=0", "strategy=single", *SHORT, cwd=tmp_path)
    assert wrong.returncode == 1 and "callbacks.timeline.epochs=0 was set" in wrong.stdout + wrong.stderr


@pytest.mark.parametrize("mode", [1, *(pytest.param(mode, marks=pytest.mark.slow) for mode in (2, 3))])
def test_bytes_are_reported_beside_their_lower_bound(tmp_path: Path, mode: int) -> None:
    """One set of halo rows forward and one backward, but for the first layer, whose input needs no gradient."""
    quick = ["model=sage", "trainer.max_epochs=3", "strategy.cache_inputs=false", f"mode={mode}"]
    ok(gtrain(*quick, *SHORT, cwd=tmp_path))
    found = summary(tmp_path / "run")
    halo = sum(found["store"]["halo"])
    # SAGE 16 -> 64 -> 4 classes: rows of 16 forward alone, then of min(64, 4) both ways; float32, three epochs
    assert sum(rank["comm_bound_bytes"] for rank in found["ranks"]) == halo * (16 + 2 * 4) * 4 * 3
    for rank in found["ranks"]:
        assert rank["comm_bound_bytes"] <= rank["bytes_sent"]
        assert rank["comm_seconds"] >= rank["wait_seconds"] > 0
