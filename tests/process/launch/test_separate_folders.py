"""Machines without a shared folder: machine 0 has the raw files, and the others fetch the parts of the store they read.

Both machines are this one, with a folder each, and reach each other at its address on the network.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest
from forked import Program, gtrain
from helpers import ok, rest_exhaustive, summary

from gtrain.graph.store.files import node_file
from gtrain.launch.sockets import is_loopback, own_address
from gtrain.wire import Security

HOST = own_address("192.0.2.1", 1)
pytestmark = pytest.mark.skipif(
    is_loopback(HOST) or socket.gethostname() == HOST, reason="this machine has no address on a network"
)
LOCAL = ("trainer.num_nodes=2", "seed=1")
TWO = (*LOCAL, "cluster=manual", "cluster.key_file=job.key")
PLANTED = ("data.num_nodes=600", "data.num_edges=4000")
ROWS = ("data=libsvm", "data.path=rows.txt", "data.split=random", "model=sparse", "data.batch_size=64")
TRIPLES = ("data=kg", "data.path=triples", "model=kg", "model.dimension=8")
CASES = {
    "sar": ("strategy=sar", *PLANTED),
    "pyg": ("strategy=pyg", *PLANTED, "data.batch_size=64", "data.num_neighbors=[5,5]"),
    "ps": ("strategy=ps", *ROWS),
    "pbg": ("strategy=pbg", *TRIPLES, "strategy.num_partitions=4", "data.batch_size=50"),
}


def write_raw_files(folder: Path) -> None:
    """Write the data of :data:`ROWS` and :data:`TRIPLES`."""
    rng = np.random.default_rng(0)
    rows = [
        f"{rng.integers(2)} " + " ".join(f"{i}:1" for i in np.sort(rng.choice(200, 5, replace=False)))
        for _ in range(600)
    ]
    (folder / "rows.txt").write_text("\n".join(rows) + "\n")
    triples = [f"e{a}\tr{r}\te{b}" for a, r, b in zip(*rng.integers([[90], [3], [90]], size=(3, 900)), strict=True)]
    (folder / "triples").mkdir()
    for name, lines in (("train", triples[:800]), ("valid", triples[800:850]), ("test", triples[850:])):
        (folder / "triples" / f"{name}.txt").write_text("\n".join(lines) + "\n")


def losses(run: Path) -> list[float]:
    return [epoch["train/loss"] for epoch in summary(run)["history"]]


def free_port() -> int:
    with socket.create_server((HOST, 0)) as free:
        return int(free.getsockname()[1])


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("pyg", "ps", "pbg")]


def two_folders(tmp_path: Path) -> list[Path]:
    """Return the folders of both machines: the first has the raw files, both have the job's key."""
    folders = [tmp_path / "zero", tmp_path / "one"]
    for folder in folders:
        folder.mkdir()
    write_raw_files(folders[0])
    Security.create().save(folders[0] / "job.key")
    (folders[1] / "job.key").write_bytes((folders[0] / "job.key").read_bytes())
    (folders[1] / "job.key").chmod(0o600)
    return folders


def run_on_both(folders: list[Path], *arguments: str) -> None:
    """Run a job of two machines to its end."""
    where = f"cluster.rendezvous=tcp://{HOST}:{free_port()}"
    jobs = [
        Program("-m", "gtrain", *arguments, *TWO, where, f"cluster.rank={rank}", cwd=folder)
        for rank, folder in enumerate(folders)
    ]
    ends = [job.end() for job in jobs]
    assert [end.returncode for end in ends] == [0, 0], "\n".join(end.stderr for end in ends)


@pytest.mark.parametrize("name", ["sar", *SLOW])
def test_the_other_machine_fetches_what_it_reads(name: str, tmp_path: Path) -> None:
    folders = two_folders(tmp_path)
    run_on_both(folders, *CASES[name], "trainer.max_epochs=3", "hydra.run.dir=run")
    (replica,) = [path for path in (folders[1] / "data/stores").iterdir() if path.is_dir()]
    assert ".replica-" in replica.name
    fetched = {str(path.relative_to(replica)) for path in replica.rglob("*.npy")}
    assert fetched <= set(json.loads((replica / "manifest.json").read_text())["sizes"])
    if name == "sar":  # ranks of pyg that run on one host read each other's parts
        assert node_file(1, "x") in fetched and node_file(0, "x") not in fetched
    assert {"rank-0.pt", "rank-1.pt"} <= {path.name for path in (folders[0] / "run/checkpoints/last.ckpt").iterdir()}
    assert not list((folders[1] / "run").rglob("*.pt"))
    if name != "pbg":  # its two machines train buckets at the same time, in an order that varies
        ok(gtrain(*CASES[name], *LOCAL, "trainer.max_epochs=3", "hydra.run.dir=local", cwd=folders[0]))
        assert losses(folders[0] / "run") == losses(folders[0] / "local")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at_address"),
    rest_exhaustive([("sar", False), ("ps", False), ("sar", True), ("ps", True)], ("sar", True), ("ps", False)),
)
def test_a_job_resumes_and_predicts_from_the_checkpoint_of_the_first_machine(
    name: str, at_address: bool, tmp_path: Path
) -> None:
    folders = two_folders(tmp_path)
    first, second = [
        (f"hydra.run.dir={run}", *([f"callbacks.checkpoint.dirpath=file://{tmp_path}/{run}"] if at_address else []))
        for run in ("first", "second")
    ]
    run_on_both(folders, *CASES[name], "trainer.max_epochs=2", *first)
    run_on_both(folders, *CASES[name], "trainer.max_epochs=4", *second, "ckpt_path=last")
    assert (tmp_path / "second/last.ckpt/manifest.json").exists() == at_address
    run_on_both(folders, "predict", *CASES[name], "ckpt_path=last", f"output={folders[0]}/both.npy", "hydra.run.dir=p")
    ok(gtrain(*CASES[name], *LOCAL, "trainer.max_epochs=4", "hydra.run.dir=local", cwd=folders[0]))
    ok(gtrain("predict", *CASES[name], *LOCAL, "ckpt_path=last", "output=local.npy", cwd=folders[0]))
    assert losses(folders[0] / "second") == losses(folders[0] / "local")[2:]
    np.testing.assert_array_equal(np.load(folders[0] / "both.npy"), np.load(folders[0] / "local.npy"))
