"""Which launcher started this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LIMIT, clean_environment
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins

from gtrain import config
from gtrain.cli import entry
from gtrain.cli.explain import explain
from gtrain.errors import ConfigError
from gtrain.launch import launchers
from gtrain.launch.launchers.base import RankInfo
from gtrain.launch.launchers.external import ExternalLauncher

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
    assert launchers.resolve("auto", environ).name == expected


def test_local_may_be_forced_inside_another_launcher() -> None:
    assert launchers.resolve("local", SLURM).name == "local"


def test_a_launcher_that_did_not_start_the_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="cluster=torchrun was set, but torchrun did not start this process"):
        launchers.resolve("torchrun", {})
    with pytest.raises(ConfigError, match="launchers are auto, local, torchrun, slurm"):
        launchers.resolve("carrier-pigeon", {})


def test_rank_and_size_come_from_the_launcher() -> None:
    for environ, expected in ((TORCHRUN, (1, 4)), (SLURM, (2, 3))):
        rank_info = launchers.detect(environ).rank_info(environ)
        assert rank_info is not None and (rank_info.rank, rank_info.size) == expected
    assert launchers.detect({}).rank_info({}) is None


SPEAKS = """
from gtrain.launch import launchers
with launchers.detect().printing_once() as prints:
    if prints:
        print("refused", flush=True)
"""


@pytest.mark.parametrize("name", [name for name, each in launchers.LAUNCHERS.items() if not each.starts_ranks])
def test_one_rank_of_a_machine_prints_a_refusal(name: str, tmp_path: Path) -> None:
    """And ends when the others have been silent; two machines that are played on one have one each."""
    launcher = launchers.LAUNCHERS[name]
    assert isinstance(launcher, ExternalLauncher)
    job = {launcher.job_variables[0]: tmp_path.name + str(os.getpid())}
    ranks = []
    for rank in range(6):
        place = (rank, 6, rank % 3, 3, rank // 3, 2)
        environment = clean_environment({**job, **dict(zip(launcher.variables, map(str, place), strict=True))})
        assert launchers.detect(environment) is launcher and launcher.rank_info(environment) == RankInfo(*place)
        ranks.append(
            subprocess.Popen([sys.executable, "-c", SPEAKS], env=environment, stdout=subprocess.PIPE, text=True)
        )
    said = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 6
    assert [sum(bool(text) for text in said[machine : machine + 3]) for machine in (0, 3)] == [1, 1], said


def test_each_launcher_is_an_option_of_cluster() -> None:
    Plugins.instance().register(entry.BackendConfigs)
    config.register()
    launchers.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("gtrain.conf", **config.VERSION_BASE):
        kinds = [
            compose("config", overrides=[f"cluster={name}"]).cluster.kind for name in ("auto", *launchers.LAUNCHERS)
        ]
    assert kinds == ["auto", *launchers.LAUNCHERS]
    assert "kind: slurm" in explain("cluster=slurm")
    with pytest.raises(ConfigError, match=", ".join(sorted(("auto", *launchers.LAUNCHERS)))):
        explain("cluster=carrier-pigeon")
