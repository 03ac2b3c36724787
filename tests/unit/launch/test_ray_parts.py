"""Parts of Ray jobs that need no cluster: resources, messages, folders, and when a job leaves a node."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from gtrain.backends import RolePlan
from gtrain.config import RayClusterConfig
from gtrain.errors import ConfigError, RankFailedError
from gtrain.launch.ray.channel import Channel, encode
from gtrain.launch.ray.machine import enter_folders
from gtrain.settings import schema

pytest.importorskip("ray")


def configuration(accelerator: str = "cpu", **settings: Any) -> Any:
    cluster = OmegaConf.merge(schema(RayClusterConfig), settings)
    return OmegaConf.create({"cluster": cluster, "trainer": {"accelerator": accelerator}})


def test_the_bundle_of_a_machine_has_the_resources_of_its_ranks_and_servers() -> None:
    from gtrain.launch.ray.cluster import bundles_of

    servers = (RolePlan("parameter", "a:b", 3), RolePlan("worker", restarts=2))
    assert bundles_of(configuration(), 2, 2, servers) == [{"CPU": 2 + 2}, {"CPU": 2 + 1}]
    settings = {"cpus_per_rank": 4, "cpus_per_server": 0.5, "memory_per_rank": 100, "resources_per_server": {"disk": 2}}
    expected = {"CPU": 2 * 4 + 2 * 0.5, "GPU": 2, "memory": 200, "disk": 4}
    assert bundles_of(configuration("gpu", **settings), 2, 2, servers)[0] == expected
    assert bundles_of(configuration("gpu", gpus_per_rank=0), 1, 1, ()) == [{"CPU": 1}]


@pytest.mark.parametrize(("rank", "server"), [(0.5, 0.1), (0.57, 0.29), (0.1, 0.3), (1.1, 0.07)])
def test_a_bundle_has_room_for_its_processes(rank: float, server: float) -> None:
    """Ray drops what exceeds a multiple of 1e-4: 0.5 + 0.1 + 0.1 + 0.1 are 0.7999 then, and 0.57 is 0.5699."""
    from gtrain.launch.ray.cluster import bundles_of, resources_of

    cfg = configuration(cpus_per_rank=rank, cpus_per_server=server)
    (bundle,) = bundles_of(cfg, 1, 1, (RolePlan("parameter", "a:b", 3),))
    assert bundle["CPU"] == pytest.approx(rank + 3 * server, rel=1e-12)
    each = [int(resources_of(cfg, role)["CPU"] * 10_000) for role in ("worker", *["parameter"] * 3)]
    assert int(bundle["CPU"] * 10_000) == sum(each) == round((rank + 3 * server) * 10_000)


def test_a_wait_for_resources_leaves_room_for_signals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No handler of a signal runs while Ray waits: it waits for half a second at a time, and is reported once."""
    from gtrain.launch.ray import cluster

    waits: list[float] = []
    group = SimpleNamespace(wait=lambda seconds: waits.append(seconds) or len(waits) == 4)
    placement = object.__new__(cluster.Placement)
    placement._cfg, placement._group = configuration(), group
    placement._connection = SimpleNamespace(lost=None)
    monkeypatch.setattr(cluster, "_REPORT_SECONDS", 0.0)
    placement._await_resources([{"CPU": 2.0}])
    assert waits == [0.5] * 4
    assert capsys.readouterr().err == "gtrain: waiting for the Ray cluster to provide {CPU: 2}\n"
    placement._connection.lost = "it ended."
    waits.clear()
    with pytest.raises(RankFailedError, match=r"it ended\."):
        placement._await_resources([{"CPU": 2.0}])


def test_a_channel_never_blocks_and_loses_nothing() -> None:
    """The other end reads nothing until more than a socket's buffer has been sent."""
    mine, theirs = socket.socketpair()
    received: list[dict[str, Any]] = []
    closed: list[Channel] = []
    with selectors.DefaultSelector() as selector, theirs:
        channel = Channel(mine, selector, lambda _, message: received.append(message), closed.append)
        for number in range(1000):
            channel.send(number=number, text="x" * 10_000)
        channel.finish()
        theirs.sendall(encode({"signal": 15}))
        theirs.setblocking(False)
        data = b""
        while True:
            for key, events in selector.select(0):
                key.data(events)
            try:
                piece = theirs.recv(1 << 20)
            except BlockingIOError:
                continue
            if not piece:
                break
            data += piece
        assert [json.loads(line)["number"] for line in data.splitlines()] == list(range(1000))
        assert received == [{"signal": 15}] and closed == [] and not selector.get_map()


