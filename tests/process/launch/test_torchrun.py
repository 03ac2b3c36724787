"""Elastic jobs of torchrun: nodes leave and join, and the job goes on from its last checkpoint with the others."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from helpers import LIMIT, REPO, alive, clean_environment, descendants, ok, only_run, rest_exhaustive, summary, until

JOBS = {
    "sar": ("strategy=sar", "data.num_nodes=600", "data.num_edges=4000"),
    "pbg": (
        *("strategy=pbg", "strategy.num_partitions=8", "data=planted_kg", "data.num_entities=200"),
        *("data.num_triples=1500", "data.batch_size=100", "model=kg", "model.dimension=8"),
    ),
}
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it a node that joins a running job waits in vain for the address of the store that the others share."""

FOREVER = ("cluster.isolated=true", "trainer.max_epochs=100000")


class Node:
    """A torchrun that takes part in the job with one rank, and the output of both."""

    def __init__(self, name: str, folder: Path, port: int, *arguments: str) -> None:
        meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job")
        quick = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        elastic = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.2")
        program = [sys.executable, "-m", "torch.distributed.run", *elastic, *meet, quick, "-m", "gtrain", *arguments]
        self._said = folder / f"{name}.said"
        with open(self._said, "w") as said:
            self.process = subprocess.Popen(
                program,
                cwd=folder,
                env=clean_environment({"PYTHONPATH": str(REPO / "tests" / "assets"), **NEW_STORES}),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def said(self) -> str:
        return self._said.read_text()

    def kill(self) -> None:
        for pid in (*descendants(self.process.pid), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Nodes to kill at the end."""
    started: list[Node] = []
    yield started
    for node in started:
        node.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def start_two(nodes: list[Node], folder: Path, port: int, *arguments: str) -> None:
    """Start two nodes; the first one serves the rendezvous, which ends with it."""

    def serves() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    nodes.append(Node("first", folder, port, *arguments))
    until(serves, folder)
    nodes.append(Node("second", folder, port, *arguments))


def has_checkpoint(folder: Path) -> bool:
    return bool(list(folder.glob("runs/2*/*/checkpoints/last.ckpt")))


@pytest.mark.slow
def test_a_sweep_trains_each_job_with_its_settings(tmp_path: Path) -> None:
    """The ranks, and the store in which they compare their settings, live as long as the sweep."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "gtrain", "--multirun")
    settings = ("trainer.max_epochs=1", "model.optimizer.lr=0.01,0.02", "hydra.sweep.dir=sweep")
    ok(forked.python(*torchrun, *JOBS["sar"], *settings, cwd=tmp_path))
    rates = [summary(tmp_path / "sweep" / job)["config"]["model"]["optimizer"]["lr"] for job in ("0", "1")]
    assert rates == [0.01, 0.02]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", rest_exhaustive(JOBS, "sar"))
def test_a_job_goes_on_without_a_node_and_with_a_new_one(strategy: str, nodes: list[Node], tmp_path: Path) -> None:
    """Two nodes; the second one is killed, the first goes on alone; another joins, and both go on."""
    port = free_port()
    stop = f"+callbacks.until={{_target_:train_until.TrainUntil,folder:{tmp_path}/until}}"
    job = (*JOBS[strategy], stop, *FOREVER)

    def trained(times: int) -> bool:
        """Whether the job has restarted this number of times and trained an epoch after each; rank 0 says it.

        torchrun orders the nodes of a host by their process ids, so that rank 0 may be on another node each time.
        """
        parts = [node.said().split("gtrain: restarting the job from its last checkpoint in") for node in nodes]
        restarts = [part for said in parts for part in said[1:]]
        since = restarts or [said[0] for said in parts if "train/loss" in said[0]]
        return len(restarts) == times and bool(since) and all("train/loss" in part for part in since)

    start_two(nodes, tmp_path, port, *job)
    until(lambda: trained(0) and has_checkpoint(tmp_path), tmp_path)
    family = [nodes[1].process.pid, *descendants(nodes[1].process.pid)]
    os.kill(nodes[1].process.pid, signal.SIGKILL)
    until(lambda: trained(1), tmp_path)
    assert not any(map(alive, family[1:]))
    nodes.append(Node("third", tmp_path, port, *job))
    until(lambda: trained(2), tmp_path)
    (tmp_path / "until" / "enough").touch()
    assert [node.process.wait(LIMIT) for node in (nodes[0], nodes[2])] == [0, 0], nodes[0].said() + nodes[2].said()
    result = summary(only_run(tmp_path / "runs"))
    assert result["world_size"] == 2
    epochs = len(result["history"])
    assert [epoch["epoch"] for epoch in result["history"]] == list(range(epochs))
    if strategy == "pbg":  # the order of its buckets varies; two machines leave out no edge of an epoch
        edges = [epoch["train/edges"] for epoch in result["history"] if "train/edges" in epoch]
        assert 1 < len(edges) < epochs and set(edges) == {1350.0}
        return
    whole = (*JOBS[strategy], f"trainer.max_epochs={epochs}", "trainer.num_nodes=2", "hydra.run.dir=undisturbed")
    ok(forked.gtrain(*whole, cwd=tmp_path))
    expected = summary(tmp_path / "undisturbed")
    mine, theirs = ([epoch["train/loss"] for epoch in each["history"]] for each in (result, expected))
    assert mine == pytest.approx(theirs, rel=1e-3)
    assert result["metrics"] == pytest.approx(expected["metrics"], abs=0.1)
