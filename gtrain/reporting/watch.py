"""``gtrain watch RUN``: a terminal page of a run, from the files that it writes anyway, until it ends."""

from __future__ import annotations

import time
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gtrain.errors import GtrainError
from gtrain.record.run import ProcessRecord, RunRecord, find_runs
from gtrain.record.scores import better, metric_names

SECONDS = 1.0
"""Time between two readings of the files."""
_BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = {"complete": "green", "running": "cyan", "failed": "red", "killed": "red"}
_MIB = 1 << 20
_LINES = 16
"""Processes that are shown."""


def main(arguments: list[str]) -> None:
    """Run the command: show the run until it ends; a run that has ended is shown once.

    Args:
        arguments: the folder of the run.

    Raises:
        GtrainError: not one folder was given, or it has no run.
    """
    if len(arguments) != 1:
        given = ", ".join(arguments) or "nothing"
        raise GtrainError(f"{given} was given; gtrain watch shows one run.", hint="gtrain watch runs/<date>/<time>")
    path = Path(arguments[0])
    runs = find_runs([path])
    if len(runs) > 1:
        raise GtrainError(f"{path} has {len(runs)} runs; gtrain watch shows one.", hint="name the folder of one run.")
    console, run = Console(), runs[0]
    if run.status != "running":
        console.print(page(run, console.width))
        return
    try:
        with Live(page(run, console.width), console=console, auto_refresh=False) as live:
            while run.status == "running":
                time.sleep(SECONDS)
                # A new object: the old one keeps what it has read.
                run = RunRecord(run.path)
                live.update(page(run, console.width), refresh=True)
    except KeyboardInterrupt:
        console.print("gtrain: stopped watching; the run goes on")


def page(run: RunRecord, width: int = 80) -> RenderableType:
    """Return what is shown of a run.

    Args:
        run: as it is now.
        width: columns of the terminal.
    """
    parts: list[RenderableType] = [_title(run), *_progress(run), *_curves(run, width)]
    if any(process.rows for process in run.processes):
        parts.append(_processes(run))
    for event in run.events[-4:]:
        if event["event"] not in ("start", "end"):
            parts.append(Text(f"{event['time'] - run.first_time:8.1f} s  {event['message']}", "yellow"))
    if message := run.end.get("message"):
        parts.append(Panel(Text(message), title="first cause" if run.status in ("failed", "refused") else run.status))
    return Group(*parts)


def _title(run: RunRecord) -> Text:
    choices = run.choices
    title = Text(f"{choices['strategy']} · {choices['data']} · {choices['model']}  ", "bold")
    title.append(run.status, COLOURS.get(run.status, "yellow"))
    now = time.time() if run.status == "running" else run.last_time
    return title.append(f"  {_clock(now - run.first_time)}  {run.path}" if run.first_time else f"  {run.path}", "dim")


def _progress(run: RunRecord) -> list[RenderableType]:
    """Return the line of epochs with the time left, from the pace of the last epochs."""
    rank = run.ranks[0] if run.ranks else ProcessRecord("rank 0")
    fits, epochs, steps = rank.of("fit"), rank.epochs, rank.of("step")
    if not fits:
        waits = {"running": "setting up: reading data, starting ranks"}
        return [Text(waits[run.status], "dim")] if run.status in waits else []
    first, most = fits[-1]["first_epoch"], fits[-1]["max_epochs"]
    done = epochs[-1]["epoch"] + 1 if epochs else first
    line = Table.grid(padding=(0, 2))
    limit = most if most is not None and most > 0 else None
    text = f"epoch {done}" + (f"/{limit}" if limit else "")
    cells: list[RenderableType] = [Text(text)]
    if steps and steps[-1]["batches"] and steps[-1]["epoch"] >= done and run.status == "running":
        cells[0] = Text(f"{text}, batch {steps[-1]['batch']}/{steps[-1]['batches']}")
    if limit:
        cells.append(ProgressBar(total=limit, completed=done, width=30))
    if limit and len(epochs) > 1 and run.status == "running" and not rank.of("fitted"):
        recent = epochs[-10:]
        pace = (recent[-1]["time"] - recent[0]["time"]) / (len(recent) - 1)
        cells.append(Text(f"{_clock(max(0.0, recent[-1]['time'] + pace * (limit - done) - time.time()))} left"))
    if rank.of("fitted") and run.status == "running":
        cells.append(Text("testing", "dim"))
    line.add_row(*cells)
    return [line]


def _curves(run: RunRecord, width: int) -> list[RenderableType]:
    """Return a line of blocks for each metric, with its last and its best value."""
    table = Table.grid(padding=(0, 2))
    names = metric_names(run.history)
    columns = max(10, min(50, width - 50))
    for name in names[:8]:
        values = [row[name] for row in run.history if row.get(name) is not None]
        if values:
            best = f"best {better(name, values, run.direction_of(name)):.4f}"
            table.add_row(Text(name), Text(sparkline(values, columns), "cyan"), f"{values[-1]:.4f}", best)
    return [table] if table.row_count else []


def sparkline(values: list[float], columns: int) -> str:
    """Return values as blocks of eight heights, at most this many; each is the mean of its share of the values."""
    count = min(columns, len(values))
    bounds = [number * len(values) // count for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    low, high = min(means), max(means)
    return "".join(_BLOCKS[round((mean - low) / (high - low) * 7) if high > low else 0] for mean in means)


def _processes(run: RunRecord) -> Table:
    """Return the table of ranks and servers: the last epoch, and memory now and at most."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("process", no_wrap=True)
    for heading in ("epoch", "seconds", "compute", "send", "wait", "read", "sent MiB", "MiB now", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for process in run.processes[:_LINES]:
        memory = [row["anonymous"] for row in process.of("memory")]
        epochs = process.epochs
        cells = ["-"] * 7
        if epochs:
            last = epochs[-1]
            share = [f"{last[part] / max(last['seconds'], 1e-9):.0%}" for part in
                     ("computing", "sending", "waiting", "reading")]  # fmt: skip
            cells = [str(last["epoch"] + 1), f"{last['seconds']:.3g}", *share, f"{last['bytes_sent'] / _MIB:,.2f}"]
        failed = process.of("failure")
        name = Text(process.label, "red" if failed else "")
        table.add_row(
            name, *cells, *([f"{memory[-1] / _MIB:,.0f}", f"{max(memory) / _MIB:,.0f}"] if memory else ["-", "-"])
        )
    if len(run.processes) > _LINES:
        table.caption = f"and {len(run.processes) - _LINES} more"
    return table


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
