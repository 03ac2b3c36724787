"""Jobs on several hosts that share no folder, with links of 100 Mbit/s: results equal those of one host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from forked import gtrain
from helpers import ok, rest_exhaustive, show, summary
from namespaces import network

from gtrain.wire import Security

pytestmark = pytest.mark.slow
PLANTED = ("data.num_nodes=800", "data.num_edges=6000")
CASES = {
    "sar": ("strategy=sar", *PLANTED),
    "pyg": ("strategy=pyg", *PLANTED, "data.batch_size=128", "data.num_neighbors=[5,5]"),
    "ps": ("strategy=ps", "data=planted_sparse", "data.num_rows=800", "model=sparse", "data.batch_size=128"),
    "pbg": ("strategy=pbg", "data=planted_kg", "model=kg", "model.dimension=8", "strategy.num_partitions=8"),
}
JOB = ("trainer.num_nodes=4", "trainer.max_epochs=2", "seed=1", "trainer.enable_progress_bar=false")


def losses(folder: Path) -> list[float]:
    return [epoch["train/loss"] for epoch in summary(folder)["history"]]


@pytest.mark.parametrize("name", rest_exhaustive(CASES, "sar", "pbg"))
def test_four_hosts_train_as_one(name: str, tmp_path: Path) -> None:
    Security.create().save(tmp_path / "job.key")
    folders = [tmp_path / f"host{number}" for number in range(4)]
    for folder in folders:
        folder.mkdir()
    with network(4, "100mbit") as machines:
        where = (f"cluster.rendezvous=tcp://{machines.address(0)}:29500", f"cluster.key_file={tmp_path}/job.key")

        def start(number: int) -> CompletedProcess[str]:
            job = (*CASES[name], *JOB, "cluster=manual", f"cluster.rank={number}", *where, "hydra.run.dir=run")
            return machines.run(number, folders[number], "gtrain", *job).end()

        with ThreadPoolExecutor(4) as pool:
            ends = list(pool.map(start, range(4)))
    assert [end.returncode for end in ends] == [0] * 4, "\n".join(map(show, ends))
    for folder in folders[1:]:
        stores = [path for path in (folder / "data" / "stores").iterdir() if path.is_dir()]
        assert all(".replica-" in path.name for path in stores)
    if name != "pbg":  # its machines train buckets at the same time, in an order that varies
        ok(gtrain(*CASES[name], *JOB, "hydra.run.dir=local", cwd=tmp_path))
        assert losses(folders[0] / "run") == losses(tmp_path / "local")
