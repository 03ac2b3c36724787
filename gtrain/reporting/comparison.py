"""The page that compares several runs, such as those of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt

from gtrain.record.run import Row, RunRecord, differing, told_direction
from gtrain.record.scores import better, is_of
from gtrain.reporting.figures import PARTS, loss_names, score_names, steady_epochs, training_axis, training_clock
from gtrain.reporting.page import write_page
from gtrain.reporting.run_page import Section, find_failure
from gtrain.reporting.style import BLUE, ORANGE, Figure, Table, colour, dashes, make_figure, thin

_LINES = 20
"""Runs whose curves are drawn."""
_MIB = 1 << 20


def write_comparison(runs: list[RunRecord], path: Path) -> list[Figure]:
    """Write the page of several runs, and return its figures."""
    names = run_names(runs)
    rows = comparison_rows(runs, names)
    sections = [
        Section("curves", "Training", _curves(runs, names)),
        Section("cost", "Time, bytes and memory", [*_times(runs, names), *_costs(rows)]),
    ]
    sections = [section for section in sections if section.figures]
    shown = [figure for section in sections for figure in section.figures]
    metrics = [name for name in dict.fromkeys(name for row in rows for name in row["metrics"]) if "loss" not in name]
    failures = [(name, find_failure(run)) for name, run in zip(names, runs, strict=True)]
    write_page(
        path,
        "comparison.html.j2",
        shown,
        title=f"{len(runs)} runs",
        folders=sorted({str(run.path.resolve().parent) for run in runs}),
        rows=rows,
        metrics=metrics,
        best={name: _best(runs, rows, name) for name in metrics},
        failures=[(name, failure) for name, failure in failures if failure is not None],
        sections=sections,
    )
    return shown


def run_names(runs: list[RunRecord]) -> list[str]:
    """Return a name for each run: the settings in which the runs differ, or else its folder; all are different."""
    varied = differing([{**run.settings, **run.choices} for run in runs])
    folders = [run.name for run in runs]
    folders = [str(run.path) if folders.count(run.name) > 1 else run.name for run in runs]
    settings = []
    for number, run in enumerate(runs):
        words = [value if key in run.choices else f"{key.rpartition('.')[2]}={value}" for key, values in varied.items()
                 if (value := values[number]) is not None]  # fmt: skip
        settings.append(" ".join(words))
    names = [
        folder if not text else f"{text} ({folder})" if settings.count(text) > 1 else text
        for text, folder in zip(settings, folders, strict=True)
    ]
    # A run may be given twice.
    again = [names[:number].count(name) for number, name in enumerate(names)]
    return [f"{name} #{number + 1}" if number else name for name, number in zip(names, again, strict=True)]


def comparison_rows(runs: list[RunRecord], names: list[str]) -> list[Row]:
    """Return the rows of the table, with the numbers of each run's ``summary.json``; None where it has none."""
    rows = []
    for run, name in zip(runs, names, strict=True):
        summary = run.summary
        row: Row = {"name": name, "status": run.status, "folder": run.name, "metrics": {}, "best": None}
        row |= dict.fromkeys(("epochs", "fit_seconds", "epoch_seconds", "sent", "bound", "memory"))
        if summary is not None:
            row["metrics"] = {key: value for key, value in summary["metrics"].items() if is_of(key, "test")}
            row["best"] = summary["best"]
            row["epochs"], row["fit_seconds"] = summary["epochs"], summary["fit_seconds"]
            epochs = max(summary["epochs"], 1)
            workers = [rank for rank in summary["ranks"] if rank["role"] == "worker"]
            row["epoch_seconds"] = sum(summary["epoch_seconds"]) / epochs
            row["sent"] = sum(rank["bytes_sent"] for rank in workers) / epochs
            bounds = [rank["comm_bound_bytes"] for rank in workers]
            row["bound"] = None if None in bounds else sum(bounds) / epochs
            row["memory"] = max(rank["peak_rss_bytes"] for rank in summary["ranks"])
        rows.append(row)
    return rows


def _best(runs: list[RunRecord], rows: list[Row], name: str) -> float | None:
    """Return the best value of a score; None with fewer than two."""
    values = [row["metrics"][name] for row in rows if row["metrics"].get(name) is not None]
    return None if len(values) < 2 else float(better(name, values, told_direction(runs, name)))


