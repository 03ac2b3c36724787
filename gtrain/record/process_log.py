"""The log of one rank or server in the run's record: a row per epoch, memory over time, the error that ended it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from gtrain.launch import slot as slots
from gtrain.launch.logs import log_path
from gtrain.record.events import PROFILE, record_folder
from gtrain.record.run import read_rows

FLUSH_SECONDS = 0.5
"""Rows are written at most this often, so that short epochs do not pay for a write each."""
_AT_ONCE = ("store", "fit", "fitted", "failure")
"""Kinds of rows that are written at once, with those that wait."""
_FRACTION = 500
"""Repeated rows, such as those of memory, are apart by this fraction of the run's time, and at least a second."""


class ProcessLog:
    """Appends rows of plain values to ``<run>/record/<process>.jsonl``, one JSON object per line.

    A run goes on if its rows cannot be written. Every method may be called from any thread.

    Args:
        run_dir: the run's folder; None writes nothing.
        label: of the process: ``rank 2``, ``parameter 0``.
        append: continue the file of the process that this one replaces.
    """

    def __init__(self, run_dir: Path | None, label: str = "", *, append: bool = False) -> None:
        self.path = None if run_dir is None else log_path(record_folder(run_dir), label).with_suffix(".jsonl")
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._started_at = time.monotonic()
        self._flushed_at = -math.inf
        self._last: dict[str, float] = {}
        if run_dir is not None and self.path is not None:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if not append:
                    self.path.unlink(missing_ok=True)
                    # That of an earlier run in the folder, of which another machine may have a copy.
                    (run_dir / PROFILE / f"spans-{self.path.stem}.json").unlink(missing_ok=True)
        restarts, attempt = slots.restarts(), slots.attempt()
        self.write("process", host=socket.gethostname(), pid=os.getpid(), restarts=restarts, attempt=attempt)

    def write(self, kind: str, **fields: Any) -> None:
        """Append a row of plain values; NaN and infinity become null."""
        if self.path is None:
            return
        row = json.dumps({"kind": kind, "time": time.time(), **{name: _plain(value) for name, value in fields.items()}})
        with self._lock:
            self._lines.append(row + "\n")
            if kind in _AT_ONCE or time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
                self._flush()

    def is_due(self, kind: str) -> bool:
        """Whether to write the next row of a kind that repeats; the intervals grow with the time of the run.

        Also writes the rows that have waited long enough: a thread asks often.
        """
        now = time.monotonic()
        if self._lines and now - self._flushed_at >= FLUSH_SECONDS:
            self.flush()
        if now - self._last.get(kind, -math.inf) < max(1.0, (now - self._started_at) / _FRACTION):
            return False
        self._last[kind] = now
        return True

    def epochs(self) -> dict[int, dict[str, Any]]:
        """Return this process's row of each epoch so far, the last one of an epoch that was trained again."""
        if self.path is None:
            return {}
        self.flush()
        return {row["epoch"]: row for row in read_rows(self.path) if row["kind"] == "epoch"}

    def flush(self) -> None:
        """Write the rows that wait."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self.path is None or not self._lines:
            return
        content, self._lines, self._flushed_at = "".join(self._lines).encode(), [], time.monotonic()
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(descriptor, content)
            finally:
                os.close(descriptor)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return {name: _plain(part) for name, part in value.items()} if isinstance(value, dict) else value
