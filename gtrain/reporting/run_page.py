"""The page of one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtrain.graph.store import Store
from gtrain.record.run import Row, RunRecord
from gtrain.record.scores import is_of, metric_names
from gtrain.reporting import figures, graph, projection, scores
from gtrain.reporting.page import write_page
from gtrain.reporting.style import Figure


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
        key: of its element.
        title: heading.
        figures: of the section.
        facts: names and values.
        note: a paragraph above the figures.
    """

    key: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a run ended before it was complete.

    Attributes:
        what: a sentence.
        hint: what to do; empty: unknown.
        process: label of the process that failed first; empty: unknown, or the command itself.
        log: its last lines.
    """

    what: str
    hint: str
    process: str
    log: list[str]


def write_run_page(run: RunRecord, path: Path) -> list[Figure]:
    """Write the page of a run, and return its figures."""
    sections = make_sections(run)
    shown = [figure for section in sections for figure in section.figures]
    write_page(
        path,
        "run.html.j2",
        shown,
        run=run,
        title=f"{run.choices['strategy']} · {run.choices['data']} · {run.choices['model']}",
        facts=_facts(run),
        cards=_cards(run),
        results=result_rows(run),
        ranks=rank_rows(run),
        failure=find_failure(run),
        events=_event_rows(run),
        sections=sections,
        settings=run.overrides,
        versions=(run.summary or {}).get("versions", {}),
    )
    return shown


def make_sections(run: RunRecord) -> list[Section]:
    """Return the sections with figures; those about which the run has nothing are left out."""
    store = graph.open_store(run)
    task = run.tests[0]["task"] if run.tests else ""
    classes = graph.class_labels(store)
    relations = None if store is None or task != "edges" else graph.relation_names(store)
    tested = scores.figures(run, classes, relations)
    if store is not None:
        tested += scores.by_degree(graph.scored_rows(run, store), task)
    sections = [
        Section("timeline", "Failures and restarts", figures.timeline(run)),
        Section("curves", "Training", figures.curves(run)),
        Section("time", "Time", figures.times(run), note=_TIME_NOTE),
        Section("bytes", "Communication", figures.traffic(run)),
        Section("memory", "Memory", figures.memory(run)),
        _partition_section(run, store),
        Section("test", "Test", tested),
        Section("picture", "Picture", _picture(run, store, task, classes)),
    ]
    return [section for section in sections if section.figures or section.facts]


_TIME_NOTE = (
    "The main thread of a rank waits for other processes, reads (waits for its next batch, or for data on a disk), "
    "hands messages over (sending), or computes, which is the rest of the epoch's time without validation."
)


def _partition_section(run: RunRecord, store: Store | None) -> Section:
    if store is not None:
        return Section("partition", "Partition", graph.partition_figures(store), graph.partition_facts(store))
    if run.summary is None:
        return Section("partition", "Partition")
    cut = run.summary["store"]
    facts = [
        ("parts", str(cut["parts"])),
        ("edge cut", f"{cut['edge_cut']:,}"),
        ("halo nodes", f"{sum(cut['halo']):,}"),
    ]
    note = f"The store {cut['path']} is not on this machine, so the matrix and the balance of its parts are unknown."
    return Section("partition", "Partition", facts=facts, note=note)


def _picture(run: RunRecord, store: Store | None, task: str, classes: list[str] | None) -> list[Figure]:
    subject = "the embeddings" if task == "edges" else "the last hidden layer"
    names: Callable[..., list[str]] = lambda ids: [f"node {number}" for number in ids.tolist()]  # noqa: E731
    if store is not None:
        opened = store
        names = lambda ids: graph.node_names(opened, ids)  # noqa: E731
    return projection.picture(run.hidden_files, names, classes, subject)


# --------------------------------------------------------------------------------------------------- numbers


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    """Return what was run, when and where."""
    hosts = sorted({row["host"] for process in run.processes for row in process.of("process")})
    facts = []
    if run.first_time:
        facts.append(("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.first_time))))
        facts.append(("took", _duration(run.last_time - run.first_time)))
    ranks = sum(process.is_rank for process in run.processes) or (run.summary or {}).get("world_size", 0)
    servers = sum(not process.is_rank for process in run.processes)
    facts.append(("ranks", f"{ranks}" + (f" and {servers} servers" if servers else "")))
    if hosts:
        facts.append(("machines", ", ".join(hosts[:4]) + (" ..." if len(hosts) > 4 else "")))
    facts.append(("folder", str(run.path.resolve())))
    return facts


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _cards(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the most important numbers: name, filter of the template, value."""
    summary = run.summary
    if summary is None:
        epochs = run.ranks[0].epochs if run.ranks else []
        return [("epochs trained", "number", len(epochs))] if epochs else []  # type: ignore[list-item]
    cards: list[tuple[str, str, Any]] = []
    if summary["best"] is not None:
        cards.append((f"best {summary['best']['name']}", "score", summary["best"]["value"]))
    cards += [
        (name, "score", value)
        for name, value in summary["metrics"].items()
        if is_of(name, "test") and not name.endswith("loss")
    ][:1]
    if summary["epochs"]:
        cards.append(("seconds per training epoch", "seconds", sum(summary["epoch_seconds"]) / summary["epochs"]))
        cards.append((summary["throughput"]["unit"], "number", summary["throughput"]["value"]))
        sent = sum(rank["bytes_sent"] for rank in summary["ranks"] if rank["role"] == "worker")
        cards.append(("sent per epoch by all ranks", "bytes", sent / summary["epochs"]))
    cards.append(
        ("largest peak memory of a process", "bytes", max(rank["peak_rss_bytes"] for rank in summary["ranks"]))
    )
    return cards


