"""Which process the page of a failed run names, from the records that the processes left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gtrain.record.run import RunRecord
from gtrain.reporting.run_page import find_failure

LOST = {"kind": "failure", "type": "PeerLostError", "message": "rank 1 is gone", "hint": None, "echo": True}
BROKEN = {"kind": "failure", "type": "ValueError", "message": "negative", "hint": None, "echo": False}


def write(folder: Path, status: str, *rows: dict[str, Any] | None) -> RunRecord:
    """Write the record of a run without a watching agent: how it ended, and the last row of each rank."""
    (folder / "record").mkdir()
    events = [{"event": "start", "time": 0.0}, {"event": "end", "time": 9.0, "status": status, "message": "why"}]
    (folder / "record/events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for rank, row in enumerate(rows):
        lines = [{"kind": "process", "time": 1.0}, *([] if row is None else [{"time": 2.0 + rank, **row}])]
        (folder / f"record/rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunRecord(folder)


@pytest.mark.parametrize(
    ("status", "rows", "process"),
    [
        ("failed", (LOST, BROKEN, LOST), "rank 1"),
        ("failed", (BROKEN, BROKEN), "rank 0"),  # the earlier one
        ("failed", (LOST, None, LOST), "rank 1"),  # killed
        ("failed", (LOST, None, None), ""),
        ("failed", (LOST,), ""),  # the other machines have their own folders
        ("interrupted", (BROKEN, BROKEN), ""),
    ],
)
def test_the_process_that_failed_first(
    status: str, rows: tuple[dict[str, Any] | None, ...], process: str, tmp_path: Path
) -> None:
    failure = find_failure(write(tmp_path, status, *rows))
    assert failure is not None
    assert (failure.what, failure.process) == ("why", process)
