"""Figures of how a run went: curves, time, bytes, memory, events."""

from __future__ import annotations

from typing import Any

import altair as alt

from gtrain.record.run import ProcessRecord, Row, RunRecord
from gtrain.record.scores import by_split, is_loss, metric_names
from gtrain.reporting.style import BLUE, COLOURS, NEUTRAL, ORANGE, RED, Figure, Table, colour, dashes, make_figure, thin

PARTS = ("computing", "sending", "waiting", "reading")
"""What the time of a rank divides into."""
_MIB = 1 << 20
_PROCESSES = 20
"""Processes whose memory is drawn."""


def score_names(history: list[Row]) -> list[str]:
    """Return the names of the metrics of a history that are not losses, the validation's first."""
    return by_split((name for name in metric_names(history) if not is_loss(name)), "val")


def loss_names(history: list[Row]) -> list[str]:
    """Return the names of the losses of a history, the training's first."""
    return by_split((name for name in metric_names(history) if is_loss(name)), "train")


def curves(run: RunRecord) -> list[Figure]:
    """Return the losses and the scores against epochs and against seconds of training."""
    history, charts = run.history, []
    scores = [name for name in score_names(history) if not name.endswith("mean_rank")]
    clock = training_clock(run)
    for kind, names, title in (("loss", loss_names(history)[:6], "Loss"), ("score", scores[:6], "Validation scores")):
        rows: Table = [
            {"epoch": row["epoch"] + 1, "seconds": clock.get(row["epoch"]), "metric": name, "value": row[name]}
            for name in names
            for row in thin([row for row in history if row.get(name) is not None])
        ]
        if not rows:
            continue
        last = {row["metric"]: row["value"] for row in rows}
        summary = ", ".join(f"{name} ends at {value:.4g}" for name, value in last.items())
        axes = ("epoch", "seconds") if rows[0]["seconds"] is not None else ("epoch",)
        for axis in axes:
            x, unit = training_axis(axis)
            chart = _lines(rows, x, "value", kind, "metric", names)
            figure = f"{kind}-by-{axis}"
            charts.append(make_figure(figure, f"{title} against {unit}", f"{title} against {unit}: {summary}.", chart))
    return charts


def training_axis(name: str) -> tuple[alt.X, str]:
    """Return the axis of the column ``epoch`` or ``seconds`` of a curve, and what it counts."""
    if name == "epoch":
        return alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickCount=8, tickMinStep=1, format="d")), "epochs"
    return alt.X("seconds:Q", title="seconds of training", axis=alt.Axis(tickCount=8)), "seconds"


def _lines(rows: Table, x: alt.X, y: str, title: str, series: str, names: list[str], *, zero: bool = False) -> Any:
    """Return lines, with points if there are few, and the values of one place on hover."""
    few = len(rows) <= 60 * len(names)
    tooltip = [alt.Tooltip(f"{series}:N"), alt.Tooltip(x.shorthand), alt.Tooltip(f"{y}:Q", format=".5~g")]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=alt.OverlayMarkDef(size=22, filled=True) if few else False)
        .encode(
            x=x,
            y=alt.Y(f"{y}:Q", title=title, scale=alt.Scale(zero=zero)),
            color=colour(series, names),
            tooltip=tooltip,
            **dashes(series, names),
        )
    )


def training_clock(run: RunRecord) -> dict[int, float]:
    """Return the seconds of training, without validation and checkpoints, until the end of each epoch."""
    clock, total = {}, 0.0
    for row in run.ranks[0].epochs if run.ranks else []:
        total += row["seconds"]
        clock[row["epoch"]] = total
    if not clock and run.summary is not None:
        for epoch, seconds in zip(run.history, run.summary["epoch_seconds"], strict=False):
            total += seconds
            clock[epoch["epoch"]] = total
    return clock


def steady_epochs(process: ProcessRecord) -> list[Row]:
    """Return a rank's epochs without the first, which compiles kernels and fills caches, if there are others."""
    return process.epochs[1:] or process.epochs


def time_split(process: ProcessRecord) -> dict[str, float]:
    """Return the mean seconds of each part of an epoch's time, see :data:`PARTS`; empty without epochs."""
    epochs = steady_epochs(process)
    return {part: sum(row[part] for row in epochs) / len(epochs) for part in PARTS} if epochs else {}


