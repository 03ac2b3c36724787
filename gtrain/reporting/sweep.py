"""The table at the end of a sweep: the settings that differ between its jobs, each job's best score and seconds."""

from __future__ import annotations

import contextlib
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gtrain.console import table_console
from gtrain.record.run import RunRecord, differing, told_direction
from gtrain.record.scores import better
from gtrain.reporting.listing import ListedRun, describe, find_folders
from gtrain.reporting.watch import COLOURS

FILE = "sweep.csv"
_MISSING = "-"


def show(folder: Path) -> None:
    """Print the table of a sweep, and write it to ``sweep.csv`` in the sweep's folder with all digits.

    Args:
        folder: of the sweep; each job's folder is below it. Jobs that have not begun have no row.
    """
    paths = sorted(find_folders(folder), key=lambda path: _order(path.relative_to(folder)))
    records = [RunRecord(path) for path in paths]
    if not records:
        return
    jobs = [describe(record, str(record.path.relative_to(folder))) for record in records]
    varied = differing([record.settings for record in records])
    settings = {key: [_MISSING if text is None else text for text in texts] for key, texts in varied.items()}
    _write(folder / FILE, jobs, settings)
    console = table_console()
    scores = {job.score for job in jobs if job.score is not None}
    direction = told_direction(records, *scores) if len(scores) == 1 else None
    console.print(_table(jobs, settings, direction))
    console.print(Text(f"the table as CSV: {folder / FILE}"), soft_wrap=True)


def _order(path: Path) -> tuple[int, str]:
    """Sort jobs by number, whatever its digits; jobs with names follow by name."""
    first = path.parts[0] if path.parts else ""
    return (int(first) if first.isdecimal() else sys.maxsize, str(path))


def _write(path: Path, jobs: Sequence[ListedRun], settings: dict[str, list[str]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["job", *settings, "score", "best", "epochs", "seconds", "state", "cause"])
        for number, job in enumerate(jobs):
            values = [texts[number] for texts in settings.values()]
            rows.writerow([job.folder, *values, job.score, job.best, job.epochs, job.seconds, job.state, job.cause])


def _table(jobs: Sequence[ListedRun], settings: dict[str, list[str]], direction: str | None) -> Table:
    """Return the table; the best score, by the ``direction`` of the jobs, is bold if all jobs have the same one."""
    scores = {job.score for job in jobs if job.score is not None}
    known = [job.best for job in jobs if job.best is not None]
    first = better(next(iter(scores)), known, direction) if len(scores) == 1 and known else None
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in ("job", *_short(list(settings))):
        table.add_column(Text(heading), overflow="fold")  # [src,dst] is text, not markup
    for heading in (f"best {min(scores)}" if len(scores) == 1 else "best", "epochs", "seconds"):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for number, job in enumerate(jobs):
        name = f"{job.score} " if len(scores) > 1 else ""
        best = Text(_MISSING if job.best is None else f"{name}{job.best:.4f}", "bold" if job.best == first else "")
        seconds = _MISSING if job.seconds is None else f"{job.seconds:,.0f}"
        state = Text(job.state, COLOURS.get(job.state, "yellow"))
        values = [Text(_rounded(texts[number])) for texts in settings.values()]
        epochs = _MISSING if job.epochs is None else str(job.epochs)
        table.add_row(Text(job.folder), *values, best, epochs, seconds, state)
    return table


def _short(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, or the whole key where several have the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return [part if last.count(part) == 1 else key for key, part in zip(keys, last, strict=True)]


def _rounded(text: str) -> str:
    """Return a long number with four digits; a whole number, such as a seed, and any other text as it is."""
    with contextlib.suppress(ValueError):
        int(text)
        return text
    with contextlib.suppress(ValueError):
        return f"{float(text):.4g}" if len(text) > 8 else text
    return text
