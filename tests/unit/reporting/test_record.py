"""What a record keeps over attempts of a job, and when a run counts as running."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gtrain.callbacks.recorder import RunRecorder
from gtrain.cli import entry
from gtrain.launch import launchers, slot
from gtrain.launch.launchers import kubernetes
from gtrain.record import events
from gtrain.record.process_log import ProcessLog
from gtrain.record.run import RunRecord
from gtrain.record.spans import SpanLog
from gtrain.reporting.trace import TRACKS, make_trace
from gtrain.strategy.counters import Counters
from gtrain.wire import tracing

COUNTS = {"bytes_sent": 70, "bytes_received": 50, "comm_seconds": 3.5, "wait_seconds": 2.5, "bound_bytes": 40}


def test_counters_outlive_a_restart() -> None:
    before = RunRecorder(Counters(**COUNTS))  # type: ignore[arg-type]
    again = RunRecorder(Counters())
    again.load_restart_state(json.loads(json.dumps(before.restart_state())))
    assert {name: getattr(again.counters, name) for name in COUNTS} == COUNTS
    old = {name: value for name, value in before.restart_state().items() if name != "counters"}
    again = RunRecorder(Counters())
    again.load_restart_state(old)
    assert again.counters.bytes_sent == 0 and again.counters.bound_bytes is None


def test_each_rank_restores_its_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a checkpoint is that of rank 0."""
    log, part = ProcessLog(tmp_path, "rank 1"), {"comm_seconds": 0.5, "wait_seconds": 0.25, "cpu_seconds": 2.0}
    for epoch in (0, 1, 1, 2):  # the second was trained again, the third is not in the checkpoint
        log.write("epoch", epoch=epoch, bytes_sent=10 + epoch, bytes_received=5, bound=None, **part)
    log.flush()
    first = RunRecorder(Counters(**COUNTS))  # type: ignore[arg-type]
    first.history, first.epoch_seconds = [{"epoch": 0}, {"epoch": 1}], [1.0, 1.0]
    monkeypatch.setattr(slot, "attempt", lambda: 1)
    for label, sent, cpu in (("rank 1", 21, 4.0), ("rank 2", 70, 0.0)):
        again = RunRecorder(Counters(), ProcessLog(tmp_path, label, append=True))
        again.load_state_dict(first.state_dict())
        assert (again.counters.bytes_sent, again.cpu_seconds) == (sent, cpu)


def test_rows_that_wait_are_written_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ProcessLog(tmp_path, "rank 0")
    log.write("epoch", epoch=0)
    log.write("epoch", epoch=1)
    assert log.path is not None and log.path.read_text().count("epoch") == 0
    log._flushed_at = time.monotonic() - 1
    log.is_due("memory")
    assert log.path.read_text().count('"kind": "epoch"') == 2


def record(folder: Path, verb: str, names: Mapping[str, str], attempt: int) -> None:
    """Record an attempt that is ended by SIGTERM, as entry does."""
    same = lambda start: start.get("job") == names["job"] and attempt > 0  # noqa: E731
    with pytest.raises(SystemExit), events.recording(lambda: folder, verb, same, **names):
        (folder / "profile").mkdir(exist_ok=True)
        (folder / "profile" / f"spans-rank-{attempt}.json").touch()
        events.append(folder, "failed", process="rank 0", message="lost")
        raise SystemExit(143)


def test_a_later_attempt_keeps_the_record(tmp_path: Path) -> None:
    record(tmp_path, "train", {"job": "slurm 7/0 0"}, 0)
    record(tmp_path, "train", {"job": "slurm 7/0 0"}, 1)
    run = RunRecord(tmp_path)
    assert [event["event"] for event in run.events] == ["start", "failed", "end"] * 2
    assert len(list((tmp_path / "profile").iterdir())) == 2
    with events.recording(lambda: tmp_path, "train", lambda _: True):
        assert RunRecord(tmp_path).end == {} and RunRecord(tmp_path).cause == {}
    assert RunRecord(tmp_path).status == "complete"
    for names, verb, attempt in (("slurm 8/0 0", "train", 2), ("slurm 8/0 0", "test", 3), ("slurm 8/0 0", "test", 0)):
        record(tmp_path, verb, {"job": names}, attempt)
        assert len(RunRecord(tmp_path).events) == 3, "of another job, verb or command"
        assert [path.name for path in (tmp_path / "profile").iterdir()] == [f"spans-rank-{attempt}.json"]


