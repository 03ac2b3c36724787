"""Workers of ``strategy=ps`` on a GPU train what those on CPUs train; servers stay on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import enough, gtrain, lasting
from helpers import ok, summary, until

from gtrain.model.module import optimizer_of
from gtrain.nn.csr import Csr
from gtrain_ps.worker.device import WorkerDevice

GPU = "trainer.accelerator=gpu"
PLAIN = ("trainer.precision=64-true", "trainer.enable_progress_bar=false", "callbacks=none", "logger=none")
ROWS = ("data=planted_sparse", "model=sparse", "data.num_rows=900", "data.num_features=300", "data.batch_size=128")
ADAGRAD = "model.sparse_optimizer={_target_:gtrain.nn.Adagrad,lr:0.1}"
GRAPH = ("data=edges", "data.path=edges.tsv", "data.labels=labels.tsv", "data.batch_size=17")
LEARNED = (*GRAPH, "model.learn_features=true", "model.hidden_channels=8", "model.dropout=0.5", ADAGRAD)
CASES = {
    "rows, 1 worker": (*ROWS, "trainer.num_nodes=1"),
    "rows, 2 workers": (*ROWS, "model.dropout=0.3"),
    "fetched": (*ROWS, "strategy.protocol=pull", "strategy.split=grid", "strategy.servers=4"),
    "allreduce": (*ROWS, "strategy.rest=allreduce"),
    "embeddings": ("data=planted_kg", "data.num_entities=200", "data.num_triples=1500", "model=kg"),
    "sage": (*LEARNED, "model=sage"),
    "gat": (*LEARNED, "model=gat"),
    "sampled": (*LEARNED, "model=gcn", "data.num_neighbors=[3,2]"),
}


def history(folder: Path, name: str, *settings: str, names: Sequence[str] = ("train/loss", "val/loss")) -> Any:
    """Train in ``folder/name``, and return the named values of all epochs."""
    ok(gtrain("strategy=ps", *settings, f"hydra.run.dir={name}", cwd=folder, timeout=110))
    return [[epoch[key] for key in names] for epoch in summary(folder / name)["history"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small graph."""
    edges = np.random.default_rng(0).integers(0, 90, (500, 2))
    (tmp_path / "edges.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in edges))
    (tmp_path / "labels.tsv").write_text("".join(f"{node}\t{node % 3}\n" for node in range(90)))
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_those_of_the_cpu(case: str, folder: Path) -> None:
    settings = (*CASES[case], *PLAIN, "trainer.max_epochs=2")
    cpu, gpu = history(folder, "cpu", *settings), history(folder, "gpu", *settings, GPU)
    assert len(gpu) == 2
    assert gpu == [pytest.approx(epoch, rel=1e-10) for epoch in cpu]


def test_a_checkpoint_of_a_gpu_resumes_on_the_cpu_and_the_other_way_round(folder: Path) -> None:
    settings = (*ROWS, "trainer.precision=64-true", "trainer.enable_progress_bar=false")
    whole = history(folder, "whole", *settings, "trainer.max_epochs=4")
    for number, ways in enumerate([(GPU, "trainer.accelerator=cpu"), ("trainer.accelerator=cpu", GPU)]):
        history(folder, f"first-{number}", *settings, "trainer.max_epochs=2", ways[0])
        checkpoint = f"ckpt_path={folder / f'first-{number}' / 'checkpoints' / 'last.ckpt'}"
        resumed = history(folder, f"second-{number}", *settings, "trainer.max_epochs=4", checkpoint, ways[1])
        assert resumed[-2:] == [pytest.approx(epoch, rel=1e-10) for epoch in whole[-2:]]


def test_a_worker_that_is_killed_resumes_on_the_gpu(folder: Path) -> None:
    settings = ("strategy=ps", *ROWS, "model.dropout=0.3", "trainer.precision=64-true", GPU)
    killer = f"{{_target_:ps_killer.Killer,folder:{folder}/killer,run:{folder}/run,plan:{{on_validation_end 1: rank-0 "
    job = lasting(folder, *settings, f"+callbacks.killer={killer}kills rank-1 rank-0}}}}")
    try:
        until(lambda: job.errors().count("restarting it") == 2, folder)
        enough(folder)
        ok(job.end(110))
    finally:
        job.kill()
    disturbed = [[epoch["train/loss"]] for epoch in summary(folder / "run")["history"]]
    epochs = f"trainer.max_epochs={len(disturbed)}"
    undisturbed = history(folder, "undisturbed", *settings[1:], epochs, names=["train/loss"])
    assert disturbed == [pytest.approx(epoch, rel=1e-10) for epoch in undisturbed]


def test_copies_to_the_host_are_complete_after_synchronize() -> None:
    device = WorkerDevice(torch.device("cuda:0"))
    there = torch.randn(2000, 1000, device="cuda:0")
    for _ in range(5):
        there = there @ there[:1000] / 100
    host, pieces = device.to_host(there), device.bytes_on_host([there.view(-1).view(torch.uint8), torch.ones(3).byte()])
    device.synchronize()
    assert host.is_pinned() and torch.equal(host, there.cpu())
    assert torch.equal(torch.cat(pieces)[:-3], there.cpu().view(-1).view(torch.uint8))


def test_a_batch_that_is_copied_ahead_keeps_sparse_rows_on_the_host() -> None:
    from torch_geometric.data import Data

    device = WorkerDevice(torch.device("cuda:0"))
    y, constant = torch.arange(1000), torch.arange(5000)
    batch = Data(x=Csr(torch.arange(3), None, torch.tensor([0, 3])), y=y.clone(), n_id=constant)
    copies: list[torch.Tensor] = []
    device.add_constants([constant], copies.extend)
    device.copy_ahead(batch)
    moved = device.batch(batch)
    assert moved.x.ids.device.type == "cpu" and moved.y.device.type == "cuda" and torch.equal(moved.y.cpu(), y)
    assert moved.n_id is copies[0] and device.batch(batch).n_id is copies[0] and len(copies) == 1
    assert device.ids_on_host(moved.n_id) is constant


def test_adam_is_one_kernel_on_a_gpu() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = optimizer_of(None, [parameter])
    assert optimizer.param_groups[0]["fused"] is True
    parameter.sum().backward()
    optimizer.step()
    assert optimizer.state[parameter]["step"].device.type == "cuda"