def times(run: RunRecord) -> list[Figure]:
    """Return how the time of an epoch divides on each rank, and over the epochs of the slowest rank."""
    splits = {process.label: time_split(process) for process in run.ranks if process.epochs}
    if not splits:
        return []
    rows: Table = [
        {"rank": label, "part": part, "seconds": seconds, "order": PARTS.index(part)}
        for label, split in splits.items()
        for part, seconds in split.items()
    ]
    busiest = max(splits, key=lambda label: splits[label]["computing"])
    total = sum(splits[busiest].values())
    says = f"{busiest} computes longest, {splits[busiest]['computing']:.3g} of {total:.3g} s per epoch"
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height={"band": 0.7})
        .encode(
            x=alt.X("seconds:Q", title="seconds per epoch", stack="zero", axis=alt.Axis(tickCount=8)),
            y=alt.Y("rank:N", title=None, sort=list(splits)),
            color=colour("part", PARTS),
            order="order:Q",
            tooltip=["rank:N", "part:N", alt.Tooltip("seconds:Q", format=".4~g")],
        )
    )
    first = len(run.ranks[0].epochs) > 1
    note = "Mean over the epochs" + (" after the first." if first else ".")
    height = max(90, 26 * len(splits) + 20)
    figures = [
        make_figure("time", "Time of each rank", f"Time of an epoch by rank: {says}.", bars, note=note, height=height)
    ]
    epochs = thin(run.ranks[0].epochs, 120)
    if len(epochs) > 1:
        parts: Table = [
            {"epoch": row["epoch"] + 1, "part": part, "seconds": row[part], "order": PARTS.index(part)}
            for row in epochs
            for part in PARTS
        ]
        area = (
            alt.Chart(alt.Data(values=parts))
            .mark_bar()
            .encode(
                x=alt.X("epoch:O", title="epoch", axis=alt.Axis(labelAngle=0)),
                y=alt.Y("seconds:Q", title="seconds", stack="zero"),
                color=colour("part", PARTS),
                order="order:Q",
                tooltip=["epoch:O", "part:N", alt.Tooltip("seconds:Q", format=".4~g")],
            )
        )
        longest = max(epochs, key=lambda row: row["seconds"])
        text = f"Time of each epoch of rank 0; epoch {longest['epoch'] + 1} takes longest, {longest['seconds']:.3g} s."
        figures.append(make_figure("time-by-epoch", "Time of each epoch, rank 0", text, area))
    return figures


def traffic(run: RunRecord) -> list[Figure]:
    """Return the bytes of each rank, beside the lower bound if the strategy states one."""
    rows: Table = []
    labels = []
    largest = max((row["bytes_sent"] for process in run.ranks for row in process.epochs), default=0)
    unit, scale = ("MiB", _MIB) if largest >= _MIB / 10 else ("KiB", 1 << 10)
    for process in run.ranks:
        epochs = process.epochs
        if not epochs:
            continue
        labels.append(process.label)
        bound = [row["bound"] for row in epochs]
        rows.append({
            "rank": process.label,
            "sent": sum(row["bytes_sent"] for row in epochs) / len(epochs) / scale,
            "received": sum(row["bytes_received"] for row in epochs) / len(epochs) / scale,
            "bound": None if None in bound else sum(bound) / len(bound) / scale,
        })  # fmt: skip
    if not any(row["sent"] or row["received"] for row in rows):
        return []
    bounded = any(row["bound"] is not None for row in rows)
    y = alt.Y("rank:N", title=None, sort=labels)
    chart = alt.Chart(alt.Data(values=rows)).encode(
        y=y,
        tooltip=[alt.Tooltip("rank:N")]
        + [alt.Tooltip(f"{name}:Q", format=",.4~g", title=f"{name}, {unit}") for name in ("sent", "received", "bound")],
    )
    sent = chart.mark_bar(height={"band": 0.6}, color=BLUE).encode(
        x=alt.X("sent:Q", title=f"{unit} sent per epoch", axis=alt.Axis(tickCount=8))
    )
    if bounded:
        sent += chart.mark_tick(color=ORANGE, thickness=4, height={"band": 0.95}).encode(x="bound:Q")
    total, lowest = sum(row["sent"] for row in rows), sum(row["bound"] or 0 for row in rows)
    text = f"The ranks send {total:.4g} {unit} per epoch"
    text += f"; the lower bound is {lowest:.4g} {unit}." if bounded else "."
    note = "The orange mark is the lower bound, the fewest bytes for this partitioning." if bounded else ""
    height = max(90, 26 * len(labels) + 20)
    figures = [make_figure("bytes", "Bytes of each rank", text, sent, note=note, height=height)]
    points: Table = []
    for process in run.ranks[:1]:
        for row in thin(process.epochs):
            number = row["epoch"] + 1
            points.append({"epoch": number, "series": "sent", "amount": row["bytes_sent"] / scale})
            if row["bound"] is not None:
                points.append({"epoch": number, "series": "lower bound", "amount": row["bound"] / scale})
    if len({row["epoch"] for row in points}) > 1:
        names = ["sent", "lower bound"] if bounded else ["sent"]
        x = alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1, format="d"))
        lines = _lines(points, x, "amount", unit, "series", names, zero=True)
        text = f"Bytes that rank 0 sends in each epoch; {points[-1]['amount']:.4g} {unit} in the last."
        figures.append(make_figure("bytes-by-epoch", "Bytes of each epoch, rank 0", text, lines))
    return figures


