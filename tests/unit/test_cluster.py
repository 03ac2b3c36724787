"""Which launcher started this process."""

from __future__ import annotations

import pytest

from gtrain.errors import ConfigError
from gtrain.launch import cluster

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_JOB_NAME": "job"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "local"),
        (TORCHRUN, "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        (SLURM, "slurm"),
        ({**SLURM, "SLURM_NTASKS": "1"}, "slurm"),
        ({**SLURM, "SLURM_JOB_NAME": "interactive"}, "local"),
        ({**SLURM, **TORCHRUN}, "torchrun"),
    ],
)
def test_auto_tells_the_launcher_from_the_environment(environ: dict[str, str], expected: str) -> None:
    assert cluster.resolve("auto", environ) == expected


def test_local_may_be_forced_inside_another_launcher() -> None:
    assert cluster.resolve("local", SLURM) == "local"


def test_a_launcher_that_did_not_start_the_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="cluster=torchrun was set, but torchrun did not start this process"):
        cluster.resolve("torchrun", {})
    with pytest.raises(ConfigError, match="launchers are auto, local, torchrun, slurm"):
        cluster.resolve("carrier-pigeon", {})


def test_rank_and_size_come_from_the_launcher() -> None:
    assert cluster.external_rank_and_size("torchrun", TORCHRUN) == (1, 4)
    assert cluster.external_rank_and_size("slurm", SLURM) == (2, 3)
