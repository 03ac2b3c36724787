"""Jobs that strangers speak to: what they learn is what they learn without them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from forked import Program, enough, gtrain, lasting
from helpers import alive, descendants, has_logged, logs, ok, rest_exhaustive, show, summary, until
from namespaces import network
from strangers import attack, listening

from gtrain.wire import Security

COMMON = ["logger=csv", "callbacks=none", "trainer.limit_test_batches=0", "trainer.enable_progress_bar=false"]
TRAININGS: dict[str, tuple[int, list[str]]] = {
    "ps": (
        2,
        ["strategy=ps", "data=planted_sparse", "data.num_rows=600", "data.num_features=200", "data.batch_size=60",
         "model=sparse", "model.hidden_channels=8", "trainer.precision=64-true"],
    ),
    "pbg": (
        5,  # a lock server, two that keep partitions and two that add up parameters
        ["strategy=pbg", "data=planted_kg", "model=kg", "data.num_entities=120", "data.num_triples=2400",
         "data.num_positions=24", "data.num_relations=4", "model.dimension=16", "data.batch_size=100",
         "strategy.num_partitions=4", "trainer.num_nodes=2"],
    ),
    "pyg": (
        2,
        ["strategy=pyg", "strategy.transport=tcp", "data.num_nodes=300", "data.num_edges=3000", "data.batch_size=64",
         "data.num_neighbors=[4,3]", "model=sage", "trainer.num_nodes=2", "trainer.precision=64-true"],
    ),
}  # fmt: skip
"""Servers, and the command."""
SAR = (0, ["strategy=sar", "data.num_nodes=300", "data.num_edges=3000", "trainer.num_nodes=2"])
HOST = 2
"""The machine that does not belong to the job."""


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_exhaustive(TRAININGS, "ps"))
def test_strangers_change_nothing(name: str, tmp_path: Path) -> None:
    servers, arguments = TRAININGS[name]
    ok(gtrain("key", "cluster.key_file=job.key", cwd=tmp_path))
    arguments = [*arguments, "cluster.key_file=job.key"]  # without, servers are at sockets that have no port
    job = lasting(tmp_path, *arguments, *COMMON)
    run = tmp_path / "run"
    try:
        until(lambda: has_logged(run), tmp_path)
        processes = descendants(job.pid)
        before = {pid: resident(pid) for pid in processes}
        assert attack(processes) == servers
        assert all(resident(pid) - before[pid] < 128 << 20 for pid in processes)
        enough(tmp_path)
        done = ok(job.end())
    finally:
        job.kill()
    assert "restarting" not in done.stderr
    said = [path.read_text() for path in (run / "logs").glob("*.log")]
    assert all(len(text) < 100_000 and "Traceback" not in text for text in said)
    history = losses(run)
    if name == "pbg":  # its workers train without locks
        assert [epoch["train/edges"] for epoch in history] == [2160] * len(history)
        return
    epochs = f"trainer.max_epochs={len(history)}"
    ok(gtrain(*arguments, *COMMON, epochs, "hydra.run.dir=undisturbed", cwd=tmp_path))
    assert history == losses(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_exhaustive(["sar", "ps", "pbg"], "sar"))
def test_strangers_on_another_host_change_nothing(name: str, tmp_path: Path) -> None:
    """They come while a rank is still free to take, and while the job trains; with another key, a public one, none."""
    servers, arguments = SAR if name == "sar" else TRAININGS[name]
    arguments = [*arguments, *COMMON]
    for key in ("job", "other"):
        Security.create().save(tmp_path / f"{key}.key")
    access, other = (f"cluster.key_file={tmp_path}/{key}.key" for key in ("job", "other"))
    run, mark = tmp_path / "run", tmp_path / "executed"
    with network(HOST + 1, strangers=1) as machines:

        def speak(jobs: list[Program]) -> dict[str, Any]:
            """Have the stranger speak to all ports of the job; returns what it reports."""
            pids = [pid for job in jobs for pid in (job.pid, *descendants(job.pid))]
            ports = {f"{host}:{port}" for pid in pids for host, port in listening(pid)}
            assert ports
            words = (str(mark), f"{tmp_path}/other.key", f"{tmp_path}/job.key", *ports)
            reply: dict[str, Any] = json.loads(ok(machines.run(HOST, tmp_path, "stranger", *words).end()).stdout)
            assert reply.pop("possible") > reply["servers"]  # the key-value store too
            return reply

        jobs = [machines.start(0, tmp_path, *arguments, access=access)]
        try:
            until(lambda: "gtrain: waiting for" in jobs[0].errors() or not alive(jobs[0].pid), tmp_path)
            for lacking in (other, "cluster.isolated=true", None) if name == "sar" else ():  # the same for all
                refused = machines.start(HOST, tmp_path, *arguments, rank=1, access=lacking).end()
                assert refused.returncode == 1 and "Traceback" not in refused.stderr
                assert refused.stderr.count("gtrain: ") == refused.stderr.count("HINT: ") == 1, show(refused)
                assert "has another key" in refused.stderr or "cluster.key_file is not set" in refused.stderr
            assert speak(jobs)["let_in"] == []
            jobs.append(machines.start(1, tmp_path, *arguments, access=access))
            until(lambda: has_logged(run) or not all(alive(job.pid) for job in jobs), tmp_path)
            assert speak(jobs) == {"servers": servers, "let_in": []}
            enough(tmp_path)
            ended = [job.end() for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        stranger = machines.address(HOST)
    assert [done.returncode for done in ended] == [0, 0], "".join(map(show, ended)) + logs(tmp_path)
    assert not mark.exists()
    assert f"the job's key-value store refused a connection from {stranger}: it lacks the job's key" in ended[0].stderr
    logged = [log.read_text() for run_dir in ("run", "run-1") for log in (tmp_path / run_dir / "logs").glob("*.log")]
    for text in (*(done.stderr for done in ended), *logged):
        refusals = [line for line in text.splitlines() if "refused a connection" in line]
        assert len(refusals) == len(set(refusals)), text
        # a peer that closes its connection at once may have gone before its address was read
        assert all(f" {stranger}:" in line or "an address that has gone" in line for line in refusals), text
        assert "Traceback" not in text
    history = losses(run)
    if name != "pbg":
        epochs = f"trainer.max_epochs={len(history)}"
        ok(gtrain(*arguments, "trainer.num_nodes=2", epochs, "hydra.run.dir=undisturbed", cwd=tmp_path))
        assert history == losses(tmp_path / "undisturbed")


def losses(run: Path) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = summary(run)["history"]
    return history


def resident(pid: int) -> int:
    """Resident memory of a process, bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
