"""``gtrain runs [FOLDER] [limit=N] [format=json]``: lists the runs below a folder, from the small files of each."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gtrain.config import PathsConfig
from gtrain.console import table_console
from gtrain.errors import GtrainError
from gtrain.record.events import record_folder
from gtrain.record.run import RunRecord, is_run
from gtrain.reporting.command import take_options
from gtrain.reporting.watch import COLOURS
from gtrain.run import runs

FORMATS = ("table", "json")
_DEPTH = 5
"""Folders between the given one and a run: ``runs/multirun/<date>/<time>/<job>`` in the current folder."""
_TAIL_BYTES = 64 << 10
_CAUSE = 60  # characters


@dataclass(frozen=True)
class ListedRun:
    """A run in the list. A value is None where the run has not got that far, or its release did not record it.

    Attributes:
        folder: below the given folder, or absolute if the run is elsewhere.
        started: when its command started, in seconds since 1970.
        verb: ``train`` or ``test``.
        data, model, strategy: the chosen options.
        ranks: how many.
        epochs: completed epochs, with those before a resumed checkpoint.
        score: name of the monitored score.
        best: its best value.
        seconds: from the start of the command to its end, or to now while it runs.
        state: as in ``gtrain watch``: ``complete``, ``running``, ``failed``, ``refused``, ``interrupted``, ``killed``.
        cause: the first cause of a run that failed.
    """

    folder: str
    started: float | None
    verb: str | None
    data: str
    model: str
    strategy: str
    ranks: int | None
    epochs: int | None
    score: str | None
    best: float | None
    seconds: float | None
    state: str
    cause: str | None


def main(arguments: list[str]) -> None:
    """Run the command.

    Args:
        arguments: at most one folder, ``format=table`` or ``json``, and ``limit=``, the most rows of the table.

    Raises:
        GtrainError: several folders were given, it does not exist, or an option has another value.
    """
    options = {"format": "table", "limit": "100"}
    folders = take_options(arguments, options)
    if len(folders) > 1:
        raise GtrainError(
            f"{', '.join(map(str, folders))} were given; gtrain runs lists one folder.", hint="gtrain runs FOLDER"
        )
    if options["format"] not in FORMATS:
        raise GtrainError(f"format={options['format']} was set.", hint=f"the forms are {', '.join(FORMATS)}.")
    if not options["limit"].isdecimal():
        raise GtrainError(f"limit={options['limit']} was set.", hint="set a number of runs; 0: all of them.")
    folder = folders[0] if folders else Path(str(PathsConfig.runs))
    if not folder.is_dir():
        raise GtrainError(f"{folder} is not a folder.", hint="gtrain runs FOLDER; without one it lists runs.")
    listed = list_runs(folder)
    if options["format"] == "json":
        print(json.dumps([asdict(run) for run in listed], indent=1))
    elif listed:
        shown = listed[-int(options["limit"]) :]
        table_console().print(_table(shown))
        if len(shown) < len(listed):
            print(f"the newest {len(shown)} of {len(listed)} runs; limit=0 shows all")
    else:
        print(f"{folder} has no runs")


def list_runs(folder: Path) -> list[ListedRun]:
    """Return the runs in a folder and in its index, the newest last; jobs of sweeps are runs too."""
    # Those that are found follow no links, so that the folder above them is resolved once for all.
    top = folder.resolve()
    folders = {top / path.relative_to(folder): path for path in find_folders(folder)}
    folders |= {path.resolve(): path for path in runs.recorded(folder)}
    gc.freeze()  # a thousand summaries make the collector traverse all imported objects often
    try:
        listed = [describe(RunRecord(path), _name(path, folder)) for path in folders.values()]
    finally:
        gc.unfreeze()
    return sorted(listed, key=lambda run: (run.started or 0.0, run.folder))


def find_folders(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield the folders of runs in a folder, without those inside of a run, such as the racers of ``strategy=auto``."""
    if is_run(folder):
        yield folder
        return
    if depth > 0:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            inner = [
                entry.path
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
            for path in inner:
                yield from find_folders(Path(path), depth - 1)


def _name(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder) if path.is_relative_to(folder) and path != folder else str(path)


def describe(run: RunRecord, folder: str) -> ListedRun:
    """Return what the list shows of a run."""
    summary, start, state = run.summary or {}, run.start, run.status
    best, cause = summary.get("best") or {}, run.cause.get("message") or run.end.get("message")
    ranks = summary.get("world_size")
    if ranks is None and "num_nodes" in start:
        ranks = start["num_nodes"] * start["devices"]
    started = start.get("time")
    return ListedRun(
        folder=folder,
        started=started,
        verb=summary.get("verb") or start.get("verb"),
        **run.choices,
        ranks=ranks,
        epochs=_epochs(run, summary),
        score=best.get("name"),
        best=best.get("value"),
        seconds=None if started is None else _last_time(run, state) - started,
        state=state,
        cause=str(cause) if cause and state in ("failed", "refused") else None,
    )


def _epochs(run: RunRecord, summary: dict[str, Any]) -> int | None:
    """Return the completed epochs: of the summary, else of the record's last rows, else of the last checkpoint."""
    if summary:
        return summary["history"][-1]["epoch"] + 1 if summary["history"] else None
    for line in reversed(_tail(record_folder(run.path) / "rank-0.jsonl")):
        with contextlib.suppress(ValueError, KeyError):
            row = json.loads(line)
            if row["kind"] == "epoch":
                return int(row["epoch"]) + 1
    saved = runs.last_checkpoint(run.path)
    return None if saved is None else saved.epochs


def _tail(path: Path) -> list[str]:
    """Return the last lines of a file; the first of them may lack its start."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
    return []


def _last_time(run: RunRecord, state: str) -> float:
    if state == "running":
        return time.time()
    if run.end:
        return float(run.end["time"])
    with contextlib.suppress(OSError):  # killed: the last sign of life
        return (record_folder(run.path) / "rank-0.jsonl").stat().st_mtime
    return float(run.events[-1]["time"])


# --------------------------------------------------------------------------------------------------- the table


def _table(listed: list[ListedRun]) -> Table:
    """Return the table; the score's name is the heading of its column if all runs have the same."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    scores = {run.score for run in listed if run.score is not None}
    table.add_column("folder", overflow="fold")
    for heading in ("data", "model", "strategy"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ranks", "epochs", f"best {min(scores)}" if len(scores) == 1 else "best", "seconds"):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    table.add_column("state", overflow="fold", min_width=11)
    for run in listed:
        name = f"{run.score} " if len(scores) > 1 else ""
        best = "-" if run.best is None else f"{name}{run.best:.4f}"
        text = Text(run.state, COLOURS.get(run.state, "yellow"))
        if run.verb not in (None, "train"):
            text.append(f" {run.verb}", "dim")
        if cause := _short(run.cause or ""):
            text.append(f": {cause}", "dim")
        seconds = "-" if run.seconds is None else f"{run.seconds:,.0f}"
        names = (Text(value) for value in (run.folder, run.data, run.model, run.strategy))
        table.add_row(*names, _number(run.ranks), _number(run.epochs), Text(best), seconds, text)
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _short(text: str) -> str:
    """Return the first line of a message, cut to a few words; empty if it has none."""
    line = next(iter(text.strip().splitlines()), "")
    if len(line) <= _CAUSE:
        return line
    end = line.rfind(" ", 0, _CAUSE)
    return line[: end if end > 0 else _CAUSE] + " ..."