def memory(run: RunRecord) -> list[Figure]:
    """Return the resident memory of each process over time."""
    note = "Resident memory without mapped files, whose pages the kernel may drop."
    figures = _memory(run, "anonymous", "memory", "Memory over time", "Memory of each process over time", note)
    return figures + _memory(run, "device", "device-memory", "GPU memory over time", "Memory of tensors on GPUs", "")


def _memory(run: RunRecord, kind: str, key: str, title: str, said: str, note: str) -> list[Figure]:
    """Return the memory of a kind over time, of the processes with the highest peaks."""
    samples = {process.label: [row for row in process.of("memory") if row.get(kind)] for process in run.processes}
    peaks = {label: max(row[kind] for row in rows) / _MIB for label, rows in samples.items() if rows}
    if not peaks:
        return []
    highest = set(sorted(peaks, key=lambda label: -peaks[label])[:_PROCESSES])
    shown = [label for label in peaks if label in highest]
    rows: Table = [
        {"process": label, "seconds": row["time"] - run.first_time, "MiB": row[kind] / _MIB}
        for label in shown
        for row in thin(samples[label], 200)
    ]
    x = alt.X("seconds:Q", title="seconds since the start", axis=alt.Axis(tickCount=8))
    lines = _lines(rows, x, "MiB", "MiB", "process", shown)
    largest = max(peaks, key=lambda label: peaks[label])
    text = f"{said}; {largest} has the most, {peaks[largest]:.4g} MiB."
    if len(peaks) > len(shown):
        note = f"{note} The {len(shown)} of {len(peaks):,} processes with the highest peaks.".strip()
    return [make_figure(key, title, text, lines, note=note, wide=len(shown) > 8)]


def timeline(run: RunRecord) -> list[Figure]:
    """Return the lives of the processes, and what happened to them; empty if nothing did."""
    start = run.first_time
    lives: Table = []
    for process in run.processes:
        begins = [row for row in process.rows if row["kind"] == "process"]
        for number, row in enumerate(begins):
            index = process.rows.index(row)
            stop = process.rows.index(begins[number + 1]) if number + 1 < len(begins) else len(process.rows)
            end = process.rows[stop - 1]["time"]
            lives.append({"process": process.label, "from": row["time"] - start, "to": end - start, "life": number + 1})
            failures = [each for each in process.rows[index:stop] if each["kind"] == "failure"]
            lives[-1]["failed"] = failures[0]["message"] if failures else ""
    events: Table = []
    names = {"failed": "failed", "restarted": "restarted", "lost": "machine lost", "job restarted": "job restarted"}
    for event in run.events:
        if event["event"] in names:
            where = event.get("process") or (lives[0]["process"] if lives else "job")
            row = {"process": where, "seconds": event["time"] - start, "what": names[event["event"]]}
            events.append({**row, "message": event["message"]})
    if not events or not lives:
        return []
    labels = [process.label for process in run.processes]
    y = alt.Y("process:N", title=None, sort=labels)
    bars = (
        alt.Chart(alt.Data(values=lives))
        .mark_bar(height={"band": 0.35}, color=NEUTRAL, opacity=0.55, cornerRadius=2)
        .encode(x=alt.X("from:Q", title="seconds since the start"), x2="to:Q", y=y, tooltip=["process:N", "life:Q"])
    )
    kinds = list(names.values())
    shapes = ["cross", "triangle-right", "square", "diamond"]
    marks = (
        alt.Chart(alt.Data(values=events))
        .mark_point(filled=True, size=130, opacity=1)
        .encode(
            x="seconds:Q",
            y=y,
            color=alt.Color(
                "what:N",
                scale=alt.Scale(domain=kinds, range=[RED, ORANGE, RED, COLOURS[4]]),
                legend=alt.Legend(orient="top", title=None),
            ),
            shape=alt.Shape("what:N", scale=alt.Scale(domain=kinds, range=shapes), legend=None),
            tooltip=["process:N", "what:N", "message:N", alt.Tooltip("seconds:Q", format=".2f")],
        )
    )
    said = "; ".join(f"after {row['seconds']:.1f} s {row['message']}" for row in events[:5])
    height = max(100, 30 * len(labels) + 20)
    chart = bars + marks
    return [make_figure("timeline", "Failures and restarts", f"Time line: {said}.", chart, wide=True, height=height)]