@pytest.mark.parametrize(
    ("environ", "key", "attempts"),
    [
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, "SLURM_RESTART_COUNT", ("1",)),
        ({kubernetes.JOB: "uid"}, kubernetes.ATTEMPT, ("0", "1")),  # a suspension is not counted
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}, "TORCHELASTIC_RESTART_COUNT", ("0", "1")),
        ({}, "SLURM_RESTART_COUNT", ()),
    ],
    ids=["slurm", "kubernetes", "torchrun", "local"],
)
def test_attempts_know_their_job(
    environ: dict[str, str], key: str, attempts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = {"num": 0}
    monkeypatch.setattr(entry.HydraConfig, "get", lambda: SimpleNamespace(job=entry.OmegaConf.create(number)))
    for name in ("SLURM_JOB_NAME", *environ):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for count in ("0", "1"):
        monkeypatch.setenv(key, count)
        names, continues = entry._job_names()
        assert bool(continues) == bool(environ)
        if continues is not None:
            assert continues(names) == (count in attempts) and not continues({}) and not continues({"job": "other"})
            number["num"] = 1
            assert not continues(entry._job_names()[0]), "of another job of the sweep"
            number["num"] = 0


def test_other_ranks_of_a_sweep_write_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(verb="train", hydra=SimpleNamespace(sweep=SimpleNamespace(dir="none")))
    monkeypatch.setattr(launchers, "is_first", lambda: False)
    monkeypatch.setattr(entry, "_reports", lambda _: pytest.fail("a report was to be written"))
    entry.RunFolder().on_multirun_end(config)


def test_a_run_on_another_machine_runs_while_it_writes(tmp_path: Path) -> None:
    for host, seconds, status in (("elsewhere", 5, "running"), ("elsewhere", 500, "killed"), (None, 5, "killed")):
        folder = events.record_folder(tmp_path / f"{host}-{seconds}")
        folder.mkdir(parents=True)
        start = {"event": "start", "time": time.time() - seconds, "host": host or os.uname().nodename}
        (folder / "events.jsonl").write_text(json.dumps(start) + "\n")
        assert RunRecord(folder.parent).status == status
    # Rows of a long run are further apart.
    hours = {"event": "lost", "time": time.time() - 500}
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ({**start, "host": "elsewhere", "time": time.time() - 1e5}, hours))
    )
    assert RunRecord(folder.parent).status == "running"


def test_a_wait_has_a_name_of_its_own() -> None:
    log = SpanLog(lambda _: nullcontext())

    def wait(name: str = "") -> None:
        start = time.perf_counter()
        with log.named(name) if name else nullcontext():
            pass
        log.waited(start, start, time.perf_counter())

    wait("wait: all-reduce")
    wait()
    with log.named("wait: the other workers"):
        wait()
        wait("wait: send")
        wait()
    wait()
    names = [span["name"].removeprefix("wait: ") for span in log.spans]
    assert names == ["all-reduce", "a reply", "the other workers", "send", "the other workers", "a reply"]


def test_a_server_keeps_the_first_and_the_last_executions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST", 6)
    log = tracing.RequestLog()
    for number in range(10):
        log.add(log.executed, 0, sequence=number)
        log.add(log.sent, 0, sequence=number)
    assert [span["sequence"] for span in log.kept_executed()] == [0, 1, 2, 7, 8, 9]
    assert [span["sequence"] for span in log.sent] == list(range(6)) and isinstance(deque(log.sent), deque)


def test_lanes_of_tracks_do_not_overlap(tmp_path: Path) -> None:
    who = {"client": "rank 0", "incarnation": 0, "peer": "parameter 0", "method": "pull"}
    sent = [{**who, "sequence": number, "start": number, "end": 1000} for number in range(250)]
    process = {"process": "rank 0", "host": "here", "spans": [], "sent": sent, "samples": [], "epochs": [0]}
    server = {"process": "parameter 0", "host": "here", "executed": sent}
    (tmp_path / "profile").mkdir()
    for name, content in (("rank-0", process), ("parameter-0", server)):
        (tmp_path / "profile" / f"spans-{name}.json").write_text(json.dumps(content))
    spans = [event for event in make_trace(tmp_path)["traceEvents"] if event["ph"] == "X"]
    lanes = {track: {event["tid"] for event in spans if event["cat"] == track} for track in TRACKS}
    assert len(lanes["requests"]) == len(lanes["executed"]) == 250 and not lanes["requests"] & lanes["executed"]
