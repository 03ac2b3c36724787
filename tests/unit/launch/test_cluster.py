"""Which launcher started this process."""

from __future__ import annotations

import os
import socket
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
from gtrain.launch.key_value import KeyValueServer
from gtrain.launch.launchers import mpi
from gtrain.launch.launchers.base import RankInfo
from gtrain.launch.launchers.external import ExternalLauncher, RankVariables
from gtrain.launch.slot import ServerRoster, set_roster
from gtrain.launch.sockets import abstract_address, listen_abstract

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_JOB_NAME": "job"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}


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
        ({**SLURM, **OPEN_MPI}, "mpi"),
        ({**SLURM, **MPICH}, "mpi"),
        ({**OPEN_MPI, **TORCHRUN}, "torchrun"),
        ({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "3"}, "slurm"),  # srun --mpi=pmi2
    ],
)
def test_auto_tells_the_launcher_from_the_environment(environ: dict[str, str], expected: str) -> None:
    assert launchers.resolve("auto", environ).name == expected


def test_local_may_be_forced_inside_another_launcher() -> None:
    assert launchers.resolve("local", SLURM).name == "local"


def test_a_launcher_that_did_not_start_the_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="cluster=torchrun was set, but torchrun did not start this process"):
        launchers.resolve("torchrun", {})
    with pytest.raises(ConfigError, match="launchers are auto, local, torchrun, mpi, slurm, kubernetes"):
        launchers.resolve("carrier-pigeon", {})


def test_rank_and_size_come_from_the_launcher() -> None:
    for environ, expected in ((TORCHRUN, (1, 4)), (SLURM, (2, 3)), (OPEN_MPI, (2, 3)), (MPICH, (2, 3))):
        rank_info = launchers.detect(environ).rank_info(environ)
        assert rank_info is not None and (rank_info.rank, rank_info.size) == expected
    assert launchers.detect({}).rank_info({}) is None


def test_steps_of_a_slurm_job_differ_in_name_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, seen = launchers.LAUNCHERS["slurm"], set()
    assert isinstance(launcher, ExternalLauncher)
    for job, step in (("4294967", "0"), ("4294967", "1"), ("4294967", "2"), ("4294968", "0"), ("4294968", "1")):
        variables = {**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_NODELIST": "head"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        port = launcher.environment().main_port
        assert 15000 <= port < 25000
        seen.add((launcher.job_id(), port))
    assert len({name for name, _ in seen}) == len({port for _, port in seen}) == 5
    assert launcher.environment().main_address == "head"
    monkeypatch.setenv("SLURM_STEP_NODELIST", "second")  # a step on some machines of the job
    assert launcher.environment().main_address == "second"
    before = launcher.job_id()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # the requeued job
    assert launcher.job_id() == before


@pytest.mark.parametrize(("tasks", "size", "accepted"), [("4(x2)", "8", True), ("4,3", "7", False)])
def test_a_slurm_step_has_fewer_ranks_than_its_job(tasks: str, size: str, accepted: bool) -> None:
    """The job has 3 machines, and asks for 8 ranks on each."""
    step = {"SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": tasks}
    place = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "3"}
    info = launchers.LAUNCHERS["slurm"].rank_info({**place, **step, "SLURM_NTASKS": "24", "SLURM_NTASKS_PER_NODE": "8"})
    assert info == RankInfo(5, int(size), 1, 4, 1, 2)
    assert (info.machines * info.local_size == info.size) == accepted


@pytest.mark.parametrize(
    ("place", "accepted"),
    [
        ((3, 4, 1, 2, 1, 2), True),
        ((1, 3, 1, 2, 0, 2), False),  # 2 and 1
        ((3, 4, 0, 2, 1, 2), False),  # 3 and 1, where SLURM does not give the number of each machine
        ((1, 4, 0, 2, 1, 2), False),  # dealt to the machines in turn
        ((1, 4, 1, 8, 0, 1), True),  # one machine, whose allocation has room for 8
    ],
)
def test_every_machine_has_the_same_number_of_ranks(
    place: tuple[int, ...], accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launchers.LAUNCHERS["slurm"]
    assert isinstance(launcher, ExternalLauncher)
    for name, number in zip(launcher.variables, place, strict=True):
        monkeypatch.setenv(name, str(number))
    if accepted:
        launcher.check_even()
        return
    answer = f"slurm started {place[1]} ranks on 2 machines, and rank {place[0]} is local rank {place[2]} of machine"
    with pytest.raises(ConfigError, match=answer):
        launcher.check_even()


SPEAKS = """
from gtrain.launch import launchers
from gtrain.launch.key_value import KeyValueServer
with launchers.detect().printing_once() as prints:
    if prints:
        print("refused", flush=True)
"""


EXTERNAL = {name: each for name, each in launchers.LAUNCHERS.items() if isinstance(each, ExternalLauncher)}
SETS = [
    *((name, each.variables, each.job_variables[0]) for name, each in EXTERNAL.items() if name != "mpi"),
    ("mpi", mpi.OPEN_MPI, "PMIX_NAMESPACE"),
    ("mpi", mpi.HYDRA, "NO_VARIABLE"),  # the parent of the ranks, which is this process, identifies their job
]


@pytest.mark.parametrize(("name", "variables", "job"), SETS, ids=["torchrun", "slurm", "open-mpi", "mpich"])
def test_one_rank_of_a_machine_prints_a_refusal(name: str, variables: RankVariables, job: str, tmp_path: Path) -> None:
    """And ends when the others have been silent; two machines that are played on one have one each."""
    launcher = launchers.LAUNCHERS[name]
    ranks = []
    for rank in range(6):
        place = (rank, 6, rank % 3, 3, rank // 3, 2)
        numbers = {name: str(number) for name, number in zip(variables, place, strict=True) if name}
        environment = clean_environment({job: tmp_path.name + str(os.getpid()), **numbers})
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


def test_ranks_that_do_not_fill_machines_in_order_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Open MPI's --map-by node deals them: ranks 0 and 2 on one host, 1 and 3 on the other."""
    set_roster(ServerRoster())
    name = f"gtrain-test/{tmp_path.name}/{os.getpid()}"
    listener = listen_abstract(name)
    server = KeyValueServer([listener.socket], None, None)
    try:
        for rank, host in enumerate(("a", "a", "b", "b", "a", "b")):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            info = RankInfo(rank, 6, rank % 2, 2, rank // 2, 3)
            if rank < 5:
                mpi._check_machines(abstract_address(name), info)
            else:
                with pytest.raises(ConfigError, match="started rank 4 on a and rank 5 on b; ranks 4 to 5 must be on"):
                    mpi._check_machines(abstract_address(name), info)
    finally:
        server.close()
        listener.close()