def _curves(runs: list[RunRecord], names: list[str]) -> list[Figure]:
    """Return the first score, and the training loss, of all runs against epochs and seconds."""
    every = [score for run in runs for score in score_names(run.history)]
    scores = [run.summary["best"]["name"] for run in runs if run.summary and run.summary["best"]] or every
    charts = []
    losses = [loss for run in runs for loss in loss_names(run.history) if is_of(loss, "train")]
    wanted = ((scores, "", "score"), (losses, "Training loss", "loss"))
    for metric, title, key in ((names_of[0], title, key) for names_of, title, key in wanted if names_of):
        rows: Table = []
        for run, name in list(zip(runs, names, strict=True))[:_LINES]:
            clock = training_clock(run)
            for row in thin([row for row in run.history if row.get(metric) is not None], 150):
                values = {"epoch": row["epoch"] + 1, "seconds": clock.get(row["epoch"]), "value": row[metric]}
                rows.append({"run": name, **values})
        if not rows:
            continue
        shown = list(dict.fromkeys(str(row["run"]) for row in rows))
        last = {row["run"]: row["value"] for row in rows}
        said = ", ".join(f"{run} ends at {value:.4g}" for run, value in last.items())
        note = f"The first {_LINES} of {len(runs)} runs." if len(runs) > _LINES else ""
        for axis in ("epoch", "seconds"):
            x, unit = training_axis(axis)
            chart = (
                alt.Chart(alt.Data(values=rows))
                .mark_line(point=alt.OverlayMarkDef(size=18, filled=True) if len(rows) < 600 else False)
                .encode(
                    x=x,
                    y=alt.Y("value:Q", title=metric, scale=alt.Scale(zero=False)),
                    color=colour("run", shown),
                    tooltip=["run:N", f"{axis}:Q", alt.Tooltip("value:Q", title=metric, format=".5~g")],
                    **dashes("run", shown),
                )
            )
            heading = f"{title or metric} against {unit}"
            charts.append(make_figure(f"{key}-by-{axis}", heading, f"{heading}: {said}.", chart, note=note))
    return charts


def _times(runs: list[RunRecord], names: list[str]) -> list[Figure]:
    rows: Table = []
    for run, name in zip(runs, names, strict=True):
        epochs = [row for process in run.ranks for row in steady_epochs(process)]
        for order, part in enumerate(PARTS if epochs else ()):
            rows.append({"run": name, "part": part, "order": order, "seconds": _mean(epochs, part)})
    if not rows:
        return []
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["run"]] = totals.get(row["run"], 0.0) + row["seconds"]
    fastest = min(totals, key=lambda name: totals[name])
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height={"band": 0.7})
        .encode(
            x=alt.X("seconds:Q", title="seconds per epoch", stack="zero", axis=alt.Axis(tickCount=8)),
            y=alt.Y("run:N", title=None, sort=list(totals)),
            color=colour("part", PARTS),
            order="order:Q",
            tooltip=["run:N", "part:N", alt.Tooltip("seconds:Q", format=".4~g")],
        )
    )
    text = f"Time of an epoch by run; {fastest} is fastest, {totals[fastest]:.3g} s."
    note = "Mean over the ranks, and the epochs after the first."
    height = max(90, 26 * len(totals) + 20)
    return [make_figure("time", "Time of an epoch", text, chart, note=note, height=height)]


def _mean(rows: list[Row], key: str) -> float:
    return float(sum(row[key] for row in rows) / len(rows))


def _costs(rows: list[Row]) -> list[Figure]:
    """Return the bytes that an epoch sends, and the peak memory, of the runs that have a summary."""
    rows = [row for row in rows if row["sent"] is not None]
    if not rows:
        return []
    height = max(90, 26 * len(rows) + 20)
    charts = []
    columns: list[tuple[str, str, str, Callable[[Row], float]]] = [
        ("memory", "Peak memory", "MiB, the largest process", lambda row: row["memory"] / _MIB)
    ]
    if any(row["sent"] for row in rows):
        columns.insert(0, ("bytes", "Bytes", "MiB sent per epoch by all ranks", lambda row: row["sent"] / _MIB))
    for key, title, unit, value in columns:
        values: Table = [{"run": row["name"], "MiB": value(row), "bound": _bound(row, key)} for row in rows]
        base: Any = alt.Chart(alt.Data(values=values)).encode(
            y=alt.Y("run:N", title=None, sort=[row["name"] for row in rows]),
            tooltip=["run:N", alt.Tooltip("MiB:Q", format=",.4~g")],
        )
        axis = alt.X("MiB:Q", title=unit, axis=alt.Axis(tickCount=6))
        chart = base.mark_bar(height={"band": 0.6}, color=BLUE).encode(x=axis)
        bounded = any(row["bound"] is not None for row in values)
        if bounded:
            chart += base.mark_tick(color=ORANGE, thickness=4, height={"band": 0.95}).encode(x="bound:Q")
        text = f"{title} by run: " + ", ".join(f"{row['run']} {row['MiB']:.4g} MiB" for row in values) + "."
        note = "The orange mark is the lower bound for the run's partitioning." if bounded else ""
        charts.append(make_figure(key, title, text, chart, note=note, height=height))
    return charts


def _bound(row: Row, key: str) -> float | None:
    return row["bound"] / _MIB if key == "bytes" and row["bound"] is not None else None
