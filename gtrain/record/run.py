"""Reads the folder of a run: its record, summary, settings and logs. Imports the standard library only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gtrain.errors import GtrainError
from gtrain.record.events import EVENTS, SUMMARY, record_folder
from gtrain.record.scores import measure
from gtrain.record.trials import REPORTER

Row = dict[str, Any]
_SILENT_SECONDS = 60.0
"""Without locks, a run that has written nothing for this time has ended."""
_SILENT_FRACTION = 100
"""The same as a part of the run's time, if that is longer."""
_TAIL_BYTES = 16 << 10


@dataclass
class ProcessRecord:
    """The rows of one rank or server, in the order in which they were written; each has ``kind`` and ``time`` (s).

    Attributes:
        label: ``rank 2``, ``parameter 0``.
        rows: all of them.
    """

    label: str
    rows: list[Row] = field(default_factory=list)

    def of(self, kind: str) -> list[Row]:
        """Return the rows of a kind."""
        return [row for row in self.rows if row["kind"] == kind]

    @property
    def epochs(self) -> list[Row]:
        """The row of each epoch, in order: the last one, if a restarted job trained an epoch again."""
        rows = {row["epoch"]: row for row in self.of("epoch")}
        return [rows[epoch] for epoch in sorted(rows)]

    @property
    def attempt(self) -> int:
        """How many times the job had been started before the process started last."""
        return int(next((row.get("attempt") or 0 for row in reversed(self.of("process"))), 0))

    def last_life(self, kind: str) -> list[Row]:
        """Return the rows of a kind since the process started last."""
        starts = [number for number, row in enumerate(self.rows) if row["kind"] == "process"]
        return [row for row in self.rows[starts[-1] if starts else 0 :] if row["kind"] == kind]

    @property
    def is_rank(self) -> bool:
        """Whether this is a rank, not a server."""
        return self.label.startswith("rank ")


