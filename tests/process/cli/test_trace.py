"""``gtrain trace``: one trace of ranks and servers, whose sums are those of the summary.

Perfetto's trace processor is a binary that its package on PyPI downloads on first use, so the form is checked here.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import forked
import pytest
from helpers import ok, summary

from gtrain.reporting import trace as command

RUN = (
    *("strategy=ps", "trainer.num_nodes=2", "strategy.servers=2", "model=sparse", "data=planted_sparse"),
    *("debug=profile", "callbacks.timeline.first_epoch=0", "callbacks.timeline.max_batches=100000"),
)


@pytest.mark.slow
def test_a_run_that_goes_on_for_one_epoch_has_a_trace_of_it(tmp_path: Path) -> None:
    data = ("strategy=single", "model=sparse", "data=planted_sparse", "logger=none", "trainer.limit_test_batches=0")
    ok(forked.gtrain(*data, "trainer.max_epochs=3", "hydra.run.dir=first", cwd=tmp_path))
    more = ("trainer.max_epochs=4", "debug=profile", "ckpt_path=first/checkpoints/last.ckpt", "hydra.run.dir=second")
    ok(forked.gtrain(*data, *more, cwd=tmp_path))
    ok(forked.gtrain("trace", "second", cwd=tmp_path))
    assert json.loads((tmp_path / "second" / "trace.json").read_text())["metadata"]["epochs"] == [3]


@pytest.mark.slow
def test_a_trace_of_two_ranks_and_two_servers(tmp_path: Path) -> None:
    ok(forked.gtrain(*RUN, "trainer.max_epochs=2", "hydra.run.dir=run", cwd=tmp_path))
    ok(forked.gtrain("trace", "run", cwd=tmp_path))
    trace, total = json.loads((tmp_path / "run" / "trace.json").read_text()), summary(tmp_path / "run")
    events = trace["traceEvents"]
    assert trace["metadata"]["epochs"] == [0, 1]
    pids = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(pids) == {"rank 0", "rank 1", "parameter 0", "parameter 1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in spans)
    for rank in total["ranks"]:
        if rank["role"] != "worker":
            continue
        pid = pids[f"rank {rank['rank']}"]
        mine = [event for event in spans if event["pid"] == pid]
        waits = sum(event["dur"] for event in mine if event["cat"] == "waits") / 1e6
        assert waits == pytest.approx(rank["wait_seconds"], rel=1e-3) and waits > 0
        counters = [event for event in events if event["ph"] == "C" and event["pid"] == pid]
        for name in ("bytes_sent", "bytes_received"):
            values = [event["args"][name] for event in counters if event["name"] == name]
            assert values[0] == 0 and values[-1] == rank[name] > 0
        kinds = Counter(event["name"] for event in mine if event["cat"] == "batches")
        assert kinds["training batch"] > 0 and kinds["validation batch"] > 0
        assert {"batches", "layers", "waits", "requests", "cpu_op"} <= {event["cat"] for event in mine}
    # Spans of a track do not overlap, unless one contains the other.
    lanes: dict[tuple[int, int], list[float]] = {}
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        if event["cat"] in ("waits", "requests", "executed"):
            assert event["ts"] >= max(0.0, lanes.get((event["pid"], event["tid"]), [0.0])[-1] - 1e-3)
            lanes.setdefault((event["pid"], event["tid"]), []).append(event["ts"] + event["dur"])
    # Each answered request of a recording has an arrow to its execution, which lies within it, and one back.
    requests = {
        (e["args"]["client"], e["args"]["peer"], e["args"]["sequence"]): e for e in spans if e["cat"] == "requests"
    }
    names = {pid: name for name, pid in pids.items()}
    executed = {
        (e["args"]["client"], names[e["pid"]], e["args"]["sequence"]): e for e in spans if e["cat"] == "executed"
    }
    both = requests.keys() & executed.keys()
    assert len(both) > 10 and len(both) == len(requests)
    for key in both:
        sent, done = requests[key], executed[key]
        assert sent["args"]["method"] == done["name"] == sent["name"]
        assert sent["ts"] <= done["ts"] and done["ts"] + done["dur"] <= sent["ts"] + sent["dur"] + 1000
    arrows = Counter((event["name"], event["ph"]) for event in events if event.get("cat") == "flow")
    assert arrows == {(name, end): len(both) for name in ("request", "reply") for end in ("s", "f")}


def test_processes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    for name in ("rank 0", "rank 10", "rank 2", "parameter 0"):
        process = {"process": name, "host": "here", "sent": [], "samples": [], "epochs": [0]}
        process |= {"spans": []} if name.startswith("rank") else {"executed": []}
        (tmp_path / "profile" / f"spans-{name.replace(' ', '-')}.json").write_text(json.dumps(process))
    output = tmp_path / "new" / "folder" / "trace.json"
    command.main([str(tmp_path), f"output={output}"])
    events = json.loads(output.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 2", "rank 10", "parameter 0"]
