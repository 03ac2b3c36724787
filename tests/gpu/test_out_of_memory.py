"""A rank whose GPU has no memory left says what it held there, and which settings to turn down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from forked import gtrain
from helpers import REPO, show

LARGE = ("data.num_nodes=20000", "data.num_edges=80000", "model.hidden_channels=8192", "trainer.max_epochs=1")


@pytest.mark.parametrize(
    ("strategy", "hint"), [("single", "HINT: choose strategy=pyg"), ("sar", "HINT: set mode=1 and strategy.prefetch=0")]
)
def test_a_job_that_is_too_large_names_rank_device_and_settings(strategy: str, hint: str, tmp_path: Path) -> None:
    share = 2**29 / torch.cuda.get_device_properties(0).total_memory
    limit = f"+callbacks.limit={{_target_:devices.full.LimitsDevice,share:{share}}}"
    settings = (f"strategy={strategy}", *LARGE, "trainer.accelerator=gpu", "trainer.num_nodes=1")
    environment = {"PYTHONPATH": str(REPO / "tests" / "assets")}
    done = gtrain(*settings, limit, cwd=tmp_path, env=environment, timeout=100)
    assert done.returncode == 1, show(done)
    message = re.search(r"gtrain: rank 0 of 1 ran out of memory on cuda:0 \((.+), ([\d.]+) GiB\)\. (.*)", done.stderr)
    assert message is not None, show(done)
    assert message[1] == torch.cuda.get_device_name(0)
    held = re.search(r"It had allocated ([\d.]+) MiB and reserved ([\d.]+) MiB; ([\d.]+) GiB were free", message[3])
    assert held is not None, message[3]
    assert 0 < float(held[1]) <= float(held[2]) <= 513
    assert "parameters and buffers" in message[3]
    assert hint in done.stderr and "Traceback" not in done.stderr
