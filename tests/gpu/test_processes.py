"""Processes and devices: a rank starts to use CUDA after its fork, and has a device of its own if there are enough."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from forked import gtrain
from helpers import REPO, ok, run, show

BEFORE = {
    "gtrain first": "from gtrain import run_local\nimport torch_geometric",
    "torch_geometric first": "import torch_geometric\nfrom gtrain import run_local",
    "a tensor on the GPU": "import torch\nthere = torch.ones(3, device='cuda')\nfrom gtrain import run_local",
}
PROGRAM = """
{before}


def main():
    import torch

    was_used = torch.cuda.is_initialized()
    total = torch.arange(1000, device="cuda").sum().item()
    return [was_used, total, torch.cuda.device_count()]


print("ranks", run_local(main, num_nodes=2))
"""
IN_USE = """
import torch
from gtrain.launch import cuda
print(cuda.in_use(), torch.cuda.is_initialized())
"""
RANKS = ("data.num_nodes=300", "data.num_edges=2400", "trainer.max_epochs=1", "trainer.accelerator=gpu")


def output(program: str, folder: Path) -> str:
    path = folder / "program.py"
    path.write_text(program)
    done = run([sys.executable, str(path)], cwd=folder, timeout=100, env={"PYTHONPATH": str(REPO / "tests")})
    return ok(done).stdout


@pytest.mark.parametrize("before", BEFORE)
def test_ranks_of_a_program_use_gpus_whether_it_has_used_them_or_not(before: str, tmp_path: Path) -> None:
    expected = [False, 499500, torch.cuda.device_count()]
    assert f"ranks {expected}" in output(PROGRAM.format(before=BEFORE[before]), tmp_path)


@pytest.mark.parametrize(
    "imports",
    [
        "from gtrain.launch.agent import preload; preload()",
        "import forked; forked.load()",
        "from gtrain.launch.agent import preload; preload(); import gtrain_ps.strategy, gtrain_pyg.strategy",
        "from gtrain.launch.agent import preload; preload(); import gtrain_sar.strategy, gtrain_pbg.strategy",
    ],
)
def test_what_is_imported_before_a_fork_uses_no_gpu(imports: str, tmp_path: Path) -> None:
    assert output(imports + IN_USE, tmp_path).split() == ["False", "False"]


def test_a_driver_in_use_is_noticed(tmp_path: Path) -> None:
    assert output("import torch; torch.ones(1, device='cuda')" + IN_USE, tmp_path).split() == ["True", "True"]


def test_ranks_that_share_a_device_are_named(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    done = ok(gtrain("strategy=sar", *RANKS, f"trainer.num_nodes={count + 1}", cwd=tmp_path, timeout=100))
    assert f"{count + 1} ranks share {count} GPU" in done.stdout + done.stderr, show(done)


def test_more_devices_than_gpus_are_refused(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    done = gtrain(
        "strategy=sar", *RANKS, "trainer.num_nodes=1", f"trainer.devices={count + 1}", cwd=tmp_path, timeout=100
    )
    assert done.returncode == 1
    assert f"trainer.devices={count + 1} was set with trainer.accelerator=gpu; torch finds {count} GPU" in done.stderr


def test_ranks_have_a_device_each(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU; two ranks would share it")
    settings = ("strategy=sar", *RANKS, "trainer.num_nodes=1", "trainer.devices=2")
    done = ok(gtrain(*settings, cwd=tmp_path, timeout=100))
    assert "ranks share" not in done.stdout + done.stderr


def test_a_rank_of_the_cpu_uses_no_gpu(tmp_path: Path) -> None:
    """Checkpoints have the states of all generators, and do not start CUDA for them."""
    watch = "+callbacks.watch._target_=devices.full.RefusesDevices"
    environment = {"PYTHONPATH": str(REPO / "tests" / "assets")}
    settings = ("data.num_nodes=300", "data.num_edges=2400", "trainer.max_epochs=1")
    ok(gtrain("strategy=pyg", *settings, watch, cwd=tmp_path, env=environment, timeout=100))