def test_the_end_of_a_connection_is_reported_once() -> None:
    mine, theirs = socket.socketpair()
    closed: list[Channel] = []
    with selectors.DefaultSelector() as selector:
        channel = Channel(mine, selector, lambda *_: None, closed.append)
        theirs.close()
        channel.send(late=True)
        for _ in range(2):
            channel.handle(selectors.EVENT_READ)
    assert closed == [channel]


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The settings of a job whose command was started in a folder that this process has."""
    before, path = os.getcwd(), [*sys.path]
    (tmp_path / "command").mkdir()
    run = tmp_path / "run"
    yield {
        "job": {"log_dir": run / "logs"},
        "token": "token",
        "folder": str(tmp_path / "command"),
        "modules": ["/modules"],
        "code": {"own/model.py": b"x = 1"},
    }
    os.chdir(before)
    sys.path[:] = path


def test_machine_0_must_see_the_folder_of_the_run(folders: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"machine 0 \(host\) does not see the run's folder .*run\.\n") as refused:
        enter_folders(folders, 0, "host")
    assert "HINT: cluster.first_machine=command" in str(refused.value)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "token").touch()
    folders["code"] = None
    assert enter_folders(folders, 0, "host")
    assert Path.cwd() == tmp_path / "command" and "/modules" in sys.path


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_machine_without_the_folders_gets_modules_and_logs(
    folders: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_folder: bool
) -> None:
    """Its working folder lasts, because the stores that it fetches are below."""
    removals: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda function, *args, **settings: removals.append((function, args)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders["job"]["log_dir"] = tmp_path / "runs" / "first" / "logs"
    if not has_folder:
        (tmp_path / "command").rmdir()
    assert not enter_folders(folders, 1, "host")
    assert (tmp_path / "runs/first/logs").is_dir()
    assert Path(sys.path[0], "own/model.py").read_bytes() == b"x = 1" and sys.path[1] == "/modules"
    assert Path.cwd() == tmp_path / "command" or Path.cwd().is_relative_to(tmp_path / "cache/gtrain/folders")
    assert (Path.cwd() == tmp_path / "command") is has_folder
    for function, args in removals:
        function(*args)
    assert not Path(sys.path[0]).exists() and not (tmp_path / "runs").exists() and Path.cwd().exists()


def test_the_modules_of_a_command_are_its_python_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gtrain.launch.ray import run

    for name in ("model.py", "own/layers.py", "own/data.csv", ".git/hook.py", "venv/lib/big.py", "venv/pyvenv.cfg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert run.modules_below(tmp_path) == {"model.py": b"model.py", "own/layers.py": b"own/layers.py"}
    monkeypatch.setattr(run, "_MOST_CODE", 10)
    with pytest.raises(ConfigError, match="its Python files have more than 0 MiB"):
        run.modules_below(tmp_path)


def test_a_job_leaves_a_node_after_the_next_checkpoint_or_shortly_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gtrain.launch.ray import driver

    monkeypatch.setattr(driver, "_POLL_SECONDS", 0.0)
    deadlines: dict[str, int] = {"other": 0}
    job = driver.RayJob(2, 1, tmp_path / "logs", nodes=["first", "second"], draining=lambda: deadlines)
    manifest = tmp_path / "checkpoints" / "last.ckpt" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"epoch": 4}))
    assert not job.is_over() and capsys.readouterr().err == ""
    deadlines["second"] = 0
    assert not job.is_over() and not job.is_over()
    assert capsys.readouterr().err.count("Ray drains the node of machine 1; the job leaves it after the next") == 1
    deadlines["second"] = int((time.time() + 3600) * 1000)
    assert not job.is_over()
    manifest.write_text(json.dumps({"epoch": 5}))
    assert job.is_over() and job.leaves == "Ray drained the node of machine 1"
    hurried = driver.RayJob(2, 1, tmp_path / "logs", nodes=["first", "second"], draining=lambda: deadlines)
    deadlines["second"] = int((time.time() + 5) * 1000)
    assert hurried.is_over()


def test_ranks_that_can_save_get_sigterm_when_a_node_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, and the job leaves the node when one of them has ended."""
    from gtrain.launch.ray import driver

    monkeypatch.setattr(driver, "_POLL_SECONDS", 0.0)
    job = driver.RayJob(2, 1, tmp_path / "logs", nodes=["first", "second"], draining=lambda: {"second": 0})
    sent: list[int] = []
    spec = SimpleNamespace(terminates=True)
    ranks = [SimpleNamespace(spec=spec, saves_on_request=True, status=None, deliver=sent.append) for _ in range(2)]
    job.children = ranks  # type: ignore[assignment]
    assert not job.is_over() and not job.is_over() and sent == [signal.SIGTERM] * 2
    assert "machine 1; the ranks save a checkpoint after their step" in capsys.readouterr().err
    ranks[1].status = 143
    assert job.is_over() and job.leaves == "Ray drained the node of machine 1"