@dataclass
class RunRecord:
    """A run as its folder shows it; also of a run that goes on, or failed.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def name(self) -> str:
        """Short name of the run: the last parts of its path."""
        parts = self.path.resolve().parts
        return "/".join(parts[-2:]) if parts[-1][:1].isdigit() and len(parts) > 2 else parts[-1]

    @cached_property
    def summary(self) -> Row | None:
        """The content of ``summary.json``; None if the run has written none."""
        try:
            return json.loads((self.path / SUMMARY).read_text())
        except (OSError, ValueError):
            return None

    @cached_property
    def events(self) -> list[Row]:
        """The events of the job."""
        return list(read_rows(record_folder(self.path) / EVENTS))

    @cached_property
    def processes(self) -> list[ProcessRecord]:
        """The ranks in order, then the servers by role and number."""
        processes = [
            ProcessRecord(path.stem.replace("-", " "), list(read_rows(path)))
            for path in record_folder(self.path).glob("*-*.jsonl")
        ]
        return sorted(processes, key=lambda process: (not process.is_rank, *by_number(process.label)))

    @property
    def ranks(self) -> list[ProcessRecord]:
        """The ranks in order."""
        return [process for process in self.processes if process.is_rank]

    @cached_property
    def tests(self) -> list[Row]:
        """The test's summary of each rank."""
        paths = sorted(record_folder(self.path).glob("test-rank-*.json"), key=lambda path: by_number(path.stem))
        return [json.loads(path.read_text()) for path in paths]

    @property
    def hidden_files(self) -> list[Path]:
        """The files with samples of the hidden layer."""
        return sorted(record_folder(self.path).glob("hidden-rank-*.npz"))

    @cached_property
    def start(self) -> Row:
        """The event with which the record starts; empty if there is none."""
        return next((event for event in self.events if event["event"] == "start"), {})

    @cached_property
    def end(self) -> Row:
        """The event with which the command ended; empty if there is none, or the job was restarted since."""
        return next((event for event in reversed(self._attempt) if event["event"] == "end"), {})

    @property
    def cause(self) -> Row:
        """The event of the process that failed first since the last start of the job; empty if none is known to."""
        return next((event for event in reversed(self._attempt) if event["event"] == "failed"), {})

    @property
    def _attempt(self) -> list[Row]:
        """The events since the job was started last."""
        starts = [number for number, event in enumerate(self.events) if event["event"] in ("start", "job restarted")]
        return self.events[starts[-1] if starts else 0 :]

    @cached_property
    def status(self) -> str:
        """``complete``, ``running``, ``failed``, ``refused``, ``interrupted`` or ``killed``."""
        if self.end:
            status = str(self.end["status"])
            if status != "failed" or self.cause or any(record_folder(self.path).glob("*-*.jsonl")):
                return status
            return "refused"
        if self.summary is not None and not self.events:
            return "complete"
        return "running" if self.is_running() else "killed"

    def is_running(self) -> bool:
        """Whether a command holds the lock of the folder; a lock of another machine may not show here."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return True
            return self._wrote_lately()  # a file system without locks
        finally:
            os.close(descriptor)
        hosts = [event["host"] for event in self.events if event["event"] == "start" and "host" in event]
        return bool(hosts) and hosts[-1] != socket.gethostname() and self._wrote_lately()

    def _wrote_lately(self) -> bool:
        # Rows of memory are apart by a fraction of the run's time.
        apart = (self.last_time - self.first_time) / _SILENT_FRACTION
        return time.time() - self.last_time < max(_SILENT_SECONDS, apart)

    @property
    def last_time(self) -> float:
        """The time of the newest row or event, in seconds since 1970."""
        rows = [process.rows[-1] for process in self.processes if process.rows]
        return max((row["time"] for row in [*rows, *self.events]), default=0.0)

    @property
    def first_time(self) -> float:
        """The time at which the command started."""
        return float(self.start.get("time") or min((p.rows[0]["time"] for p in self.processes if p.rows), default=0.0))

    @property
    def choices(self) -> dict[str, str]:
        """The chosen strategy, data and model."""
        source = self.summary or self.start
        return {name: str(source.get(name, "?")) for name in ("strategy", "data", "model")}

    @cached_property
    def history(self) -> list[Row]:
        """The metrics of each epoch, with ``epoch`` and ``time``; a failed run has those of the epochs it trained."""
        rows = self.ranks[0].epochs if self.ranks else []
        said = list((self.summary or {}).get("history", []))
        if rows and len(rows) >= len(said):  # the rows of an earlier attempt may be on another machine
            return [{"epoch": row["epoch"], "time": row["time"], **row.get("metrics", {})} for row in rows]
        return said

    def direction_of(self, score: str) -> str | None:
        """Return ``min`` or ``max`` if the checkpoint of this run tells which values of a score are better, else None.

        What it says of ``val/mse`` is true of ``test/mse`` too.
        """
        best, configured = (self.summary or {}).get("best") or {}, self.start.get("checkpoint") or {}
        for said, key in ((best, "name"), (configured, "monitor")):
            name, direction = said.get(key), said.get("direction")
            if name and direction in ("min", "max") and measure(name) == measure(score):
                return str(direction)
        return None

    @cached_property
    def overrides(self) -> list[str]:
        """The overrides of the command line."""
        if "overrides" in self.start:
            return [str(override) for override in self.start["overrides"]]
        try:
            lines = (self.path / ".hydra" / "overrides.yaml").read_text().splitlines()
        except OSError:
            return []
        return [line[2:].strip("'\"") for line in lines if line.startswith("- ")]

    @property
    def settings(self) -> dict[str, str]:
        """What the overrides set, as text by key; without what a search adds to its jobs."""
        pairs = (override.lstrip("+~").partition("=")[::2] for override in self.overrides)
        return {key: value for key, value in pairs if key != f"callbacks.{REPORTER}"}

    @property
    def store(self) -> Path | None:
        """The folder of the partitioned graph; None if the run did not get that far."""
        if self.summary is not None:
            return Path(self.summary["store"]["path"])
        rows = [row for process in self.ranks for row in process.of("store")]
        return Path(rows[-1]["path"]) if rows else None

    def log_tail(self, label: str, lines: int = 25) -> list[str]:
        """Return the last lines of the log of a process; empty if it has none."""
        path = self.path / "logs" / f"{label.replace(' ', '-')}.log"
        with contextlib.suppress(OSError), open(path, "rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-lines:]
        return []


def find_runs(paths: list[Path]) -> list[RunRecord]:
    """Return the runs in these folders: a run's folder, or one of a sweep, whose subfolders are runs.

    Raises:
        GtrainError: a folder does not exist, or has no run.
    """
    every_run = []
    for path in paths:
        if not path.is_dir():
            raise GtrainError(f"{path} was given; it is not a folder.", hint="name the folder of a run.")
        inner = sorted(
            (each for each in path.iterdir() if each.is_dir() and is_run(each)), key=lambda p: by_number(p.name)
        )
        runs = [path] if is_run(path) else inner
        if not runs:
            raise GtrainError(
                f"{path} was given; neither it nor its subfolders are folders of a run.",
                hint="name the folder of a run, such as runs/<date>/<time>, or that of a sweep.",
            )
        every_run += [RunRecord(run) for run in runs]
    return every_run


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run that trained or tested, or was to."""
    return any((path / name).exists() for name in (SUMMARY, f"record/{EVENTS}", "run.json"))


def told_direction(runs: Iterable[RunRecord], score: str) -> str | None:
    """Return the direction of a score, as the first of several runs tells that does; see RunRecord.direction_of."""
    return next((told for run in runs if (told := run.direction_of(score)) is not None), None)


def by_number(name: str) -> tuple[str, int]:
    """Return a key that orders names which end in a number."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name.removesuffix(digits), int(digits or 0)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines; a last line that is being written is left out."""
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def differing(runs: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    """Return the settings that have several values, with the value of each run, None where a run does not set it."""
    keys = dict.fromkeys(key for run in runs for key in run)
    values = {key: [run.get(key) for run in runs] for key in keys}
    return {key: texts for key, texts in values.items() if len(set(texts)) > 1}
