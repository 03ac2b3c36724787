"""A rank without memory on its device or its machine says what it held, and which settings to turn down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked import gtrain
from helpers import REPO

SMALL = ("data.num_nodes=300", "data.num_edges=2400", "trainer.num_nodes=2", "hydra.run.dir=run")


@pytest.mark.parametrize(
    ("strategy", "hint"),
    [
        ("sar", "HINT: set mode=1 and strategy.prefetch=0"),
        ("pyg", "HINT: lower data.batch_size or data.num_neighbors"),
    ],
)
def test_the_job_ends_with_the_message_of_the_rank_that_ran_out(strategy: str, hint: str, tmp_path: Path) -> None:
    full = "+callbacks.full={_target_:devices.full.RunsOut,rank:1}"
    environment = {"PYTHONPATH": str(REPO / "tests" / "assets")}
    done = gtrain(f"strategy={strategy}", *SMALL, full, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "gtrain: rank 1 of 2 ran out of memory on cpu. Allocated: parameters and buffers " in done.stderr
    assert hint in done.stderr and "Traceback" not in done.stderr
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in log


def test_a_rank_that_its_machine_has_no_memory_for_says_what_it_held(tmp_path: Path) -> None:
    full = "+callbacks.full={_target_:devices.full.RunsOutOnTheHost,rank:1}"
    environment = {"PYTHONPATH": str(REPO / "tests" / "assets")}
    done = gtrain("strategy=sar", *SMALL, full, cwd=tmp_path, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = re.search(
        r"gtrain: rank 1 of 2 ran out of memory on its machine \([\d.]+ GiB\)\. It held ([\d.]+ [GM]iB) when it needed "
        r"2\.00 GiB more; [\d.]+ [GM]iB were available\. Allocated: parameters and buffers ",
        done.stderr,
    )
    assert said is not None, done.stderr
    assert "HINT: set mode=1 and strategy.prefetch=0" in done.stderr
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert "DefaultCPUAllocator" in log
