"""``gtrain trace RUN``: one trace of all ranks and servers, in the JSON form that Perfetto and Chrome read.

Times are those of the processes' own clocks. Processes of one machine share it. The clock of a server on another
machine is moved by an offset that its requests tell, as NTP estimates it; those of ranks on other machines are taken as
they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from gtrain.errors import GtrainError
from gtrain.files import replace_text
from gtrain.record.run import by_number
from gtrain.reporting.command import take_options

Event = dict[str, Any]
TRACKS = ("batches", "layers", "waits", "exchanges", "requests", "executed")
"""The tracks of a process, in their order; spans of a track that overlap are on several lanes."""
_LANES = 1_000_000
"""Numbers of lanes between two tracks, more than a process has spans."""


def main(arguments: list[str]) -> None:
    """Run the command.

    Args:
        arguments: the folder of a run, ``output=FILE`` and ``operators=true`` or ``false``.

    Raises:
        GtrainError: not one folder was given, or the run recorded no spans.
    """
    options = {"output": "", "operators": "true"}
    folders = take_options(arguments, options)
    if len(folders) != 1:
        raise GtrainError("gtrain trace was given without a run.", hint="gtrain trace runs/<date>/<time>")
    if options["operators"] not in ("true", "false"):
        raise GtrainError(f"operators={options['operators']} was set.", hint="set true or false.")
    path = Path(options["output"] or folders[0] / "trace.json")
    content = make_trace(folders[0], operators=options["operators"] == "true")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content))
    print(f"trace: {path}, for https://ui.perfetto.dev")


def make_trace(run_dir: Path, *, operators: bool = True) -> dict[str, Any]:
    """Return the trace of a run: ``traceEvents``, and in ``metadata`` the clocks.

    Args:
        run_dir: folder of a run with ``debug=profile``.
        operators: include torch's operators.

    Raises:
        GtrainError: the run recorded no spans.
    """
    folder = run_dir / "profile"
    processes = [json.loads(path.read_text()) for path in sorted(folder.glob("spans-*.json"))]
    processes.sort(key=lambda process: (not process["process"].startswith("rank "), *by_number(process["process"])))
    ranks = [process for process in processes if "spans" in process]
    if not ranks:
        raise GtrainError(
            f"{run_dir} has no recorded spans.",
            hint="run it with debug=profile, which writes profile/spans-rank-<r>.json.",
        )
    offsets = {process["process"]: _offset(process, ranks) for process in processes}
    # Servers record from their start.
    sent = {_key(span["peer"], span) for rank in ranks for span in rank["sent"]}
    for process in processes:
        process["executed"] = [span for span in process.get("executed", []) if _key(process["process"], span) in sent]
    starts = [span["start"] for rank in ranks for span in (*rank["spans"], *rank["sent"])]
    origin = min([row["time"] for rank in ranks for row in rank["samples"]] + starts, default=0)
    events: list[Event] = []
    where: dict[tuple[str, ...], tuple[int, int]] = {}  # pid and lane of each executed request
    for number, process in enumerate(processes, start=1):
        events += _names(number, process)
        events += _spans(number, process, origin - offsets[process["process"]][0], where)
    events += _flows(processes, where, origin, offsets)
    for number, process in enumerate(processes, start=1):
        if operators and "spans" in process:
            rank = process["process"].removeprefix("rank ")
            events += _operators(number, process, folder / f"trace-rank{rank}.json", origin)
    clocks = {name: {"offset_ns": ns, "how": how} for name, (ns, how) in offsets.items()}
    epochs = ranks[0]["epochs"]
    return {"traceEvents": events, "displayTimeUnit": "ms", "metadata": {"clocks": clocks, "epochs": epochs}}


def _offset(process: Event, ranks: list[Event]) -> tuple[int, str]:
    """Return the ns to add to a process's times so that they agree with rank 0's, and how they are known."""
    if process["host"] == ranks[0]["host"]:
        return 0, "the clock of rank 0's machine"
    executed = {_key(process["process"], span): span for span in process.get("executed", [])}
    deltas = []
    for rank in ranks:
        for span in rank["sent"] if rank["host"] == ranks[0]["host"] else ():
            other = executed.get(_key(span["peer"], span))
            if other is not None:
                # Half of the time that the request spent outside of the server is on each way.
                deltas.append((span["start"] + span["end"] - other["start"] - other["end"]) // 2)
    if deltas:
        return round(median(deltas)), f"estimated from {len(deltas)} requests"
    return 0, "the machine's own clock, taken to agree with that of rank 0"


def _key(server: str, span: Event) -> tuple[str, ...]:
    return server, span["client"], str(span["incarnation"]), str(span["sequence"])


def _names(pid: int, process: Event) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process["process"]}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}


def _spans(pid: int, process: Event, origin: int, where: dict[tuple[str, ...], tuple[int, int]]) -> Iterator[Event]:
    """Yield the spans of a process, each on the first lane of its track that is free, and the counters."""
    by_track: dict[str, list[Event]] = {}
    for span in process.get("spans", []):
        by_track.setdefault(span["track"], []).append(span)
    for track, spans in (("requests", process.get("sent", [])), ("executed", process.get("executed", []))):
        by_track[track] = [{**span, "name": span["method"]} for span in spans]
    for number, track in enumerate(TRACKS):
        ends: list[int] = []
        for span in sorted(by_track.get(track, []), key=lambda span: (span["start"], -span["end"])):
            lane = next((lane for lane, end in enumerate(ends) if end <= span["start"]), len(ends))
            if track == "layers" and ends and span["end"] <= ends[0]:
                lane = 0  # a layer within another one
            if lane == len(ends):
                ends.append(0)
                tid = _LANES * (number + 1) + lane
                name = track if not lane else f"{track} {lane + 1}"
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
                yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            ends[lane] = max(ends[lane], span["end"])
            tid = _LANES * (number + 1) + lane
            fields = {
                key: value
                for key, value in span.items()
                if key not in ("track", "name", "start", "end") and value != ""
            }
            yield {
                "ph": "X", "pid": pid, "tid": tid, "cat": track, "name": span["name"],
                "ts": (span["start"] - origin) / 1000, "dur": (span["end"] - span["start"]) / 1000, "args": fields,
            }  # fmt: skip
            if track in ("requests", "executed"):
                server = span["peer"] if track == "requests" else process["process"]
                where[(track, *_key(server, span))] = (pid, tid)
    for sample in process.get("samples", []):
        for name, value in sample.items():
            if name != "time":
                ts = (sample["time"] - origin) / 1000
                yield {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": ts, "args": {name: value}}


def _flows(
    processes: list[Event],
    where: dict[tuple[str, ...], tuple[int, int]],
    origin: int,
    offsets: dict[str, tuple[int, str]],
) -> Iterator[Event]:
    """Yield an arrow from each request to its execution, and one from there to its reply."""
    executed = {
        _key(process["process"], span): (span, offsets[process["process"]][0])
        for process in processes
        for span in process.get("executed", [])
    }
    number = 0
    for process in processes:
        moved = offsets[process["process"]][0]
        for span in process.get("sent", []):
            key = _key(span["peer"], span)
            if key not in executed:
                continue
            other, shift = executed[key]
            client, server = where[("requests", *key)], where[("executed", *key)]
            ends = [(client, span["start"] + moved), (server, other["start"] + shift)]
            back = [(server, other["end"] + shift), (client, span["end"] + moved)]
            for name, ((first, begin), (second, end)) in (("request", ends), ("reply", back)):
                number += 1
                flow = {"cat": "flow", "name": name, "id": number}
                yield {**flow, "ph": "s", "pid": first[0], "tid": first[1], "ts": (begin - origin) / 1000}
                yield {**flow, "ph": "f", "bp": "e", "pid": second[0], "tid": second[1], "ts": (end - origin) / 1000}


def _operators(pid: int, process: Event, path: Path, origin: int) -> Iterator[Event]:
    """Yield the operators of torch's trace of a rank, moved so that its first batch begins where gtrain's does."""
    if not path.is_file():
        return
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    batch = next((event for event in spans if event["name"] in ("training batch", "validation batch")), None)
    own = next((span for span in process["spans"] if span["track"] == "batches"), None)
    if batch is None or own is None:
        return
    shift = (own["start"] - origin) / 1000 - float(batch["ts"])
    threads: dict[Any, int] = {}
    for event in spans:
        if event.get("cat") not in ("cpu_op", "kernel", "gpu_memcpy"):
            continue
        if event["tid"] not in threads:
            threads[event["tid"]] = tid = len(threads) + 1
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": f"operators {tid}"}}
        moved = {"ts": float(event["ts"]) + shift, "dur": event.get("dur", 0), "args": {}}
        tid = threads[event["tid"]]
        yield {"ph": "X", "pid": pid, "tid": tid, "cat": event["cat"], "name": event["name"], **moved}