def result_rows(run: RunRecord) -> list[Row]:
    """Return the rows of the table of metrics: name, value, and the epoch (from 1) of the weights."""
    if run.summary is None:
        last = run.history[-1] if run.history else {}
        names = metric_names([last])
        return [{"name": name, "value": last[name], "epoch": last["epoch"] + 1} for name in names]
    epochs = run.summary["metrics_epoch"]
    rows = []
    for name, value in run.summary["metrics"].items():
        epoch = epochs.get(name)
        shown = "best possible" if name.startswith("data/") else "-" if epoch is None else epoch + 1
        rows.append({"name": name, "value": value, "epoch": shown})
    if (best := run.summary["best"]) is not None:
        rows.append(
            {
                "name": f"best {best['name']}",
                "value": best["value"],
                "epoch": "-" if best["epoch"] is None else best["epoch"] + 1,
            }
        )
    return rows


def rank_rows(run: RunRecord) -> list[Row]:
    """Return the rows of the table of ranks and servers, with the figures of ``summary.json``."""
    rows = []
    for rank in (run.summary or {}).get("ranks", []):
        label = f"rank {rank['rank']}" if rank["role"] == "worker" else f"{rank['role']} {rank['rank']}"
        rows.append({**rank, "label": label})
    return rows


def find_failure(run: RunRecord) -> Failure | None:
    """Return why a run ended early; None for one that is complete or goes on."""
    if run.status in ("complete", "running"):
        return None
    process = run.cause.get("process") or _first_to_fail(run)
    what = run.end.get("message", "")
    if run.status == "killed":
        silent = time.strftime("%H:%M:%S", time.localtime(run.last_time))
        what = f"The command wrote nothing after {silent} and did not report its end: it or its machine was killed."
    log = run.log_tail(process or "rank 0") if run.status != "refused" else []
    return Failure(what or "unknown", run.end.get("hint") or "", process, log)


def _first_to_fail(run: RunRecord) -> str:
    """Return the process that failed first by the records of the processes; empty if they do not tell."""
    if run.status == "interrupted":  # all ranks end by an exception
        return ""
    newest = max((each.attempt for each in run.processes), default=0)
    ends = {each.label: each.last_life("failure") for each in run.processes if each.attempt == newest}
    failures = {label: rows[-1] for label, rows in ends.items() if rows}
    # A rank that lost a peer only echoes the peer's failure.
    causes = [label for label, failure in failures.items() if not failure["echo"]]
    if causes:
        return min(causes, key=lambda label: float(failures[label]["time"]))
    silent = [each.label for each in run.ranks if each.label not in failures]
    return silent[0] if failures and len(silent) == 1 else ""  # it was killed


def _event_rows(run: RunRecord) -> list[Row]:
    """Return the events after the start, with their time in seconds since then."""
    rows = []
    for event in run.events:
        if event["event"] != "start":
            what = "ended" if event["event"] == "end" else event["event"]
            message = event.get("message") or event.get("status", "")
            rows.append({"seconds": event["time"] - run.first_time, "what": what, "message": message})
    return rows
