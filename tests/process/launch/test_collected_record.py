"""Machines with a disk each: what their ranks and servers recorded is in the folder of the first machine at the end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from helpers import ok, show, summary
from namespaces import network

from gtrain.record.run import RunRecord
from gtrain.reporting.trace import make_trace
from gtrain.wire import Security

SPARSE = ("data=planted_sparse", "data.num_rows=400", "model=sparse", "data.batch_size=100")
JOB = ("strategy=ps", "strategy.servers=2", *SPARSE, "trainer.num_nodes=2", "trainer.max_epochs=2", "debug=profile")


@pytest.mark.slow
def test_the_first_machine_has_the_record_of_all(tmp_path: Path) -> None:
    disks, here = [tmp_path / "machine-0", tmp_path / "machine-1"], tmp_path / "job"
    here.mkdir()
    key = Security.create()
    for disk in disks:
        disk.mkdir()
        key.save(disk / "job.key")
    with network(2) as machines:
        where = (f"cluster.rendezvous=tcp://{machines.address(0)}:29500", "cluster.key_file=job.key")

        def start(number: int) -> CompletedProcess[str]:
            job = (*JOB, *where, "cluster=manual", f"cluster.rank={number}", "hydra.run.dir=run")
            return machines.run(number, here, "gtrain", *job, disk=disks[number]).end()

        with ThreadPoolExecutor(2) as pool:
            ends = list(pool.map(start, range(2)))
    for end in ends:
        ok(end)
    assert not list(here.iterdir()), show(ends[0])
    run = disks[0] / "run"
    record, total = RunRecord(run), summary(run)
    assert [process.label for process in record.processes] == ["rank 0", "rank 1", "parameter 0", "parameter 1"]
    hosts = [process.rows[0]["host"] for process in record.processes]
    assert hosts == ["machine-0", "machine-1"] * 2 == [rank["host"] for rank in total["ranks"]]
    for process, rank in zip(record.ranks, total["ranks"], strict=False):
        assert sum(row["bytes_sent"] for row in process.epochs) == rank["bytes_sent"] > 0
    confusion = [sum(map(sum, test["counts"]["confusion"])) for test in record.tests]
    assert len(confusion) == len(record.hidden_files) == 2
    trace = make_trace(run)
    assert list(trace["metadata"]["clocks"]) == ["rank 0", "rank 1", "parameter 0", "parameter 1"]
    assert trace["metadata"]["clocks"]["parameter 1"]["how"].startswith("estimated from ")
    executed = {event["pid"] for event in trace["traceEvents"] if event.get("cat") == "executed"}
    operators = {event["pid"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"}
    assert (operators, executed) == ({1, 2}, {3, 4})
